"""Rows of LongBench v2, from the Hub or from a file, checked before anything runs."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from kvcat.compress import INSTRUCTION
from kvcat.data import name_seed
from kvcat.errors import InputError, one_line
from kvcat.network import hub_obstacle

HUB_SOURCE = "hub:zai-org/LongBench-v2"
LETTERS = ("A", "B", "C", "D")
_CHOICES = tuple(f"choice_{letter}" for letter in LETTERS)
_COLUMNS = ("_id", "domain", "sub_domain", "difficulty", "length", "question", *_CHOICES, "answer", "context")

# Rows of each name in the released data set, 503 in all. Academic (44 + 50), Legal (19 + 14), Financial (22 + 15) and
# Governmental (18 + 23) occur in Single-Document QA and in Multi-Document QA; the KV-CAT paper's accuracies are
# multiples of 1/94 and 1/33, so it counts both.
SUB_DOMAINS = {
    "Academic": 94, "Agent history QA": 20, "Code repo QA": 50, "Detective": 22, "Dialogue history QA": 19,
    "Event ordering": 20, "Financial": 37, "Governmental": 41, "Knowledge graph reasoning": 15, "Legal": 33,
    "Literary": 30, "Many-shot learning": 21, "Multi-news": 23, "New language translation": 20, "Table QA": 18,
    "User guide QA": 40,
}  # fmt: skip
PAPER_SUB_DOMAINS = (
    "Academic", "Agent history QA", "Knowledge graph reasoning", "Legal", "Many-shot learning",
    "New language translation", "Table QA",
)  # fmt: skip


@dataclass(frozen=True)
class LongBenchExample:
    """A question about a long text, with four answers.

    Args:
        document: hash of the context: questions about one text are resampled together.
        name: the row's ``_id``.
        stratum: sub-domain.
        context: the long text.
        question: what is asked.
        choices: the answers A to D.
        answer: letter of the right one.
    """

    document: str
    name: str
    stratum: str
    context: str
    question: str
    choices: tuple[str, str, str, str]
    answer: str


def longbench_examples(
    source: str = HUB_SOURCE, *, sub_domains: Sequence[str] | None = PAPER_SUB_DOMAINS
) -> list[LongBenchExample]:
    """Examples of a source, in an order that their names alone decide, so that the first n are a fair sample.

    Every row is checked, also those that are not chosen. Texts are stripped, as LongBench v2's own script strips them.

    Args:
        source: ``hub:OWNER/NAME[@SPLIT]`` (split ``train`` if absent), or a file in the same schema: ``.parquet``,
            JSON lines, or one JSON array of rows.
        sub_domains: names among ``SUB_DOMAINS``; the default is the paper's seven, 221 rows of the released data set.
            None takes all rows.

    Raises:
        InputError: no such file or data set, no way to the Hub (told within seconds), a damaged or empty file, a row
            that lacks a column or holds no valid text in it, an answer that is none of A to D, an ``_id`` that occurs
            twice, a context shorter than the instruction of the reconstruction sequence, an unknown sub-domain, or no
            row of those asked for.
    """
    if sub_domains is not None:
        for name in sub_domains:
            if name not in SUB_DOMAINS:
                raise InputError(f"LongBench v2 has no sub-domain {name!r}; there are {', '.join(SUB_DOMAINS)}")
    rows = _hub_rows(source.removeprefix("hub:")) if source.startswith("hub:") else _file_rows(Path(source))
    seen: dict[str, int] = {}
    found: set[str] = set()
    chosen = []
    for number, row in enumerate(rows):
        example = _example(row, f"row {number} of {source}")
        if example.name in seen:
            raise InputError(f"rows {seen[example.name]} and {number} of {source} share the _id {example.name!r}")
        seen[example.name] = number
        found.add(example.stratum)
        if sub_domains is None or example.stratum in sub_domains:
            chosen.append(example)
    if not seen:
        raise InputError(f"{source} holds no row")
    if not chosen:
        wanted = ", ".join(sub_domains or ())
        raise InputError(f"{source} has no row of sub-domain {wanted}; it has {', '.join(sorted(found))}")
    return sorted(chosen, key=lambda example: name_seed(f"longbench:{example.name}"))


def _example(row: Any, where: str) -> LongBenchExample:
    if not isinstance(row, dict):
        raise InputError(f"{where} is no JSON object")
    for column in _COLUMNS:
        if column not in row:
            raise InputError(f"{where} has no column {column!r}; its columns: {', '.join(row)}")
        if not isinstance(row[column], str):
            raise InputError(f"{where}: column {column!r} holds {type(row[column]).__name__}, not text")
        try:
            row[column].encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{where}: column {column!r} is no valid Unicode: {error.reason}") from None
    texts = {column: row[column].strip() for column in _COLUMNS}
    for column in ("_id", "sub_domain", "question", *_CHOICES):
        if not texts[column]:
            raise InputError(f"{where}: column {column!r} is empty")
    if texts["answer"] not in LETTERS:
        raise InputError(f"{where}: answer {row['answer']!r} is none of A, B, C, D")
    length, least = len(texts["context"]), len(INSTRUCTION.strip())
    if length < least:
        raise InputError(
            f"{where}: its context of {length} characters is shorter than the instruction to reproduce it, {least}"
        )
    a, b, c, d = (texts[column] for column in _CHOICES)
    document = hashlib.sha256(texts["context"].encode()).hexdigest()[:16]
    return LongBenchExample(
        document, texts["_id"], texts["sub_domain"], texts["context"], texts["question"], (a, b, c, d), texts["answer"]
    )


def _file_rows(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise InputError(f"no such LongBench v2 file: {path}")
    try:
        yield from _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    except InputError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid and UnicodeDecodeError are ValueErrors
        raise InputError(f"{path} cannot be read: {one_line(error)}") from None


def _parquet_rows(path: Path) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as table:
        for batch in table.iter_batches(16):
            yield from batch.to_pylist()


def _json_rows(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        lines = (line for line in file if line.strip())
        first = next(lines, "")
        if first.lstrip().startswith("["):
            file.seek(0)
            yield from json.load(file)
            return
        for number, line in enumerate(chain([first] if first else [], lines)):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"row {number} of {path} is not JSON: {error.msg}") from None


def _hub_rows(name: str) -> Iterator[Any]:
    from huggingface_hub import constants

    path, _, split = name.partition("@")
    # with HF_HUB_OFFLINE datasets itself looks into its cache, at once
    if not constants.HF_HUB_OFFLINE and (obstacle := hub_obstacle()):
        raise InputError(
            f"data set {path!r} is on the Hub, and {obstacle}: name a local copy, or set HF_HUB_OFFLINE=1 to take the "
            "one an earlier run left in the cache"
        )
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        yield from datasets.load_dataset(path, split=split or "train")
    except (OSError, ValueError, DatasetsError) as error:
        raise InputError(f"data set {path!r} cannot be opened: {one_line(error)}") from None
