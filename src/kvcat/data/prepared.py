"""Text tokenised once into a folder that training maps into memory.

``tokens.json`` describes the folder; ``train.bin`` and ``validation.bin`` hold token ids in little-endian, EOS after
each document and before it what begins a text (``opening``), without gaps, so that sequences of any length can be cut
from them.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

import kvcat
from kvcat.choices import Bos
from kvcat.data.documents import Source, open_source, read_documents
from kvcat.data.packing import Encoder
from kvcat.data.split import HELD_OUT_FRACTION, split_of
from kvcat.errors import InputError, check_least
from kvcat.files import LOCK_FILE, one_writer, read_json, resolved, write_json

INDEX = "tokens.json"
FORMAT, VERSION = "kvcat tokens", 1
SPLITS = ("train", "validation")
PROGRESS = "progress.json"
BATCH_CHARACTERS = 1 << 18
SAVE_SECONDS = 5.0
_EARLIER: dict[str, Any] = {"opening": []}  # settings that folders of earlier versions do not name


def is_prepared(path: str | Path) -> bool:
    """Whether a folder was made by ``prepare``."""
    return (Path(path).expanduser() / INDEX).is_file()


def open_prepared(folder: str | Path, encoder: Encoder, seq_len: int) -> list[np.ndarray]:
    """The training and validation sequences of a prepared folder, mapped read-only.

    Raises:
        InputError: not such a folder, a newer format, another tokenizer, a truncated file, fewer tokens than one
            sequence.
    """
    folder = Path(folder).expanduser()
    index = _read_index(folder)
    if index["tokenizer"] != encoder.fingerprint:
        raise InputError(
            f"{folder} holds tokens of tokenizer {index['tokenizer_name']!r} ({index['tokenizer']}), not of "
            f"{encoder.name!r} ({encoder.fingerprint})"
        )
    opening = _setting(index, "opening")
    if opening != list(encoder.opening):
        raise InputError(
            f"{folder} holds documents that begin with the token ids {opening}, not with "
            f"{list(encoder.opening)}: choose bos as it was prepared, or prepare the text again"
        )
    tables, dtype = [], np.dtype(index["dtype"])
    for split in SPLITS:
        path, part = folder / f"{split}.bin", index["splits"][split]
        num_bytes, num_sequences = part["tokens"] * dtype.itemsize, part["tokens"] // seq_len
        if not path.is_file():
            raise InputError(f"{folder} is incomplete: {path.name} is missing")
        if (size := path.stat().st_size) != num_bytes:
            raise InputError(f"{path} is damaged: it has {size} bytes, not {num_bytes}")
        if not num_sequences:
            raise InputError(f"{path} has {part['tokens']} tokens, fewer than one sequence of {seq_len}")
        tables.append(np.memmap(path, dtype, "r", shape=(num_sequences, seq_len)))
    return tables


def _read_index(folder: Path) -> dict[str, Any]:
    index = read_json(folder / INDEX)
    if index.get("format") != FORMAT:
        raise InputError(f"{folder / INDEX} does not describe prepared tokens")
    if index["version"] > VERSION:
        raise InputError(f"{folder} has format {index['version']}, newer than {VERSION}, the newest this kvcat reads")
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
    """A folder of the source's training and validation tokens; returns its index.

    The files are read in an order drawn by the seed, their documents in order; test documents are left out. Everything
    is written to ``FOLDER.partial`` and renamed at the end. Stopped at any moment, the same call continues after the
    last five seconds; where the folder is complete it returns at once. The tokenizer uses all cores, unless
    ``TOKENIZERS_PARALLELISM=false``.

    Args:
        source: as in ``open_documents``.
        tokenizer: with a fast form and an EOS token.
        folder: absent or empty.
        max_tokens: training tokens after which reading ends, once there is a validation document.
        seed: of the order of the files.
        bos: what each document begins with (``opening_ids``).
        on_progress: called with the training tokens written so far.

    Raises:
        InputError: a source, folder or tokenizer that cannot be used, too little disk space, no document of a split. A
            mistake leaves nothing behind but tokens of a Hub data set.
    """
    target = Path(folder).expanduser()
    if target.is_symlink():
        target = resolved(target)
    work = target.with_name(f"{target.name}.partial")
    encoder = Encoder.of(tokenizer, bos)
    settings = {
        "format": FORMAT, "version": VERSION, "source": source, "tokenizer": encoder.fingerprint,
        "dtype": encoder.dtype.str, "eos": encoder.eos, "opening": list(encoder.opening), "seed": seed,
        "max_tokens": max_tokens,
        "held_out_fraction": HELD_OUT_FRACTION,
    }  # fmt: skip
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        return _existing(target, settings)
    check_least(1, max_tokens=1 if max_tokens is None else max_tokens)
    with one_writer(work):
        try:
            # a source that is not there now, or a full disk, costs nothing of what an earlier call wrote
            opened, progress = _begin(work, settings)
            _check_disk(work, progress)
            try:
                return _finish(work, target, encoder.name, _write(work, opened, encoder, progress, on_progress))
            except OSError:
                raise
            except Exception:
                if not (source.startswith("hub:") and _saved(work)):
                    shutil.rmtree(work)
                raise
        except OSError as error:
            raise InputError(f"cannot write to {work}: {error.strerror}") from error


def _existing(target: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The index of a folder that is complete already, if it holds the same tokens."""
    if not is_prepared(target):
        raise InputError(f"output folder {target} is not empty and holds no prepared tokens")
    index, expected = _read_index(target), dict(settings)
    if not settings["source"].startswith("hub:"):
        expected["revision"] = open_source(settings["source"]).revision
    for name, value in expected.items():
        there = _setting(index, name)
        if there != value:
            raise InputError(f"{target} holds other tokens: its {name} is {there!r}, not {value!r}")
    return index


