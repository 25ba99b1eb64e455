"""The queries to which Attention Matching is fitted, and the weight of each query's error."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvcat.attention.mass import log_mass
from kvcat.compress.prefix import Prefix
from kvcat.compress.trace import PastQueries, Trace, sampled_positions
from kvcat.errors import InputError
from kvcat.models.rotation import KeyRotation
from kvcat.types import Float, Int, Tensor, at_least_float32

_LEAST_PARTS = 3


@dataclass(frozen=True)
class MovedQueries:
    """The queries of the prefix, rotated part by part to the positions right after the prefix.

    Log-bias and values are fitted to the first queries. The others only select keys.

    Args:
        rotation: the model's rotation.
        rows: index of each query among those that the trace keeps.
        shifts: number of positions by which each query is moved.
        log_later_mass: per layer, for each query, the log of the attention mass on the keys that it
            sees in its part of the prefix.
        fit_boost: as in ``FittedQueries``.
        factors: square root of the number of tokens that each query represents.
    """

    rotation: KeyRotation
    rows: Int[Tensor, " queries"]
    shifts: Int[Tensor, " queries"]
    log_later_mass: Sequence[Float[Tensor, "batch heads queries"]]
    fit_boost: Float[Tensor, " fitted"]
    factors: Float[Tensor, " queries"]


@dataclass(frozen=True)
class FittedQueries:
    """Queries for a fit, with the error weights factor * m / (m + exp(log_later_mass)).

    Here m is the attention mass on the prefix, so that the quotient is the share of the query's
    attention that goes to the prefix. Protected slots (``protection``) and attention sinks are not
    fitted: their mass is part of exp(log_later_mass), and m is that of the others. Supervising
    queries come first, then those of the prefix.

    Args:
        trace: the trace that the queries come from.
        supervising: per layer, the supervising queries.
        moved: queries of the prefix, moved after it; None: there are none.
        factors: factor of each query.
        log_later_mass: per layer, for each query, the log of the attention mass on the keys that it
            sees after the prefix, and on its sink; -inf if all queries count equally.
        fit_boost: further factors of those queries to which log-bias and values are fitted. They
            come first; the other queries only select keys.
        num_unseen: number of the last slots that each query does not see, for queries of the
            prefix at their original positions; None: every query sees all slots.
    """

    trace: Trace
    supervising: Sequence[Float[Tensor, "batch heads supervising _"]]
    moved: MovedQueries | None
    factors: Float[Tensor, " queries"]
    log_later_mass: Sequence[Float[Tensor, "batch heads queries"]]
    fit_boost: Float[Tensor, " fitted"]
    num_unseen: Int[Tensor, " queries"] | None = None

    @property
    def causal(self) -> bool:
        """Whether the queries are at their original positions, where they do not see all slots."""
        return self.num_unseen is not None

    @property
    def num_queries(self) -> int:
        """The number of positions whose queries select keys."""
        return len(self.factors)

    @property
    def num_fitted(self) -> int:
        """The number of positions to whose queries log-bias and values are fitted."""
        return len(self.fit_boost)

    def states(
        self, layer: int, example: int, heads: list[int], count: int
    ) -> Float[Tensor, "heads count head_dim"]:
        """The first ``count`` queries of the chosen query heads.

        The queries of the prefix are rotated at every call, instead of being kept in memory.
        """
        supervising = self.supervising[layer][example]
        head_rows = torch.tensor(heads, device=supervising.device)
        supervising = supervising.index_select(0, head_rows)[:, :count]
        num_moved = count - supervising.shape[1]
        if self.moved is None or not num_moved:
            return supervising
        prefix_queries = self.trace.layers[layer].prefix_queries[example]
        past = past_queries(self.trace)
        if past is not None:
            past_states = past.states[layer][example].numbers()
            prefix_queries = torch.cat([prefix_queries, past_states.to(prefix_queries)], dim=1)
        num_kept = prefix_queries.shape[1]
        kept_rows = self.moved.rows[:num_moved].to(supervising.device)
        flat_rows = head_rows.unsqueeze(1) * num_kept + kept_rows  # (heads, num_moved)
        in_place = prefix_queries.flatten(0, 1).index_select(0, flat_rows.flatten())
        in_place = in_place.unflatten(0, flat_rows.shape)
        shifts = self.moved.shifts[:num_moved]
        number = self.trace.layer_numbers[layer]
        moved = self.moved.rotation(in_place.unsqueeze(0), number, shifts).squeeze(0)
        return torch.cat([supervising, moved], dim=1)


def past_queries(trace: Trace) -> PastQueries | None:
    """The queries of tokens in the compact cache; None: there are none."""
    return None if trace.past is None else trace.past.queries


def usual_own_weight(trace: Trace) -> float:
    """The weight of the prefix's own queries where none is named.

    With a repetition of the document a larger weight is closer on later text, but loses right
    answers: what a model attends to when it copies is what answers need.
    """
    return 1.0 if trace.text.supervision == "reconstruction" else 2.0


@torch.no_grad()
def fitted_queries(
    prefix: Prefix,
    own_weight: float | None,
    *,
    by_share: bool,
    part_tokens: int = 256,
    fitted_per_token: float = 1.5,
) -> FittedQueries:
    """The supervising queries, and those of the prefix moved to positions after it.

    With supervision "self", the fit uses only the queries of the prefix. They are moved after it,
    or stay in place if they cannot be moved or own_weight is 0.

    Args:
        prefix: what is compressed.
        own_weight: sum of the squared weights of the prefix's queries, relative to that of the
            supervising queries; None: ``usual_own_weight``.
        by_share: a query's error is weighted by the share of its attention that goes to the prefix;
            False: all queries count equally.
        part_tokens: largest number of tokens in a part of the prefix that is repeated after it.
        fitted_per_token: number of the prefix's queries per token to which log-bias and values are
            fitted. If there are at least twice as many, they are thinned evenly, to between one and
            two times this number.
    """
    trace = prefix.trace
    if own_weight is None:
        own_weight = usual_own_weight(trace)
    moved = moved_queries(trace, part_tokens, fitted_per_token) if own_weight else None
    if moved is None:
        fitted = _supervising_queries(trace, by_share=by_share)
    else:
        if not by_share:
            moved = replace(moved, log_later_mass=_no_mass(moved.log_later_mass))
        if trace.text.supervision == "self":
            fitted = _moved_alone(trace, moved)
        else:
            supervising = _supervising_queries(trace, by_share=by_share)
            fitted = _with_moved(supervising, moved, own_weight)
    if by_share:
        fitted = _with_sinks(fitted)
    return _with_protected_mass(fitted, prefix) if prefix.protected else fitted


def _with_sinks(fitted: FittedQueries) -> FittedQueries:
    """The queries, where the attention of each includes that to the sink of its head."""
    masses = []
    for later, sinks in zip(fitted.log_later_mass, fitted.trace.sinks, strict=True):
        if sinks is not None:
            later = torch.logaddexp(later, sinks.to(later).unsqueeze(-1))
        masses.append(later)
    return replace(fitted, log_later_mass=masses)


def _with_protected_mass(fitted: FittedQueries, prefix: Prefix) -> FittedQueries:
    """The queries for a fit of the slots that are not protected.

    Queries that see none of these are left out.
    """
    trace = prefix.trace
    last_seen = torch.full([fitted.num_queries], prefix.num_protected - 1)
    if fitted.num_unseen is not None:
        fitted, last_seen = _seeing_unprotected(fitted, prefix)
    masses = []
    for layer, later in enumerate(fitted.log_later_mass):
        every_head = list(range(later.shape[1]))
        states = [
            fitted.states(layer, example, every_head, fitted.num_queries)
            for example in range(trace.batch_size)
        ]
        keys = prefix.protected[layer].keys
        scale = trace.layers[layer].scale
        mass = log_mass(torch.stack(states), keys, scale, last_seen.clamp_min(0))
        mass[..., last_seen < 0] = -torch.inf
        masses.append(torch.logaddexp(later, mass))
    return replace(fitted, log_later_mass=masses)


def _seeing_unprotected(
    fitted: FittedQueries, prefix: Prefix
) -> tuple[FittedQueries, Int[Tensor, " queries"]]:
    """Those queries at their original positions that see slots that are not protected, and the
    last protected slot that each of them sees, or -1.
    """
    trace = prefix.trace
    is_protected = torch.zeros(trace.prefix_len, dtype=torch.long)
    for start, stop in trace.protected:
        is_protected[start:stop] = 1
    num_seen = is_protected.cumsum(0)[trace.prefix_positions]
    num_after = (1 - is_protected).flip(0).cumsum(0).flip(0) - (1 - is_protected)
    num_unseen = num_after[trace.prefix_positions]
    fewest = min(int(layer.present_counts().min()) for layer in prefix.layers)
    sees = num_unseen < fewest
    kept = replace(
        fitted,
        supervising=[queries[:, :, sees] for queries in fitted.supervising],
        factors=fitted.factors[sees],
        log_later_mass=[mass[:, :, sees] for mass in fitted.log_later_mass],
        fit_boost=fitted.fit_boost[sees],
        num_unseen=num_unseen[sees],
    )
    return kept, num_seen[sees] - 1


def _supervising_queries(trace: Trace, *, by_share: bool) -> FittedQueries:
    """The queries at the supervising positions, which are not moved."""
    is_self = trace.text.supervision == "self"
    if by_share and not is_self:
        first_seen = trace.text.supervision_start - trace.prefix_len
        last_seen = torch.arange(first_seen, trace.suffix_ids.shape[1])
        log_later_mass = [
            log_mass(layer.queries, layer.suffix_keys, layer.scale, last_seen)
            for layer in trace.layers
        ]
    else:
        log_later_mass = _no_mass([queries[..., 0] for queries in trace.queries])
    ones = torch.ones(trace.queries[0].shape[2])
    num_unseen = torch.arange(len(ones)).flip(0) if is_self else None
    return FittedQueries(
        trace, trace.queries, None, ones, log_later_mass, fit_boost=ones, num_unseen=num_unseen
    )


def _moved_alone(trace: Trace, moved: MovedQueries) -> FittedQueries:
    """The fit to the moved queries of the prefix alone."""
    nothing = [queries[:, :, :0] for queries in trace.queries]
    return FittedQueries(
        trace, nothing, moved, moved.factors, moved.log_later_mass, fit_boost=moved.fit_boost
    )


def _with_moved(
    supervising: FittedQueries, moved: MovedQueries, own_weight: float
) -> FittedQueries:
    """The supervising queries, followed by the moved queries of the prefix."""
    num_represented = moved.factors.square().sum()
    factor = (own_weight * supervising.num_queries / num_represented) ** 0.5
    masses = zip(supervising.log_later_mass, moved.log_later_mass, strict=True)
    return replace(
        supervising,
        moved=moved,
        factors=torch.cat([supervising.factors, factor * moved.factors]),
        log_later_mass=[torch.cat(both, dim=2) for both in masses],
        fit_boost=torch.cat([supervising.fit_boost, moved.fit_boost]),
    )


class _PlacedQueries(NamedTuple):
    """The queries of the prefix by part, in the order of the fit."""

    rows: Int[Tensor, " queries"]  # index among the queries that the trace keeps
    positions: Int[Tensor, " queries"]
    starts: Int[Tensor, " queries"]  # position at which the query's part begins
    num_fitted: int  # number of queries to which log-bias and values are fitted
    num_represented: int  # number of queries that each fitted query represents


def moved_queries(trace: Trace, part_tokens: int, fitted_per_token: float) -> MovedQueries | None:
    """The queries of each part of the prefix, as if the part were repeated right after the prefix.

    A part is a third of the prefix, but at most ``part_tokens``. The result is None if a compact
    cache holds part of the prefix and no queries of that part were kept, or if the model's keys
    cannot be moved to other positions.
    """
    past = past_queries(trace)
    if trace.past is not None and past is None:
        return None
    part_len = min(-(-trace.prefix_len // _LEAST_PARTS), part_tokens)
    try:
        rotation = KeyRotation(trace.model, part_len)
    except InputError:
        return None
    placed = _place_by_part(trace, part_len, fitted_per_token)
    num_new = trace.prefix_len - trace.past_len
    moved = MovedQueries(
        rotation=rotation,
        rows=placed.rows,
        shifts=trace.prefix_len - placed.starts,
        log_later_mass=[
            _mass_of_parts(
                layer.prefix_queries,
                layer.slots.keys[:, :, -num_new:],
                layer.scale,
                placed,
                part_len,
                trace.past_len,
            )
            for layer in trace.layers
        ],
        fit_boost=torch.full([placed.num_fitted], placed.num_represented**0.5),
        factors=torch.ones(len(placed.rows)),
    )
    return moved if past is None else _with_past(trace, moved, past)


def _with_past(trace: Trace, moved: MovedQueries, past: PastQueries) -> MovedQueries:
    """The moved queries, behind those of the tokens in the compact cache, moved to their place.

    Each of the latter represents as many tokens as are in the cache for every query kept.
    """
    num_kept = len(past.positions)
    if not num_kept:
        return moved
    first_row = trace.layers[0].prefix_queries.shape[2]
    factors = torch.full([num_kept], (trace.past_len / num_kept) ** 0.5)
    masses = zip(past.log_later_mass, moved.log_later_mass, strict=True)
    return replace(
        moved,
        rows=torch.cat([first_row + torch.arange(num_kept), moved.rows]),
        shifts=torch.cat([past.place - past.starts, moved.shifts]),
        log_later_mass=[torch.cat(both, dim=2) for both in masses],
        fit_boost=torch.cat([torch.ones(num_kept), moved.fit_boost]),
        factors=torch.cat([factors, moved.factors]),
    )


def _place_by_part(trace: Trace, part_len: int, fitted_per_token: float) -> _PlacedQueries:
    """The queries of the prefix in order: the last part first, fitted queries before the others.

    All positions, at most 4,096, select keys. If query heads share a KV head, log-bias and values
    are fitted only to evenly spaced positions, of which at least ``fitted_per_token`` queries per
    token of the prefix remain.
    """
    prefix_len = trace.prefix_len
    positions = trace.past_len + sampled_positions(prefix_len - trace.past_len)
    rows = torch.isin(trace.prefix_positions, positions).nonzero().squeeze(1)
    part_numbers = (positions - prefix_len) // part_len  # -1 is the last part
    starts = (prefix_len + part_numbers * part_len).clamp_min(trace.past_len)
    last_part_first = part_numbers.argsort(descending=True, stable=True)

    first = trace.layers[0]
    query_heads = first.prefix_queries.shape[1] // first.slots.keys.shape[1]
    num_queries = query_heads * len(positions)
    stride = max(1, int(num_queries / (fitted_per_token * prefix_len)))
    places = torch.arange(len(positions))
    is_fitted = places % stride == 0
    order = last_part_first[torch.cat([places[is_fitted], places[~is_fitted]])]
    return _PlacedQueries(
        rows[order], positions[order], starts[order], int(is_fitted.sum()), num_represented=stride
    )


def _mass_of_parts(
    queries: Float[Tensor, "batch heads kept head_dim"],
    keys: Float[Tensor, "batch kv_heads prefix head_dim"],
    scale: float,
    placed: _PlacedQueries,
    part_len: int,
    first_position: int,
) -> Float[Tensor, "batch heads queries"]:
    """The log of each query's attention mass on the keys that it sees in its part of the prefix."""
    batch, heads = queries.shape[:2]
    masses = at_least_float32(queries.new_empty(batch, heads, len(placed.rows)))
    for start in placed.starts.unique().tolist():
        is_in_part = placed.starts == start
        first_key = start - first_position
        part_keys = keys[:, :, first_key : first_key + part_len]
        part_queries = queries.index_select(2, placed.rows[is_in_part].to(queries.device))
        last_seen = placed.positions[is_in_part] - start
        masses[:, :, is_in_part] = log_mass(part_queries, part_keys, scale, last_seen)
    return masses


def _no_mass(
    like: Sequence[Float[Tensor, "batch heads queries"]],
) -> list[Float[Tensor, "batch heads queries"]]:
    """The log of a mass of 0 for every query: -inf."""
    return [torch.full_like(at_least_float32(states), -torch.inf) for states in like]
