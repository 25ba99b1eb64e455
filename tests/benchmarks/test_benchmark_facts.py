"""The page on conversations shows what the records of ``facts.py`` give."""

import facts
import pandas as pd


def test_the_page_shows_the_records():
    page = facts.PAGE.read_text(encoding="utf-8")
    assert facts.page_table() in page


def test_an_answer_is_right_if_it_holds_the_number_that_was_stated():
    record = {
        "model": "m",
        "document": "test-0",
        "turns": 2,
        "tokens": 90,
        "slots": 30.0,
        "compactions": 1,
        "asked": [("Anna", "01234"), ("Bert", "56789")],
    }
    dense = record | {"condition": "dense", "answers": [" 01234.", " 56789"]}
    session = record | {"condition": "session", "answers": [" 1234.", " 56789"]}
    rows = facts.rows_of([dense, session])
    assert rows["stated"].tolist() == [1, 2, 1, 2]
    lines = facts.tables(pd.DataFrame(rows))
    assert "| whole conversation | 100" in "\n".join(lines)
    assert "| session | 50" in "\n".join(lines)
