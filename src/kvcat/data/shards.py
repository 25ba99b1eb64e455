"""The files of a source of text: local, on the Hub, or the installed Python sources."""

import glob
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvcat.data.retry import one_line, with_retries
from kvcat.errors import InputError
from kvcat.network import hub_obstacle

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".tex", ".html")
PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
LINES_SUFFIXES = (".jsonl", *(f".jsonl{packed}" for packed in PACKED_SUFFIXES))
HUB_LINES_SUFFIXES = (*LINES_SUFFIXES, ".json", *(f".json{packed}" for packed in PACKED_SUFFIXES), ".ndjson")

Kind = Literal["parquet", "jsonl", "text", "whole"]


@dataclass(frozen=True)
class Shard:
    """One file of a source.

    Args:
        name: the same on every machine; documents without an ``id`` are named after it.
        url: path, or a URL that fsspec opens.
        kind: ``parquet`` and ``jsonl`` hold a document a row, ``text`` is cut into pieces, ``whole`` is one document.
    """

    name: str
    url: str
    kind: Kind

    @property
    def remote(self) -> bool:
        """Whether reading it may fail for a moment."""
        return "://" in self.url


@dataclass(frozen=True)
class Shards:
    """The files of a source, in the order of their names.

    Args:
        source: as in ``open_shards``.
        files: at least one.
        revision: a Hub commit, or a hash of names and sizes: the same files have the same one.
    """

    source: str
    files: tuple[Shard, ...]
    revision: str


def open_shards(source: str, *, revision: str | None = None) -> Shards:
    """The files of a source named on the command line; nothing of them is read.

    Args:
        source: as in ``open_documents``.
        revision: commit of a ``hub:`` source; None takes the newest. Other sources ignore it.

    Raises:
        InputError: nothing of that name, no readable file in it, or no way to the Hub (told within seconds).
    """
    if source.startswith("hub:"):
        return _hub_shards(source.removeprefix("hub:"), revision)
    if source.removeprefix("stream:") == "installed":
        from kvcat.data.installed import installed_files

        files = [Shard(name, str(path), "whole") for name, path in installed_files()]
        return Shards(source, tuple(files), _digest(files))
    return local_shards(source)


def local_shards(source: str) -> Shards:
    """The readable files of a local file, folder or pattern, in the order of their names.

    Raises:
        InputError: nothing of that name, or no readable file in it.
    """
    path = Path(source.removeprefix("stream:")).expanduser()
    if path.is_file():
        root, found = path.parent, [path]
    elif path.is_dir():
        if (path / "tokens.json").is_file():
            raise InputError(f"{path} holds prepared tokens, not text: name the text itself")
        named = (*TEXT_SUFFIXES, *LINES_SUFFIXES, ".parquet")
        root, found = path, sorted(p for p in path.rglob("*") if p.name.endswith(named) and p.is_file())
        if not found:
            raise InputError(f"no text, .jsonl or .parquet file in folder {path}")
    else:
        root, found = _matches(path)
    files = [Shard(p.relative_to(root).as_posix(), str(p), _kind(p.name, LINES_SUFFIXES) or "text") for p in found]
    return Shards(source, tuple(files), _digest(files))


def _matches(pattern: Path) -> tuple[Path, list[Path]]:
    """The folder before the first wildcard, and the files that match."""
    if not glob.has_magic(str(pattern)):
        raise InputError(f"no such text file or folder: {pattern}")
    found = sorted(p for p in map(Path, glob.glob(str(pattern), recursive=True)) if p.is_file())
    if not found:
        raise InputError(f"no file matches {pattern}")
    fixed = next(i for i, part in enumerate(pattern.parts) if glob.has_magic(part))
    return Path(*pattern.parts[:fixed]), found


def _kind(name: str, lines: tuple[str, ...]) -> Kind | None:
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith(lines):
        return "jsonl"
    return "text" if name.endswith(TEXT_SUFFIXES) else None


def _digest(files: list[Shard]) -> str:
    listed = "\n".join(f"{file.name} {Path(file.url).stat().st_size}" for file in files)
    return hashlib.sha256(listed.encode()).hexdigest()[:40]


def _hub_shards(name: str, revision: str | None) -> Shards:
    path, _, split = name.partition("@")
    owner_name, config = "/".join(path.split("/")[:2]), "/".join(path.split("/")[2:]) or None
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", owner_name):
        raise InputError(f"hub:{name} names no data set: write hub:OWNER/NAME, hub:OWNER/NAME/CONFIG or ...@SPLIT")
    if obstacle := hub_obstacle():
        raise InputError(f"data set {owner_name!r} is on the Hub, and {obstacle}")
    urls = _hub_urls(owner_name, config, split or "train", revision)
    files = [_hub_shard(url, owner_name) for url in sorted(urls)]
    commit = re.search(r"@([^/]+)/", urls[0])
    return Shards(f"hub:{name}", tuple(files), commit[1] if commit else _digest_names(files))


def _hub_urls(owner_name: str, config: str | None, split: str, revision: str | None) -> list[str]:
    """Where the files of a data set's split are, each with its commit."""
    import datasets

    def list_files() -> Any:
        return datasets.load_dataset_builder(owner_name, config, revision=revision).config.data_files

    try:
        listed = with_retries(f"the file list of {owner_name}", list_files)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"data set {owner_name!r} cannot be opened: {one_line(error)}") from None
    if not listed or not listed.get(split):
        found = ", ".join(map(str, listed or ())) or "none"
        raise InputError(f"data set {owner_name!r} has no split {split!r}; its splits: {found}")
    return [str(url) for url in listed[split]]


def _hub_shard(url: str, owner_name: str) -> Shard:
    name = url.partition("://")[2] or url
    name = re.sub(rf"^datasets/{re.escape(owner_name)}(@[^/]+)?/", "", name)
    kind = _kind(name, HUB_LINES_SUFFIXES)
    if kind is None:
        raise InputError(f"data set {owner_name!r} keeps its text in {name}; only parquet, JSON lines and text stream")
    return Shard(name, url, kind)


def _digest_names(files: list[Shard]) -> str:
    return hashlib.sha256("\n".join(file.url for file in files).encode()).hexdigest()[:40]
