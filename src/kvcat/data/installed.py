"""The Python sources that come with the installation: real text that every machine has."""

import os
import sysconfig
from pathlib import Path

from kvcat.data.documents import Document
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
    paths = sysconfig.get_paths()
    roots = {"stdlib": Path(paths["stdlib"])}
    for package in PACKAGES:
        for site in (paths["purelib"], paths["platlib"]):
            if (Path(site) / package).is_dir():
                roots[package] = Path(site) / package
    documents = [document for name, root in roots.items() for document in _walk(name, root)]
    if not documents:
        raise InputError(f"this installation has no Python sources below {roots['stdlib']}")
    return sorted(documents, key=lambda document: document.id)


def _walk(name: str, root: Path) -> list[Document]:
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS)
        for file in sorted(files):
            path = Path(folder, file)
            if file.endswith(".py") and MIN_BYTES <= path.stat().st_size <= MAX_BYTES:
                found.append(
                    Document(f"{name}/{path.relative_to(root).as_posix()}", lambda path=path: read_source(path))
                )
    return found


def read_source(path: Path) -> str:
    """A source file's text with Unix line ends; bytes that are not UTF-8 become replacement characters."""
    return path.read_text(encoding="utf-8", errors="replace")
