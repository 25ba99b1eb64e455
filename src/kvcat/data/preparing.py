"""Text to a folder of tokens, once, for runs that read it many times or from many nodes."""

import json
import os
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

import kvcat
from kvcat.data.encoding import BatchEncoder, Encoder
from kvcat.data.prepared import FORMAT, INDEX, SPLITS, VERSION, read_index
from kvcat.data.rows import Document, Place, read_documents
from kvcat.data.shards import Shards, open_shards
from kvcat.data.split import HELD_OUT_FRACTION, split_of
from kvcat.data.workers import Worker, make_worker
from kvcat.errors import InputError

PROGRESS = "progress.json"
BATCH_CHARACTERS = 1 << 18
REQUESTS_AHEAD = 3  # batches that wait at each worker
SAVE_SECONDS = 5.0


@dataclass(frozen=True)
class Part:
    """How much of a split is written.

    Args:
        tokens: tokens in the file, EOS included.
        documents: documents that they come from, a cut one included.
        crc32: checksum of the file.
    """

    tokens: int = 0
    documents: int = 0
    crc32: int = 0


@dataclass(frozen=True)
class Progress:
    """What is written so far, and the last document of it.

    Args:
        parts: of the two splits.
        held_out: documents of the test split, left out.
        file: how many of the files, in their order, come before the one being read.
        place: of the last document, None before the first.
        num_files: files in all.
    """

    parts: dict[str, Part] = field(default_factory=lambda: {split: Part() for split in SPLITS})
    held_out: int = 0
    file: int = 0
    place: tuple[int, int] | None = None
    num_files: int = 0


@dataclass(frozen=True)
class Batch:
    """Documents on their way through a worker, and what is read when they are written."""

    texts: dict[str, list[str]]
    held_out: int
    file: int
    place: tuple[int, int] | None


