"""The leaderboard: tool calls where the model can call, questions that every method was asked."""

from itertools import product
from pathlib import Path
from types import MappingProxyType

import leaderboard
import leaderboard_tools
import pytest
from leaderboard_tools import tool_calls_section, tool_runs
from named_models import NamedModel

from kvcat.errors import InputError
from kvcat.evals import Record, ResultsFolder

CASES = 24
KEEPS = (0.1, 0.4)
METHODS = {"snapkv": "SnapKV", "kvpress:KVzipPress": "KVzip"}


def write_calls(out, method, *, right, dense_right, options=MappingProxyType({})):
    """Results in which the first cases are right: so many of the method, so many of the cache."""
    folder = out / "tools" / "model" / str(len(tool_runs(out, "model")))
    config = {
        "evaluation": "tools",
        "dataset": "d",
        "num_examples": CASES,
        "methods": [
            {
                "name": method,
                "options": dict(options),
                "num_examples": CASES,
                "keep_ratios": list(KEEPS),
            }
        ],
    }
    records = []
    cells = [("dense", 1.0), ("no-context", 0.0), *((method, keep) for keep in KEEPS)]
    for case, (name, keep) in product(range(CASES), cells):
        is_dense_right = float(case < dense_right)
        score = {"dense": is_dense_right, "no-context": 0.0}.get(name, float(case < right))
        values = {}
        for metric in ("schema_valid", "right_function", "exact_match"):
            values |= {metric: score, f"dense_{metric}": is_dense_right}
        place = ("d", "", f"case{case}", "0", values)
        records.append(
            Record("model", "f", "float32", name, "{}", keep, None, None, *place),
        )
    with ResultsFolder(folder, config) as written:
        written.append(records)


def test_right_calls_are_a_row_for_each_measured_method(tmp_path):
    write_calls(tmp_path, "kvpress:KVzipPress", right=12, dense_right=24)
    sentence, lines = tool_calls_section(tmp_path, "model", METHODS, KEEPS)
    assert sentence.startswith("Right calls of a function, per cent, in 24 contexts")
    assert "the dense cache 100.0 [" in sentence
    assert lines[0] == "| slots kept | 10 % | 40 % |"
    assert [line.partition(" [")[0] for line in lines[2:]] == ["| KVzip | 50.0"]
    write_calls(tmp_path, "snapkv", right=6, dense_right=24)
    _, lines = tool_calls_section(tmp_path, "model", METHODS, KEEPS)
    assert [line.partition(" [")[0] for line in lines[2:]] == ["| SnapKV | 25.0", "| KVzip | 50.0"]


def test_a_new_method_repeats_no_other_and_stopped_runs_continue(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(leaderboard_tools, "run_python", lambda *command: commands.append(command))
    options = {"init": "attention-matching,budgets=equal", "learn_keys": True, "num_steps": 20}
    spec = "gradient,init=[attention-matching,budgets=equal],learn_keys=true,num_steps=20"
    write_calls(tmp_path, "gradient", right=6, dense_right=24, options=options)
    write_calls(tmp_path, "h2o", right=6, dense_right=24)
    models = [NamedModel("model", "folder")]
    methods = ["h2o", spec, "snapkv", "tova"]
    leaderboard_tools.measure_tool_calls(models, methods, KEEPS, tmp_path, cases=24, functions=6)
    runs = [
        [*command[command.index("--method") + 1 : command.index("--keep")]] for command in commands
    ]
    assert runs == [[spec], ["h2o"], ["snapkv", "tova"]]
    folders = [Path(command[command.index("--out") + 1]) for command in commands]
    assert [folder.name for folder in folders] == ["0", "1", "2"]
    assert all(folder.parent == tmp_path / "tools" / "model" for folder in folders)


def test_a_stopped_run_is_no_table(tmp_path):
    write_calls(tmp_path, "snapkv", right=6, dense_right=24)
    records = tmp_path / "tools" / "model" / "0" / "records.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[:-1]))
    with pytest.raises(InputError, match="was stopped: Incomplete: model has 23 of 24 examples"):
        tool_calls_section(tmp_path, "model", METHODS, KEEPS)


def test_a_model_that_cannot_call_has_a_sentence_and_no_table(tmp_path):
    write_calls(tmp_path, "snapkv", right=0, dense_right=0)
    sentence, lines = tool_calls_section(tmp_path, "model", METHODS, KEEPS)
    assert sentence.endswith("That is too few to compare methods, so there is no table.")
    assert lines == []
    assert tool_calls_section(tmp_path, "other", METHODS, KEEPS) == ("", [])


def test_a_model_is_judged_by_the_conditions_that_it_was_asked_in():
    def answered(model, document, *conditions):
        cells = [(condition, keep) for condition in conditions for keep in leaderboard.KEEPS]
        cells += [("dense", 1.0), ("no document", 0.0)]
        place = {"model": model, "document": document}
        return [{**place, "condition": condition, "keep": keep} for condition, keep in cells]

    records = answered("first", "a", "h2o@self", "snapkv@self")
    records += answered("first", "b", "h2o@self")  # stopped before the other condition
    records += answered("second", "b", "h2o@self")
    kept = leaderboard.whole_documents(records)
    assert {(record["model"], record["document"]) for record in kept} == {
        ("first", "a"),
        ("second", "b"),
    }
    assert len(kept) == len(records) - 6
    without_dense = [record for record in records if record["condition"] != "dense"]
    assert leaderboard.whole_documents(without_dense) == []
