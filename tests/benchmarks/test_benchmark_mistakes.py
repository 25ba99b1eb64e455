"""A mistake in the command line of a script is one line, also where a script runs another."""

import ast
import importlib
from pathlib import Path

import leaderboard
import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = sorted(
    path
    for folder in ("benchmarks", "runs", "runs/*")
    for path in REPOSITORY.glob(f"{folder}/*.py")
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_reports_mistakes_in_one_line(script):
    ending = script.read_text(encoding="utf-8").partition('if __name__ == "__main__":\n')[2]
    assert ending in ("", "    run_script(main)\n", "    sys.exit(main())\n")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_imports_from_kvcat_is_there(script):
    missing = []
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "kvcat":
            names = [name.name for name in node.names if not is_there(str(node.module), name.name)]
            missing += [f"{node.module}.{name}" for name in names]
    assert missing == []


def is_there(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


@pytest.mark.slow
def test_a_mistake_ends_a_script_and_the_one_that_runs_it(tmp_path, capfd):
    script = REPOSITORY / "benchmarks" / "quality.py"
    options = ["--model", "kvcat-base", "--data", "prose=missing.parquet"]
    with pytest.raises(SystemExit) as ended:
        leaderboard.run(script.name, *options, "--out", str(tmp_path))
    assert ended.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("quality.py: ")
    assert "missing.parquet" in line
