"""The queries of a head to which log-bias and values are fitted.

All queries select keys: each token's own queries, and those of its repetition, are what keeps its
key. A fit needs fewer. Its systems have a column for each slot, and what most queries ask for is
asked for by others too. Queries are drawn with probabilities p that rise with what they contribute,
and their squared errors are divided by p, so that the expected sum is that over all queries.
"""

from dataclasses import replace

import torch

from kvcat.attention.kernels import fused_attention
from kvcat.compress.head_attention import DenseAttention, HeadBatch, dense_attention
from kvcat.types import Float, Int, Tensor

FITTED_PER_SLOT = 2.0
"""Queries to which a KV head is fitted, for each slot of its prefix."""
LEAST_FITTED = 1024
"""Queries of a head that are all fitted to."""
_SUPERVISING = 0.6  # of the queries that are drawn
_SINK = 0.1  # what attention to the sink counts, relative to that to other slots
_TINY = 1e-30


def most_fitted(num_slots: int) -> int:
    """The most queries to which a head with so many slots in its prefix is fitted."""
    return max(LEAST_FITTED, round(FITTED_PER_SLOT * num_slots))


def fitted_attention(batch: HeadBatch) -> tuple[HeadBatch, DenseAttention]:
    """A batch of heads with the queries that are fitted to, and their attention over the prefix.

    Slots are ordered by all queries of the batch. Kept queries are never left out.

    Args:
        batch: with all queries.
    """
    num_rows = batch.queries.shape[1]
    count = most_fitted(batch.keys.shape[1])
    if num_rows <= count:
        return batch, dense_attention(batch)
    every = dense_attention(batch, outputs=False)
    num_supervising = batch.num_supervising
    num_kept = 0 if batch.past is None else batch.past.log_mass.shape[1]
    num_own = num_rows - num_supervising - num_kept
    drawn_supervising = min(num_supervising, max(round(_SUPERVISING * count), count - num_own))
    drawn_own = min(num_own, count - drawn_supervising)

    contributions = _contributions(batch, every).square()
    supervising, of_supervising = draw(contributions[:, :num_supervising], drawn_supervising)
    own_rows, of_own = draw(contributions[:, num_rows - num_own :], drawn_own)
    own_rows = num_rows - num_own + own_rows
    kept = num_supervising + torch.arange(num_kept, device=own_rows.device).expand(
        len(own_rows), -1
    )
    # in the order of ``Heads.load``: supervising queries, kept ones, the prefix's own
    rows = torch.cat([supervising, kept, own_rows], 1)
    boosts = torch.cat([of_supervising, torch.ones_like(kept).to(of_own), of_own], 1)
    fitted = replace(batch.with_queries(rows, boosts), num_supervising=drawn_supervising)
    if batch.past is not None:
        fitted = replace(fitted, past=replace(batch.past, first_row=drawn_supervising))
    weights = every.weights.gather(1, rows) * boosts
    attention = every._replace(
        log_mass=every.log_mass.gather(1, rows),
        mass=every.mass.gather(1, rows),
        outputs=_outputs(fitted, weights),
        weights=weights,
        rows=rows,
        boosts=boosts,
    )
    return fitted, attention


def _outputs(
    batch: HeadBatch, weights: Float[Tensor, "heads queries"]
) -> Float[Tensor, "heads queries value_dim"]:
    """``DenseAttention.outputs`` of a batch, by torch's fused kernel where it has no more to do."""
    if batch.past is not None or batch.last_seen is not None:
        return dense_attention(batch).outputs
    mask = None if batch.log_bias is None else batch.log_bias[:, None, None]
    queries, keys, values = (x.unsqueeze(1) for x in (batch.queries, batch.keys, batch.values))
    outputs = fused_attention(queries, keys, values, mask, causal=False, scale=1.0).squeeze(1)
    return outputs.mul_(weights.unsqueeze(-1))


def _contributions(batch: HeadBatch, attention: DenseAttention) -> Float[Tensor, "heads queries"]:
    """What each query gives to the slots, most of which is not what it gives to the sink.

    The sink is the slot with the largest importance. What a query gives to it hardly depends on the
    query, so that few queries determine it.
    """
    sink = attention.importance.argmax(-1, keepdim=True)
    scores = batch.scores(slots=sink).squeeze(-1)
    of_sink = (scores - attention.log_mass).exp().nan_to_num_(0.0)
    return attention.weights * (1 + _SINK - of_sink).clamp_min(0.0)


def draw(
    contributions: Float[Tensor, "heads queries"], count: int
) -> tuple[Int[Tensor, "heads drawn"], Float[Tensor, "heads drawn"]]:
    """Rows of ``count`` queries of each head, ascending, and the factors of their weights.

    Query i is drawn with the probability p_i = min(1, a c_i), where a makes the sum ``count``; its
    factor is 1 / sqrt(p_i). Draws are systematic, at equal steps of the cumulative probabilities,
    so that they are spread over the text.

    Args:
        contributions: c, at least 0.
        count: at most the number of queries.
    """
    wanted = contributions.double() + _TINY
    is_sure = torch.zeros_like(wanted, dtype=torch.bool)
    probabilities = wanted
    while True:
        others = wanted.masked_fill(is_sure, 0.0)
        remaining = count - is_sure.sum(-1, keepdim=True)
        scale = remaining / others.sum(-1, keepdim=True).clamp_min(_TINY)
        probabilities = torch.where(is_sure, 1.0, scale * others)
        exceeds = probabilities > 1
        # these are drawn for sure, which leaves more draws for the others
        if not exceeds.any():
            break
        is_sure |= exceeds
    cumulative = probabilities.cumsum(-1)
    # the probabilities add up to ``count``: steps of 1 give as many rows, and miss none with p = 1
    marks = 0.5 + torch.arange(count, dtype=torch.float64, device=cumulative.device)
    marks = marks.expand(len(cumulative), -1).contiguous()
    rows = torch.searchsorted(cumulative, marks).clamp_max(cumulative.shape[1] - 1)
    return rows, probabilities.gather(1, rows).rsqrt().to(contributions)
