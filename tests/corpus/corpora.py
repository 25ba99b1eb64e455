"""Corpora, and the contents of stores (a helper of the tests)."""

import json

import pyarrow.parquet

from tiny import sentences


def write_rows(path, rows):
    """A JSONL file of rows; a text in their place is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def text_of(number, length=2):
    return "".join(sentences(length, seed=number))


def contents(store):
    """The bytes of every file of a local store except the manifest, whose rows lack times and how
    often they were made."""
    files = {}
    for path in sorted(store.rglob("*")):
        name = path.relative_to(store).as_posix()
        if path.is_file() and not path.name.startswith(".kvcat") and name != "manifest.parquet":
            files[name] = path.read_bytes()
    manifest = pyarrow.parquet.read_table(store / "manifest.parquet")
    files["manifest"] = manifest.drop_columns(["seconds", "finished", "revision"]).to_pylist()
    return files
