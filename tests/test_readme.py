"""The README's own examples run, and what it says of the tree is there."""

import re
import shlex
from pathlib import Path

import pytest

from kvcat.cli.app import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return [code for name, code in found if name == language]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("README.md", "CITATION.cff"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_examples_run_one_after_the_other(workplace: Path) -> None:
    exec(compile("\n".join(blocks("python")), "README.md", "exec"), {})


@pytest.mark.parametrize("commands", blocks("sh"))
def test_shell_examples_run(commands: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in commands.strip().splitlines():
        program, *arguments = shlex.split(line)
        assert program == "kvcat"
        assert run(arguments) == 0, capsys.readouterr().err
    assert (workplace / "report" / "report.html").stat().st_size > 10_000


def test_every_room_of_the_package_has_a_line_in_the_tree() -> None:
    tree = next(block for block in blocks("") if block.startswith("src/kvcat/"))
    rooms = {p.name for p in (ROOT / "src/kvcat").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert rooms == set(re.findall(r"^  (\w+)/", tree, flags=re.MULTILINE))


def test_figures_of_the_readme_name_the_command_that_prints_them() -> None:
    result = README.split("## A result")[1].split("\n## ")[0]
    assert "make demo" in result
    for plot in re.findall(r"!\[.*?\]\((.*?)\)", result):
        assert (ROOT / plot).exists()
