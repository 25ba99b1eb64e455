"""Rows in the schema of LongBench v2 and files of them (a module of the tests, not a test)."""

import json
from pathlib import Path

from tiny import sentences

ASSETS = Path(__file__).parents[3] / "shared" / "assets"
SAMPLE = ASSETS / "longbench_v2" / "sample-20-shortest.jsonl"
NAMES = ["Legal", "Table QA", "Literary", "Academic"]


def row(number=0, **changes):
    return {
        "_id": f"id{number}", "domain": "Single-Document QA", "sub_domain": NAMES[number % 4], "difficulty": "easy",
        "length": "short", "question": f" Which is small, {number}?\n", "choice_A": "the cat", "choice_B": "a dog",
        "choice_C": "a river and a tree", "choice_D": "it", "answer": "ABCD"[number % 4],
        "context": "\n" + "".join(sentences(30 + number, seed=number)), **changes,
    }  # fmt: skip


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
