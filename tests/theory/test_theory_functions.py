"""Function tables: looked up as written down."""

import pytest
import torch

from kvcat.theory.definitions import sequences
from kvcat.theory.functions import (
    FunctionTable,
    last_symbol,
    majority,
    mean,
    parity,
    random_function,
    tabulate,
)


@pytest.mark.parametrize(
    ("table", "tokens", "value"),
    [
        (parity(2, 4), [1, 1, 0, 1], [1.0]),
        (parity(2, 4), [1, 1], [0.0]),
        (last_symbol(3, 3), [0, 2, 1], [0.0, 1.0, 0.0]),
        (majority(3, 4), [2, 1, 2], [0.0, 0.0, 1.0]),
        (majority(3, 4), [2, 1, 2, 1], [0.0, 1.0, 0.0]),
        (mean(4, 3), [3, 0], [1.5]),
    ],
)
def test_a_table_holds_what_its_function_says(table: FunctionTable, tokens: list[int], value: list[float]) -> None:
    assert table(torch.tensor(tokens)).tolist() == value


def test_rows_are_found_in_lexicographic_order_for_every_length() -> None:
    table = random_function(3, 4, d_out=2, seed=1)
    for n in range(1, 5):
        assert torch.equal(table(sequences(3, n)), table.values[n - 1])
    assert table.longest == 4
    assert table.d_out == 2


def test_the_same_seed_draws_the_same_function() -> None:
    first, again, other = (torch.cat(random_function(2, 3, seed=seed).values) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not (first == other).any()


def test_a_table_with_rows_missing_or_sequences_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="length 2 needs a float64 table of 4 rows"):
        FunctionTable(2, (torch.zeros(2, 1, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)))
    with pytest.raises(ValueError, match="not finite"):
        tabulate(lambda rows: rows.sum(-1) / 0, 2, 2)
    with pytest.raises(ValueError, match="1 to 3 symbols, not 4"):
        parity(2, 3)(torch.zeros(4, dtype=torch.int64))
