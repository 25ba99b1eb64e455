"""What a trainer reads: logical streams of sequences, one for each sequence of a step.

A stream's t-th sequence is a function of seed, stream and t alone: neither the number of processes
or workers nor the way a step is cut into micro-batches changes it. A position of a few integers is
enough to continue a stream.
"""

import atexit
import multiprocessing
import signal
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from kvcat.data.documents import Document, Place, Source, SourceFile, open_documents, open_source, read_documents
from kvcat.data.packing import Encoder, TokenTable, excerpts, pack
from kvcat.data.prepared import is_prepared, open_prepared
from kvcat.data.split import split_of, training_splits
from kvcat.errors import InputError
from kvcat.types import Int, Tensor

EMPTY_EPOCHS = 100
READ_AHEAD = 8  # steps that each worker prepares


@dataclass(frozen=True)
class TableStreams:
    """The sequences of a table, permuted anew each epoch; a position is the number of steps."""

    table: TokenTable
    num_streams: int
    seed: int
    start: ClassVar = (0,)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the sequences, in JSON values."""
        return {
            "kind": "table", "num_sequences": len(self.table), "num_streams": self.num_streams, "seed": self.seed,
        }  # fmt: skip

    def sequences(self, stream: int, start: tuple[int, ...]) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
        """The endless sequences of a stream from a position on, each with the next position."""
        for step in count(start[0]):
            epoch, place = divmod(step * self.num_streams + stream, len(self.table))
            yield self.table.sequences[_order(self.seed, epoch, len(self.table))[place]], (step + 1,)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, length: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(length)


class Position(NamedTuple):
    """Where the next token comes from: epoch, file of the epoch, document's place, its token.

    Tokens that were read but not yet packed need no saving: the document is encoded again.
    """

    epoch: int = 0
    item: int = 0
    row: int = 0
    byte: int = 0
    token: int = 0


@dataclass(frozen=True)
class TextStreams:
    """Sequences packed from the documents of a source, without holding them.

    In every epoch the files, each cut into as many stripes as it takes to give every stream one,
    are permuted by the seed and dealt out to the streams. There is no shuffle buffer. Held-out
    documents are skipped.
    """

    source: Source
    encoder: Encoder
    seq_len: int
    num_streams: int
    seed: int
    start: ClassVar = Position()

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the sequences, in JSON values."""
        return {
            "kind": "streams", "source": self.source.name, "revision": self.source.revision,
            "tokenizer": self.encoder.fingerprint, "num_streams": self.num_streams, "seed": self.seed,
        }  # fmt: skip

    @property
    def num_stripes(self) -> int:
        """Parts that each file is read in."""
        return -(-self.num_streams // len(self.source.files))

    def items(self, stream: int, epoch: int) -> list[tuple[SourceFile, int]]:
        """Files and stripes that a stream reads in an epoch; over all streams each occurs once."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.source.files) * self.num_stripes)
        chosen = (divmod(item, self.num_stripes) for item in order[stream :: self.num_streams].tolist())
        return [(self.source.files[file], stripe) for file, stripe in chosen]

    def sequences(self, stream: int, start: tuple[int, ...]) -> Iterator[tuple[np.ndarray, Position]]:
        """The endless sequences of a stream from a position on, each with the next position.

        Raises:
            InputError: a file cannot be read or has changed, or the stream has no training document.
        """
        parts: list[np.ndarray] = []
        used, missing = start[-1], self.seq_len
        documents = self._documents(stream, Position(*start))
        for number, (epoch, item, place, ids) in enumerate(documents):
            if number == 0 and used and ((epoch, item, *place) != tuple(start[:4]) or used > len(ids)):
                raise InputError(f"{self.source.name} has changed: stream {stream} cannot continue at {tuple(start)}")
            while used < len(ids):
                parts.append(ids[used : used + missing])
                used, missing = used + len(parts[-1]), missing - len(parts[-1])
                if not missing:
                    yield np.concatenate(parts), Position(epoch, item, *place, used)
                    parts, missing = [], self.seq_len
            used = 0

    def _documents(self, stream: int, start: Position) -> Iterator[tuple[int, int, Place, np.ndarray]]:
        place, num_empty = Place(start.row, start.byte), 0
        for epoch in count(start.epoch):
            for item, (file, stripe) in enumerate(self.items(stream, epoch)):
                if epoch == start.epoch and item < start.item:
                    continue
                for here, document in read_documents(file, place, stripe=stripe, num_stripes=self.num_stripes):
                    if split_of(document.id) == "train":
                        num_empty = -1
                        yield epoch, item, here, self.encoder(document.text)
                place = Place()
            num_empty += 1
            if num_empty == EMPTY_EPOCHS:
                raise InputError(
                    f"{self.source.name} has too few train documents for {self.num_streams} streams: stream "
                    f"{stream} found none in {EMPTY_EPOCHS} epochs"
                )


class TokenLoader:
    """Reads the next sequence of each stream through torch's ``DataLoader``.

    This process reads only ``streams`` of the ``plan``; None for all. ``workers`` processes read and
    tokenise ahead; 0 does it here, when a sequence is needed.
    """

    def __init__(
        self, plan: TableStreams | TextStreams, *, streams: Iterable[int] | None = None, workers: int = 0
    ) -> None:
        own = range(plan.num_streams) if streams is None else sorted(streams)
        self._plan, self._num_workers = plan, min(workers, len(own))
        self._positions: dict[int, tuple[int, ...]] = dict.fromkeys(own, plan.start)
        self._ready: dict[int, deque[tuple[np.ndarray, tuple[int, ...]]]] = {}
        self._steps: Any = None  # torch's iterator
        self._processes: list[BaseProcess] = []

    def read(self, streams: Sequence[int]) -> Int[Tensor, "streams tokens"]:
        """The next sequence of each of these streams, int64, in their order.

        All or nothing: after an exception every stream is where it was, and no worker runs.

        Raises:
            InputError: a file or the network cannot be read.
            RuntimeError: a worker died.
        """
        try:
            steps = self._start() if self._steps is None else self._steps
            while not all(self._ready[stream] for stream in streams):
                step = next(steps)
                if isinstance(step, InputError):
                    raise step
                for stream, tokens, position in step:
                    self._ready[stream].append((tokens, position))
        except BaseException:
            self.close()
            raise
        taken = [self._ready[stream].popleft() for stream in streams]
        self._positions.update(zip(streams, (position for _, position in taken), strict=True))
        return torch.from_numpy(np.stack([tokens for tokens, _ in taken]).astype(np.int64))

    def state_dict(self) -> dict[str, Any]:
        """Where this process's streams are, as JSON; ``merge_states`` joins all processes."""
        return {**self._plan.identity, "streams": {str(s): list(place) for s, place in self._positions.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; a Hub data set is read at the commit that the state names.

        Raises:
            InputError: the state belongs to other data, another tokenizer, seed or number of streams.
        """
        plan, revision = self._plan, state.get("revision")
        if isinstance(plan, TextStreams) and plan.source.name.startswith("hub:") and revision != plan.source.revision:
            plan = replace(plan, source=open_source(plan.source.name, revision=revision))
        _check_identity(state, plan.identity)
        self.close()
        self._plan, self._positions = plan, {stream: tuple(state["streams"][str(stream)]) for stream in self._positions}

    def close(self) -> None:
        """End the worker processes; a later ``read`` starts them again where the streams are."""
        if self._processes:
            self._steps._shutdown_workers()
        for process in self._processes:  # those that hang
            process.kill()
        self._steps, self._processes = None, []

    def _start(self) -> Any:
        """Open the streams; a worker is a fresh interpreter, which holds no lock of this one."""
        workers: Any = {"multiprocessing_context": "spawn", "prefetch_factor": READ_AHEAD} if self._num_workers else {}
        loader = DataLoader(
            _StreamDataset(self._plan, self._positions),
            batch_size=None, collate_fn=_unchanged, num_workers=self._num_workers, worker_init_fn=_ignore_signals,
            generator=torch.Generator(), **workers,
        )  # fmt: skip
        others = multiprocessing.active_children()
        self._ready = {stream: deque() for stream in self._positions}
        self._steps = iter(loader)
        _OPEN.add(self)
        self._processes = [process for process in multiprocessing.active_children() if process not in others]
        return self._steps


_OPEN: "weakref.WeakSet[TokenLoader]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End workers before multiprocessing waits for them: they ignore its SIGTERM."""
    for loader in list(_OPEN):
        loader.close()


_Step = list[tuple[int, np.ndarray, tuple[int, ...]]]  # stream, its next sequence, the position after it


class _StreamDataset(IterableDataset[_Step | InputError]):
    """The steps of some streams; each worker process reads a part of the streams.

    A mistake in the data is the last item: raised in a worker it would come with the worker's
    traceback.
    """

    def __init__(self, plan: TableStreams | TextStreams, positions: Mapping[int, tuple[int, ...]]) -> None:
        self._plan, self._positions = plan, dict(positions)

    def __iter__(self) -> Iterator[_Step | InputError]:
        worker = get_worker_info()
        own = list(self._positions)[slice(None) if worker is None else slice(worker.id, None, worker.num_workers)]
        readers = {stream: self._plan.sequences(stream, self._positions[stream]) for stream in own}
        try:
            while True:
                yield [(stream, *next(reader)) for stream, reader in readers.items()]
        except InputError as error:
            yield error


def _unchanged(step: Any) -> Any:
    return step


def _ignore_signals(_: int) -> None:
    """The signals that end a run reach its workers too, whose data the last step may still need."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of all streams from the states of the processes that read them, each stream by one.

    Raises:
        InputError: they belong to different runs.
    """
    first, *others = states
    identity = {name: value for name, value in first.items() if name != "streams"}
    streams = dict(first["streams"])
    for state in others:
        _check_identity(state, identity)
        streams |= state["streams"]
    return {**identity, "streams": streams}


def _check_identity(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if state.get(name) != value:
            raise InputError(
                f"the saved position belongs to other data: its {name} is {state.get(name)!r}, not {value!r}"
            )


class TokenData(NamedTuple):
    """What a run reads: the sequences of each step, and those of documents that training never sees."""

    train: TokenLoader
    validation: TokenTable


def open_tokens(
    data: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    batch_size: int,
    max_steps: int,
    validation_sequences: int,
    seed: int,
    streams: Iterable[int] | None = None,
    workers: int = 0,
    check: bool = True,
) -> TokenData:
    """Training and validation tokens, disjoint by document.

    A folder that ``prepare`` made is mapped; ``hub:NAME`` and ``stream:PATH`` are streamed; any
    other source is read whole, its documents in an order drawn by the seed. A run that is too short
    for all of them reads excerpts.

    Args:
        data: a prepared folder, or a source as in ``open_documents``.
        tokenizer: with a fast form and an EOS token.
        seq_len, max_steps, seed: as in ``TrainConfig``.
        batch_size: sequences per step, over all processes; the number of streams.
        validation_sequences: sequences of validation, fewer where the text has fewer.
        streams, workers: see ``TokenLoader``.
        check: compare the checksums of a prepared folder; one process of a run is enough.

    Raises:
        InputError: no such data, too little text, or none that can be read.
    """
    encoder = Encoder.of(tokenizer)

    def packed(kind: str, documents: Iterable[Document], max_sequences: int) -> TokenTable:
        try:
            return pack(documents, encoder, seq_len, max_sequences=max_sequences)
        except InputError as error:
            raise InputError(f"{kind} documents of {data}: {error}") from None

    if data.startswith(("hub:", "stream:")):
        source = open_source(data)
        held_out = (document for document in open_documents(source) if split_of(document.id) == "validation")
        validation = packed("validation", held_out, validation_sequences)
        plan = TextStreams(source, encoder, seq_len, batch_size, seed)
        return TokenData(TokenLoader(plan, streams=streams, workers=workers), validation)
    if is_prepared(data):
        train, held_out = open_prepared(data, encoder, seq_len, check=check)
        validation = TokenTable(held_out.sequences[:validation_sequences], held_out.num_documents)
    else:
        documents, held_out = training_splits(data, seed)
        num_sequences = max_steps * batch_size
        train = packed("train", excerpts(documents, encoder, seq_len, num_sequences, seed), num_sequences)
        validation = packed("validation", held_out, validation_sequences)
    return TokenData(TokenLoader(TableStreams(train, batch_size, seed), streams=streams), validation)
