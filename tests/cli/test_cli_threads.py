"""How many threads a command computes with."""

import os
import subprocess
import sys

import pytest
import torch

from kvcat.cli import threads
from kvcat.cli.app import run


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


CODE = """
import os
from kvcat.cli import threads
threads.take_threads({command!r}, {words!r})
print(os.environ.get("OMP_NUM_THREADS"))
"""


@pytest.mark.parametrize(
    ("command", "words", "environment", "expected"),
    [
        ("compress", [], {}, "None"),
        ("compress", ["--threads", "2"], {}, "2"),
        ("compress", [], {"OMP_NUM_THREADS": "1"}, "1"),
        ("compress", ["--threads", "2"], {"OMP_NUM_THREADS": "1"}, "2"),
        ("train", ["--threads", "2"], {}, "2"),
    ],
)
def test_torch_will_read_that_number_and_otherwise_what_the_environment_says(
    command, words, environment, expected
):
    clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
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
