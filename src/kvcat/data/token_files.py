"""Token files: text tokenised once into a folder that training maps into memory.

``tokens.json`` describes the folder. ``train.bin`` and ``validation.bin`` hold token ids in
little-endian, with the ``opening`` before each document (such as BOS) and EOS after it, without
gaps, so that sequences of any length can be cut from them.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

import kvcat
from kvcat.choices import Bos
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
from kvcat.files import LOCK_FILE, one_writer, read_json, resolved, write_json
from kvcat.hub import HUB_PREFIX

FORMAT = "kvcat tokens"
VERSION = 1
SPLITS = ("train", "validation")
PROGRESS = "progress.json"
BATCH_CHARACTERS = 1 << 18
SAVE_SECONDS = 5.0


def is_token_folder(path: str | Path) -> bool:
    """Whether a folder was made by ``prepare``."""
    return (Path(path).expanduser() / TOKENS_INDEX).is_file()


class TokenTables(NamedTuple):
    """The sequences of a token folder, mapped read-only."""

    train: np.ndarray
    validation: np.ndarray


def open_token_folder(folder: str | Path, encoder: Encoder, seq_len: int) -> TokenTables:
    """The training and validation sequences of a folder, mapped read-only.

    Raises:
        InputError: not such a folder, another format, another tokenizer, a truncated file, fewer
            tokens than one sequence.
    """
    folder = Path(folder).expanduser()
    index = _read_index(folder)
    if index["tokenizer"] != encoder.fingerprint:
        raise InputError(
            f"{folder} holds tokens of tokenizer {index['tokenizer_name']!r} "
            f"({index['tokenizer']}), not of {encoder.name!r} ({encoder.fingerprint})"
        )
    opening = index["opening"]
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


def _map_sequences(path: Path, dtype: np.dtype, num_tokens: int, seq_len: int) -> np.ndarray:
    """The sequences in a token file, which has to hold as many tokens as the index says."""
    if not path.is_file():
        raise InputError(f"{path.parent} is incomplete: {path.name} is missing")
    size = path.stat().st_size
    expected_size = num_tokens * dtype.itemsize
    if size != expected_size:
        raise InputError(f"{path} is damaged: it has {size} bytes, not {expected_size}")
    num_sequences = num_tokens // seq_len
    if num_sequences == 0:
        raise InputError(f"{path} has {num_tokens} tokens, fewer than one sequence of {seq_len}")
    return np.memmap(path, dtype, "r", shape=(num_sequences, seq_len))


def _read_index(folder: Path) -> dict[str, Any]:
    """The index of a token folder, in a format that this version reads."""
    index = read_json(folder / TOKENS_INDEX)
    if index.get("format") != FORMAT:
        raise InputError(f"{folder / TOKENS_INDEX} does not describe prepared tokens")
    version = index["version"]
    if version != VERSION:
        raise InputError(
            f"{folder} has format {version}, and this version of kvcat reads {VERSION}: prepare "
            "the text again"
        )
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
    target = Path(folder).expanduser()
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
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        return _existing_index(target, settings)
    check_least(1, max_tokens=1 if max_tokens is None else max_tokens)
    work = target.with_name(f"{target.name}.partial")
    with one_writer(work):
        try:
            return _make(work, target, encoder, settings, on_progress)
        except OSError as error:
            raise InputError(f"cannot write to {work}: {error.strerror}") from error


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
    except OSError:
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
        recorded = index.get(name)
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
    return saved if saved["splits"]["train"]["tokens"] else {}


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
            file.flush()
            os.fsync(file.fileno())
        write_json(work / PROGRESS, progress)

    write_json(work / PROGRESS, progress)  # replaces that of an earlier call with other settings
    with ExitStack() as stack:
        files = {}
        for split in SPLITS:
            files[split] = stack.enter_context((work / f"{split}.bin").open("ab"))
        stack.callback(save)
        for split, file in files.items():
            file.truncate(progress["splits"][split]["tokens"] * encoder.dtype.itemsize)
        saved_at = time.monotonic()
        for batch in _batches(source, progress):
            if _is_enough(progress):
                break
            progress = _append_batch(files, encoder, batch, progress)
            if time.monotonic() - saved_at > SAVE_SECONDS:
                save()
                saved_at = time.monotonic()
            on_progress(progress["splits"]["train"]["tokens"])
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
    files: dict[str, IO[bytes]], encoder: Encoder, batch: _Batch, progress: dict[str, Any]
) -> dict[str, Any]:
    """Write the tokens of a batch; returns the progress after it."""
    splits = {}
    for split, file in files.items():
        limit = progress["max_tokens"] if split == "train" else None
        encoded = encoder(batch.texts[split])
        splits[split] = _append(file, progress["splits"][split], encoded, limit)
    return {**progress, "splits": splits, "file": batch.next_file, "row": batch.next_row}


def _append(
    file: IO[bytes], before: dict[str, int], documents: list[np.ndarray], limit: int | None
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
