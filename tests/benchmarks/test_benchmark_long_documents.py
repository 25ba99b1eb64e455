"""The table of long documents is that of its records."""

from argparse import Namespace

import leaderboard
import long_documents
import pandas as pd
import pytest
from leaderboard import RECORDS, shows, with_tables

from kvcat.files import append_jsonl, read_json


def test_the_page_shows_the_records():
    page = long_documents.PAGE.read_text(encoding="utf-8")
    assert with_tables(page, {"long": long_documents.page_table()}) == page
    assert shows(long_documents.PICTURE, {"": long_documents.summary()})


def test_a_row_counts_the_answers_that_the_whole_cache_has_right():
    rows = pd.read_csv(RECORDS / "long.csv.gz")
    rows = rows[rows["tokens"] == 1536]
    answers = rows.pivot(index=["document", "question"], columns="method", values="right")
    known = answers[(answers["dense"] == 1) & answers["snapkv"].notna()]
    right = f"| {known['snapkv'].sum():.0f} of {len(known)} ["
    (line,) = (
        line
        for line in long_documents.page_table().splitlines()
        if "1,536" in line and "Snap" in line
    )
    assert right in line
    of_snapkv = rows[rows["method"] == "snapkv"].drop_duplicates("document")
    assert f"| {of_snapkv['kl'].mean():.4f} |" in line
    assert float(line.split("|")[5]) == pytest.approx(
        (of_snapkv["trace"] / of_snapkv["reading"]).mean(), abs=0.05
    )


def test_one_model_in_two_types_is_two_measurements(tmp_path, monkeypatch):
    for module in (leaderboard, long_documents):
        monkeypatch.setattr(module, "RECORDS", tmp_path)
    cell = {"model": "m", "document": 0, "tokens": 64, "method": "h2o", "keep": 0.1, "right": [1]}
    options = Namespace(collect=[tmp_path / "new.jsonl"], date="today")
    for dtype in ("bfloat16", "float32"):
        append_jsonl(options.collect[0], cell | {"dtype": dtype})
    long_documents.put_away(options)
    rows = pd.read_csv(tmp_path / "long.csv.gz")
    assert rows["dtype"].tolist() == ["bfloat16", "float32"]
    command = read_json(tmp_path / "long.json")["command"]
    assert command.count("--model m ") == 2
    assert command.count("--dtype bfloat16") == 1