def _setting(recorded: dict[str, Any], name: str) -> Any:
    """A setting that a folder records, or that earlier versions had where they recorded none."""
    return recorded.get(name, _EARLIER.get(name))


def _begin(work: Path, settings: dict[str, Any]) -> tuple[Source, dict[str, Any]]:
    """The source, and how far an earlier call with the same settings came; of a Hub data set at its commit."""
    saved = _saved(work)
    same = bool(saved) and all(_setting(saved, name) == value for name, value in settings.items())
    source = open_source(settings["source"], revision=saved["revision"] if same else None)
    if same and saved["revision"] == source.revision:
        return source, saved
    splits = {split: {"tokens": 0, "documents": 0} for split in SPLITS}
    # file and row are where to read on
    return source, {**settings, "revision": source.revision, "splits": splits, "file": 0, "row": 0}


def _saved(work: Path) -> dict[str, Any]:
    """What ``_write`` recorded last; empty where that is nothing."""
    try:
        saved = read_json(work / PROGRESS)
    except InputError:
        return {}
    return saved if saved["splits"]["train"]["tokens"] else {}


def _check_disk(work: Path, progress: dict[str, Any]) -> None:
    """Refuse to start where the tokens that are asked for will not fit."""
    missing = (progress["max_tokens"] or 0) - progress["splits"]["train"]["tokens"]
    needed = missing * np.dtype(progress["dtype"]).itemsize
    if (free := shutil.disk_usage(work).free) < needed:
        raise InputError(f"no disk space for {work}: {free / 1e6:,.1f} MB free, {needed / 1e6:,.1f} MB needed")


def _write(
    work: Path, source: Source, encoder: Encoder, progress: dict[str, Any], on_progress: Callable[[int], None]
) -> dict[str, Any]:
    """Append what is not done, and record every few seconds how far the files are good; returns the last record."""
    limits, saved_at = {"train": progress["max_tokens"], "validation": None}, time.monotonic()

    def save() -> None:
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
        write_json(work / PROGRESS, progress)

    write_json(work / PROGRESS, progress)  # what an earlier call with other settings recorded is true no longer
    with ExitStack() as stack:
        files = {split: stack.enter_context((work / f"{split}.bin").open("ab")) for split in SPLITS}
        stack.callback(save)
        for split, file in files.items():
            file.truncate(progress["splits"][split]["tokens"] * encoder.dtype.itemsize)
        for texts, number, row in _batches(source, progress):
            done = progress["splits"]
            if limits["train"] and done["train"]["tokens"] >= limits["train"] and done["validation"]["tokens"]:
                break
            done = {s: _append(files[s], progress["splits"][s], encoder(texts[s]), limits[s]) for s in SPLITS}
            progress = {**progress, "splits": done, "file": number, "row": row}
            if time.monotonic() - saved_at > SAVE_SECONDS:
                save()
                saved_at = time.monotonic()
            on_progress(done["train"]["tokens"])
    return progress


def _batches(source: Source, done: dict[str, Any]) -> Iterator[tuple[dict[str, list[str]], int, int]]:
    """Texts by split of some 260,000 characters, with the file and the row that come next."""
    order = np.random.default_rng(done["seed"]).permutation(len(source.files)).tolist()
    texts, num_characters = {split: [] for split in SPLITS}, 0
    for number in range(done["file"], len(order)):
        start = done["row"] if number == done["file"] else 0
        for row, document in read_documents(source.files[order[number]], start):
            if (split := split_of(document.id)) in texts:
                texts[split].append(document.text)
                num_characters += len(texts[split][-1])
            if num_characters >= BATCH_CHARACTERS:
                yield texts, number, row + 1
                texts, num_characters = {split: [] for split in SPLITS}, 0
    yield texts, len(order), 0


def _append(file: IO[bytes], done: dict[str, int], documents: list[np.ndarray], limit: int | None) -> dict[str, int]:
    """Write documents up to the limit of tokens; returns what the file then holds."""
    tokens, num_documents = done["tokens"], done["documents"]
    for document in documents:
        ids = document if limit is None else document[: limit - tokens]
        if not len(ids):
            break
        file.write(ids.tobytes())
        tokens, num_documents = tokens + len(ids), num_documents + 1
    return {"tokens": tokens, "documents": num_documents}


def _finish(work: Path, target: Path, tokenizer_name: str, progress: dict[str, Any]) -> dict[str, Any]:
    """Write the index and give the folder its name."""
    for split, part in progress["splits"].items():
        if not part["tokens"]:
            count = sum(part["documents"] for part in progress["splits"].values())
            raise InputError(
                f"{progress['source']} has no {split} document among {count}; prepare more text, or train on the text "
                "itself, which then holds one out"
            )
    index = {**progress, "tokenizer_name": tokenizer_name, "kvcat": kvcat.__version__}
    del index["file"], index["row"]
    write_json(work / INDEX, index)
    if target.is_dir():
        target.rmdir()
    work.rename(target)
    for name in (PROGRESS, LOCK_FILE):
        (target / name).unlink()
    return index
