"""Attention scores of some queries at a time; no tensor of all queries x keys is made."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvcat.types import Float, Int, Tensor, at_least_float32


class ScoreChunk(NamedTuple):
    """Scores of some queries.

    Args:
        rows: the queries.
        scores: against the first keys, up to the last that any of the queries sees, in at least
            float32; -inf for the keys that a query does not see.
    """

    rows: slice
    scores: Float[Tensor, "batch kv_heads group rows seen_keys"]


def score_chunks(
    queries: Float[Tensor, "batch kv_heads group queries head_dim"],
    keys: Float[Tensor, "batch kv_heads keys head_dim"],
    scale: float,
    last_seen: Int[Tensor, " queries"],
    rows_at_once: int,
    *,
    window: int | None = None,
) -> Iterator[ScoreChunk]:
    """Scores scale q.k, chunk by chunk of queries.

    Args:
        queries: after rotation; ``group`` are the query heads that read a KV head.
        keys: after rotation.
        scale: factor on q.k.
        last_seen: last key that each query sees.
        rows_at_once: queries of a chunk.
        window: keys that a query sees, up to the last one; None: all of them.
    """
    last_seen = last_seen.to("cpu")  # decides shapes, for which an accelerator would have to wait
    key_numbers = torch.arange(keys.shape[2], device=keys.device)
    for start in range(0, len(last_seen), rows_at_once):
        rows = slice(start, start + rows_at_once)
        row_last = last_seen[rows]
        num_seen = int(row_last.max()) + 1
        some_queries = queries[:, :, :, rows]
        # the query heads of a KV head as one matrix: (batch, kv_heads, group * rows, seen_keys)
        products = some_queries.flatten(2, 3) @ keys[:, :, :num_seen].mT
        scores = at_least_float32(products).mul_(scale).unflatten(2, some_queries.shape[2:4])
        # keys that all rows see need no mask
        first_hidden = int(row_last.min()) + 1 if window is None else 0
        numbers = key_numbers[first_hidden:num_seen]
        row_last = row_last.to(keys.device).unsqueeze(1)
        is_hidden = numbers > row_last
        if window is not None:
            is_hidden |= numbers <= row_last - window
        scores[..., first_hidden:].masked_fill_(is_hidden, -torch.inf)
        yield ScoreChunk(rows, scores)


def exp_below(
    largest: Float[Tensor, "*batch queries 1"], scores: Float[Tensor, "*batch queries keys"]
) -> Float[Tensor, "*batch queries keys"]:
    """exp(scores - largest), written over the scores.

    By powers of two: on many CPUs this is two to three times as fast as exp.
    """
    log2_e = math.log2(math.e)
    return torch.add(largest * -log2_e, scores, alpha=log2_e, out=scores).exp2_()
