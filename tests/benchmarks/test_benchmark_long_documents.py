"""The table of long documents is that of its records."""

import long_documents
import pandas as pd
import pytest
from leaderboard import RECORDS, shows, with_tables


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
