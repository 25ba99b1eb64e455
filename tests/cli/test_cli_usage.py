"""Help texts, exit codes, and one line for each mistake; no model is loaded here."""

import json
import resource
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcat.cli.app import run
from kvcat.cli.options import METHODS, spread_values

COMMANDS = (
    ["demo"],
    ["prepare"],
    ["train"],
    ["export"],
    ["compress"],
    ["generate"],
    ["info"],
    ["pack"],
    ["report"],
    ["eval"],
    ["eval", "suffix"],
    ["theory"],
    ["theory", "histogram"],
    ["theory", "theorem"],
    ["theory", "train"],
    ["theory", "profile"],
    ["theory", "errata"],
)


def mistake(capsys, *argv):
    """The one line on standard error of a command that ends with exit code 2."""
    code = run([str(x) for x in argv])
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert code == 2
    assert said.out == ""
    assert len(lines) == 1
    assert lines[0].startswith("kvcat: ")
    return lines[0]


def test_help_takes_less_than_half_a_second_and_no_heavy_import():
    code = "import sys; from kvcat.cli import main\ntry: main(['--help'])\nexcept SystemExit as e: assert not e.code\n"
    code += "heavy = {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules); print(sorted(heavy))"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert child.stdout.splitlines()[-1] == "[]"
    assert after.ru_utime - before.ru_utime < 0.5


def test_the_overview_names_every_command_with_a_whole_sentence(capsys):
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    listed = shown.split("Commands:\n")[1].splitlines()
    assert {line.split()[0] for line in listed} == {command[0] for command in COMMANDS}
    assert all(line.endswith(".") and "..." not in line for line in listed)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(command, capsys):
    assert run([*command, "--help"]) == 0
    assert f"Usage: kvcat {' '.join(command)}" in capsys.readouterr().out


def test_without_arguments_the_help_is_shown(capsys):
    run([])
    assert "Usage: kvcat" in "".join(capsys.readouterr())


def test_the_version_is_printed(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvcat 0.")


def test_the_train_help_lists_one_recipe_a_line_and_every_field(capsys):
    from dataclasses import fields

    from kvcat.recipes import RECIPES
    from kvcat.training import TrainConfig

    run(["train", "--help"])
    shown = capsys.readouterr().out
    lines = [line.split()[0] for line in shown.splitlines() if line.strip()]
    assert set(RECIPES) <= set(lines)
    for field in fields(TrainConfig):
        assert f"--{field.name.replace('_', '-')}" in shown


def test_the_methods_are_the_compressors():
    from kvcat.compress import COMPRESSORS

    assert set(METHODS) == set(COMPRESSORS)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["nonsense"], "nonsense"),
        (["train"], "recipe"),
        (["train", "huge"], "no recipe 'huge'; recipes: small, "),
        (["train", "small"], "needs a model"),
        (["train", "small", "--model", "m", "--target-keep", "1.5"], "target_keep is 1.5"),
        (["train", "small", "--model", "m", "--target-keep", "half"], "'half'"),
        (["train", "small", "--model", "m", "--policy", "best"], "best"),
        (["train", "small", "--model", "m", "--group-starts", "0;6"], "'0;6'"),
        (["train", "small", "--model", "m", "--group-starts", ""], "--group-starts"),
        (["train", "small", "--model", "m", "--betas", "0.9"], "betas"),
        (["train", "small", "--model", "m", "--prefix-range", "0.5"], "--prefix-range takes two numbers"),
        (["train", "small", "--model", "m", "--prefix-range", "0.9,0.2"], "prefix_range is 0.9, 0.2"),
        (["train", "small", "--model", "m", "--learning-rate", "1"], "--learning-rate"),
        (["train", "small", "--model", "./gone", "--output", "o"], "model folder ./gone does not exist"),
        (["compress", "m", "--text", "gone.txt", "-o", "c.safetensors"], "cannot read text file gone.txt"),
        (["compress", "m", "--text", "t.txt", "-o", "c.safetensors", "--keep", "0"], "--keep is 0;"),
        (["compress", "m", "--text", "t.txt", "-o", "c.safetensors", "--keep", "1.01"], "--keep is 1.01;"),
        (["compress", "m", "--text", "t.txt", "-o", "c.safetensors", "--keep", "nan"], "--keep is nan;"),
        (["compress", "m", "--text", "t.txt", "-o", "c.safetensors", "--keep", "0.1", "0.2"], "0.2"),
        (["compress", "m", "--text", "t.txt", "-o", "c.safetensors", "--method", "zip"], "no method 'zip'"),
        (["compress", "m", "--text", "t.txt", "-o", "c.safetensors", "--supervision", "none"], "none"),
        (["compress", "m", "--text", "t.txt", "-o", "gone/c.safetensors"], "no folder gone"),
        (["compress", "./gone", "--text", "t.txt", "-o", "c.safetensors"], "model folder ./gone does not exist"),
        (["compress", "m", "--text", "empty.txt", "-o", "c.safetensors"], "empty.txt is empty"),
        (["compress", "m", "--text", "latin.txt", "-o", "c.safetensors"], "latin.txt is not UTF-8"),
        (["compress", "m", "--text", "t.txt", "-o", "t.txt"], "t.txt exists; --overwrite replaces it"),
        (["compress", "m", "--text", "t.txt", "-o", ".", "--overwrite"], ". is a folder"),
        (["compress", "m", "--text", "t.txt", "-o", "c.safetensors", "--seed", "-1"], "not '-1'"),
        (["compress", "m", "--text", "t.txt", "-o", "c.safetensors", "--seed", f"{2**63}"], f"not '{2**63}'"),
        (["compress", "m"], "--text"),
        (["generate", "m", "--cache", "gone.safetensors"], "no cache file gone.safetensors"),
        (["generate", "m", "--cache", "t.txt", "--prompt", "a"], "t.txt is truncated or not a safetensors file"),
        (["generate", "m", "--cache", "t.txt", "--max-new-tokens", "0"], "not '0'"),
        (["generate", "m", "--cache", "t.txt", "--temperature", "1e-9"], "--temperature is 1e-09;"),
        (["generate", "m", "--cache", "t.txt", "--temperature", "-1"], "--temperature is -1;"),
        (["generate", "m", "--cache", "t.txt", "--temperature", "nan"], "--temperature is nan;"),
        (["generate", "m", "--cache", "t.txt", "--temperature", "inf"], "--temperature is inf;"),
        (["eval", "suffix", "m"], "--out"),
        (["eval", "suffix", "--out", "o"], "models"),
        (["eval", "suffix", "m", "--keep", "0.1", "2", "--out", "o"], "--keep is 2;"),
        (["eval", "suffix", "m", "--method", "zip", "--out", "o"], "no method 'zip'"),
        (["eval", "suffix", "a/m", "b/m", "--out", "o"], "same label"),
        (["eval", "suffix", "./gone", "--out", "o"], "model folder ./gone does not exist"),
        (["eval", "nonsense"], "nonsense"),
        (["report", "gone"], "no folder gone"),
        (["report", ".", "--run", "gone"], "--run takes LABEL=FOLDER"),
        (["demo", "--quick", "--full"], "exclude each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2_and_nothing_is_written(argv, told, capsys, tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text("a text")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    monkeypatch.chdir(tmp_path)
    assert told in mistake(capsys, *argv)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["empty.txt", "latin.txt", "t.txt"]


def test_a_full_disk_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("kvcat.cli.app.app", lambda **_: (_ for _ in ()).throw(OSError(28, "No space", "out/x")))
    assert "no space left on the disk for out/x" in mistake(capsys, "report", "x")


def test_a_place_that_may_not_be_written_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("kvcat.cli.app.app", lambda **_: (_ for _ in ()).throw(PermissionError(13, "Denied", "out/x")))
    assert "cannot use out/x: Denied" in mistake(capsys, "report", "x")


def test_a_bug_shows_its_traceback(monkeypatch):
    monkeypatch.setattr("kvcat.cli.app.app", lambda **_: {}["missing"])
    with pytest.raises(KeyError):
        run(["report", "x"])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("eval suffix m --keep 0.05 0.1 --out o", "eval suffix m --keep 0.05 --keep 0.1 --out o"),
        ("eval suffix --keep 0.05 0.1 m", "eval suffix --keep 0.05 --keep 0.1 m"),
        ("eval suffix --method first h2o m --keep 1", "eval suffix --method first --method h2o m --keep 1"),
        ("eval suffix --keep", "eval suffix --keep"),
        ("eval suffix --keep --method first", "eval suffix --keep --method first"),
        ("eval suffix --keep=0.1 m", "eval suffix --keep=0.1 m"),
        ("eval suffix --method zip first", "eval suffix --method zip --method first"),
        ("compress m --keep 0.1 0.2", "compress m --keep 0.1 0.2"),
    ],
)
def test_options_with_several_values(written, meant):
    assert spread_values(written.split()) == meant.split()


