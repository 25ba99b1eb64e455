"""kvcat budgets from the command line, and compression with its file."""

import json

import kvcat
from kvcat.cli.app import run
from tiny import sentences


def test_budgets_are_measured_once_and_used_for_other_documents(
    tiny_folder, tmp_path, capsys, mistake
):
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"id": str(n), "text": "".join(sentences(4, seed=n))} for n in range(3)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "budgets.json"
    words = ["budgets", tiny_folder, "--corpus", corpus, "-o", file, "--tokens", 32]
    assert run([str(word) for word in words]) == 0
    assert capsys.readouterr().out == f"{file}: budgets of 3 documents of 32 tokens\n"
    assert "exists; --overwrite replaces it" in mistake(*words)
    text = tmp_path / "text.txt"
    text.write_text("".join(sentences(2, seed=9)))
    cache = tmp_path / "cache.safetensors"
    words = ["compress", tiny_folder, "--text", text, "--keep", "0.25", "-o", cache]
    words += ["--method", f"attention-matching,budgets={file}"]
    assert run([str(word) for word in words]) == 0
    made = kvcat.CompactCache.load(cache)
    assert made.metadata["budgets"].startswith("budgets.json ")
    assert made.max_slots > made.mean_slots
    words = ["budgets", tiny_folder, "--corpus", corpus, "-o", tmp_path / "b", "--tokens", 200]
    assert "no document has 200 tokens" in mistake(*words)
