"""One stream of a training run: its own documents, packed, with a position that says exactly where it is."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvcat.data.encoding import Encoder
from kvcat.data.rows import Place, read_documents
from kvcat.data.shards import Shard, Shards
from kvcat.data.split import Split, split_of
from kvcat.errors import InputError

EMPTY_EPOCHS = 100


class Position(NamedTuple):
    """Where the next token of a stream comes from: epoch, item of the epoch, document's place in its file, token of it.

    The start is all zeros. Tokens that were read but not yet packed need no saving: the document is tokenised again.
    """

    epoch: int = 0
    item: int = 0
    row: int = 0
    byte: int = 0
    token: int = 0


@dataclass(frozen=True)
class StreamPlan:
    """What the streams of a run read, and in which order.

    In every epoch the files, each cut into as many stripes as it takes to give every stream one, are permuted by the
    seed and dealt out to the streams.

    Args:
        shards: the files.
        encoder: turns documents into tokens.
        seq_len: tokens a sequence.
        num_streams: sequences a step.
        seed: seed of the permutations.
        split: documents of other splits are skipped.
    """

    shards: Shards
    encoder: Encoder
    seq_len: int
    num_streams: int
    seed: int
    split: Split

    @property
    def stripes(self) -> int:
        """Parts that each file is read in."""
        return -(-self.num_streams // len(self.shards.files))

    def items(self, stream: int, epoch: int) -> list[tuple[Shard, int]]:
        """Files and stripes that a stream reads in an epoch, in order; over all streams each occurs once."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.shards.files) * self.stripes)
        chosen = order[stream :: self.num_streams].tolist()
        return [(self.shards.files[item // self.stripes], item % self.stripes) for item in chosen]


class StreamReader:
    """The sequences of one stream, from a position on, without end.

    Args:
        plan: what all streams read.
        stream: number of this one.
        position: where its next token comes from.
    """

    def __init__(self, plan: StreamPlan, stream: int, position: Position) -> None:
        self._plan, self._stream = plan, stream
        self._documents = self._tokenised(position)
        self._epoch, self._item, self._place, self._tokens = next(self._documents)
        self._used = position.token
        if self._used and (self._place != (position.row, position.byte) or self._used > len(self._tokens)):
            raise InputError(f"{plan.shards.source} has changed: stream {stream} cannot continue at {tuple(position)}")

    def __iter__(self) -> Iterator[tuple[np.ndarray, Position]]:
        return self

    def __next__(self) -> tuple[np.ndarray, Position]:
        """The next sequence, int32 (tokens), and the position after it."""
        parts, missing = [], self._plan.seq_len
        while missing:
            if self._used == len(self._tokens):
                self._epoch, self._item, self._place, self._tokens = next(self._documents)
                self._used = 0
            part = self._tokens[self._used : self._used + missing]
            parts.append(part)
            self._used += len(part)
            missing -= len(part)
        return np.concatenate(parts), Position(self._epoch, self._item, *self._place, self._used)

    def _tokenised(self, position: Position) -> Iterator[tuple[int, int, Place, np.ndarray]]:
        plan, epoch, first = self._plan, position.epoch, position.item
        place, empty = Place(position.row, position.byte), 0
        while empty < EMPTY_EPOCHS:
            empty += 1
            for item, (shard, stripe) in enumerate(plan.items(self._stream, epoch)):
                if item < first:
                    continue
                for here, document in read_documents(shard, place=place, stripe=stripe, stripes=plan.stripes):
                    if split_of(document.id) == plan.split:
                        empty = 0
                        yield epoch, item, here, plan.encoder(document.text)
                place = Place()
            epoch, first = epoch + 1, 0
        raise InputError(
            f"{plan.shards.source} has too few {plan.split} documents for {plan.num_streams} streams: stream "
            f"{self._stream} found none in {EMPTY_EPOCHS} epochs"
        )


class StreamServer:
    """Reads some of the streams on request; picklable, the readers are made where it runs.

    A request lists (stream, position) pairs and is answered by the next sequence of each of these streams and the
    position after it; the position in a request is given once, at the start, and None afterwards.

    Args:
        plan: what all streams read.
    """

    def __init__(self, plan: StreamPlan) -> None:
        self._plan = plan
        self._readers: dict[int, StreamReader] = {}

    def __call__(self, request: list[tuple[int, Position | None]]) -> list[tuple[int, np.ndarray, Position]]:
        """Each stream, its next sequence, int32 (tokens), and the position after it."""
        answer = []
        for stream, position in request:
            if position is not None:
                self._readers[stream] = StreamReader(self._plan, stream, position)
            answer.append((stream, *next(self._readers[stream])))
        return answer
