"""How many threads a command computes with."""

import os
import subprocess
import sys

import pytest
import torch

from kvcat.cli import threads
from kvcat.cli.app import run


def machine(monkeypatch, tmp_path, *, total=8, allowed=8, load=0.0, running=0, quota=None):
    """A machine of so many processors, of which this process may use some: its root folder.

    ``running``: threads that run, without the one that asks; None: not known.
    """
    monkeypatch.setattr(os, "cpu_count", lambda: total)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    cgroup = tmp_path / "sys" / "fs" / "cgroup"
    cgroup.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    if running is not None:
        (tmp_path / "proc" / "loadavg").write_text(f"{load} 0.0 0.0 {running + 1}/99 7\n")
    if quota is not None:
        (cgroup / "cpu.max").write_text(quota)
    return tmp_path


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, 8),
        ({"total": 1, "allowed": 1}, 1),
        ({"allowed": 3}, 3),
        ({"load": 5.2, "running": 6}, 3),
        ({"load": 30.0, "running": 40}, 1),
        ({"load": 6.0, "running": 1}, 7),  # the processes that made the load have ended
        ({"load": 0.3, "running": 9}, 8),  # a moment's burst
        ({"load": 6.0, "running": None}, 2),  # a system without /proc
        ({"quota": "250000 100000"}, 2),
        ({"quota": "50000 100000"}, 1),
        ({"quota": "max 100000"}, 8),
        ({"total": 64, "allowed": 2, "load": 30.0, "running": 30}, 2),
    ],
    ids=str,
)
def test_a_command_uses_the_processors_that_are_allowed_and_free(
    facts, expected, monkeypatch, tmp_path
):
    root = machine(monkeypatch, tmp_path, **facts)
    assert threads.free_processors(root) == expected


def test_the_limit_of_the_first_version_of_control_groups_is_read_too(monkeypatch, tmp_path):
    root = machine(monkeypatch, tmp_path)
    folder = root / "sys" / "fs" / "cgroup" / "cpu"
    folder.mkdir()
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    for quota, expected in (("300000\n", 3), ("-1\n", 8)):
        (folder / "cpu.cfs_quota_us").write_text(quota)
        assert threads.free_processors(root) == expected


def test_the_machine_at_hand_has_some_number_of_free_processors():
    assert 1 <= threads.free_processors() <= os.cpu_count()


@pytest.mark.parametrize("spelled", [["--threads", "3"], ["--threads=3"]])
def test_threads_apply_to_every_command_and_are_removed_from_its_arguments(spelled, capsys):
    before = torch.get_num_threads()
    try:
        assert threads.take_threads("compress", ["a", *spelled, "--keep", "1"]) == [
            "a",
            "--keep",
            "1",
        ]
        assert torch.get_num_threads() == 3
        assert run(["info", *spelled, "nowhere.safetensors"]) == 2
        assert "no cache file nowhere.safetensors" in capsys.readouterr().err
        assert threads.take_threads("compress", ["a"]) == [
            "a"
        ]  # a program that imported torch before sets threads itself
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "words",
    [
        ["--threads", "0"],
        ["--threads"],
        ["--threads=two"],
        ["--threads", "-1"],
        ["--threads", "9" * 9999],
    ],
)
def test_what_is_no_number_of_threads_is_rejected(words, capsys):
    assert run(["compress", "model", *words]) == 2
    assert "--threads takes INT from 1 to " in capsys.readouterr().err


CODE = """
import os
from kvcat.cli import threads
threads.free_processors = lambda: 3
threads.take_threads({command!r}, {words!r})
print(os.environ["OMP_NUM_THREADS"])
"""


@pytest.mark.parametrize(
    ("command", "words", "environment", "expected"),
    [
        ("compress", [], {}, "3"),
        ("compress", ["--threads", "2"], {}, "2"),
        ("compress", [], {"OMP_NUM_THREADS": "1"}, "1"),
        ("compress", ["--threads", "2"], {"OMP_NUM_THREADS": "1"}, "2"),
        ("train", ["--threads", "2"], {}, "2"),
    ],
)
def test_torch_will_read_that_number_and_the_environment_comes_before_the_choice(
    command, words, environment, expected
):
    clean = {name: value for name, value in os.environ.items() if name not in threads.VARIABLES}
    code = CODE.format(command=command, words=words)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected


def test_every_help_text_names_the_option(capsys):
    for command in ("compress", "train small", "eval suffix"):
        assert run([*command.split(), "--help"]) == 0
        assert "--threads INT>=1" in capsys.readouterr().out
