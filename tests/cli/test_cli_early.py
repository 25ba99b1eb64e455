"""Mistakes of a user are reported before torch and transformers are imported."""

import json
import os
import subprocess
import sys

import pytest

CODE = """
import io, json, sys
from contextlib import redirect_stderr
from kvcat.cli.app import run
heavy = {"torch", "transformers", "datasets"}
for argv in json.loads(sys.argv[1]):
    with redirect_stderr(io.StringIO()) as said:
        code = run(argv)
    imported = sorted(heavy & set(sys.modules))
    heavy -= set(imported)  # named at the first command that imports them
    print(json.dumps([code, imported, said.getvalue()]))
"""
MISTAKES = [
    (["compress", "./none", "--text", "TEXT", "-o", "OUT"], "model folder ./none does not exist"),
    (
        ["generate", "./none", "--cache", "TEXT", "--prompt", "x"],
        "model folder ./none does not exist",
    ),
    (["pack", "./none", "--cache", "TEXT", "-o", "OUT"], "model folder ./none does not exist"),
    (["widen", "./none", "-o", "OUT"], "model folder ./none does not exist"),
    (["widen", "./none", "-o", "OUT.gguf"], "model folder ./none does not exist"),
    (
        ["prepare", "installed", "--model", "./none", "-o", "OUT"],
        "model folder ./none does not exist",
    ),
    (
        ["train", "small", "--model", "./none", "--output", "OUT"],
        "model folder ./none does not exist",
    ),
    (["train", "small", "--model", "./none", "--dry-run"], "model folder ./none does not exist"),
    (["export", "./none", "-o", "OUT"], "no training run in folder none"),
    *(
        (["eval", name, "base=./none", "--out", "OUT"], "model folder ./none does not exist")
        for name in ("suffix", "needle", "longbench", "ruler", "qa")
    ),
    (
        ["eval", "profile", "./none", "--data", "TEXT", "--out", "OUT"],
        "model folder ./none does not exist",
    ),
    (
        ["compress", "nobody/none", "--text", "TEXT", "-o", "OUT"],
        "neither a folder nor in the local Hub cache",
    ),
    (["compress", "TEXT", "--text", "TEXT", "-o", "OUT"], "is a file, not a model folder"),
    (
        ["compress", "FOLDER", "--text", "TEXT", "-o", "OUT"],
        "is not a model folder: it has no config.json",
    ),
    (
        ["compress", "kvcat-base", "--text", "TEXT", "-o", "OUT", "--method", "magic"],
        "no compressor 'magic'",
    ),
    (
        ["compress", "kvcat-base", "--text", "TEXT", "-o", "OUT", "--method", "gradient,x"],
        "is not of the form option=value",
    ),
    (
        ["compress", "kvcat-base", "--text", "TEXT", "-o", "OUT", "--device", "abacus"],
        "device is 'abacus'",
    ),
    (
        ["compress", "kvcat-base", "--text", "TEXT", "-o", "OUT", "--device", "cuda:x"],
        "device is 'cuda:x'",
    ),
    (
        ["generate", "kvcat-base", "--cache", "none.safetensors", "--prompt", "x"],
        "no cache file none.safetensors",
    ),
    (["info", "none.safetensors"], "no cache file none.safetensors"),
    (
        ["generate", "kvcat-base", "--cache", "TEXT", "--prompt", "x", "--top-p", "0.9"],
        "--top-p needs a --temperature above 0",
    ),
    (["chat", "kvcat-base", "--cache", "TEXT", "--top-p", "0.9"], "--top-p needs a --temperature"),
    (["chat", "kvcat-base", "--cache", "TEXT", "--temperature", "-1"], "--temperature is -1"),
    (
        ["eval", "needle", "kvcat-base", "--out", "OUT", "--method", "magic"],
        "no compressor 'magic'",
    ),
    (["eval", "qa", "kvcat-base", "--out", "OUT", "--device", "abacus"], "device is 'abacus'"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Exit code, heavy imports and message of every mistake, one after another in one process."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "text.txt").write_text("A text.")
    (folder / "empty").mkdir()
    places = {"TEXT": folder / "text.txt", "OUT": folder / "out", "FOLDER": folder / "empty"}
    commands = [
        [
            str(places.get(word, word)).replace("OUT.gguf", str(folder / "out.gguf"))
            for word in arguments
        ]
        for arguments, _ in MISTAKES
    ]
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(commands)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        pytest.param(row, reason, id=f"{row} {' '.join(arguments)[:50]}")
        for row, (arguments, reason) in enumerate(MISTAKES)
    ],
)
def test_a_mistake_is_named_before_torch_is_imported(row, reason, outcomes):
    code, imported, said = outcomes[row]
    assert (code, imported) == (2, [])
    assert reason in said


def test_every_method_that_exists_passes_the_early_check():
    from kvcat.cli.early import check_method
    from kvcat.compress import COMPRESSORS

    for name in COMPRESSORS:
        check_method(name)
    check_method("kvpress:SnapKVPress,window_size=8")
