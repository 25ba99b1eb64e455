"""Sequences for training, in logical streams: one stream for each sequence of a step.

A stream's t-th sequence is a function of seed, stream and t alone. Neither the number of processes
nor the cut of a step into micro-batches changes it. A position of a few integers is enough to
continue a stream.
"""

import math
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

from kvcat.data.documents import Document, Source, Stripe, open_source, read_documents
from kvcat.data.packing import Encoder, excerpts, pack
from kvcat.data.split import split_of, training_splits
from kvcat.data.token_files import TokenTable, is_token_folder, open_token_folder
from kvcat.errors import InputError
from kvcat.hub import HUB_PREFIX
from kvcat.options import Bos
from kvcat.types import Int, Tensor

EMPTY_EPOCHS = 100
_COMPARED = 256  # rows of a table by which it is recognised


class PositionedSequence(NamedTuple):
    """A sequence of a stream, and the stream's position after it."""

    tokens: np.ndarray
    position: tuple[int, ...]


Sequences = Iterator[PositionedSequence]


@dataclass(frozen=True)
class TableStreams:
    """The rows of a table, with a new permutation in each epoch; a position is the number of
    steps.
    """

    table: np.ndarray | TokenTable
    num_streams: int
    seed: int
    start: ClassVar = (0,)

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the sequences, in JSON values."""
        compared = np.linspace(0, len(self.table) - 1, _COMPARED).astype(int)
        return {
            "kind": "table",
            "num_sequences": len(self.table),
            "num_streams": self.num_streams,
            "seed": self.seed,
            "tokens": crc32(self.table[compared].tobytes()),
        }

    def sequences(self, stream: int, start: tuple[int, ...]) -> Sequences:
        """The endless sequences of a stream from a position on."""
        num_rows = len(self.table)
        for step in count(start[0]):
            epoch, place = divmod(step * self.num_streams + stream, num_rows)
            row = _order(self.seed, epoch, num_rows)[place]
            yield PositionedSequence(self.table[row], (step + 1,))


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, length: int) -> np.ndarray:
    """The order of a table's rows in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(length)


class Position(NamedTuple):
    """The position of a stream's next token.

    Tokens that were read but not yet packed are not saved: the document is encoded again.
    """

    epoch: int = 0
    item: int = 0  # of the stripes that the stream reads in the epoch
    row: int = 0  # of the document, in its file
    token: int = 0  # of the document


