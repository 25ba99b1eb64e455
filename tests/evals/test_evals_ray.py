"""An evaluation on a real local Ray cluster: the records are those without Ray."""

import shlex

import pytest

from kvcat.cli.app import run
from kvcat.evals.records import read_records
from ray_commands import kill_a_worker, start
from tiny import write_texts

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

OPTIONS = (
    "--split all --prefix 64 --suffix 16 --windows 24 --batch-size 2 --keep 0.1 0.5 --method "
    "attention-matching snapkv"
)


def contents(folder):
    """The records of a results folder by example; equal numbers are equal to the last bit."""
    return {record.key: record.values for record in read_records(folder)}


def test_windows_on_two_workers_one_of_which_dies_have_the_records_of_one_process(
    cluster, tiny_folder, tmp_path
):
    data = write_texts(tmp_path / "texts", documents=8, length=12)
    arguments = ["eval", "suffix", str(tiny_folder), "--data", str(data), *shlex.split(OPTIONS)]
    assert run([*arguments, "--out", str(tmp_path / "plain")]) == 0
    out = tmp_path / "ray"
    command = start(cluster, *arguments, "--out", out, "--workers", 2)

    def is_in_the_middle():
        files = out.glob("records-*.jsonl")
        return any(file.read_bytes().count(b"\n") >= 6 for file in files)

    kill_a_worker(b"_run_in_folder", is_in_the_middle, command)
    output, errors = command.communicate()
    assert command.returncode == 0, errors
    assert "shard 1 of 2 is done" in errors
    assert output.strip().endswith("report.html")
    assert contents(out) == contents(tmp_path / "plain")
    lines = [file.read_text().splitlines() for file in out.glob("records-*.jsonl")]
    assert sum(map(len, lines)) == len(contents(out))
