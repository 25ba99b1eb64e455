"""The gradient search: never below the exact optimum, and close to it where the problem is convex."""

import pytest
import torch

from kvcat.theory.compression import compress, prefix_cache, suffix_error
from kvcat.theory.definitions import AttentionHead, Block, FeedForward, Transformer, sequences
from kvcat.theory.histogram import compressible_histogram, histogram_policy, incompressible_histogram
from kvcat.theory.histogram_optimum import joint_optimum, optimal_policy
from kvcat.theory.searching import FoundCache, search_cache


def every_suffix(num_symbols: int, longest_suffix: int) -> list[torch.Tensor]:
    return [sequences(num_symbols, k) for k in range(1, longest_suffix + 1)]


def largest_error(model: Transformer, found: FoundCache, prefix: torch.Tensor, suffixes: list[torch.Tensor]) -> float:
    return max(float(suffix_error(model, found.cache, prefix, rows).max()) for rows in suffixes)


@pytest.mark.parametrize(
    ("m", "longest", "prefix", "num_slots", "num_blocks"),
    [
        (2, 4, [0, 0], 1, 2),
        (2, 6, [0, 1, 0], 2, 4),
        (3, 6, [0, 0, 0, 0], 2, 2),
        (4, 5, [0, 1, 2], 1, 2),
        (2, 7, [1, 1, 1, 1], 3, 2),
    ],
)
def test_no_cache_found_by_gradients_beats_the_optimum_and_the_best_comes_close(
    m: int, longest: int, prefix: list[int], num_slots: int, num_blocks: int
) -> None:
    model, tokens = incompressible_histogram(m, longest, num_blocks=num_blocks), torch.tensor(prefix)
    suffixes = every_suffix(m, longest - len(prefix))
    best = joint_optimum(torch.bincount(tokens, minlength=m), longest - len(prefix), num_slots).error
    found = search_cache(model, tokens, suffixes, num_slots, num_steps=40, num_restarts=2)
    assert best - 1e-12 <= found.error <= 1.001 * best
    assert largest_error(model, found, tokens, suffixes) == pytest.approx(found.error, rel=1e-12)


def test_a_search_from_the_optimal_policy_stays_there() -> None:
    model, prefix = incompressible_histogram(2, 6), torch.tensor([0, 0, 0])
    start = compress(optimal_policy(2, 6, lambda n: 1), prefix_cache(model, prefix))
    best = joint_optimum(torch.tensor([3, 0]), 3, 1).error
    found = search_cache(model, prefix, every_suffix(2, 3), 1, num_steps=20, num_restarts=1, start=start)
    assert found.error == pytest.approx(best, rel=1e-12)


def test_a_search_from_the_compressible_construction_keeps_its_error_near_zero() -> None:
    model, prefix = compressible_histogram(2, 5), torch.tensor([0, 1])
    start = compress(histogram_policy(2), prefix_cache(model, prefix))
    found = search_cache(model, prefix, every_suffix(2, 3), 1, num_steps=5, num_restarts=1, start=start)
    assert found.error < 1e-13


def test_without_slots_there_is_nothing_to_search() -> None:
    model, prefix = incompressible_histogram(3, 5), torch.tensor([0, 1, 1])
    found = search_cache(model, prefix, every_suffix(3, 2), 0, num_steps=1, num_restarts=5)
    assert found.error == pytest.approx(joint_optimum(torch.tensor([1, 2, 0]), 2, 0).error, rel=1e-12)
    assert [keys.shape[0] for heads in found.cache for keys, _ in heads] == [0, 0]


def attending_model() -> Transformer:
    """Random, two blocks of two heads, attention not uniform, under the causal mask."""
    draw = torch.Generator().manual_seed(4)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def block(d_in: int, d_out: int) -> Block:
        heads = tuple(AttentionHead(matrix(d_in, 3), matrix(d_in, 3), matrix(d_in, 2)) for _ in range(2))
        return Block(heads, matrix(4, d_in), FeedForward(matrix(d_in, 7), matrix(7), matrix(7, d_out), matrix(d_out)))

    return Transformer(matrix(3, 6, 4), (block(4, 5), block(5, 2)), causal=True)


def test_a_search_improves_on_keeping_tokens_in_a_transformer_that_attends() -> None:
    model, prefix, suffixes = attending_model(), torch.tensor([0, 2, 1, 1]), every_suffix(3, 2)
    found = search_cache(model, prefix, suffixes, 1, num_steps=60, num_restarts=2, seed=3)
    assert largest_error(model, found, prefix, suffixes) == pytest.approx(found.error, rel=1e-12)
    kept = [
        tuple(tuple((keys[[i]], values[[i]]) for keys, values in heads) for heads in prefix_cache(model, prefix))
        for i in range(4)
    ]
    errors = [max(float(suffix_error(model, cache, prefix, rows).max()) for rows in suffixes) for cache in kept]
    assert found.error < 0.45 * min(errors)


def test_the_seed_alone_decides_what_a_search_finds() -> None:
    model, prefix = attending_model(), torch.tensor([0, 2, 1, 1])
    first, again, other = (
        search_cache(model, prefix, [sequences(3, 1)], 1, num_steps=4, num_restarts=2, seed=seed).error
        for seed in (3, 3, 4)
    )
    assert first == again != other


def test_the_whole_cache_is_where_a_search_with_n_slots_can_start_and_stay() -> None:
    model, prefix = attending_model(), torch.tensor([0, 2, 1])
    whole = prefix_cache(model, prefix)
    found = search_cache(model, prefix, every_suffix(3, 2), 3, num_steps=1, num_restarts=1, start=whole)
    assert found.error < 1e-11
    assert torch.equal(found.cache[0][0][0].round(decimals=12), whole[0][0][0].round(decimals=12))


def test_arguments_outside_their_range_are_refused() -> None:
    model, prefix, suffixes = incompressible_histogram(2, 4), torch.tensor([0, 1]), [sequences(2, 1)]
    with pytest.raises(ValueError, match="slots must number 0 to 2, got 3"):
        search_cache(model, prefix, suffixes, 3)
    with pytest.raises(ValueError, match="at least one step and one start, got 0 and 3"):
        search_cache(model, prefix, suffixes, 1, num_steps=0)
    with pytest.raises(ValueError, match="none of them empty"):
        search_cache(model, prefix, [], 1)
    with pytest.raises(ValueError, match="does not have 1 slots"):
        search_cache(model, prefix, suffixes, 1, start=prefix_cache(model, prefix))


def test_with_all_slots_the_search_begins_with_the_whole_cache_itself() -> None:
    model, prefix = compressible_histogram(2, 5), torch.zeros(3, dtype=torch.int64)
    found = search_cache(model, prefix, [sequences(2, 1), sequences(2, 2)], 3, num_steps=1, num_restarts=1)
    assert found.error < 1e-12
