"""The fit of slots: keys are chosen, log-bias and values solved for."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from kvcat.cache import HeadGrid, HeadSlots
from kvcat.compress.head_attention import DenseAttention, HeadBatch, dense_attention, take
from kvcat.compress.heads import HeadIndex, Heads, with_progress
from kvcat.compress.prefix import Prefix
from kvcat.compress.rounding import RoundedHeads, round_keys_together, round_values_together
from kvcat.compress.solvers import fit_in_chunks, fit_log_bias, fit_values
from kvcat.types import Float, Tensor

BOUNDS = (-3.0, 3.0)
PULL = 0.15  # of the log-bias, relative to the usual column
RIDGE = 0.05  # of the values


def fit_segments(
    prefix: Prefix,
    segments: Sequence[Heads],
    attentions: Sequence[Mapping[HeadIndex, DenseAttention]],
    slots_of_segments: Sequence[Mapping[HeadIndex, int]],
    *,
    num_iters: int | None,
    ridge: float | None,
    log_bias: bool,
    bits: int | None,
) -> list[HeadGrid]:
    """The fitted heads of every layer of a prefix.

    Args:
        prefix: what is compressed.
        segments: its heads with the queries to fit to, segment by segment.
        attentions: of every segment, the attention of its heads over it; where only the order of
            the slots was kept, the rest is computed again.
        slots_of_segments: of every segment, the number of slots of each head.
        num_iters, ridge, log_bias, bits: as in ``match_attention``.
    """
    fits: dict[HeadIndex, list[HeadSlots]] = defaultdict(list)
    for heads, dense, num_slots in zip(segments, attentions, slots_of_segments, strict=True):
        for group in with_progress(heads.groups_for_fit(num_slots), "attention matching"):
            attention = DenseAttention.batched([dense[head] for head in group])
            batch = heads.load(group).with_queries(attention.rows, attention.boosts)
            if not attention.weights.shape[1]:  # of several segments only the orders were kept
                attention = dense_attention(batch)._replace(order=attention.order)
            slots = match_attention(
                batch,
                attention,
                num_slots[group[0]],
                num_iters=num_iters,
                ridge=ridge,
                log_bias=log_bias,
                bits=bits,
            )
            positions: Tensor = slots.positions  # type: ignore[assignment]
            slots = replace(slots, positions=positions + heads.prefix.first_slot)
            for head, fit in zip(group, slots.split(), strict=True):
                fits[head].append(fit)
    # the slots of one segment may have codes
    joined = {
        head: of_segments[0] if len(of_segments) == 1 else HeadSlots.joined(of_segments)
        for head, of_segments in fits.items()
    }
    return _in_prefix(prefix, joined, log_bias=log_bias)


def match_attention(
    batch: HeadBatch,
    dense: DenseAttention,
    num_slots: int,
    *,
    num_iters: int | None = None,
    ridge: float | None = RIDGE,
    log_bias: bool = True,
    bits: int | None = None,
) -> HeadSlots:
    """The slots of a batch of KV heads, in at least float32; positions are those in the prefix.

    Args:
        batch: keys, values, queries and their weights.
        dense: their attention over the whole prefix.
        num_slots: slots per head; heads that have no more slots keep all of them unchanged.
        num_iters, ridge, log_bias: as in ``AttentionMatching``; without log-bias it is 0.
        bits: with codes, also where all slots are kept: the keys are rounded before the fit and the
            values after it. None: without.
    """
    num_heads, prefix_len, _ = batch.keys.shape
    if num_slots >= prefix_len and bits is None:
        every_slot = torch.arange(prefix_len, device=batch.keys.device).expand(num_heads, -1)
        no_bias = torch.zeros_like(batch.keys[..., 0])
        return HeadSlots(batch.keys, batch.values, no_bias, every_slot)
    slots = dense.first_slots(num_slots)
    keys = take(batch.keys, slots)
    slot_values = take(batch.values, slots)
    rounded_keys = None
    if bits is not None:
        # first the keys: log-bias and values then make up for what their rounding changed
        weighted_queries = batch.queries * dense.weights.unsqueeze(-1)
        rounded_keys = round_keys_together(keys, weighted_queries, bits)
        keys = rounded_keys.numbers
    rows_at_once = max(1, Heads.group_elements // (num_heads * num_slots))
    is_usual = num_iters is None and bits is None and batch.last_seen is None
    num_queries = batch.queries.shape[1]
    # the scores of all queries against so many slots would need much memory
    is_large = keys.device.type == "cpu" and num_slots <= num_queries > rows_at_once
    if ridge is None or not (is_usual and is_large):
        scores = batch.scores(slots=slots, keys=keys)  # (heads, queries, slots)
        outputs = dense.outputs
        if batch.last_seen is not None:
            # a query in place that sees no kept slot gets nothing from any values
            sees_a_slot = scores.amax(-1, keepdim=True) > -torch.inf
            outputs = outputs * sees_a_slot
        dense = dense._replace(outputs=outputs)
        bias, values, attention = fit_to_dense(
            scores, dense, slot_values, num_iters=num_iters, ridge=ridge, log_bias=log_bias
        )
        if bits is None or rounded_keys is None:
            return HeadSlots(keys, values, bias, slots)
        rounded_values = round_values_together(values, attention, bits)
        codes = list(RoundedHeads(rounded_keys, rounded_values).split())
        return HeadSlots(keys, rounded_values.numbers, bias, slots, codes)
    bias, values = fit_in_chunks(
        batch.queries,
        keys,
        None if batch.log_bias is None else batch.log_bias.gather(1, slots),
        dense.log_mass,
        dense.weights,
        dense.outputs,
        slot_values,
        bounds=BOUNDS if log_bias else None,
        pull=PULL,
        ridge=ridge,
        rows_at_once=rows_at_once,
    )
    return HeadSlots(keys, values, bias, slots)


def fit_to_dense(
    scores: Float[Tensor, "heads queries slots"],
    dense: DenseAttention,
    slot_values: Float[Tensor, "heads slots value_dim"],
    *,
    num_iters: int | None = None,
    ridge: float | None = RIDGE,
    log_bias: bool = True,
) -> tuple[
    Float[Tensor, "heads slots"],
    Float[Tensor, "heads slots value_dim"],
    Float[Tensor, "heads queries slots"],
]:
    """Log-bias and values of given slots, and the weighted attention that they get.

    Args:
        scores: of the queries against the slots' keys; overwritten by the attention.
        dense: their attention over the whole prefix.
        slot_values: values to which the fitted ones are pulled.
        num_iters, ridge, log_bias: as in ``AttentionMatching``; without log-bias it is 0.
    """
    is_paper_form = num_iters is not None
    bias = torch.zeros_like(slot_values[..., 0])
    if log_bias:
        # a query's equation is divided by its whole mass, except in the paper's form
        weights = dense.weights * dense.mass if is_paper_form else dense.weights
        bias = fit_log_bias(
            scores,
            dense.log_mass.unsqueeze(-1),
            bounds=BOUNDS,
            num_iters=num_iters,
            pull=0.0 if is_paper_form or ridge is None else PULL,
            relative_to="columns",
            weights=weights,
        )
    attention = torch.softmax(scores.add_(bias.unsqueeze(1)), -1, out=scores)
    # 0 where a query sees no slot
    attention.nan_to_num_(0.0).mul_(dense.weights.unsqueeze(-1))
    if is_paper_form:
        values = fit_values(attention, dense.outputs, ridge=ridge)
    else:
        values = fit_values(
            attention, dense.outputs, ridge=ridge, towards=slot_values, relative_to="columns"
        )
    return bias, values, attention


def _in_prefix(
    prefix: Prefix, fits: Mapping[HeadIndex, HeadSlots], *, log_bias: bool
) -> list[HeadGrid]:
    """The fitted heads of every layer, in the prefix's number type and with its positions.

    Slots that have a log-bias from an earlier compression keep it, and the fit's comes on top.
    """
    grids: list[HeadGrid] = []
    for index, layer in enumerate(prefix.layers):
        num_examples, num_heads = layer.keys.shape[:2]
        grid: HeadGrid = []
        for example in range(num_examples):
            of_example = []
            for head in range(num_heads):
                fit = fits[index, example, head]
                before = layer.present_head(example, head)
                bias = fit.log_bias if log_bias else None
                if before.log_bias is not None:
                    bias = fit.bias_or_zeros() + before.log_bias[fit.positions]
                positions = before.positions
                positions = None if positions is None else positions[fit.positions]
                slots = replace(fit.to(layer.keys.dtype), log_bias=bias, positions=positions)
                of_example.append(slots)
            grid.append(of_example)
        grids.append(grid)
    return grids
