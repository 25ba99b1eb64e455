"""Measured compressibility of a trained network, and of the paper's two constructions beside it."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvcat.errors import InputError
from kvcat.recipes.histogram_search import search_caches
from kvcat.theory.compression import Cache, prefix_cache, suffix_error
from kvcat.theory.definitions import Transformer, sequences
from kvcat.types import Int, Tensor


@dataclass(frozen=True)
class SearchOptions:
    """How hard the best cache is looked for.

    Args:
        num_steps: gradient steps.
        num_restarts: searches for every prefix.
        seed: of random starts.
    """

    num_steps: int = 200
    num_restarts: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Compressibility:
    """Errors at one number of slots; for each prefix the error is the worst over all suffixes of 1 to N - n symbols.

    Args:
        prefix_len: n.
        num_slots: r.
        max_error: over prefixes.
        mean_error: over prefixes.
        worst_prefix: where the maximum lies.
    """

    prefix_len: int
    num_slots: int
    max_error: float
    mean_error: float
    worst_prefix: tuple[int, ...]

    def as_row(self, model: str, seed: int | str) -> dict[str, Any]:
        """A line of a table, its first columns ``model`` and ``seed``; the prefix as digits separated by spaces."""
        return {"model": model, "seed": seed, **asdict(self), "worst_prefix": " ".join(map(str, self.worst_prefix))}


def count_prefixes(
    num_symbols: int, length: int, *, limit: int | None = None, seed: int = 0
) -> Int[Tensor, "prefixes length"]:
    """One sequence for every count vector, in a seeded order of its own.

    Args:
        num_symbols: m.
        length: n.
        limit: at most so many, the m constant sequences among them and the others drawn with the seed; None for all.
        seed: of the orders and the draw.

    Raises:
        InputError: a limit below m.
    """
    if limit is not None and limit < num_symbols:
        raise InputError(f"the number of prefixes must be at least {num_symbols} (the constant ones), got {limit}")
    rows = sequences(num_symbols, length)
    rows = rows[(rows.diff(dim=1) >= 0).all(1)]
    draw = torch.Generator().manual_seed(seed)
    constant = (rows == rows[:, :1]).all(1)
    others = rows[~constant]
    if limit is not None:
        others = others[torch.randperm(len(others), generator=draw)[: limit - num_symbols].sort().values]
    others = others.gather(1, torch.rand(others.shape, generator=draw, dtype=torch.float64).argsort(1))
    return torch.cat([rows[constant], others])


def measure_histogram(
    model: Transformer,
    *,
    prefix_len: int,
    slots: Iterable[int] | None = None,
    num_prefixes: int | None = None,
    search: SearchOptions | None = None,
    done: Callable[[str], None] | None = None,
) -> list[Compressibility]:
    """The error of the best cache found against the number of slots.

    For r = n the prefix's own cache is taken, which is exact up to rounding. For less, gradient search
    (``search_caches``): upper bounds on the least error, each attained by a cache.

    Args:
        model: a causal transformer with one head in every block, on m symbols and N positions.
        prefix_len: n, 1 <= n < N.
        slots: r, each in 1 to n; default all.
        num_prefixes: how many count vectors are looked at; None for all.
        search: its effort.
        done: called after every r with its name.

    Raises:
        InputError: prefix_len or slots out of range.
    """
    search = SearchOptions() if search is None else search
    if not 1 <= prefix_len < model.num_positions:
        raise InputError(f"prefixes must have 1 to {model.num_positions - 1} symbols, got {prefix_len}")
    budgets = list(range(1, prefix_len + 1)) if slots is None else list(slots)
    if not all(1 <= r <= prefix_len for r in budgets):
        raise InputError(f"slots must lie in 1 to {prefix_len}, got {budgets}")
    prefixes = count_prefixes(model.num_symbols, prefix_len, limit=num_prefixes, seed=search.seed)
    measured: list[Compressibility] = []
    for r in budgets:
        if r == prefix_len:
            errors = own_cache_errors(model, prefixes)
        else:
            errors = search_caches(
                model,
                prefixes,
                r,
                num_steps=search.num_steps,
                num_restarts=search.num_restarts,
                seed=search.seed,
            ).errors.tolist()
        measured.append(summarise_prefixes(prefixes, r, errors))
        if done is not None:
            done(f"{r} of {prefix_len} slots")
    return measured


def summarise_prefixes(prefixes: Int[Tensor, "prefixes n"], num_slots: int, errors: list[float]) -> Compressibility:
    """Maximum and mean of the errors of r slots, one for each prefix."""
    worst = max(range(len(errors)), key=errors.__getitem__)
    mean = sum(errors) / len(errors)
    return Compressibility(prefixes.shape[1], num_slots, errors[worst], mean, tuple(prefixes[worst].tolist()))


@torch.no_grad()
def worst_error(model: Transformer, cache: Cache, prefix: Int[Tensor, " n"]) -> float:
    """The largest error behind one cache over all suffixes of 1 to N - n symbols."""
    lengths = range(1, model.num_positions - prefix.shape[0] + 1)
    return max(float(suffix_error(model, cache, prefix, sequences(model.num_symbols, k)).max()) for k in lengths)


def own_cache_errors(model: Transformer, prefixes: Int[Tensor, "prefixes n"]) -> list[float]:
    """Each prefix's worst error behind its own whole cache: rounding alone."""
    with torch.no_grad():
        return [worst_error(model, prefix_cache(model, prefix), prefix) for prefix in prefixes]
