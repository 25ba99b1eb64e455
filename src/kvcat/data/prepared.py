"""Text tokenised once into a folder that training maps into memory.

``tokens.json`` describes the folder; ``train.bin`` and ``validation.bin`` hold token ids in
little-endian, each document followed by EOS, without gaps, so that sequences of any length can be
cut from them.
"""

import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

import kvcat
from kvcat.data.documents import Place, Source, open_source, read_documents
from kvcat.data.packing import Encoder, TokenTable
from kvcat.data.split import HELD_OUT_FRACTION, split_of
from kvcat.errors import InputError
from kvcat.files import LOCK_FILE, one_writer, read_json, write_json

INDEX = "tokens.json"
FORMAT, VERSION = "kvcat tokens", 1
SPLITS = ("train", "validation")
PROGRESS = "progress.json"
BATCH_CHARACTERS = 1 << 18
SAVE_SECONDS = 5.0


def is_prepared(path: str | Path) -> bool:
    """Whether a folder was made by ``prepare``."""
    return (Path(path).expanduser() / INDEX).is_file()


def open_prepared(
    folder: str | Path, encoder: Encoder, seq_len: int, *, check: bool = True
) -> tuple[TokenTable, TokenTable]:
    """The training and validation sequences of a prepared folder, mapped read-only.

    ``check`` compares the checksums too, which reads the files once; sizes are always compared.

    Raises:
        InputError: not such a folder, a newer format, another tokenizer, a truncated or damaged
            file, fewer tokens than one sequence.
    """
    folder = Path(folder).expanduser()
    index = _read_index(folder)
    if index["tokenizer"] != encoder.fingerprint:
        raise InputError(
            f"{folder} holds tokens of tokenizer {index['tokenizer_name']!r} ({index['tokenizer']}), not of "
            f"{encoder.name!r} ({encoder.fingerprint})"
        )
    train, validation = (_open_table(folder, split, index, seq_len, check) for split in SPLITS)
    return train, validation


def _read_index(folder: Path) -> dict[str, Any]:
    index = read_json(folder / INDEX)
    if index.get("format") != FORMAT:
        raise InputError(f"{folder / INDEX} does not describe prepared tokens")
    if index["version"] > VERSION:
        raise InputError(f"{folder} has format {index['version']}, newer than {VERSION}, the newest this kvcat reads")
    return index


def _open_table(folder: Path, split: str, index: dict[str, Any], seq_len: int, check: bool) -> TokenTable:
    path, part, dtype = folder / f"{split}.bin", index["splits"][split], np.dtype(index["dtype"])
    num_bytes, num_sequences = part["tokens"] * dtype.itemsize, part["tokens"] // seq_len
    if not path.is_file():
        raise InputError(f"{folder} is incomplete: {path.name} is missing")
    if (size := path.stat().st_size) != num_bytes:
        raise InputError(f"{path} is damaged: it has {size} bytes, not {num_bytes}")
    if check and (found := _checksum(path)) != part["crc32"]:
        raise InputError(f"{path} is damaged: its checksum is {found:08x}, not {part['crc32']:08x}")
    if not num_sequences:
        raise InputError(f"{path} has {part['tokens']} tokens, fewer than one sequence of {seq_len}")
    return TokenTable(np.memmap(path, dtype, "r", shape=(num_sequences, seq_len)), part["documents"])


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 23):
            checksum = zlib.crc32(block, checksum)
    return checksum


