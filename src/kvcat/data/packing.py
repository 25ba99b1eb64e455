"""Tokens: documents encoded, packed into sequences of one length, and handed out in an order fixed by the seed."""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from kvcat.data.documents import Document
from kvcat.data.encoding import end_token
from kvcat.errors import InputError
from kvcat.types import Int, Tensor

BATCH_DOCUMENTS = 64


def encode_documents(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and token ids of each document, without special tokens, in the documents' order."""
    iterator = iter(documents)
    while batch := list(islice(iterator, BATCH_DOCUMENTS)):
        encoded = tokenizer(
            [d.text for d in batch], add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        for document, ids in zip(batch, encoded["input_ids"], strict=True):
            yield document.id, np.asarray(ids, dtype=np.int32)


@dataclass(frozen=True)
class TokenTable:
    """Sequences of one length, and the order in which training sees them.

    Args:
        sequences: (sequences, tokens) token ids, in memory or in a read-only memory map.
        num_documents: documents that the sequences come from.
        mapped: the memory map, if they lie in one.
    """

    sequences: np.ndarray
    num_documents: int
    mapped: mmap.mmap | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens in the table."""
        return self.sequences.size

    def batch(self, step: int, batch_size: int, seed: int) -> Int[Tensor, "batch tokens"]:
        """The sequences of one step, a function of step and seed alone; every epoch has its own permutation.

        Args:
            step: number of the step, from 0.
            batch_size: sequences a step.
            seed: seed of the permutations.
        """
        return self.take(self.rows(range(step * batch_size, (step + 1) * batch_size), seed))

    def rows(self, places: Iterable[int], seed: int) -> list[int]:
        """The sequences that stand at these places of the endless order of all epochs."""
        epochs = (divmod(place, len(self)) for place in places)
        return [int(_order(seed, epoch, len(self))[place]) for epoch, place in epochs]

    def take(self, rows: Sequence[int]) -> Int[Tensor, "batch tokens"]:
        """These sequences, int64."""
        return torch.from_numpy(self.sequences[list(rows)].astype(np.int64))

    def will_need(self, rows: Iterable[int]) -> None:
        """Ask the system to bring these sequences of a memory map into memory; returns at once."""
        if self.mapped is None or not hasattr(self.mapped, "madvise"):
            return
        size = self.sequences.strides[0]
        for row in rows:
            start = row * size // mmap.PAGESIZE * mmap.PAGESIZE
            self.mapped.madvise(mmap.MADV_WILLNEED, start, (row + 1) * size - start)

    def first(self, count: int) -> "TokenTable":
        """The first so many sequences, or all where there are fewer."""
        return replace(self, sequences=self.sequences[:count])


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The permutation of an epoch; a step needs one or two of them."""
    order = np.random.default_rng([seed, epoch]).permutation(count)
    order.flags.writeable = False
    return order


def pack(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    *,
    max_sequences: int | None = None,
) -> TokenTable:
    """The documents' tokens, EOS after each document, cut into sequences of ``seq_len``; the remainder is dropped.

    Args:
        documents: read only as far as needed.
        tokenizer: must have an EOS token.
        seq_len: tokens a sequence.
        max_sequences: stop after so many; None takes all.

    Raises:
        InputError: no EOS token, or the text is shorter than one sequence.
    """
    end = np.array([end_token(tokenizer)], dtype=np.int32)
    limit = None if max_sequences is None else max_sequences * seq_len
    parts, total, num_documents = [], 0, 0
    for _, ids in encode_documents(documents, tokenizer):
        parts += [ids, end]
        total += len(ids) + 1
        num_documents += 1
        if limit is not None and total >= limit:
            break
    if total < seq_len:
        raise InputError(f"the text has {total} tokens, fewer than one sequence of {seq_len}")
    count = total // seq_len if max_sequences is None else min(total // seq_len, max_sequences)
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.int32
    flat = np.concatenate(parts)[: count * seq_len]
    return TokenTable(flat.reshape(count, seq_len).astype(dtype), num_documents)