@dataclass(frozen=True)
class TextStreams:
    """Sequences packed from the documents of a source, without holding them.

    Each file is cut into as many stripes as are needed to give every stream one. In every epoch the
    stripes are permuted by the seed and distributed over the streams. There is no shuffle buffer.
    Held-out documents are skipped.
    """

    source: Source
    encoder: Encoder
    seq_len: int
    num_streams: int
    seed: int
    start: ClassVar = Position()

    def __post_init__(self) -> None:
        _ = self.source.revision  # of the files as they are now

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the sequences, in JSON values."""
        return {
            "kind": "streams",
            "source": self.source.name,
            "revision": self.source.revision,
            "tokenizer": self.encoder.fingerprint,
            "opening": list(self.encoder.opening),
            "num_streams": self.num_streams,
            "seed": self.seed,
        }

    def sequences(self, stream: int, start: tuple[int, ...]) -> Sequences:
        """The endless sequences of a stream from a position on.

        Raises:
            InputError: a file cannot be read, or the stream finds no text.
        """
        chunks: list[np.ndarray] = []
        missing = self.seq_len
        first_token = start[-1]
        for position, ids in self._documents(stream, Position(*start)):
            num_used = first_token
            first_token = 0  # of the next document
            while num_used < len(ids):
                chunk = ids[num_used : num_used + missing]
                chunks.append(chunk)
                num_used += len(chunk)
                missing -= len(chunk)
                if missing == 0:
                    end = position._replace(token=num_used)
                    yield PositionedSequence(np.concatenate(chunks), end)
                    chunks = []
                    missing = self.seq_len

    def _documents(self, stream: int, start: Position) -> Iterator[tuple[Position, np.ndarray]]:
        """The token ids of a stream's training documents, each with the position of its start."""
        num_empty_epochs = 0
        for epoch in count(start.epoch):
            is_empty = True
            for item, (file, stripe) in enumerate(self._stripes(stream, epoch)):
                is_first_epoch = epoch == start.epoch
                if is_first_epoch and item < start.item:
                    continue
                first_row = start.row if is_first_epoch and item == start.item else 0
                for row, document in read_documents(self.source.files[file], first_row, stripe):
                    if split_of(document.split_id) == "train":
                        is_empty = False
                        yield Position(epoch, item, row), self.encoder([document.text])[0]
            num_empty_epochs = num_empty_epochs + 1 if is_empty else 0
            if num_empty_epochs == EMPTY_EPOCHS:
                raise InputError(
                    f"{self.source.name} has too few train documents for {self.num_streams} "
                    f"streams: stream {stream} found none in {EMPTY_EPOCHS} epochs"
                )

    def _stripes(self, stream: int, epoch: int) -> Iterator[tuple[int, Stripe]]:
        """The files, by number, and their stripes that a stream reads in an epoch, in order."""
        num_files = len(self.source.files)
        stripes_per_file = math.ceil(self.num_streams / num_files)
        generator = np.random.default_rng([self.seed, epoch])
        order = generator.permutation(num_files * stripes_per_file)
        for index in order[stream :: self.num_streams].tolist():
            file, number = divmod(index, stripes_per_file)
            yield file, Stripe(number, stripes_per_file)


