"""The tables of the page on serving are those of its records."""

import pandas as pd
import serving
from leaderboard import RECORDS, with_tables


def test_the_page_shows_the_records():
    page = serving.PAGE.read_text(encoding="utf-8")
    tables = {"vllm": serving.vllm_table(), "one": serving.one_table()}
    assert with_tables(page, tables) == page


def test_a_row_shows_right_answers_next_to_speed_and_memory():
    rows = pd.read_csv(RECORDS / "serving.csv.gz")
    rows = rows[(rows["kind"] == "vllm") & (rows["mode"] == "dense")]
    last = rows.sort_values("requests").groupby(["model", "tokens", "keep"], sort=False).tail(1)
    table = serving.vllm_table()
    for _, row in last.iterrows():
        size = row["cells"] * row["cell_bytes"] / 1e6
        line = f"| {size:.1f} | {row['right']:.0f} of {row['asked']} | "
        assert line in table
