"""The evaluations and report, end to end."""

import contextlib
import io
import json
import shlex
from pathlib import Path

import pytest

from kvcat.cli.app import run
from kvcat.evals.records import read_records
from tiny import write_texts

SMALL = Path(__file__).parents[2] / "runs" / "small"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("data") / "texts", documents=4, length=12)


def arguments(model, data, out, *options):
    fixed = ["--data", data]
    fixed += shlex.split("--split all --prefix 32 --suffix 8 --windows 4 --batch-size 2")
    return [str(x) for x in ["eval", "suffix", model, *fixed, "--out", out, *options]]


QUICK = ("--method", "first", "snapkv", "--keep", 0.1, 0.5)


def records(out):
    return sorted((out / "records.jsonl").read_text().splitlines())


@pytest.fixture(scope="module")
def finished(tiny_folder, data, tmp_path_factory):
    """A finished evaluation: the command, its folder, what it printed."""
    out = tmp_path_factory.mktemp("evaluation") / "out"
    argv = arguments(f"base={tiny_folder}", data, out, *QUICK)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert run(argv) == 0
    return argv, out, said.getvalue()


def test_an_evaluation_ends_in_records_a_table_and_a_page_and_again_adds_nothing(
    finished, tiny_folder, data, capsys
):
    argv, out, said = finished
    page = out / "report" / "report.html"
    before = records(out)
    assert said.splitlines()[-1] == str(page)
    assert (
        "Not a result, base: context gain" in said
    )  # an untrained model: no result on the terminal either
    assert len(before) == 4 * 2 * 2
    assert {json.loads(line)["model"] for line in before} == {"base"}
    assert page.stat().st_size > 1000
    assert run(argv) == 0
    assert capsys.readouterr().out == said
    assert (
        run(arguments(tiny_folder, data, out, "--method", "first", "--keep", 0.3)) == 2
    )  # another configuration
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert records(out) == before


@pytest.mark.slow
def test_several_sources_and_shards_end_in_one_report(
    tiny_folder, data, tmp_path, capsys, monkeypatch
):
    other = write_texts(tmp_path / "other", documents=4, length=12)
    argv = arguments(
        f"base={tiny_folder}",
        data,
        tmp_path / "out",
        "--data",
        other,
        "--method",
        "first",
        "--keep",
        0.5,
    )
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets them
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert run(argv) == 0
    folders = capsys.readouterr().out.split("kvcat report ")[-1].split()
    assert not (tmp_path / "out" / "report").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(
        '{"kind": "train", "step": 1, "dense_loss": 2.0}\n'
    )
    report = [
        "report",
        *folders,
        "-o",
        str(tmp_path / "page"),
        "--run",
        f"KV-CAT={tmp_path / 'run'}",
        "--title",
        "T",
    ]
    assert run(report) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page' / 'report.html'}\n"
    assert "<title>T" in (tmp_path / "page" / "report.html").read_text()
    assert [len(read_records(Path(folder))) for folder in folders] == [4, 4]


def evaluate(out, name, *options):
    assert run([str(x) for x in ["eval", name, "base=kvcat-base", "--out", out, *options]]) == 0


def evaluated(out, name, *options):
    """Evaluates with kvcat-base; what the records are of."""
    evaluate(out, name, *options)
    return {(record.method, record.keep_ratio, record.step) for record in read_records(out)}


@pytest.mark.slow
def test_a_needle_run_ends_in_records_of_both_methods_the_baselines_and_a_page(tmp_path):
    out = tmp_path / "out"
    method = (
        "--method",
        "first",
        "gradient,init=random,num_steps=1",
        "--keep",
        0.5,
        "--batch-size",
        5,
    )
    primary = ("--primary", "gradient,num_steps=1,init=random", 0.5, "nll")
    evaluated_cells = evaluated(out, "needle", "--length", 200, "--per-depth", 1, *method, *primary)
    chosen = {
        "method": "gradient init=random num_steps=1",
        "keep_ratio": 0.5,
        "metric": "nll",
        "named": True,
    }
    assert json.loads((out / "config.json").read_text())["primary"] == chosen
    expected = {("dense", 1.0, None), ("no-context", 0.0, None), ("first", 0.5, None)}
    assert evaluated_cells == expected | {("gradient", 0.5, step) for step in (0, 1)}
    assert len(read_records(out)) == 5 * 5
    assert "exact match" in (out / "report" / "report.html").read_text()


@pytest.mark.slow
def test_a_ruler_run_accepts_several_lengths(tmp_path):
    tasks = ("--task", "vt", "--per-task", 1, "--method", "first", "--keep", 0.5)
    evaluate(tmp_path, "ruler", "--length", 400, 420, *tasks)
    for length in ("400", "420"):
        assert {record.dataset for record in read_records(tmp_path / length)} == {f"ruler-{length}"}
    assert (tmp_path / "report" / "report.html").exists()


@pytest.mark.slow
def test_longbench_and_multiple_choice_run_and_a_model_that_cannot_do_it_is_labelled(tmp_path):
    options = shlex.split("--sub-domain all --max-tokens 700 --limit 2 --method first --keep 0.2")
    evaluated_cells = evaluated(
        tmp_path / "long", "longbench", "--data", SMALL / "longbench.jsonl", *options
    )
    baselines = {("dense", 1.0, None), ("no-context", 0.0, None), ("truncated", 0.2, None)}
    assert evaluated_cells == baselines | {("first", 0.2, None)}
    assert "[not a result]" in (tmp_path / "long" / "report" / "report.html").read_text()
    assert evaluated(tmp_path / "qa", "qa", "--data", SMALL / "qa", "--limit", 1) == {
        ("dense", 1.0, None)
    }
    assert len({record.stratum for record in read_records(tmp_path / "qa")}) == 8


@pytest.mark.slow
def test_a_profile_ends_in_a_table(tmp_path, capsys):
    data = write_texts(tmp_path / "texts", documents=8, length=60)
    argv = ["eval", "profile", "kvcat-base", "--data", data, "--out", tmp_path / "out"]
    argv += shlex.split("--method first --prefix 16 --suffix 8 --windows 1 --slots 2")
    assert run([str(x) for x in argv]) == 0
    assert "kvcat-base   best          2" in capsys.readouterr().out
    assert (tmp_path / "out" / "profile.csv").stat().st_size
