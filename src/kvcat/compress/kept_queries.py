"""A sample of the queries of what is compressed, for the fits of later compressions."""

import math
from dataclasses import replace

import torch

from kvcat.compress.queries import MovedQueries, moved_queries
from kvcat.compress.trace import PastQueries, Trace
from kvcat.types import Int, Tensor

_GOLDEN = (math.sqrt(5) - 1) / 2


def keep_queries(trace: Trace, count: int, part_tokens: int = 256) -> PastQueries | None:
    """A sample of the queries of a trace's prefix, for later fits; None if they cannot be moved.

    Query heads that share a KV head take turns: a row holds one query of each of them, of tokens
    that follow each other, so that more tokens are represented. Of all rows, whenever their tokens
    were compressed, equally many are kept: those whose position times the golden ratio has the
    smallest fractional part, which are evenly spaced.

    Args:
        trace: of a prefix, with all its queries after the compact cache, and those kept before.
        count: largest number of rows, at least 0.
        part_tokens: as in ``fitted_queries``.
    """
    moved = moved_queries(replace(trace, past_queries=no_queries(trace)), part_tokens, math.inf)
    if moved is None:
        return None
    new = _in_turns(trace, moved)
    both = new if trace.past_queries is None else _joined(trace.past_queries, new)
    order = (both.positions.double() * _GOLDEN).frac().argsort(stable=True)[:count]
    return _selected(both, order.sort().values)


def _in_turns(trace: Trace, moved: MovedQueries) -> PastQueries:
    """The queries of the prefix after the compact cache, in rows of one query of each head.

    The query heads of a KV head take theirs from as many tokens of the same part, in turns.
    """
    query_heads = trace.prefix_queries[0].shape[1] // trace.keys[0].shape[1]
    all_starts = trace.prefix_len - moved.shifts
    positions = trace.prefix_positions[moved.rows]
    rows = []
    for start in all_starts.unique().tolist():
        in_part = (all_starts == start).nonzero().squeeze(1)
        in_part = in_part[positions[in_part].argsort()]
        num_rows = -(-len(in_part) // query_heads)
        # the last row begins again with the part's first tokens
        padded = in_part.repeat(query_heads)[: num_rows * query_heads]
        rows.append(padded.view(num_rows, query_heads))
    by_turn = torch.cat(rows)  # (rows, query heads of a KV head)
    states = []
    masses = []
    for queries, mass in zip(trace.prefix_queries, moved.log_later_mass, strict=True):
        num_heads = queries.shape[1]
        of_heads = by_turn.T.repeat(num_heads // query_heads, 1).to(queries.device)
        in_order = queries.index_select(2, moved.rows.to(queries.device))
        indices = of_heads.expand(len(queries), -1, -1)
        states.append(
            in_order.gather(2, indices.unsqueeze(-1).expand(-1, -1, -1, queries.shape[-1]))
        )
        masses.append(mass.gather(2, indices))
    first = by_turn[:, 0]
    return PastQueries(positions[first], all_starts[first], states, masses)


def no_queries(trace: Trace) -> PastQueries:
    """No rows of kept queries."""
    none = torch.zeros(0, dtype=torch.long)
    states = [queries[:, :, :0] for queries in trace.prefix_queries]
    return PastQueries(none, none, states, [queries[..., 0] for queries in states])


def _joined(first: PastQueries, second: PastQueries) -> PastQueries:
    """The rows of both."""
    states = zip(first.states, second.states, strict=True)
    masses = zip(first.log_later_mass, second.log_later_mass, strict=True)
    return PastQueries(
        torch.cat([first.positions, second.positions]),
        torch.cat([first.starts, second.starts]),
        [torch.cat(both, dim=2) for both in states],
        [torch.cat(both, dim=2) for both in masses],
    )


def _selected(kept: PastQueries, rows: Int[Tensor, " rows"]) -> PastQueries:
    """Some of the rows."""
    return PastQueries(
        kept.positions[rows],
        kept.starts[rows],
        [states.index_select(2, rows.to(states.device)) for states in kept.states],
        [mass.index_select(2, rows.to(mass.device)) for mass in kept.log_later_mass],
    )
