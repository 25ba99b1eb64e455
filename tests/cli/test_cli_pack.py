"""``kvcat pack``: a saved cache as another engine's file."""

import dataclasses

import pytest
import safetensors
import torch

import kvcat
from kvcat.cache import CompactCache, CompactLayer
from kvcat.cli.app import run


@pytest.fixture(scope="module")
def saved(tiny_folder, tmp_path_factory):
    """A cache with a log-bias and one without, of the tiny model."""
    folder = tmp_path_factory.mktemp("caches")
    model, _ = kvcat.load(tiny_folder)
    trace = kvcat.trace(model, torch.arange(40).unsqueeze(0), 32)
    cache = kvcat.Eviction("random")(trace, num_slots=5)
    cache.save(folder / "plain")
    biased = [CompactLayer(x.keys, x.values, torch.ones(x.keys.shape[:3])) for x in cache.layers]
    dataclasses.replace(cache, layers=biased).save(folder / "biased")
    CompactCache(cache.layers, 32, "0" * 64).save(folder / "other")
    return folder


def test_a_prefix_and_a_llama_cpp_state_are_written(tiny_folder, saved, tmp_path, capsys):
    base = ["pack", str(tiny_folder), "--cache", str(saved / "plain"), "-o"]
    assert run([*base, str(tmp_path / "p")]) == 0
    assert capsys.readouterr().out.endswith("5 slots for transformers, rerotated; the next token stands at 5\n")
    with safetensors.safe_open(tmp_path / "p", "pt") as file:
        assert file.metadata()["format"] == "kvcat-prefix-1"
    options = ["--engine", "llama.cpp", "--positions", "original", "--cache-type", "float32", "--no-flash-attention"]
    assert run([*base, str(tmp_path / "s"), *options]) == 0
    assert capsys.readouterr().out.endswith("5 slots for llama.cpp, original; the next token stands at 32\n")
    assert (tmp_path / "s").read_bytes()[:8] == b"qsgg\3\0\0\0"


def test_a_log_bias_is_dropped_only_on_demand(tiny_folder, saved, tmp_path, capsys):
    base = ["pack", str(tiny_folder), "--cache", str(saved / "biased"), "-o", str(tmp_path / "p")]
    assert run(base) == 2
    assert "has a log-bias" in capsys.readouterr().err
    assert run([*base, "--drop-log-bias"]) == 0


def test_mistakes_are_one_line_and_write_nothing(tiny_folder, saved, tmp_path, capsys):
    for cache, output, told in (
        (saved / "other", tmp_path / "p", "other belongs to another model"),
        (saved / "gone", tmp_path / "p", "no cache file"),
        (saved / "plain", tmp_path / "gone" / "p", "no folder"),
        (saved / "plain", saved / "plain", "exists; --overwrite replaces it"),
    ):
        assert run(["pack", str(tiny_folder), "--cache", str(cache), "-o", str(output)]) == 2
        said = capsys.readouterr()
        assert told in said.err
        assert len(said.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
