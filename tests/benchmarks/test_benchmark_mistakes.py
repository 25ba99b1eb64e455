"""A mistake in the command line of a script is one line, also where a script runs another."""

from pathlib import Path

import leaderboard
import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = sorted([*REPOSITORY.glob("benchmarks/*.py"), *REPOSITORY.glob("runs/*/*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_reports_mistakes_in_one_line(script):
    ending = script.read_text(encoding="utf-8").partition('if __name__ == "__main__":\n')[2]
    assert ending in ("", "    run_script(main)\n", "    sys.exit(main())\n")


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
