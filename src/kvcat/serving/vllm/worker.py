"""What a worker's connector and its attention layers share: documents, and the rows of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kvcat.types import Int, Tensor


class Row(NamedTuple):
    """A request of a step that names a document.

    Args:
        number: of the row in the batch.
        digest: of the document.
        start, stop: its tokens in the batch.
        length: tokens of question and answer so far.
    """

    number: int
    digest: str
    start: int
    stop: int
    length: int


class DocumentTokens(NamedTuple):
    """The tokens of all requests that name one document, in the order of ``Rows.tokens``."""

    digest: str
    start: int
    stop: int


@dataclass(frozen=True)
class Rows:
    """The requests of a step that name documents, document after document.

    Args:
        rows: of the batch.
        tokens: their tokens in the batch.
        positions: of these tokens in their texts.
        documents: which of the tokens belong to which document.
    """

    rows: Sequence[Row]
    tokens: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    documents: Sequence[DocumentTokens]


@dataclass
class Worker:
    """The documents that a worker process holds.

    Args:
        layers: of every document, by digest and number of the layer: a ``DocumentLayer``, or the
            form of it that the attention reads.
        digests: of the documents of the running requests, by their first block, for every group of
            layers.
        group_of_layer: by the name of the layer.
        reserve: memory that is allocated while the engine measures how much the model needs, so
            that it leaves room for documents.
    """

    layers: dict[str, list[Any]] = field(default_factory=dict)
    digests: Sequence[Mapping[int, str]] = ()
    group_of_layer: dict[str, int] = field(default_factory=dict)
    reserve: Tensor | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request of the step names a document."""
        return not any(self.digests)

    def hold_reserve(self, num_bytes: int, device: torch.device) -> None:
        """Allocate the room for documents, once."""
        if self.reserve is None:
            # ones: a CPU gives memory to what is written alone
            self.reserve = torch.ones(num_bytes, dtype=torch.uint8, device=device)

    def rows(
        self,
        group: int,
        first_blocks: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        device: torch.device,
    ) -> Rows | None:
        """The rows of a batch that name documents; None if none does.

        Args:
            group: of the layers.
            first_blocks: of every row.
            starts: the first token of every row in the batch, and the end of the last one.
            lengths: tokens of every row's text so far.
            device: of the result.
        """
        digests = self.digests[group]
        with_document = []
        for number, (block, length) in enumerate(zip(first_blocks, lengths, strict=True)):
            digest = digests.get(block)
            if digest is not None and starts[number + 1] > starts[number]:
                row = Row(number, digest, starts[number], starts[number + 1], length)
                with_document.append(row)
        if not with_document:
            return None
        with_document.sort(key=lambda row: row.digest)
        documents: list[DocumentTokens] = []
        tokens: list[Tensor] = []
        positions: list[Tensor] = []
        end = 0
        for row in with_document:
            count = row.stop - row.start
            tokens.append(torch.arange(row.start, row.stop))
            positions.append(torch.arange(row.length - count, row.length))
            begin = end
            if documents and documents[-1].digest == row.digest:
                begin = documents.pop().start
            end += count
            documents.append(DocumentTokens(row.digest, begin, end))
        return Rows(
            with_document, torch.cat(tokens).to(device), torch.cat(positions).to(device), documents
        )


WORKER = Worker()
"""Of this process."""
