"""Token files: text tokenised once into a folder that training maps into memory.

``tokens.json`` describes the folder. ``train.bin`` and ``validation.bin`` hold token ids in
little-endian, with the ``opening`` before each document (such as BOS) and EOS after it, without
gaps, so that sequences of any length can be cut from them. ``train.crc32`` and
``validation.crc32`` hold the CRC-32 of each 64 KiB of these files, which is compared when they are
read: the files may have many gigabytes, of which a run reads a part.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zlib import crc32

import numpy as np
from transformers import PreTrainedTokenizerBase

import kvcat
from kvcat.data.documents import (
    INSTALLED,
    READ_WHOLE,
    TOKENS_INDEX,
    Source,
    open_source,
    read_documents,
)
from kvcat.data.packing import Encoder
from kvcat.data.split import HELD_OUT_FRACTION, split_of
from kvcat.errors import InputError, check_least
from kvcat.files import (
    LOCK_FILE,
    WriteError,
    check_format,
    check_no_file,
    check_no_links,
    expanded,
    one_writer,
    read_json,
    reason,
    resolved,
    write_json,
)
from kvcat.hub import HUB_PREFIX
from kvcat.options import Bos, typed_fields
from kvcat.types import Int

FORMAT = "kvcat tokens"
VERSION = 1
SPLITS = ("train", "validation")
PROGRESS = "progress.json"
BATCH_CHARACTERS = 1 << 18
BLOCK_BYTES = 1 << 16
SAVE_SECONDS = 5.0
# the entries of tokens.json
_INDEX = {
    "format": str,
    "version": int,
    "source": str,
    "tokenizer": str,
    "dtype": Literal["<u2", "<i4"],
    "eos": int,
    "opening": tuple[int, ...],
    "seed": int,
    "max_tokens": int | None,
    "held_out_fraction": float,
    "revision": str | None,
    "splits": dict[str, dict[str, int]],
    "tokenizer_name": str,
    "kvcat": str,
}


def is_token_folder(path: str | Path) -> bool:
    """Whether a folder was made by ``prepare``."""
    return (expanded(path) / TOKENS_INDEX).is_file()


class TokenTable:
    """The sequences of a token file, mapped read-only; each block is checked when it is first read.

    Args:
        num_sequences, seq_len: the table's shape.
    """

    def __init__(self, path: Path, dtype: np.dtype, num_sequences: int, seq_len: int) -> None:
        self._path = path
        self._bytes = np.memmap(path, np.uint8, "r")
        self._sums = np.fromfile(_sums_file(path), "<u4")
        self._is_checked = np.zeros(len(self._sums), dtype=bool)
        used = self._bytes[: num_sequences * seq_len * dtype.itemsize]
        self._sequences = used.view(dtype).reshape(num_sequences, seq_len)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, rows: int | np.integer | slice | Int[np.ndarray, " rows"]) -> np.ndarray:
        """The sequences of these rows; ``InputError`` if their part of the file is damaged."""
        numbers = (
            range(*rows.indices(len(self))) if isinstance(rows, slice) else np.atleast_1d(rows)
        )
        row_bytes = self._sequences[:1].nbytes
        for row in numbers:
            first = int(row) * row_bytes // BLOCK_BYTES
            last = (int(row) * row_bytes + row_bytes - 1) // BLOCK_BYTES
            for block in range(first, last + 1):
                if not self._is_checked[block]:
                    self._check(block)
        return self._sequences[rows]

    def _check(self, block: int) -> None:
        start = block * BLOCK_BYTES
        if crc32(self._bytes[start : start + BLOCK_BYTES].tobytes()) != self._sums[block]:
            raise InputError(
                f"{self._path} is damaged: the {BLOCK_BYTES} bytes from {start:,} on do not match "
                "their checksum; copy the folder again, or prepare the text again"
            )
        self._is_checked[block] = True


class TokenTables(NamedTuple):
    """The sequences of a token folder."""

    train: TokenTable
    validation: TokenTable


class _TokenFile:
    """A token file that is being written, with the checksums of its blocks.

    Args:
        num_bytes: of an earlier call, that are kept.

    Raises:
        InputError: the file has not as many, or not their checksums.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        wanted = {path: num_bytes, _sums_file(path): num_bytes // BLOCK_BYTES * 4}
        for file, least in wanted.items():
            size = file.stat().st_size if file.exists() else 0
            if size < least:
                raise InputError(
                    f"{file} has {size} of the {least} bytes that were written to it: remove "
                    f"{path.parent} to begin again"
                )
        self._file = path.open("a+b")
        self._file.truncate(num_bytes)
        self._sums = _sums_file(path).open("ab")
        self._sums.truncate(num_bytes // BLOCK_BYTES * 4)
        self._file.seek(num_bytes - num_bytes % BLOCK_BYTES)
        self._begun = self._file.read()  # the block that is not full

    def write(self, content: bytes) -> None:
        """Append bytes."""
        self._file.write(content)
        content = self._begun + content
        num_full = len(content) - len(content) % BLOCK_BYTES
        for start in range(0, num_full, BLOCK_BYTES):
            self._write_sum(content[start : start + BLOCK_BYTES])
        self._begun = content[num_full:]

    def end(self) -> None:
        """Write the checksum of the last block."""
        if self._begun:
            self._write_sum(self._begun)

    def save(self) -> None:
        """Wait until everything is on disk."""
        for file in (self._file, self._sums):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close both files, even if the disk has no space for the rest of one."""
        with self._sums, self._file:
            pass

    def _write_sum(self, block: bytes) -> None:
        self._sums.write(crc32(block).to_bytes(4, "little"))


def _sums_file(path: Path) -> Path:
    """The file with the checksums of a token file."""
    return path.with_suffix(".crc32")


def open_token_folder(folder: str | Path, encoder: Encoder, seq_len: int) -> TokenTables:
    """The training and validation sequences of a folder, mapped read-only.

    Raises:
        InputError: not such a folder, another format, another tokenizer, a truncated file, fewer
            tokens than one sequence. A damaged block is found when it is read.
    """
    folder = expanded(folder)
    index = _read_index(folder)
    if index["tokenizer"] != encoder.fingerprint:
        raise InputError(
            f"{folder} holds tokens of tokenizer {index['tokenizer_name']!r} "
            f"({index['tokenizer']}), not of {encoder.name!r} ({encoder.fingerprint})"
        )
    opening = list(index["opening"])
    if opening != list(encoder.opening):
        raise InputError(
            f"{folder} holds documents that begin with the token ids {opening}, not with "
            f"{list(encoder.opening)}: choose bos as it was prepared, or prepare the text again"
        )
    dtype = np.dtype(index["dtype"])
    tables = {}
    for split in SPLITS:
        num_tokens = index["splits"][split]["tokens"]
        tables[split] = _map_sequences(folder / f"{split}.bin", dtype, num_tokens, seq_len)
    return TokenTables(**tables)


def _map_sequences(path: Path, dtype: np.dtype, num_tokens: int, seq_len: int) -> TokenTable:
    """The sequences in a token file, which has to hold as many tokens as the index says."""
    num_bytes = num_tokens * dtype.itemsize
    sizes = {path: num_bytes, _sums_file(path): math.ceil(num_bytes / BLOCK_BYTES) * 4}
    for file, expected_size in sizes.items():
        if not file.is_file():
            raise InputError(f"{path.parent} is incomplete: {file.name} is missing")
        size = file.stat().st_size
        if size != expected_size:
            raise InputError(f"{file} is damaged: it has {size} bytes, not {expected_size}")
    num_sequences = num_tokens // seq_len
    if num_sequences == 0:
        raise InputError(f"{path} has {num_tokens} tokens, fewer than one sequence of {seq_len}")
    return TokenTable(path, dtype, num_sequences, seq_len)


def _read_index(folder: Path) -> dict[str, Any]:
    """The index of a token folder, in a format that this version reads."""
    path = folder / TOKENS_INDEX
    index = read_json(path)
    if index.get("format") != FORMAT:
        raise InputError(f"{path} does not describe prepared tokens")
    check_format(folder, index.get("version"), VERSION, "prepare the text again")
    typed_fields(_INDEX, index, path)
    for split in SPLITS:
        counts = index["splits"].get(split, {})
        typed_fields({"tokens": int, "documents": int}, counts, f"{path}, {split}")
    return index


def prepare(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    max_tokens: int | None = None,
    seed: int = 0,
    bos: Bos = "auto",
    on_progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """The index of a folder with the source's training and validation tokens, which it makes.

    The files are read in an order drawn by the seed, their documents in order; test documents are
    left out. Everything is written to ``FOLDER.partial``, which is renamed at the end. After an
    interruption, the same call continues; at most the last five seconds are lost. If the folder is
    complete, the call returns at once. The tokenizer uses all cores, unless
    ``TOKENIZERS_PARALLELISM=false``.

    Args:
        source: as in ``open_documents``, except "installed".
        tokenizer: with a fast form and an EOS token.
        folder: absent or empty.
        max_tokens: training tokens after which reading ends, once there is a validation document.
        seed: seed of the order of the files.
        bos: what each document begins with (``opening_ids``).
        on_progress: called with the training tokens written so far.

    Raises:
        InputError: a source, folder or tokenizer that cannot be used, too little disk space, no
            document of a split. Then no files are left, except tokens of a Hub data set.
    """
    if source == INSTALLED:
        raise InputError(f"{READ_WHOLE}: train with --data {INSTALLED}, which prepares nothing")
    target = expanded(folder)
    if target.is_symlink():
        target = resolved(target)
    encoder = Encoder.of(tokenizer, bos)
    settings = {
        "format": FORMAT,
        "version": VERSION,
        "source": source,
        "tokenizer": encoder.fingerprint,
        "dtype": encoder.dtype.str,
        "eos": encoder.eos,
        "opening": list(encoder.opening),
        "seed": seed,
        "max_tokens": max_tokens,
        "held_out_fraction": HELD_OUT_FRACTION,
    }
    check_no_file(target)
    if target.exists() and any(target.iterdir()):
        return _existing_index(target, settings)
    check_least(1, max_tokens=1 if max_tokens is None else max_tokens)
    work = target.with_name(f"{target.name}.partial")
    with one_writer(work):
        check_no_links(work)
        try:
            return _make(work, target, encoder, settings, on_progress)
        except OSError as error:
            raise InputError(f"cannot write to {work}: {reason(error)}") from error


def _make(
    work: Path,
    target: Path,
    encoder: Encoder,
    settings: dict[str, Any],
    on_progress: Callable[[int], None],
) -> dict[str, Any]:
    """Write the folder to ``work`` and rename it to ``target``; returns its index."""
    # a source that cannot be opened, or a full disk, removes nothing that an earlier call wrote
    source, progress = _begin(work, settings)
    _check_disk(work, progress)
    try:
        progress = _write(work, source, encoder, progress, on_progress)
        return _finish(work, target, encoder.name, progress)
    except (OSError, WriteError):
        raise
    except Exception:
        is_downloaded = settings["source"].startswith(HUB_PREFIX) and bool(_saved(work))
        if not is_downloaded:
            shutil.rmtree(work)
        raise


def _existing_index(target: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The index of a folder that is complete, if it holds the same tokens."""
    if not is_token_folder(target):
        raise InputError(f"output folder {target} is not empty and holds no prepared tokens")
    index = _read_index(target)
    expected = dict(settings)
    if not settings["source"].startswith(HUB_PREFIX):
        expected["revision"] = open_source(settings["source"]).revision
    for name, value in expected.items():
        recorded = index[name]
        if recorded != value:
            raise InputError(
                f"{target} holds other tokens: its {name} is {recorded!r}, not {value!r}"
            )
    return index


def _begin(work: Path, settings: dict[str, Any]) -> tuple[Source, dict[str, Any]]:
    """The source, and the progress of an earlier call with the same settings, if there was one.

    A Hub data set is opened at the commit of the earlier call.
    """
    saved = _saved(work)
    is_same = bool(saved) and all(saved.get(name) == value for name, value in settings.items())
    source = open_source(settings["source"], revision=saved["revision"] if is_same else None)
    if is_same and saved["revision"] == source.revision:
        return source, saved
    progress = {
        **settings,
        "revision": source.revision,
        "splits": {split: {"tokens": 0, "documents": 0} for split in SPLITS},
        # where reading continues
        "file": 0,
        "row": 0,
    }
    return source, progress


def _saved(work: Path) -> dict[str, Any]:
    """The progress that ``_write`` recorded last; empty if there are no tokens yet."""
    try:
        saved = read_json(work / PROGRESS)
    except InputError:
        return {}
    return saved if saved.get("splits", {}).get("train", {}).get("tokens") else {}


def _check_disk(work: Path, progress: dict[str, Any]) -> None:
    """Raise an ``InputError`` if the disk has no space for the tokens that are missing."""
    missing = (progress["max_tokens"] or 0) - progress["splits"]["train"]["tokens"]
    needed = missing * np.dtype(progress["dtype"]).itemsize
    free = shutil.disk_usage(work).free
    if free < needed:
        raise InputError(
            f"no disk space for {work}: {free / 1e6:,.1f} MB free, {needed / 1e6:,.1f} MB needed"
        )


def _write(
    work: Path,
    source: Source,
    encoder: Encoder,
    progress: dict[str, Any],
    on_progress: Callable[[int], None],
) -> dict[str, Any]:
    """The progress at the end, after all missing tokens were appended.

    Progress is recorded every few seconds, once the tokens are on disk.
    """

    def save() -> None:
        for file in files.values():
            file.save()
        write_json(work / PROGRESS, progress)

    write_json(work / PROGRESS, progress)  # replaces that of an earlier call with other settings
    with ExitStack() as stack:
        files = {}
        for split in SPLITS:
            num_bytes = progress["splits"][split]["tokens"] * encoder.dtype.itemsize
            files[split] = _TokenFile(work / f"{split}.bin", num_bytes)
            stack.callback(files[split].close)
        stack.callback(save)
        saved_at = time.monotonic()
        for batch in _batches(source, progress):
            if _is_enough(progress):
                break
            progress = _append_batch(files, encoder, batch, progress)
            if time.monotonic() - saved_at > SAVE_SECONDS:
                save()
                saved_at = time.monotonic()
            on_progress(progress["splits"]["train"]["tokens"])
        for file in files.values():
            file.end()
    return progress


def _is_enough(progress: dict[str, Any]) -> bool:
    """Whether there are as many training tokens as requested, and a validation document."""
    splits = progress["splits"]
    if progress["max_tokens"] is None or not splits["validation"]["tokens"]:
        return False
    return splits["train"]["tokens"] >= progress["max_tokens"]


class _Batch(NamedTuple):
    """Some texts of each split, and where reading continues after them."""

    texts: dict[str, list[str]]
    next_file: int
    next_row: int


def _batches(source: Source, progress: dict[str, Any]) -> Iterator[_Batch]:
    """Batches of about 260,000 characters, starting where an earlier call ended."""
    generator = np.random.default_rng(progress["seed"])
    order = generator.permutation(len(source.files)).tolist()
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    num_characters = 0
    start = progress["row"]
    for number in range(progress["file"], len(order)):
        for row, document in read_documents(source.files[order[number]], start):
            split = split_of(document.split_id)
            if split in texts:
                texts[split].append(document.text)
                num_characters += len(document.text)
            if num_characters >= BATCH_CHARACTERS:
                yield _Batch(texts, number, row + 1)
                texts = {split: [] for split in SPLITS}
                num_characters = 0
        start = 0
    yield _Batch(texts, len(order), 0)


def _append_batch(
    files: dict[str, _TokenFile], encoder: Encoder, batch: _Batch, progress: dict[str, Any]
) -> dict[str, Any]:
    """Write the tokens of a batch; returns the progress after it."""
    splits = {}
    for split, file in files.items():
        limit = progress["max_tokens"] if split == "train" else None
        encoded = encoder(batch.texts[split])
        splits[split] = _append(file, progress["splits"][split], encoded, limit)
    return {**progress, "splits": splits, "file": batch.next_file, "row": batch.next_row}


def _append(
    file: _TokenFile, before: dict[str, int], documents: list[np.ndarray], limit: int | None
) -> dict[str, int]:
    """Tokens and documents in a file after it wrote documents, up to a limit of tokens."""
    num_tokens = before["tokens"]
    num_documents = before["documents"]
    for document in documents:
        ids = document if limit is None else document[: limit - num_tokens]
        if len(ids) == 0:
            break
        file.write(ids.tobytes())
        num_tokens += len(ids)
        num_documents += 1
    return {"tokens": num_tokens, "documents": num_documents}


def _finish(
    work: Path, target: Path, tokenizer_name: str, progress: dict[str, Any]
) -> dict[str, Any]:
    """Write the index and then give the folder its final name; returns the index."""
    counts = progress["splits"]
    for split in SPLITS:
        if counts[split]["tokens"] == 0:
            num_documents = sum(count["documents"] for count in counts.values())
            raise InputError(
                f"{progress['source']} has no {split} document among {num_documents}; prepare a "
                "longer text, or train on the text itself, which then holds one out"
            )
    index = {**progress, "tokenizer_name": tokenizer_name, "kvcat": kvcat.__version__}
    del index["file"]
    del index["row"]
    write_json(work / TOKENS_INDEX, index)
    if target.is_dir():
        target.rmdir()
    work.rename(target)
    for name in (PROGRESS, LOCK_FILE):
        (target / name).unlink()
    return index
