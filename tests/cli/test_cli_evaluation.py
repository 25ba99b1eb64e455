"""eval suffix and report, end to end."""

import contextlib
import io
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest

from kvcat.cli.app import run
from kvcat.evals.records import ResultsFolder, read_records
from tiny import write_texts, write_tiny_model


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("data") / "texts", documents=4, length=12)


def arguments(model, data, out, *options):
    fixed = ["--data", data, "--split", "all", "--prefix", 32, "--suffix", 8, "--windows", 4, "--batch-size", 2]
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


def test_an_evaluation_ends_in_records_a_table_and_a_page(finished):
    _, out, said = finished
    page = out / "report" / "report.html"
    assert said.splitlines()[-1] == str(page)
    assert "base" in said
    assert len(records(out)) == 4 * 2 * 2
    assert {json.loads(line)["model"] for line in records(out)} == {"base"}
    assert page.stat().st_size > 1000


def test_the_same_command_again_adds_nothing(finished, capsys):
    argv, out, said = finished
    before = records(out)
    assert run(argv) == 0
    assert records(out) == before
    assert capsys.readouterr().out == said


def test_a_report_over_recorded_evaluations_and_a_run(finished, tiny_folder, texts_folder, tmp_path, capsys):
    options = ["--seq-len", 32, "--batch-size", 2, "--max-steps", 2, "--num-groups", 2, "--feature-dim", 8]
    folders = ["--model", tiny_folder, "--data", texts_folder, "--output", tmp_path / "run"]
    run([str(x) for x in ["train", "small", *folders, *options]])
    capsys.readouterr()
    report = ["report", finished[1], "-o", tmp_path / "page", "--run", f"KV-CAT={tmp_path / 'run'}", "--title", "T"]
    assert run([str(x) for x in report]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page' / 'report.html'}\n"
    assert "<title>T" in (tmp_path / "page" / "report.html").read_text()


def test_another_configuration_in_the_same_folder_is_a_mistake(finished, tiny_folder, data, capsys):
    _, out, _ = finished
    before = records(out)
    assert run(arguments(tiny_folder, data, out, "--method", "first", "--keep", 0.3)) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert records(out) == before


@pytest.mark.parametrize(
    ("source", "options", "told"),
    [
        ("data", ["--prefix", 300], "no document is long enough"),
        ("long", ["--prefix", 300], "windows of 308 tokens exceed the 256 positions"),
        ("text", ["--split", "test"], "no document in split 'test'"),
        ("data", ["--keep", 0.5, 0.5], "twice"),
        ("data", ["--data", "text"], "no document is long enough"),
        ("data", ["--shard", "2/2"], "--shard takes INDEX/COUNT"),
        ("data", ["--supervision", "reconstruction", "--prefix", 150], "reconstruction sequences of"),
    ],
)
def test_windows_that_cannot_be_are_one_line_and_nothing_is_written(
    source, options, told, tiny_folder, data, tmp_path, capsys
):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "1.txt").write_text("short")
    sources = {"data": data, "long": write_texts(tmp_path / "long", documents=4, length=90), "text": tmp_path / "text"}
    filled = [sources.get(option, option) for option in options]
    assert run(arguments(tiny_folder, sources[source], tmp_path / "out", "--method", "first", *filled)) == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_several_sources_and_shards_end_in_one_report(tiny_folder, data, tmp_path, capsys, monkeypatch):
    other = write_texts(tmp_path / "other", documents=4, length=12)
    argv = arguments(f"base={tiny_folder}", data, tmp_path / "out", "--data", other, "--method", "first", "--keep", 0.5)
    assert run([*argv, "--shard", "0/2"]) == 0
    monkeypatch.setenv("RANK", "1")  # as torchrun sets them
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(argv) == 0
    folders = capsys.readouterr().out.split("kvcat report ")[-1].split()
    assert not (tmp_path / "out" / "report").exists()
    assert run(["report", *folders, "-o", str(tmp_path / "page")]) == 0
    assert (tmp_path / "page" / "report.html").exists()
    assert [len(read_records(Path(folder))) for folder in folders] == [4, 4]


def test_an_evaluation_stopped_between_two_batches_ends_with_the_same_records_and_table(
    finished, tiny_folder, data, tmp_path, capsys, monkeypatch
):
    _, whole, said = finished
    argv = arguments(f"base={tiny_folder}", data, tmp_path / "out", *QUICK)
    append, calls = ResultsFolder.append, []

    def stop(self, new):
        append(self, new)
        calls.append(new)
        if len(calls) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResultsFolder, "append", stop)
        assert run(argv) == 130
    assert 0 < len(records(tmp_path / "out")) < len(records(whole))
    capsys.readouterr()
    assert run(argv) == 0
    assert records(tmp_path / "out") == records(whole)
    assert capsys.readouterr().out.replace(str(tmp_path / "out"), str(whole)) == said


def evaluate(argv):
    with open(os.devnull, "w") as nothing:
        sys.stdout = sys.stderr = nothing
        os._exit(run(argv))


@pytest.mark.slow
def test_a_killed_evaluation_ends_with_the_same_records_and_summary(tiny_folder, data, tmp_path, capsys):
    other = write_tiny_model(tmp_path / "other", seed=1)
    whole, broken = tmp_path / "a", tmp_path / "b"
    both = (f"other={other}", *QUICK, "--batch-size", 1)
    assert run(arguments(f"base={tiny_folder}", data, whole, *both)) == 0
    said = capsys.readouterr().out
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvcat.cli.app", "kvcat.evals", "kvcat.training.loop"])
    child = context.Process(target=evaluate, args=(arguments(f"base={tiny_folder}", data, broken, *both),), daemon=True)
    child.start()
    while not (broken / "records.jsonl").exists() or len(records(broken)) < 3:
        time.sleep(0.005)
    child.kill()
    child.join()
    assert len(records(broken)) < len(records(whole))
    assert run(arguments(f"base={tiny_folder}", data, broken, *both)) == 0
    assert capsys.readouterr().out.replace(str(broken), str(whole)) == said
    assert records(broken) == records(whole)
