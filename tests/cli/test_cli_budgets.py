"""kvcat budgets from the command line, and compression with its file."""

import json
from dataclasses import replace

import kvcat
from kvcat.cli.app import run
from kvcat.compress import CalibratedBudgets
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
    printed = capsys.readouterr()
    assert printed.out == f"{file}: budgets of 3 documents of 32 tokens\n"
    assert "documents with at least 32 tokens: 3 of the 50 wanted" in printed.err
    assert "exists; --overwrite replaces it" in mistake(*words)
    text = tmp_path / "text.txt"
    text.write_text("".join(sentences(2, seed=9)))
    cache = tmp_path / "cache.safetensors"
    words = ["compress", tiny_folder, "--text", text, "--keep", "0.25", "-o", cache]
    words += ["--method", f"attention-matching,budgets={file}"]
    assert run([str(word) for word in words]) == 0
    made = kvcat.CompactCache.load(cache)
    assert made.metadata["budgets"].startswith("budgets.json ")
    store = tmp_path / "store"
    words = ["corpus", tiny_folder, corpus, "--keep", "0.25", "-o", store]
    words += ["--method", f"attention-matching,budgets={file}"]
    assert run([str(word) for word in words]) == 0
    budgets = CalibratedBudgets.load(file)
    replace(budgets, num_documents=9).save(file)
    assert "was made with budgets" in mistake(*words)
    words = ["budgets", tiny_folder, "--corpus", corpus, "-o", tmp_path / "b", "--tokens", 200]
    assert "no document has 200 tokens" in mistake(*words)
