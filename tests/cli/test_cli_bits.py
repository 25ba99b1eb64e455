"""compress --bits and --mb; info and generate with caches in few bits."""

from dataclasses import replace

import pytest
import torch

from kvcat import DocumentSettings, compress_document, load
from kvcat.cache import CompactCache
from kvcat.cli.app import run
from tiny import refusal, sentences

DOCUMENT = "".join(sentences(4, seed=7))


@pytest.fixture
def document(tmp_path):
    (tmp_path / "doc.txt").write_text(DOCUMENT)
    return tmp_path / "doc.txt"


def kvcat(*words):
    return run([str(word) for word in words])


def compress(folder, document, *options):
    output = document.parent / "doc.safetensors"
    assert kvcat("compress", folder, "--text", document, "-o", output, *options) == 0
    return output


@pytest.mark.parametrize("bits", ["4", "8"])
@pytest.mark.parametrize("method", ["attention-matching", "snapkv"])
def test_bits_are_in_the_file_its_description_and_its_answers(
    bits, method, tiny_folder, document, capsys
):
    output = compress(tiny_folder, document, "--method", method, "--bits", bits, "--keep", 0.4)
    cache = CompactCache.load(output)
    assert str(cache.bits) == bits
    assert f"{bits} bits" in capsys.readouterr().out
    assert kvcat("info", output) == 0
    described = capsys.readouterr().out
    assert f"keys and values in {bits} bits" in described
    assert f"{cache.nbytes:,}, " in described
    assert "dense cache in 16 bits" in described
    answers = []
    for option in ([], ["--packed"]):
        asked = ("--prompt", "the cat", "--max-new-tokens", 8, *option)
        assert kvcat("generate", tiny_folder, "--cache", output, *asked) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("bits", ["auto", "16", "8", "4"])
def test_a_size_in_bytes_is_an_upper_bound(bits, tiny_folder, document):
    output = compress(tiny_folder, document, "--mb", 0.003, "--bits", bits)
    cache = CompactCache.load(output)
    assert 1900 < cache.nbytes <= 3000
    assert str(cache.bits) == {"auto": "8", "16": "None"}.get(bits, bits)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--keep", 1),
        ("--max-kl", 0.5),
        ("--method", "gradient,num_steps=2"),
        ("--method", "snapkv", "--supervision", "self"),
    ],
)
def test_a_file_is_in_8_bits_unless_a_number_of_bits_is_given(options, tiny_folder, document):
    loaded = CompactCache.load(compress(tiny_folder, document, *options))
    assert loaded.bits == 8
    plain = compress(tiny_folder, document, *options, "--bits", 16, "--overwrite")
    plain = CompactCache.load(plain)
    assert plain.bits is None
    assert loaded.nbytes < plain.nbytes


def test_what_does_not_fit_in_8_bits_keeps_its_numbers_unless_bits_are_asked_for(tiny_folder):
    model, tokenizer = load(tiny_folder)
    with torch.no_grad():  # float16, the type of scales, ends at 65,504
        model.model.layers[0].self_attn.v_proj.weight.mul_(1e8)
    for method in ("attention-matching", "gradient,num_steps=1"):
        settings = DocumentSettings(method=method, num_slots=5)
        cache = compress_document(model, tokenizer, DOCUMENT, settings)
        assert cache.bits is None
        wanted = replace(settings, bits="8")
        message = refusal(compress_document, model, tokenizer, DOCUMENT, wanted)
        assert "do not fit" in message


def test_packed_answers_need_a_cache_in_few_bits(tiny_folder, document, capsys):
    output = compress(tiny_folder, document, "--bits", 16)
    asked = ("--prompt", "the cat", "--packed")
    assert kvcat("generate", tiny_folder, "--cache", output, *asked) == 2
    assert "is not in 8 or 4 bits" in capsys.readouterr().err