def prepare(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    max_tokens: int | None = None,
    workers: int = 0,
    seed: int = 0,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> dict[str, Any]:
    """A folder of the source's training and validation tokens; returns its index.

    The files are read in an order drawn by the seed, their documents in order; test documents are left out. The tokens
    are the same for any number of workers. Written beside the target and renamed at the end; stopped at any moment,
    the same call continues after the last five seconds, and where the folder is complete it returns at once.

    Args:
        source: as in ``open_documents``.
        tokenizer: with a fast form and an EOS token.
        folder: absent or empty.
        max_tokens: training tokens after which reading ends, once there is a validation document; None reads
            everything.
        workers: processes that tokenise; 0 does it here.
        seed: seed of the order of the files.
        on_progress: called after each batch of documents.

    Raises:
        InputError: no such source, a folder with something else in it, another process at work on it, a tokenizer
            without EOS, too little disk space, no document for training or validation, a network that stays away.
    """
    target = Path(folder).expanduser()
    encoder = Encoder.of(tokenizer)
    settings = _settings(source, encoder, seed, max_tokens)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        return _existing(target, settings)
    partial = target.with_name(f"{target.name}.partial")
    with _claimed(partial):
        saved = _load_progress(partial, settings)
        revision, progress = saved or (None, Progress())
        shards = open_shards(source, revision=revision)
        if shards.revision != revision:
            progress = Progress()
        progress = replace(progress, num_files=len(shards.files))
        _check_disk(partial, shards, settings, progress)
        with _Writer(partial, settings, shards.revision, progress) as writer, _make_workers(encoder, workers) as pool:
            for batch, tokens in _tokenised(_batches(shards, seed, progress), pool):
                writer.write(batch, tokens)
                on_progress(writer.progress)
                if _enough(writer.progress, max_tokens):
                    break
        index = {**settings, "revision": shards.revision, "tokenizer_name": encoder.name}
        return _finish(partial, target, index, writer.progress)


def _settings(source: str, encoder: Encoder, seed: int, max_tokens: int | None) -> dict[str, Any]:
    """What decides the tokens, beside the files themselves."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "source": source,
        "tokenizer": encoder.fingerprint,
        "dtype": "<u2" if encoder.num_ids <= 1 << 16 else "<i4",
        "eos": encoder.eos,
        "seed": seed,
        "max_tokens": max_tokens,
        "held_out_fraction": HELD_OUT_FRACTION,
    }


def _enough(progress: Progress, max_tokens: int | None) -> bool:
    """Whether reading can end: there are the training tokens asked for, and something to validate on."""
    done = {split: part.tokens for split, part in progress.parts.items()}
    return max_tokens is not None and done["train"] >= max_tokens and done["validation"] > 0


def _batches(shards: Shards, seed: int, done: Progress) -> Iterator[Batch]:
    """The documents after those that are done, in batches of some 260,000 characters."""
    order = np.random.default_rng(seed).permutation(len(shards.files)).tolist()
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    held_out = characters = 0
    for file, place, document in _documents(shards, order, done):
        split = split_of(document.id)
        if split in texts:
            texts[split].append(document.text)
            characters += len(texts[split][-1])
        else:
            held_out += 1
        if characters >= BATCH_CHARACTERS:
            yield Batch(texts, held_out, file, place)
            texts, held_out, characters = {split: [] for split in SPLITS}, 0, 0
    yield Batch(texts, held_out, len(order), None)


def _documents(shards: Shards, order: list[int], done: Progress) -> Iterator[tuple[int, tuple[int, int], Document]]:
    for number in range(done.file, len(order)):
        last = done.place if number == done.file else None
        for here, document in read_documents(shards.files[order[number]], place=Place(*last or (0, 0))):
            if here != last:
                yield number, (here.row, here.byte), document


def _tokenised(batches: Iterator[Batch], pool: list[Worker]) -> Iterator[tuple[Batch, dict[str, list[np.ndarray]]]]:
    """The batches in their order, with their tokens; each worker has a few in hand."""
    waiting: deque[tuple[Batch, Worker]] = deque()
    for number, batch in enumerate(batches):
        if len(waiting) == REQUESTS_AHEAD * len(pool):
            first, worker = waiting.popleft()
            yield first, worker.receive()
        worker = pool[number % len(pool)]
        worker.send(batch.texts)
        waiting.append((batch, worker))
    for batch, worker in waiting:
        yield batch, worker.receive()


@contextmanager
def _make_workers(encoder: Encoder, count: int) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        pool: list[Worker] = []
        for _ in range(max(count, 1)):
            pool.append(make_worker(BatchEncoder(encoder), process=count > 0))
            stack.callback(pool[-1].close)
        yield pool


class _Writer:
    """The two files, and every few seconds a record of how far they are good."""

    def __init__(self, folder: Path, settings: dict[str, Any], revision: str, progress: Progress) -> None:
        self._folder, self._settings, self._revision, self.progress = folder, settings, revision, progress
        self._dtype, self._limit = np.dtype(settings["dtype"]), settings["max_tokens"]
        self._files: dict[str, IO[bytes]] = {}
        self._saved = time.monotonic()

    def __enter__(self) -> "_Writer":
        for split in SPLITS:
            file = self._files[split] = (self._folder / f"{split}.bin").open("ab")
            file.truncate(self.progress.parts[split].tokens * self._dtype.itemsize)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._save()
        finally:
            for file in self._files.values():
                file.close()

    def write(self, batch: Batch, tokens: dict[str, list[np.ndarray]]) -> None:
        """Append a batch, training tokens up to the limit; it counts once it is written whole."""
        parts = {split: self._append(split, documents) for split, documents in tokens.items()}
        held_out = self.progress.held_out + batch.held_out
        self.progress = Progress(parts, held_out, batch.file, batch.place, self.progress.num_files)
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self._save()

    def _append(self, split: str, documents: list[np.ndarray]) -> Part:
        part, limit = self.progress.parts[split], self._limit if split == "train" else None
        for ids in documents:
            taken = ids if limit is None else ids[: limit - part.tokens]
            if not len(taken):
                break
            data = taken.astype(self._dtype).tobytes()
            self._files[split].write(data)
            part = Part(part.tokens + len(taken), part.documents + 1, zlib.crc32(data, part.crc32))
        return part

    def _save(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        record = {"settings": self._settings, "revision": self._revision, "progress": asdict(self.progress)}
        write_json(self._folder / PROGRESS, record)
        self._saved = time.monotonic()


def _existing(target: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The index of a folder that is complete already."""
    if not (target / INDEX).is_file():
        raise InputError(f"output folder {target} is not empty and holds no prepared tokens")
    index = read_index(target)
    wanted = dict(settings)
    if not settings["source"].startswith("hub:"):
        wanted["revision"] = open_shards(settings["source"]).revision
    for name, value in wanted.items():
        if index.get(name) != value:
            raise InputError(f"{target} holds other tokens: its {name} is {index.get(name)!r}, not {value!r}")
    return index


@contextmanager
def _claimed(partial: Path) -> Iterator[None]:
    """The folder to work in, held against other processes for as long as this one lives."""
    import fcntl

    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = (partial / "lock").open("w")
    except OSError as error:
        raise InputError(f"cannot make output folder {partial}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"another process is preparing {partial}") from None
        yield


def _load_progress(partial: Path, settings: dict[str, Any]) -> tuple[str, Progress] | None:
    """The source's revision and how far an earlier call with the same settings came; None starts anew."""
    try:
        saved = json.loads((partial / PROGRESS).read_text())
        sizes = {split: (partial / f"{split}.bin").stat().st_size for split in SPLITS}
    except (OSError, ValueError):
        return None
    if saved["settings"] != settings:
        return None
    values = saved["progress"]
    parts = {split: Part(**part) for split, part in values["parts"].items()}
    width = np.dtype(settings["dtype"]).itemsize
    if any(sizes[split] < parts[split].tokens * width for split in SPLITS):
        return None
    place = values["place"]
    return saved["revision"], Progress(parts, values["held_out"], values["file"], tuple(place) if place else None)


def _check_disk(partial: Path, shards: Shards, settings: dict[str, Any], progress: Progress) -> None:
    """Refuse to start where the tokens will not fit, as far as that can be told beforehand."""
    if settings["max_tokens"] is not None:
        needed = settings["max_tokens"] * np.dtype(settings["dtype"]).itemsize * (1 + HELD_OUT_FRACTION)
    else:
        needed = sum(Path(file.url).stat().st_size for file in shards.files if not file.remote) / 2
    needed -= sum(part.tokens for part in progress.parts.values()) * np.dtype(settings["dtype"]).itemsize
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise InputError(f"no disk space for {partial}: {free / 1e6:,.1f} MB free, some {needed / 1e6:,.1f} MB needed")


def _finish(partial: Path, target: Path, index: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Write the index and give the folder its name."""
    for split in SPLITS:
        if not progress.parts[split].tokens:
            count = sum(part.documents for part in progress.parts.values()) + progress.held_out
            shutil.rmtree(partial)
            raise InputError(
                f"{index['source']} has no {split} document among {count}; prepare more text, or train on the text "
                "itself, which then holds one out"
            )
    index = {
        **index,
        "kvcat": kvcat.__version__,
        "splits": {split: asdict(part) for split, part in progress.parts.items()},
        "test_documents": progress.held_out,
    }
    write_json(partial / INDEX, index)
    for name in (PROGRESS, "lock"):
        (partial / name).unlink()
    if target.is_dir():
        target.rmdir()
    partial.rename(target)
    return index


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    fresh = path.with_suffix(".partial")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
