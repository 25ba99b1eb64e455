"""Every name and file on the page for engineers exists, and its rooms are those of the contract."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
DOTTED = sorted(set(re.findall(r"`(kvcat(?:\.\w+)+)", PAGE)))
FILES = sorted(set(re.findall(r"`((?:src|tests|docs|examples)/[\w./]+)`", PAGE)))
WORDS = re.compile(r"\b(?:[a-z]+_[a-z_]+|[A-Z][a-z]+(?:[A-Z][a-z]+)+(?:\.[a-z_]+)?)\b")
PLAIN = {"kv_gate"}  # arguments of functions in the pictures


def source():
    """All code of the package."""
    files = sorted((ROOT / "src" / "kvcat").rglob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def test_the_page_names_things():
    assert len(DOTTED) > 20
    assert len(FILES) > 30
    assert len(PAGE.splitlines()) <= 250


@pytest.mark.parametrize("dotted", DOTTED)
def test_a_dotted_name_on_the_page_can_be_imported(dotted):
    thing = None
    for index, name in enumerate(words := dotted.split("."), 1):
        file = ROOT.joinpath("src", *words[:index])
        if file.is_dir() or file.with_suffix(".py").exists():
            thing = importlib.import_module(".".join(words[:index]))
        else:
            thing = getattr(thing, name)


def test_every_file_on_the_page_exists():
    assert [name for name in FILES if not (ROOT / name).exists()] == []


def test_every_name_in_the_tables_and_pictures_is_defined_in_the_code():
    quoted = " ".join(re.findall(r"`(?!kvcat\.)([A-Za-z_.]+)`", PAGE))
    definitions = re.findall(r"\b(?:def|class) (\w+)|^ +(\w+):", source(), re.MULTILINE)
    defined = {word for words in definitions for word in words}
    names = set(WORDS.findall(quoted + "\n".join(BLOCKS[1:]))) - PLAIN
    assert sorted(name for name in names if name.rpartition(".")[2] not in defined) == []


def test_the_rooms_are_those_of_the_import_contract_in_their_order():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    shown = [re.split(r" {2,}", line)[0] for line in BLOCKS[0].splitlines()]
    assert shown == [layer.replace("kvcat.", "") for layer in layers]
