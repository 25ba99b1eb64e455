"""The printed constructions fail, and in the way stated."""

import pytest
import torch

from kvcat.theory.histogram import compressible_histogram, histogram, incompressible_histogram
from kvcat.theory.printed_histogram import doubled_blocks, misplaced_counts, nilpotent_output, unmoved_output

TOKENS = torch.tensor([0, 0, 1, 2])


@pytest.mark.parametrize("transposed", [False, True])
def test_the_printed_first_construction_gives_nothing_where_the_corrected_one_gives_the_histogram(
    transposed: bool,
) -> None:
    found = nilpotent_output(TOKENS, 3, transposed=transposed)
    assert found.computed.tolist() == [0, 0, 0]
    assert found.claimed.tolist() == [0.5, 0.25, 0.25]
    assert incompressible_histogram(3, 4)(TOKENS).tolist() == [0.5, 0.25, 0.25]
    assert found.deviation == pytest.approx(0.375**0.5, rel=1e-14)


def test_with_the_printed_value_matrix_nothing_reaches_the_block_that_is_read() -> None:
    found = unmoved_output(TOKENS, 3)
    assert found.computed.tolist() == [0, 0, 0]
    assert found.claimed.tolist() == compressible_histogram(3, 4)(TOKENS).tolist() == [0.5, 0.25, 0.25]


def test_with_the_value_matrix_transposed_the_residual_counts_two_blocks_twice() -> None:
    found = doubled_blocks(TOKENS, 3)
    assert found.computed.tolist() == [0.5, 0.25, 1.25, 6.5, 2, 0, 0.5, 0.25, 0.25, 0, 0, 0]
    assert found.claimed.tolist() == [0, 0, 1, 4, 1, 0, 0.5, 0.25, 0.25, 0, 0, 0]
    assert found.deviation == pytest.approx((0.375 + 2.5**2 + 1) ** 0.5, rel=1e-14)


@pytest.mark.parametrize(
    ("prefix", "suffix"), [([0, 0, 1], [2]), ([1], [1, 1, 0]), ([2, 0, 2, 2], [1, 2]), ([0, 1, 2, 0, 1], [0])]
)
def test_the_printed_slot_leaves_the_prefix_out_of_the_average(prefix: list[int], suffix: list[int]) -> None:
    a, b = torch.tensor(prefix), torch.tensor(suffix)
    found = misplaced_counts(a, b, 3)
    total = len(prefix) + len(suffix)
    torch.testing.assert_close(found.computed, histogram(b, 3) * len(b) / total, rtol=0, atol=1e-13)
    torch.testing.assert_close(found.claimed, histogram(torch.cat([a, b]), 3), rtol=0, atol=1e-15)
    assert found.deviation == pytest.approx(float(torch.bincount(a).double().norm()) / total, rel=1e-12)