def prepare(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    max_tokens: int | None = None,
    seed: int = 0,
    on_progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """A folder of the source's training and validation tokens; returns its index.

    The files are read in an order drawn by the seed, their documents in order; test documents are
    left out. Everything is written to ``FOLDER.partial`` and renamed at the end. Stopped at any
    moment, the same call continues after the last five seconds; where the folder is complete it
    returns at once. The tokenizer uses all cores, unless ``TOKENIZERS_PARALLELISM=false``.

    Args:
        source: as in ``open_documents``.
        tokenizer: with a fast form and an EOS token.
        folder: absent or empty.
        max_tokens: training tokens after which reading ends, once there is a validation document.
        seed: seed of the order of the files.
        on_progress: called with the training tokens written so far.

    Raises:
        InputError: a source, folder or tokenizer that cannot be used, too little disk space, no
            document for training or validation. A mistake leaves nothing behind, unless tokens of a
            Hub data set are written.
    """
    target = Path(folder).expanduser()
    work = target.with_name(f"{target.name}.partial")
    encoder = Encoder.of(tokenizer)
    settings = {
        "format": FORMAT, "version": VERSION, "source": source, "tokenizer": encoder.fingerprint,
        "dtype": encoder.dtype.str, "eos": encoder.eos, "seed": seed, "max_tokens": max_tokens,
        "held_out_fraction": HELD_OUT_FRACTION,
    }  # fmt: skip
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        return _existing(target, settings)
    opened = open_source(source, revision=_saved(work, settings).get("revision"))
    settings["revision"] = opened.revision
    with one_writer(work):
        progress = _saved(work, settings).get("progress", _NOTHING)
        try:
            _check_disk(work, opened, settings, progress)
            with closing(_write(work, opened, encoder, settings, progress)) as written:
                for progress in written:
                    on_progress(progress["splits"]["train"]["tokens"])
            return _finish(work, target, settings, encoder.name, progress)
        except OSError as error:
            raise InputError(f"cannot write to {work}: {error.strerror}") from error
        except InputError:
            if not (source.startswith("hub:") and progress["splits"]["train"]["tokens"]):
                shutil.rmtree(work)
            raise


def _existing(target: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The index of a folder that is complete already, if it holds the same tokens."""
    if not is_prepared(target):
        raise InputError(f"output folder {target} is not empty and holds no prepared tokens")
    index, expected = _read_index(target), dict(settings)
    if not settings["source"].startswith("hub:"):
        expected["revision"] = open_source(settings["source"]).revision
    for name, value in expected.items():
        if index.get(name) != value:
            raise InputError(f"{target} holds other tokens: its {name} is {index.get(name)!r}, not {value!r}")
    return index


# what each file holds; the last document: files before its own, its row and byte
_NOTHING = {
    "splits": {split: {"tokens": 0, "documents": 0, "crc32": 0} for split in SPLITS},
    "test_documents": 0, "file": 0, "place": None,
}  # fmt: skip


def _saved(work: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Revision and progress of an earlier call with the same settings; empty where there is nothing to continue."""
    try:
        saved = json.loads((work / PROGRESS).read_text(encoding="utf-8"))
        for split in SPLITS:
            size = (work / f"{split}.bin").stat().st_size // np.dtype(settings["dtype"]).itemsize
            if saved["progress"]["splits"][split]["tokens"] > size:
                return {}
        same = all(saved["settings"][name] == value for name, value in settings.items())
        return {"revision": saved["settings"]["revision"], "progress": saved["progress"]} if same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _check_disk(work: Path, source: Source, settings: dict[str, Any], progress: dict[str, Any]) -> None:
    """Refuse to start where the tokens will not fit, as far as that is known beforehand."""
    item_bytes = np.dtype(settings["dtype"]).itemsize
    if settings["max_tokens"] is not None:
        needed = settings["max_tokens"] * item_bytes * (1 + HELD_OUT_FRACTION)
    else:
        needed = sum(Path(file.url).stat().st_size for file in source.files if not file.remote) / 2
    needed -= sum(part["tokens"] for part in progress["splits"].values()) * item_bytes
    if (free := shutil.disk_usage(work).free) < needed:
        raise InputError(f"no disk space for {work}: {free / 1e6:,.1f} MB free, some {needed / 1e6:,.1f} MB needed")


def _write(
    work: Path, source: Source, encoder: Encoder, settings: dict[str, Any], progress: dict[str, Any]
) -> Generator[dict[str, Any], None, None]:
    """Append what is not done; record every few seconds how far the files are good."""

    def save() -> None:
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
        write_json(work / PROGRESS, {"settings": settings, "progress": progress})

    limits, saved_at = {"train": settings["max_tokens"], "validation": None}, time.monotonic()
    with ExitStack() as stack:
        files = {split: stack.enter_context((work / f"{split}.bin").open("ab")) for split in SPLITS}
        for split, file in files.items():
            file.truncate(progress["splits"][split]["tokens"] * encoder.dtype.itemsize)
        try:
            for texts, num_test, number, place in _batches(source, settings["seed"], progress):
                parts = {
                    s: _append(files[s], progress["splits"][s], encoder.batch(texts[s]), encoder.dtype, limits[s])
                    for s in SPLITS
                }
                num_test += progress["test_documents"]
                progress = {"splits": parts, "test_documents": num_test, "file": number, "place": place}
                if time.monotonic() - saved_at > SAVE_SECONDS:
                    save()
                    saved_at = time.monotonic()
                yield progress
                if limits["train"] and parts["train"]["tokens"] >= limits["train"] and parts["validation"]["tokens"]:
                    return
        finally:
            save()


def _batches(
    source: Source, seed: int, done: dict[str, Any]
) -> Iterator[tuple[dict[str, list[str]], int, int, Place | None]]:
    """Texts by split of some 260,000 characters, the test documents between them, and the last one's file and place."""
    order = np.random.default_rng(seed).permutation(len(source.files)).tolist()
    texts, num_test, num_characters = {split: [] for split in SPLITS}, 0, 0
    for number in range(done["file"], len(order)):
        last = Place(*done["place"]) if done["place"] and number == done["file"] else None
        for place, document in read_documents(source.files[order[number]], last or Place()):
            if place == last:
                continue
            if (split := split_of(document.id)) == "test":
                num_test += 1
                continue
            texts[split].append(document.text)
            num_characters += len(texts[split][-1])
            if num_characters >= BATCH_CHARACTERS:
                yield texts, num_test, number, place
                texts, num_test, num_characters = {split: [] for split in SPLITS}, 0, 0
    yield texts, num_test, len(order), None


def _append(
    file: IO[bytes], part: dict[str, int], documents: list[np.ndarray], dtype: np.dtype, limit: int | None
) -> dict[str, int]:
    """Write documents up to the limit of tokens; returns what the file then holds."""
    tokens, num_documents, checksum = part["tokens"], part["documents"], part["crc32"]
    for document in documents:
        ids = document if limit is None else document[: limit - tokens]
        if not len(ids):
            break
        data = ids.astype(dtype).tobytes()
        file.write(data)
        tokens, num_documents, checksum = tokens + len(ids), num_documents + 1, zlib.crc32(data, checksum)
    return {"tokens": tokens, "documents": num_documents, "crc32": checksum}


def _finish(
    work: Path, target: Path, settings: dict[str, Any], tokenizer_name: str, progress: dict[str, Any]
) -> dict[str, Any]:
    """Write the index and give the folder its name."""
    splits, num_test = progress["splits"], progress["test_documents"]
    for split, part in splits.items():
        if not part["tokens"]:
            count = sum(part["documents"] for part in splits.values()) + num_test
            raise InputError(
                f"{settings['source']} has no {split} document among {count}; prepare more text, or train on the text "
                "itself, which then holds one out"
            )
    made = {"tokenizer_name": tokenizer_name, "kvcat": kvcat.__version__}
    index = {**settings, **made, "splits": splits, "test_documents": num_test}
    write_json(work / INDEX, index)
    for name in (PROGRESS, LOCK_FILE):
        (work / name).unlink()
    if target.is_dir():
        target.rmdir()
    work.rename(target)
    return index
