"""``kvcat info``: what a file says of itself, checked against the cache in memory."""

import subprocess
import sys

import pytest
import torch

from kvcat.cache import CompactCache, CompactLayer
from kvcat.cli.app import run
from kvcat.cli.info import describe
from kvcat.errors import InputError

OWNER = "0123456789ab" + "c" * 52


@pytest.fixture
def path(tmp_path):
    """A file of four layers with 10 of 100 slots for three examples."""

    def layer():
        states = (torch.ones(3, 2, 10, 8, dtype=torch.bfloat16) for _ in range(2))
        return CompactLayer(*states, torch.zeros(3, 2, 10))

    told = {"method": "attention-matching", "model": "tiny", "seed": "7", "preset": "stable"}
    CompactCache([layer() for _ in range(4)], 100, OWNER, told).save(tmp_path / "doc.safetensors")
    return tmp_path / "doc.safetensors"


def test_the_bytes_are_those_in_memory_and_of_the_dense_cache_of_the_same_dtype(path):
    facts, cache = describe(path), CompactCache.load(path)
    assert facts["cache_bytes"] == cache.nbytes == 4 * 3 * 2 * 10 * (2 * 8 * 2 + 4)
    assert facts["dense_bytes"] == 4 * 3 * 2 * 100 * 2 * 8 * 2
    assert facts["saved_bytes"] == facts["dense_bytes"] - facts["cache_bytes"]
    assert facts["file_bytes"] == path.stat().st_size
    assert (facts["fingerprint"], facts["metadata"]) == (OWNER, cache.metadata)


def test_the_text_names_slots_ratio_bytes_method_settings_seed_and_model(path, capsys):
    assert run(["info", str(path)]) == 0
    shown = capsys.readouterr().out
    for told in (
        "format kvcat-compact-cache-2, whole (checksum compared)", "100 tokens in 10 slots", "(10.0% kept)",
        "8.64 kB; the dense cache has 76.80 kB: 68.16 kB saved (88.8%)", "3 examples, 4 layers, 2 KV heads of 8",
        "attention-matching", "tiny, fingerprint 0123456789ab", "preset stable, seed 7", "BF16, with log-bias",
    ):  # fmt: skip
        assert told in shown
    assert "slots by layer" not in shown


def test_heads_of_unequal_slots_are_told_by_layer(path, capsys):
    heads = [[[torch.ones(n, 8) for n in counts]] for counts in ((2, 4), (1, 3))]
    cache = CompactCache([CompactLayer.ragged(x, x) for x in heads], 20, OWNER, {"method": "by hand"})
    cache.save(path)
    assert run(["info", str(path)]) == 0
    shown, facts = capsys.readouterr().out, describe(path)
    assert (facts["keep_ratio"], facts["mean_slots"], facts["cache_bytes"]) == (0.125, cache.mean_slots, cache.nbytes)
    assert "20 tokens in 2.5 on average, at most 4 slots" in shown
    assert "slots by layer  3 2\n" in shown


def test_damaged_and_other_files_are_one_line_and_exit_code_2(path, capsys, tmp_path):
    content = path.read_bytes()
    path.write_bytes(content[:-5] + b"!" + content[-4:])
    (tmp_path / "text").write_text("a text")
    for name, told in ((path.name, "doc.safetensors is corrupt"), ("gone", "no cache file"), (".", "no cache file"),
                       ("text", "not a safetensors file")):  # fmt: skip
        assert run(["info", str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert told in said.err
        assert (len(said.err.splitlines()), said.out) == (1, "")


def test_a_header_without_the_facts_is_refused(path, monkeypatch):
    content = path.read_bytes()
    monkeypatch.setattr("kvcat.cachefile._digest", lambda *given: given[2])
    for damaged in (content.replace(b'"num_tokens"', b'"num_tokans"'), content.replace(b"layers.2", b"layers.7")):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="is not whole"):
            describe(path)


def test_neither_torch_nor_numpy_is_loaded(path):
    code = "import sys; from kvcat.cli.app import run; run(['info', sys.argv[1]])\n"
    code += "print(sorted({'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)))"
    child = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert child.stdout.splitlines()[-1] == "[]"
