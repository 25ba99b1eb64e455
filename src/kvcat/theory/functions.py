"""Functions of sequences as tables: f(a) for every sequence of 1 to N symbols of a finite alphabet.

References: KV-CAT, the main theorem.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot

from kvcat.theory.definitions import sequences
from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class FunctionTable:
    """f as a table: ``values[n - 1][i]`` is f of the i-th sequence of length n in lexicographic order.

    Raises:
        ValueError: fewer than 2 symbols, no lengths, a table of another size, values that are not finite.
    """

    num_symbols: int
    values: tuple[Float[Tensor, "_ d_out"], ...]

    def __post_init__(self) -> None:
        if self.num_symbols < 2 or not self.values:
            raise ValueError(f"a table needs 2 symbols and length 1 at least, got {self.num_symbols} symbols")
        for n, rows in enumerate(self.values, 1):
            if rows.shape != (self.num_symbols**n, self.d_out) or rows.dtype != torch.float64:
                raise ValueError(f"length {n} needs a float64 table of {self.num_symbols**n} rows of {self.d_out}")
            if not rows.isfinite().all():
                raise ValueError(f"the table holds values that are not finite at length {n}")

    @property
    def longest(self) -> int:
        """N, the length of the longest sequences."""
        return len(self.values)

    @property
    def d_out(self) -> int:
        """Width of the values."""
        return self.values[0].shape[1]

    def __call__(self, tokens: Int[Tensor, "*batch n"]) -> Float[Tensor, "*batch d_out"]:
        """f, looked up."""
        n = tokens.shape[-1]
        if not 1 <= n <= self.longest:
            raise ValueError(f"the table has sequences of 1 to {self.longest} symbols, not {n}")
        place = self.num_symbols ** torch.arange(n - 1, -1, -1)
        return self.values[n - 1][(tokens * place).sum(-1)]


def tabulate(function: Callable[[Tensor], Tensor], num_symbols: int, longest: int) -> FunctionTable:
    """A function of symbol sequences (all, n) -> (all,) or (all, d_out) as a table."""
    values = [function(sequences(num_symbols, n)).to(torch.float64) for n in range(1, longest + 1)]
    return FunctionTable(num_symbols, tuple(rows[:, None] if rows.ndim == 1 else rows for rows in values))


def random_function(num_symbols: int, longest: int, *, d_out: int = 1, seed: int = 0) -> FunctionTable:
    """Independent standard normal values."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [num_symbols**n for n in range(1, longest + 1)]
    values = [torch.randn(size, d_out, generator=draw, dtype=torch.float64) for size in sizes]
    return FunctionTable(num_symbols, tuple(values))


def parity(num_symbols: int, longest: int) -> FunctionTable:
    """The sum of the symbols modulo 2."""
    return tabulate(lambda rows: rows.sum(-1) % 2, num_symbols, longest)


def last_symbol(num_symbols: int, longest: int) -> FunctionTable:
    """The last symbol as a one-hot vector, which needs no prefix at all."""
    return tabulate(lambda rows: one_hot(rows[:, -1], num_symbols), num_symbols, longest)


def majority(num_symbols: int, longest: int) -> FunctionTable:
    """The most frequent symbol as a one-hot vector; the smallest of them on a tie."""
    return tabulate(
        lambda rows: one_hot(one_hot(rows, num_symbols).sum(1).argmax(-1), num_symbols), num_symbols, longest
    )


def mean(num_symbols: int, longest: int) -> FunctionTable:
    """The mean of the symbols as numbers."""
    return tabulate(lambda rows: rows.to(torch.float64).mean(-1), num_symbols, longest)


FUNCTIONS: dict[str, Callable[[int, int], FunctionTable]] = {
    "random": random_function,
    "parity": parity,
    "last": last_symbol,
    "majority": majority,
    "mean": mean,
}
"""The functions that the theorem is checked on, by name."""