class TokenLoader:
    """Reads the next sequence of each stream in a thread, one step before it is used.

    Args:
        streams: that this process reads; None: all.
    """

    def __init__(
        self, plan: TableStreams | TextStreams, *, streams: Iterable[int] | None = None
    ) -> None:
        numbers = range(plan.num_streams) if streams is None else sorted(streams)
        self._plan = plan
        self._positions: dict[int, tuple[int, ...]] = dict.fromkeys(numbers, plan.start)
        self._steps: Iterator[list[PositionedSequence]] | None = None

    def read(self) -> Int[Tensor, "streams tokens"]:
        """The next sequence of each stream of this process, int64, in the order of the streams.

        After an ``InputError``, of a file or the network, every stream is at its old position.
        """
        if self._steps is None:
            readers = [self._plan.sequences(*place) for place in self._positions.items()]
            self._steps = _read_ahead(readers)
        try:
            step = next(self._steps)
        except BaseException:
            self._steps = None
            raise
        for stream, sequence in zip(list(self._positions), step, strict=True):
            self._positions[stream] = sequence.position
        tokens = np.stack([sequence.tokens for sequence in step])
        return torch.from_numpy(tokens.astype(np.int64))

    def state_dict(self) -> dict[str, Any]:
        """The positions of this process's streams, as JSON.

        ``merge_states`` joins those of all processes.
        """
        positions = {str(stream): list(place) for stream, place in self._positions.items()}
        return {**self._plan.identity, "streams": positions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; ``InputError`` if it belongs to other data."""
        _check_identity(state, self._plan.identity)
        self._steps = None
        for stream in self._positions:
            self._positions[stream] = tuple(state["streams"][str(stream)])


def _read_ahead(readers: list[Sequences]) -> Iterator[list[PositionedSequence]]:
    """The next sequence of each stream, step by step; a thread reads each step ahead of its use."""

    def read_step() -> None:
        try:
            steps.put([next(reader) for reader in readers])
        except Exception as error:
            steps.put(error)

    # daemon threads, not a pool: at its exit Python would wait for a read that hangs
    steps: Queue[Any] = Queue()
    Thread(target=read_step, daemon=True).start()
    while True:
        step = steps.get()
        if isinstance(step, Exception):
            raise step
        Thread(target=read_step, daemon=True).start()
        yield step


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of all streams, from the states of the processes that read them; empty for none.

    Raises:
        InputError: the states belong to different data.
    """
    merged: dict[str, Any] = {}
    streams: dict[str, Any] = {}
    for state in states:
        identity = {name: value for name, value in merged.items() if name != "streams"}
        _check_identity(state, identity)
        streams.update(state["streams"])
        merged = {**state, "streams": streams}
    return merged


def _check_identity(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise an ``InputError`` if a state belongs to data of another identity."""
    for name, value in expected.items():
        recorded_value = state.get(name)
        if recorded_value != value:
            raise InputError(
                f"the saved position belongs to other data: its {name} is {recorded_value!r}, not "
                f"{value!r}"
            )


class TokenData(NamedTuple):
    """The sequences of a run."""

    train: TokenLoader
    validation: Int[Tensor, "sequences tokens"]  # of documents that are not trained on

    def state_dict(self) -> dict[str, Any]:
        """The positions of this process's streams and a hash of the validation tokens, as JSON."""
        return {**self.train.state_dict(), **self._validation_identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; ``InputError`` if it belongs to other data."""
        self.train.load_state_dict(state)
        _check_identity(state, self._validation_identity())

    def _validation_identity(self) -> dict[str, Any]:
        return {"validation": crc32(self.validation.numpy().tobytes())}


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

    A folder that ``prepare`` made is mapped into memory. ``hub:NAME`` and ``stream:PATH`` are
    streamed. Any other source is read at once, its documents in an order drawn by the seed; a run
    that is too short for all of them reads excerpts.

    Args:
        data: a token folder, or a source as in ``open_documents``.
        tokenizer: with a fast form and an EOS token.
        seq_len: tokens of a sequence.
        batch_size: sequences per step, over all processes; the number of streams.
        validation_sequences: at most so many.
        streams: see ``TokenLoader``.
        revision: commit of a Hub data set; None: the newest.
        bos: what each document begins with (``opening_ids``).

    Raises:
        InputError: no such data, too little text, or none that can be read.
    """
    encoder = Encoder.of(tokenizer, bos)
    if data.startswith((HUB_PREFIX, "stream:")):
        source = open_source(data, revision=revision)
        plan = TextStreams(source, encoder, seq_len, batch_size, seed)
        held_out = _validation_documents(source)
        validation = _packed("validation", held_out, data, encoder, seq_len, validation_sequences)
    elif is_token_folder(data):
        train, validation = open_token_folder(data, encoder, seq_len)
        plan = TableStreams(train, batch_size, seed)
    else:
        documents, held_out = training_splits(data, seed)
        num_sequences = max_steps * batch_size
        trained_on = excerpts(documents, encoder, seq_len, num_sequences, seed)
        train = _packed("train", trained_on, data, encoder, seq_len, num_sequences)
        validation = _packed("validation", held_out, data, encoder, seq_len, validation_sequences)
        plan = TableStreams(train, batch_size, seed)
    first = torch.from_numpy(validation[:validation_sequences].astype(np.int64))
    return TokenData(TokenLoader(plan, streams=streams), first)


def _validation_documents(source: Source) -> Iterator[Document]:
    """The validation documents of a source, in the order of its files."""
    for file in source.files:
        for _, document in read_documents(file):
            if split_of(document.split_id) == "validation":
                yield document


def _packed(
    kind: str,
    documents: Iterable[Document],
    data: str,
    encoder: Encoder,
    seq_len: int,
    max_sequences: int,
) -> np.ndarray:
    """The sequences of ``pack``; its errors name the kind of the documents and the data."""
    try:
        return pack(documents, encoder, seq_len, max_sequences=max_sequences)
    except InputError as error:
        raise InputError(f"{kind} documents of {data}: {error}") from None