words = st.sampled_from(["--keep", "--method", "--out", "0.1", "1", "first", "h2o", "./m", "label=x", "-o", ""])


@given(st.lists(words))
def test_spreading_only_ever_repeats_an_option(argv):
    spread = spread_values(["eval", *argv])
    repeats = 0
    for word in spread[1:]:
        if repeats < len(argv) and word == argv[repeats]:
            repeats += 1
        else:
            assert word in ("--keep", "--method")
    assert repeats == len(argv)
    assert spread_values(spread) == spread


@given(st.lists(st.floats(0.01, 1.0), min_size=1), st.lists(st.sampled_from(METHODS), min_size=1))
def test_values_written_once_equal_options_written_each_time(ratios, methods):
    short = ["eval", "suffix", "m", "--keep", *map(str, ratios), "--method", *methods]
    long = ["eval", "suffix", "m", *(x for r in ratios for x in ("--keep", str(r)))]
    assert spread_values(short) == [*long, *(x for m in methods for x in ("--method", m))]


def test_the_configuration_written_by_the_command_line_is_the_recipes(tiny_folder, texts_folder, tmp_path, capsys):
    from kvcat.recipes import small

    options = {
        "seq_len": 32, "batch_size": 2, "max_steps": 1, "group_starts": (1,), "betas": (0.8, 0.9),
        "keep_range": (0.2, 0.8), "prefix_range": (0.5, 0.9),
    }  # fmt: skip
    argv = ["--seq-len=32", "--batch-size=2", "--max-steps=1", "--group-starts=1", "--betas=0.8,0.9", "--keep-self"]
    argv += ["--keep-range=0.2,0.8", "--prefix-range=0.5,0.9"]
    argv += ["--model", str(tiny_folder), "--data", str(texts_folder), "--output", str(tmp_path / "run")]
    assert run(["train", "small", *argv]) == 0
    said = capsys.readouterr()
    assert said.out == f"exported to {tmp_path / 'run' / 'export'}\n"
    assert all(line.startswith(("step 1/1  dense", "validation at step", "saved ")) for line in said.err.splitlines())
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    expected = small(
        model=str(tiny_folder), data=str(texts_folder), output=str(tmp_path / "run"), keep_self=True, **options
    )
    assert written == json.loads(json.dumps(vars(expected)))
