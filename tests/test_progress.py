"""Progress bars: TQDM_DISABLE=1 hides each of them."""

import ast
from pathlib import Path

import pytest

from kvcat.evals import progress_bar
from kvcat.progress import disable_bar

SOURCES = sorted((Path(__file__).parent.parent / "src" / "kvcat").rglob("*.py"))


@pytest.mark.parametrize(
    ("value", "hidden"), [("1", True), ("true", True), ("0", False), ("", False), (None, False)]
)
def test_the_environment_hides_a_bar_that_would_be_shown(value, hidden, monkeypatch, capsys):
    if value is None:
        monkeypatch.delenv("TQDM_DISABLE", raising=False)
    else:
        monkeypatch.setenv("TQDM_DISABLE", value)
    assert disable_bar() is (True if hidden else None)
    with progress_bar(3, "scores") as bar:
        bar.update(3)
    assert ("scores" in capsys.readouterr().err) is not hidden


def test_every_bar_asks_the_environment():
    """tqdm itself does not where ``disable`` is passed."""
    calls = [
        (source.name, node)
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tqdm"
    ]
    assert len(calls) >= 8
    for name, call in calls:
        (value,) = (word.value for word in call.keywords if word.arg == "disable")
        assert isinstance(value, ast.Call), name
        assert ast.unparse(value.func) == "disable_bar", name
