"""The evaluations beside suffix, end to end: needle, ruler, longbench, qa."""

from pathlib import Path

import pytest

from kvcat.cli.app import run
from kvcat.evals import read_records

SMALL = Path(__file__).parents[2] / "runs" / "small"


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Evaluates with kvcat-base; the folder of the results."""

    def evaluate(name, *options):
        out = tmp_path_factory.mktemp("evaluation") / name
        argv = ["eval", name, "base=kvcat-base", "--out", out, *options]
        assert run([str(x) for x in argv]) == 0
        return out

    return evaluate


def methods(out):
    return {(record.method, record.keep_ratio, record.step) for record in read_records(out)}


def test_a_needle_run_ends_in_records_of_both_methods_the_baselines_and_a_page(evaluated):
    method = ("--method", "first", "gradient,init=random,num_steps=1", "--keep", 0.5, "--batch-size", 5)
    out = evaluated("needle", "--length", 200, "--per-depth", 1, *method)
    expected = {("dense", 1.0, None), ("no-context", 0.0, None), ("first", 0.5, None)}
    assert methods(out) == expected | {("gradient", 0.5, step) for step in (0, 1)}
    assert len(read_records(out)) == 5 * 5
    assert "exact match" in (out / "report" / "report.html").read_text()


def test_a_ruler_run_takes_several_lengths(evaluated):
    tasks = ("--task", "vt", "--per-task", 1, "--method", "first", "--keep", 0.5, "--supervision", "self")
    out = evaluated("ruler", "--length", 400, 420, *tasks)
    for length in ("400", "420"):
        assert {record.dataset for record in read_records(out / length)} == {f"ruler-{length}"}
    assert (out / "report" / "report.html").exists()


def test_a_longbench_run_of_a_model_that_cannot_do_it_is_labelled_plumbing(evaluated):
    options = ("--sub-domain", "all", "--max-tokens", 700, "--limit", 2, "--method", "first", "--keep", 0.2)
    out = evaluated("longbench", "--data", SMALL / "longbench.jsonl", *options)
    baselines = {("dense", 1.0, None), ("no-context", 0.0, None), ("truncated", 0.2, None)}
    assert methods(out) == baselines | {("first", 0.2, None)}
    assert "plumbing" in (out / "report" / "report.html").read_text()


def test_a_multiple_choice_run_covers_the_eight_tasks(evaluated):
    out = evaluated("qa", "--data", SMALL / "qa", "--limit", 2)
    assert len({record.stratum for record in read_records(out)}) == 8
    assert methods(out) == {("dense", 1.0, None)}


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["needle", "--length", 20], "too short"),
        (["needle", "--length", 900], "positions"),
        (["needle", "--filler", "absent.txt"], "absent.txt"),
        (["ruler", "--task", "maze"], "no RULER task 'maze'"),
        (["longbench", "--data", "absent.jsonl"], "absent.jsonl"),
        (["longbench", "--data", SMALL / "longbench.jsonl", "--sub-domain", "Poetry"], "Poetry"),
        (["longbench", "--data", SMALL / "longbench.jsonl", "--sub-domain", "all"], "sequences of 32768 tokens exceed"),
        (["qa", "--data", SMALL], "no file of a QA task"),
        (["qa", "--data", SMALL / "qa", "--task", "maths"], "maths"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_written(argv, told, tmp_path, capsys):
    name, *options = argv
    out = tmp_path / "out"
    assert run([str(x) for x in ["eval", name, "kvcat-base", "--out", out, *options]]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1
    assert not out.exists()
