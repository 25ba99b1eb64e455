"""Logical streams of sequences, one for each sequence of a step.

A stream's t-th sequence is a function of seed, stream and t alone: neither the number of processes
or workers nor the way a step is cut into micro-batches changes it. A position of a few integers is
enough to continue a stream.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvcat.data.documents import Place, Source, SourceFile, read_documents
from kvcat.data.packing import Encoder, TokenTable
from kvcat.data.split import Split, split_of
from kvcat.errors import InputError

EMPTY_EPOCHS = 100


@dataclass(frozen=True)
class TableStreams:
    """The sequences of a table, permuted anew each epoch; a position is the number of steps.

    Args:
        table: sequences in memory or in a memory map.
        num_streams: sequences per step, over all processes.
        seed: seed of the permutations.
    """

    table: TokenTable
    num_streams: int
    seed: int
    start: ClassVar = (0,)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the sequences, in JSON values."""
        counts = {"num_sequences": len(self.table), "num_streams": self.num_streams}
        return {"kind": "table", **counts, "seed": self.seed}

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
    are permuted by the seed and dealt out to the streams. There is no shuffle buffer.

    Args:
        source: the files.
        encoder: turns documents into tokens.
        seq_len: tokens per sequence.
        num_streams: sequences per step, over all processes.
        seed: seed of the permutations.
        split: documents of other splits are skipped.
    """

    source: Source
    encoder: Encoder
    seq_len: int
    num_streams: int
    seed: int
    split: Split = "train"
    start: ClassVar = Position()

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the sequences, in JSON values."""
        data = {"source": self.source.name, "revision": self.source.revision, "tokenizer": self.encoder.fingerprint}
        return {"kind": "streams", **data, "num_streams": self.num_streams, "seed": self.seed, "split": self.split}

    @property
    def num_stripes(self) -> int:
        """Parts that each file is read in."""
        return -(-self.num_streams // len(self.source.files))

    def items(self, stream: int, epoch: int) -> list[tuple[SourceFile, int]]:
        """Files and stripes that a stream reads in an epoch; over all streams each occurs once."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.source.files) * self.num_stripes)
        chosen = order[stream :: self.num_streams].tolist()
        return [(self.source.files[item // self.num_stripes], item % self.num_stripes) for item in chosen]

    def sequences(self, stream: int, start: tuple[int, ...]) -> Iterator[tuple[np.ndarray, Position]]:
        """The endless sequences of a stream from a position on, each with the next position.

        Raises:
            InputError: a file cannot be read or has changed, or the stream has no document of the
                split.
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
                    if split_of(document.id) == self.split:
                        num_empty = -1
                        yield epoch, item, here, self.encoder(document.text)
                place = Place()
            num_empty += 1
            if num_empty == EMPTY_EPOCHS:
                raise InputError(
                    f"{self.source.name} has too few {self.split} documents for {self.num_streams} streams: stream "
                    f"{stream} found none in {EMPTY_EPOCHS} epochs"
                )
