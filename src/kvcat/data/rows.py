"""Rows of a data set of questions, from the Hub or a file."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
from datasets.exceptions import DatasetsError

from kvcat.errors import InputError, one_line
from kvcat.hub import HUB_PREFIX, HubDataSet
from kvcat.text.encoder import repaired


def read_rows(source: str) -> Iterator[Any]:
    """The rows of a data set, in order; JSON values.

    Half of a surrogate pair, which JSON can spell and no encoding can hold, becomes U+FFFD.

    Args:
        source: ``hub:OWNER/NAME[/CONFIG][@SPLIT]`` (split ``train`` if absent; from the cache alone
            if HF_HUB_OFFLINE is set), or a file: ``.parquet``, JSON lines, or one JSON array.

    Raises:
        InputError: it does not exist or is damaged, or the Hub cannot be reached, within seconds.
    """
    try:
        rows = _unrepaired_rows(source)
    except InputError:
        raise
    except (OSError, ValueError, DatasetsError) as error:
        # ArrowInvalid and UnicodeDecodeError are ValueErrors
        raise InputError(f"{source} cannot be read: {one_line(error)}") from None
    for row in rows:
        yield repaired(row)


def _unrepaired_rows(source: str) -> Iterable[Any]:
    """The rows, unchanged."""
    if source.startswith(HUB_PREFIX):
        return HubDataSet.parse(source).rows()
    if source.endswith(".parquet"):
        return pyarrow.parquet.read_table(source).to_pylist()
    text = Path(source).read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def data_name(source: str) -> str:
    """The name of a source in records.

    A file is recorded by its name alone, so that results do not depend on its folder.
    """
    return source if source.startswith(HUB_PREFIX) else Path(source).name
