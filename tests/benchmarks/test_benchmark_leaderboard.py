"""The leaderboard and README show what the records give."""

import dataclasses
import math

import leaderboard
import pandas as pd
import pytest
import scipy.stats
from leaderboard import Records, condition_of

KEEP = leaderboard.README_KEEP


@pytest.fixture(scope="module")
def records():
    return Records.read()


def test_page_picture_and_readme_are_what_the_records_give(records):
    changed = leaderboard.different(records, leaderboard.names_of(records))
    assert [path.name for path, _ in changed] == []


def test_one_changed_answer_is_noticed(records):
    answers = records.answers.copy()
    is_default = answers["condition"] == condition_of(leaderboard.DEFAULT)
    first = answers[is_default & (answers["keep"] == KEEP)].index[0]
    answers.loc[first, "right"] = 1 - answers.loc[first, "right"]
    changed = leaderboard.different(
        dataclasses.replace(records, answers=answers), leaderboard.names_of(records)
    )
    assert [path.name for path, _ in changed] == ["leaderboard.md", "README.md"]


def test_right_answers_are_those_of_the_texts(records):
    for row in records.answers.itertuples():
        assert row.right == leaderboard.right(row.answer, row.asked)


def test_a_document_that_one_condition_was_not_asked_about_does_not_count():
    conditions = [*map(condition_of, leaderboard.README_ROWS), leaderboard.TRUNCATED]
    cells = [*((condition, KEEP) for condition in conditions), ("dense", 1.0), ("no document", 0.0)]
    h2o = condition_of("h2o")
    rows = [
        {"model": "m", "document": document, "question": str(i), "condition": condition}
        | {"keep": keep, "right": int(condition != h2o or document in "ab")}
        for document in "abcde"
        for i in range(4)
        for condition, keep in cells
        if (document, condition) != ("e", leaderboard.TRUNCATED)
    ]
    rows.append(rows[0] | {"keep": 0.1})  # a size that only one question has
    model = leaderboard.OfModel("m", pd.DataFrame(), pd.DataFrame(rows))
    assert set(model.asked_documents) == set("abcd")
    assert {keep for _, keep in model.marks.columns} == {KEEP, 1.0, 0.0}
    assert model.right_answers(h2o, KEEP).value == 0.5
    difference, p_value = model.paired(h2o, KEEP)
    assert (difference.value, p_value) == (0.5, 0.5)  # two documents differ: 2 of 4 ways
    three = leaderboard.OfModel("m", pd.DataFrame(), model.answers[model.answers["document"] < "d"])
    assert three.right_answers(h2o, KEEP) is None


def test_a_cell_of_kl_is_students_interval_of_the_documents_at_least():
    kl = [0.1, 0.2, 0.3, 0.6]
    rows = [
        {"model": "m", "window": i, "document": str(i), "method": method}
        | {"way": condition_of(method).split("@")[1].replace("self", "suffix")}
        | {"keep": KEEP, "kl_first": value - 0.05, "kl_second": value + 0.05}
        for i, value in enumerate(kl)
        for method in leaderboard.README_ROWS
    ]
    h2o = next(row for row in rows if row["method"] == "h2o")
    rows.append(h2o | {"way": "reconstruction", "kl_first": 9.0})  # of another kind of cache
    rows.append(h2o | {"method": "streaming"})  # measured on one window
    model = leaderboard.OfModel("m", pd.DataFrame(rows), pd.DataFrame())
    estimate = model.kl_estimate("h2o", KEEP)
    half = scipy.stats.t.ppf(0.975, 3) * pd.Series(kl).std() / math.sqrt(4)
    assert estimate.value == pytest.approx(0.3)
    assert (estimate.low, estimate.high) == pytest.approx((0.3 - half, 0.3 + half))
    assert model.kl_estimate("streaming", KEEP) is None


def test_holms_correction_is_over_the_cells_of_one_size():
    p_values = {("a", 0.1): 0.02, ("b", 0.1): 0.03, ("a", 0.2): 0.04, ("b", 0.2): 0.2}
    assert leaderboard.unclear(p_values) == {("a", 0.2), ("b", 0.2)}


def test_new_records_are_added_or_take_the_place_of_old_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(leaderboard, "RECORDS", tmp_path)
    key = ["document", "method"]
    old = pd.DataFrame(
        {"document": ["1", "1"], "method": ["a", "b"], "answer": ["", "007"], "kl": [math.nan, 0.5]}
    )
    leaderboard.add_to_table("some", old, key)
    new = pd.DataFrame({"document": ["2", "1"], "method": ["a"] * 2, "answer": "8", "kl": [1.0, 2]})
    rows = leaderboard.add_to_table("some", new, key)
    assert rows.to_dict("records") == [
        {"document": "1", "method": "b", "answer": "007", "kl": 0.5},
        {"document": "2", "method": "a", "answer": "8", "kl": 1.0},
        {"document": "1", "method": "a", "answer": "8", "kl": 2.0},
    ]
    again = leaderboard.add_to_table("some", new, key)
    assert again.to_dict("records") == rows.to_dict("records")
