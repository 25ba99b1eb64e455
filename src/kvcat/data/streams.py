"""What a trainer reads: logical streams of sequences, one for each sequence of a step.

A stream's t-th sequence is a function of seed, stream and t alone: neither the number of processes nor the way a step
is cut into micro-batches changes it. A position of a few integers is enough to continue a stream.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from queue import Queue
from threading import Thread
from typing import Any, ClassVar, NamedTuple
from zlib import crc32

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from kvcat.choices import Bos
from kvcat.data.documents import Document, Source, open_source, read_documents
from kvcat.data.packing import Encoder, excerpts, pack
from kvcat.data.prepared import is_prepared, open_prepared
from kvcat.data.split import split_of, training_splits
from kvcat.errors import InputError
from kvcat.types import Int, Tensor

EMPTY_EPOCHS = 100
_COMPARED = 256  # rows of a table that tell it from another

Sequences = Iterator[tuple[np.ndarray, tuple[int, ...]]]  # a stream's sequences, each with the position after it


@dataclass(frozen=True)
class TableStreams:
    """The rows of a table, permuted anew each epoch; a position is the number of steps."""

    table: np.ndarray
    num_streams: int
    seed: int
    start: ClassVar = (0,)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the sequences, in JSON values."""
        sizes = {"num_sequences": len(self.table), "num_streams": self.num_streams}
        some = self.table[np.linspace(0, len(self.table) - 1, _COMPARED).astype(int)]
        return {"kind": "table", **sizes, "seed": self.seed, "tokens": crc32(some.tobytes())}

    def sequences(self, stream: int, start: tuple[int, ...]) -> Sequences:
        """The endless sequences of a stream from a position on."""
        for step in count(start[0]):
            epoch, place = divmod(step * self.num_streams + stream, len(self.table))
            yield self.table[_order(self.seed, epoch, len(self.table))[place]], (step + 1,)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, length: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(length)


class Position(NamedTuple):
    """Where the next token comes from: epoch, file of the epoch, row of the document, token of it.

    Tokens that were read but not yet packed need no saving: the document is encoded again.
    """

    epoch: int = 0
    item: int = 0
    row: int = 0
    token: int = 0


