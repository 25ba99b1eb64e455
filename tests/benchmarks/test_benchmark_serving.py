"""The tables of the page on serving are those of its records."""

import leaderboard
import pandas as pd
from leaderboard import RECORDS, with_tables

import serving
from kvcat.files import append_jsonl, read_json


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


def test_new_records_are_added_and_take_the_place_of_those_of_the_same_setting(
    tmp_path, monkeypatch
):
    for module in (leaderboard, serving):
        monkeypatch.setattr(module, "RECORDS", tmp_path)

    def measured(name, keep, speed):
        run = {"mode": "compact", "requests": 1, "tokens_a_second": speed}
        record = dict.fromkeys(serving.FACTS, "-") | {"engine": "vllm", "vllm": "vllm 1"}
        record |= {"model": "m", "documents": 8, "tokens": 1000, "keep": keep, "cpu": name}
        record |= {"command": f"serving.py vllm --model m=.../folder --keep {keep}", "runs": [run]}
        file = tmp_path / f"{name}.jsonl"
        append_jsonl(file, record)
        return file

    serving.put_away([measured("old", 0.1, 1.0), measured("other", 0.2, 2.0)])
    serving.put_away([measured("new", 0.1, 3.0)])
    rows = pd.read_csv(tmp_path / "serving.csv.gz")
    kept = rows[["keep", "cpu", "tokens_a_second"]].to_numpy().tolist()
    assert kept == [[0.2, "other", 2.0], [0.1, "new", 3.0]]
    commands = read_json(tmp_path / "serving.json")["commands"]
    assert commands == [f"serving.py vllm --model m --keep {keep}" for keep in (0.1, 0.2)]
