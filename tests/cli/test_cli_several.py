"""Several caches on the command line: generate, info and pack."""

import pytest
import torch

import kvcat as kvcat_library
from kvcat.cache import CompactCache
from kvcat.cli.app import run
from kvcat.compress import question_ids
from kvcat.models import load
from kvcat.serving import plain_prefix, read_prefix
from tiny import sentences


def kvcat(*words):
    return run([str(word) for word in words])


@pytest.fixture(scope="module")
def files(tiny_folder, tmp_path_factory):
    """The caches of two documents."""
    folder = tmp_path_factory.mktemp("several")
    saved = []
    for number in range(2):
        text = folder / f"{number}.txt"
        text.write_text("".join(sentences(2, seed=number)))
        saved.append(folder / f"{number}.safetensors")
        method = ("--method", "streaming", "--supervision", "self")
        options = ("--text", text, "--keep", 0.5, *method)
        assert kvcat("compress", tiny_folder, *options, "-o", saved[-1]) == 0
    return saved


def test_generate_answers_from_the_composed_cache_in_the_order_of_the_files(
    files, tiny_folder, capsys
):
    model, tokenizer = load(tiny_folder)
    caches = [CompactCache.load(file, model) for file in files]
    for order in ((0, 1), (1, 0)):
        composed = kvcat_library.compose(model, [caches[i] for i in order], seam_tokens=4)
        ids = question_ids(tokenizer, "the cat", cache=composed)
        made = model.generate(**composed.inputs(model, ids), max_new_tokens=8, do_sample=False)
        expected = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        capsys.readouterr()
        paths = [files[i] for i in order]
        options = ("--prompt", "the cat", "--max-new-tokens", 8, "--seam-tokens", 4)
        assert kvcat("generate", tiny_folder, "--cache", *paths, *options) == 0
        assert capsys.readouterr().out.strip() == expected.strip()


def test_info_describes_each_file_and_their_sum_and_pack_writes_the_composed_cache(
    files, tiny_folder, tmp_path, capsys
):
    assert kvcat("info", *files) == 0
    shown = capsys.readouterr().out
    caches = [CompactCache.load(file) for file in files]
    num_tokens = sum(cache.num_tokens for cache in caches)
    assert f"together: {num_tokens} tokens" in shown
    assert "first_ids" not in shown
    packed = tmp_path / "both.prefix"
    options = ("--head-dim", 16, "--seam-tokens", 0, "-o", packed)
    assert kvcat("pack", tiny_folder, "--cache", *files, *options) == 0
    model, _ = load(tiny_folder)
    composed = kvcat_library.compose(model, caches, seam_tokens=0)
    expected = plain_prefix(composed, model, head_dim=16)
    for (keys, _), layer in zip(read_prefix(packed).load(), expected.layers, strict=True):
        assert torch.equal(keys, layer.keys[0])


def test_mistakes_with_several_caches_are_one_line(files, tiny_folder, mistake):
    words = ("generate", tiny_folder, "--cache", *files, "--prompt", "a")
    assert "--seam-tokens takes 0<=INT<=16, not 17" in mistake(*words, "--seam-tokens", 17)
    assert "single cache" in mistake(*words, "--packed")
    one = ("--cache", files[0], "--seam-tokens", 4)
    for command in (("generate", tiny_folder, "--prompt", "a"), ("pack", tiny_folder, "-o", "x")):
        assert "one has no seam" in mistake(*command, *one)
    assert "no cache file" in mistake("info", files[0], "gone")
