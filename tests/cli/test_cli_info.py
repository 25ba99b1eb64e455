"""``kvcat info``: what a file says of itself, checked against the cache in memory."""

import subprocess
import sys

import pytest
import torch

from kvcat.cache import CompactCache, CompactLayer
from kvcat.cachefile import CACHE, read_header
from kvcat.cli import documents
from kvcat.cli.app import run

OWNER = "0123456789ab" + "c" * 52


@pytest.fixture
def path(tmp_path):
    """A file of four layers with 10 of 100 slots for three examples."""

    def layer():
        states = (torch.ones(3, 2, 10, 8, dtype=torch.bfloat16) for _ in range(2))
        return CompactLayer(*states, torch.zeros(3, 2, 10))

    told = {"method": "attention-matching", "model": "tiny", "seed": "7", "preset": "stable"}
    cache = CompactCache([layer() for _ in range(4)], 100, OWNER, told)
    assert cache.nbytes == 4 * 3 * 2 * 10 * (2 * 8 * 2 + 4) == 8640
    cache.save(tmp_path / "doc.safetensors")
    return tmp_path / "doc.safetensors"


def test_the_text_names_slots_ratio_bytes_method_settings_seed_and_model_without_loading_torch(path):
    code = "import sys; from kvcat.cli.app import run; run(['info', sys.argv[1]])\n"
    code += "print(sorted({'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)))"
    child = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    for told in (
        "format kvcat-compact-cache-2, whole (checksum compared)", "100 tokens in 10 slots", "(10.0% kept)",
        "8.64 kB; the dense cache has 76.80 kB: 68.16 kB saved (88.8%)", "3 examples, 4 layers, 2 KV heads of 8",
        "attention-matching", "tiny, fingerprint 0123456789ab", "preset stable, seed 7", "BF16, with log-bias",
    ):  # fmt: skip
        assert told in child.stdout
    assert "slots by layer" not in child.stdout
    assert child.stdout.splitlines()[-1] == "[]"


def test_heads_of_unequal_slots_are_told_by_layer(path, capsys):
    heads = [[[torch.ones(n, 8) for n in counts]] for counts in ((2, 4), (1, 3))]
    cache = CompactCache([CompactLayer.ragged(x, x) for x in heads], 20, OWNER, {"method": "by hand"})
    cache.save(path)
    assert run(["info", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "20 tokens in 2.5 on average, at most 4 slots a layer and head (12.5% kept)" in shown
    assert f"{cache.nbytes} bytes; the dense cache has 5.12 kB" in shown
    assert "slots by layer  3 2\n" in shown


def test_damaged_and_other_files_are_one_line_and_exit_code_2(path, capsys, tmp_path, monkeypatch):
    def refused(name, content, told):
        path.write_bytes(content)
        assert run(["info", str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert told in said.err
        assert (len(said.err.splitlines()), said.out) == (1, "")

    content = path.read_bytes()
    refused(path.name, content[:-5] + b"!" + content[-4:], "doc.safetensors is corrupt")
    refused(path.name, b"a text", "not a safetensors file")
    refused("gone", content, "no cache file")
    refused(".", content, "no cache file")
    header = read_header(path, CACHE)
    for changed in ({"entries": {}}, {"tensors": {}}):
        monkeypatch.setattr(documents, "read_header", lambda *_, changed=changed: header._replace(**changed))
        refused(path.name, content, "is not whole")
