"""The Python sources that come with the installation: real text that every machine has."""

import os
import sysconfig
from pathlib import Path

from kvcat.data.rows import Document
from kvcat.errors import InputError

PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "sympy",
    "pandas",
    "matplotlib",
    "networkx",
    "huggingface_hub",
    "datasets",
)
SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "testing", "idlelib", "site-packages", "dist-packages", "__pycache__", "_vendor", "lib2to3")
)
MAX_BYTES = 400_000
MIN_BYTES = 400


def installed_documents() -> list[Document]:
    """The standard library's and the dependencies' Python files, in the order of their names; nothing is read yet.

    A document's id is ``stdlib/...`` or ``PACKAGE/...``, the path inside the library, so that a file belongs to the
    same split on every machine. Tests, vendored copies, tiny files and generated giants are left out.

    Raises:
        InputError: this installation has no Python sources (a frozen or stripped one).
    """
    return [Document(name, lambda path=path: read_source(path)) for name, path in installed_files()]


def installed_files() -> list[tuple[str, Path]]:
    """Name and path of each file of ``installed_documents``.

    Raises:
        InputError: this installation has no Python sources.
    """
    paths = sysconfig.get_paths()
    roots = {"stdlib": Path(paths["stdlib"])}
    for package in PACKAGES:
        for site in (paths["purelib"], paths["platlib"]):
            if (Path(site) / package).is_dir():
                roots[package] = Path(site) / package
    files = [file for name, root in roots.items() for file in _walk(name, root)]
    if not files:
        raise InputError(f"this installation has no Python sources below {roots['stdlib']}")
    return sorted(files)


def _walk(name: str, root: Path) -> list[tuple[str, Path]]:
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS)
        for file in files:
            path = Path(folder, file)
            if file.endswith(".py") and MIN_BYTES <= path.stat().st_size <= MAX_BYTES:
                found.append((f"{name}/{path.relative_to(root).as_posix()}", path))
    return found


def read_source(path: Path) -> str:
    """A source file's text with Unix line ends; bytes that are not UTF-8 become replacement characters."""
    return path.read_text(encoding="utf-8", errors="replace")
