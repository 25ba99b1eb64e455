"""A sample of the queries of what is compressed, for the fits of later compressions."""

import math
from dataclasses import replace

import torch

from kvcat.compress.queries import moved_queries
from kvcat.compress.trace import PastQueries, Trace
from kvcat.types import Int, Tensor

_GOLDEN = (math.sqrt(5) - 1) / 2


def keep_queries(trace: Trace, count: int, part_tokens: int = 256) -> PastQueries | None:
    """A sample of the queries of a trace's prefix, for later fits; None if they cannot be moved.

    Of all tokens of the prefix, whenever they were compressed, equally many are kept: those whose
    position times the golden ratio has the smallest fractional part, which are evenly spaced.

    Args:
        trace: of a prefix, with all its queries after the compact cache, and those kept before.
        count: largest number of tokens whose queries are kept, at least 0.
        part_tokens: as in ``fitted_queries``.
    """
    moved = moved_queries(replace(trace, past_queries=no_queries(trace)), part_tokens, math.inf)
    if moved is None:
        return None
    rows = moved.rows
    new = PastQueries(
        trace.prefix_positions[rows],
        trace.prefix_len - moved.shifts,
        [queries.index_select(2, rows.to(queries.device)) for queries in trace.prefix_queries],
        moved.log_later_mass,
    )
    both = new if trace.past_queries is None else _joined(trace.past_queries, new)
    order = (both.positions.double() * _GOLDEN).frac().argsort(stable=True)[:count]
    return _selected(both, order[both.positions[order].argsort()])


def no_queries(trace: Trace) -> PastQueries:
    """No kept queries."""
    none = torch.zeros(0, dtype=torch.long)
    states = [queries[:, :, :0] for queries in trace.prefix_queries]
    return PastQueries(none, none, states, [queries[..., 0] for queries in states])


def _joined(first: PastQueries, second: PastQueries) -> PastQueries:
    """The queries of both."""
    states = zip(first.states, second.states, strict=True)
    masses = zip(first.log_later_mass, second.log_later_mass, strict=True)
    return PastQueries(
        torch.cat([first.positions, second.positions]),
        torch.cat([first.starts, second.starts]),
        [torch.cat(both, dim=2) for both in states],
        [torch.cat(both, dim=2) for both in masses],
    )


def _selected(kept: PastQueries, rows: Int[Tensor, " rows"]) -> PastQueries:
    """Some of the queries."""
    return PastQueries(
        kept.positions[rows],
        kept.starts[rows],
        [states.index_select(2, rows.to(states.device)) for states in kept.states],
        [mass.index_select(2, rows.to(mass.device)) for mass in kept.log_later_mass],
    )
