import sys

import pytest

import kvcat
from kvcat.cli.app import run
from kvcat.extras import EXTRAS, missing_package


class Absent:
    """A finder that knows no package of this name."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return


@pytest.fixture
def without_matplotlib(monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "matplotlib" or name.startswith("kvcat.report"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent("matplotlib"), *sys.meta_path])


def test_a_command_whose_package_is_missing_says_how_to_install_it(
    without_matplotlib, tmp_path, capsys
):
    assert run(["report", str(tmp_path), "-o", str(tmp_path / "report")]) == 2
    message = "kvcat: kvcat report needs the package matplotlib: pip install 'kvcat[report]'\n"
    assert capsys.readouterr().err == message


def test_a_name_whose_package_is_missing_says_so_too(without_matplotlib, monkeypatch):
    monkeypatch.delitem(vars(kvcat), "report", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"kvcat\.report needs the package matplotlib"):
        _ = kvcat.report


def test_the_extra_of_a_package_is_that_of_the_command_or_the_smallest():
    error = ModuleNotFoundError("No module named 'pandas.core'", name="pandas.core")
    assert "kvcat[report]" in missing_package(error, "kvcat theory theorem")
    assert "kvcat[eval]" in missing_package(error, "kvcat.evals")
    assert missing_package(ModuleNotFoundError("no", name="torch"), "kvcat train") == ""


def test_every_optional_package_is_in_its_extra():
    import tomllib
    from pathlib import Path

    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    for extra, packages in EXTRAS.items():
        required = " ".join(project["optional-dependencies"][extra])
        assert all(package in required for package in packages)
        assert not any(package in " ".join(project["dependencies"]) for package in packages)


def test_every_pinned_package_that_is_installed_allows_the_lowest_python():
    import tomllib
    from importlib import metadata
    from pathlib import Path

    from packaging.specifiers import SpecifierSet

    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lowest = project["requires-python"].removeprefix(">=") + ".0"
    pins = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    num_checked = 0
    for distribution in metadata.distributions():
        if f"{distribution.name}=={distribution.version}" in pins:
            needed = SpecifierSet(distribution.metadata.get("Requires-Python") or "")
            assert needed.contains(lowest), f"{distribution.name} needs Python {needed}"
            num_checked += 1
    assert num_checked > 20