@dataclass(frozen=True)
class TextStreams:
    """Sequences packed from the documents of a source, without holding them.

    In every epoch the files, each cut into as many stripes as it takes to give every stream one, are permuted by the
    seed and dealt out to the streams. There is no shuffle buffer. Held-out documents are skipped.
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
            "tokenizer": self.encoder.fingerprint, "opening": list(self.encoder.opening),
            "num_streams": self.num_streams, "seed": self.seed,
        }  # fmt: skip

    def sequences(self, stream: int, start: tuple[int, ...]) -> Sequences:
        """The endless sequences of a stream from a position on; ``InputError`` if a file holds no text."""
        parts: list[np.ndarray] = []
        used, missing = start[-1], self.seq_len
        for here, ids in self._documents(stream, Position(*start)):
            while used < len(ids):
                parts.append(ids[used : used + missing])
                used, missing = used + len(parts[-1]), missing - len(parts[-1])
                if not missing:
                    yield np.concatenate(parts), here._replace(token=used)
                    parts, missing = [], self.seq_len
            used = 0

    def _documents(self, stream: int, start: Position) -> Iterator[tuple[Position, np.ndarray]]:
        files, row, num_empty = self.source.files, start.row, 0
        num_stripes = -(-self.num_streams // len(files))
        for epoch in count(start.epoch):
            order = np.random.default_rng([self.seed, epoch]).permutation(len(files) * num_stripes)
            for item, part in enumerate(order[stream :: self.num_streams].tolist()):
                if epoch == start.epoch and item < start.item:
                    continue
                file, stripe = divmod(part, num_stripes)
                for here, document in read_documents(files[file], row, stripe=stripe, num_stripes=num_stripes):
                    if split_of(document.id) == "train":
                        num_empty = -1
                        yield Position(epoch, item, here), self.encoder([document.text])[0]
                row = 0
            num_empty += 1
            if num_empty == EMPTY_EPOCHS:
                raise InputError(
                    f"{self.source.name} has too few train documents for {self.num_streams} streams: stream "
                    f"{stream} found none in {EMPTY_EPOCHS} epochs"
                )


class TokenLoader:
    """Reads the next sequence of each stream, one step ahead of its use, in a thread.

    This process reads only ``streams`` of the ``plan``; None for all.
    """

    def __init__(self, plan: TableStreams | TextStreams, *, streams: Iterable[int] | None = None) -> None:
        own = range(plan.num_streams) if streams is None else sorted(streams)
        self._plan = plan
        self._positions: dict[int, tuple[int, ...]] = dict.fromkeys(own, plan.start)
        self._steps: Iterator[list[tuple[np.ndarray, tuple[int, ...]]]] | None = None

    def read(self) -> Int[Tensor, "streams tokens"]:
        """The next sequence of each stream of this process, int64, in the order of the streams.

        All or nothing: after an ``InputError``, of a file or the network, every stream is where it was.
        """
        if self._steps is None:
            self._steps = _read_ahead([self._plan.sequences(*place) for place in self._positions.items()])
        try:
            step = next(self._steps)
        except BaseException:
            self._steps = None
            raise
        self._positions = dict(zip(self._positions, (place for _, place in step), strict=True))
        return torch.from_numpy(np.stack([tokens for tokens, _ in step]).astype(np.int64))

    def state_dict(self) -> dict[str, Any]:
        """Where this process's streams are, as JSON; ``merge_states`` joins all processes."""
        return {**self._plan.identity, "streams": {str(s): list(place) for s, place in self._positions.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; ``InputError`` if it is of other data."""
        _check_identity(state, self._plan.identity)
        self._steps = None
        self._positions = {stream: tuple(state["streams"][str(stream)]) for stream in self._positions}


def _read_ahead(readers: list[Sequences]) -> Iterator[list[tuple[np.ndarray, tuple[int, ...]]]]:
    """The steps of some streams, each stream's next sequence; while one is used, a thread reads the next."""

    def read() -> None:
        try:
            steps.put([next(reader) for reader in readers])
        except Exception as error:
            steps.put(error)

    # daemon threads, not a pool: at its exit Python would wait for a read that hangs
    steps: Queue[Any] = Queue()
    Thread(target=read, daemon=True).start()
    while True:
        step = steps.get()
        if isinstance(step, Exception):
            raise step
        Thread(target=read, daemon=True).start()
        yield step


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of all streams from the states of the processes that read them; ``InputError`` of different runs."""
    merged: dict[str, Any] = {}
    for state in states:
        _check_identity(state, {name: value for name, value in merged.items() if name != "streams"})
        merged = {**state, "streams": {**merged.get("streams", {}), **state["streams"]}}
    return merged


def _check_identity(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    state = {"opening": [], **state}  # a run of an earlier version had none
    for name, value in expected.items():
        if state.get(name, value) != value:  # a run of an earlier version has no "tokens"
            raise InputError(
                f"the saved position belongs to other data: its {name} is {state.get(name)!r}, not {value!r}"
            )


class TokenData(NamedTuple):
    """What a run reads: the sequences of each step, and those of documents that training never sees."""

    train: TokenLoader
    validation: Int[Tensor, "sequences tokens"]


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
    revision: str | None = None,
    bos: Bos = "auto",
) -> TokenData:
    """Training and validation tokens, disjoint by document.

    A folder that ``prepare`` made is mapped; ``hub:NAME`` and ``stream:PATH`` are streamed; any other source is read
    whole, its documents in an order drawn by the seed. A run that is too short for all of them reads excerpts.

    Args:
        data: a prepared folder, or a source as in ``open_documents``.
        tokenizer: with a fast form and an EOS token.
        batch_size: sequences per step, over all processes; the number of streams.
        streams: see ``TokenLoader``; other settings are those of ``TrainConfig``.
        revision: commit of a Hub data set; None is its newest.
        bos: what each document begins with (``opening_ids``).

    Raises:
        InputError: no such data, too little text, or none that can be read.
    """
    encoder = Encoder.of(tokenizer, bos)

    def packed(kind: str, documents: Iterable[Document], max_sequences: int) -> np.ndarray:
        try:
            return pack(documents, encoder, seq_len, max_sequences=max_sequences)
        except InputError as error:
            raise InputError(f"{kind} documents of {data}: {error}") from None

    if data.startswith(("hub:", "stream:")):
        plan = TextStreams(open_source(data, revision=revision), encoder, seq_len, batch_size, seed)
        documents = (document for file in plan.source.files for _, document in read_documents(file))
        held_out = (document for document in documents if split_of(document.id) == "validation")
        validation = packed("validation", held_out, validation_sequences)
    elif is_prepared(data):
        train, validation = open_prepared(data, encoder, seq_len)
        plan = TableStreams(train, batch_size, seed)
    else:
        documents, held_out = training_splits(data, seed)
        num_sequences = max_steps * batch_size
        train = packed("train", excerpts(documents, encoder, seq_len, num_sequences, seed), num_sequences)
        validation = packed("validation", held_out, validation_sequences)
        plan = TableStreams(train, batch_size, seed)
    first = torch.from_numpy(validation[:validation_sequences].astype(np.int64))
    return TokenData(TokenLoader(plan, streams=streams), first)
