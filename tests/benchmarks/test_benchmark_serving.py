"""The tables of the page on serving are those of its records."""

import pandas as pd
from leaderboard import RECORDS, with_tables

import serving


def test_the_page_shows_the_records():
    page = serving.PAGE.read_text(encoding="utf-8")
    tables = {"vllm": serving.vllm_table(), "one": serving.one_table()}
    assert with_tables(page, tables) == page


def test_a_row_shows_right_answers_next_to_speed_and_memory():
    rows = pd.read_csv(RECORDS / "serving.csv.gz")
    rows = rows[(rows["kind"] == "vllm") & (rows["mode"] == "compact")]
    table = serving.vllm_table()
    for _, setting in rows.groupby(["model", "tokens", "keep"]):
        last = setting.sort_values("requests").iloc[-1]
        size = last["document_bytes"] / 1e6
        speeds = [f"{speed:.1f}" for speed in setting.sort_values("requests")["tokens_a_second"]]
        right = f"{last['right']:.0f} of {last['asked']}"
        assert f"| {size:.1f} | {right} | {' / '.join(speeds)} |" in table
