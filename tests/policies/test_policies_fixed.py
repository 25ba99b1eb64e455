"""The policies that keep an exact count."""

import pytest
import torch

from kvcat import InputError
from kvcat.policies import AttentionMassPolicy, RandomPolicy, attention_mass


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention_mass_naive(queries, keys, *, scale, window=None):
    """Query by query and head by head."""
    batch, heads, num_tokens, _ = queries.shape
    mass = torch.zeros(batch, num_tokens, dtype=queries.dtype)
    for b in range(batch):
        for head in range(heads):
            k = keys[b, head * keys.shape[1] // heads]
            for t in range(num_tokens):
                first = 0 if window is None else max(0, t - window + 1)
                mass[b, first : t + 1] += ((k[first : t + 1] @ queries[b, head, t]) * scale).softmax(0)
    return mass


def test_random_masks_follow_the_generator_and_differ_between_sequences_of_a_batch():
    policy, hidden, generator = RandomPolicy(0.5), torch.zeros(2, 64, 2), torch.Generator().manual_seed(3)
    state = generator.get_state()
    first, second = policy(hidden, generator), policy(hidden, generator)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(policy(hidden, generator.set_state(state)), first)
    with pytest.raises(InputError, match=r"torch\.Generator"):
        policy(hidden)


def test_random_masks_are_uniform_over_all_positions_but_the_first_and_over_pairs():
    draws, tokens = 20_000, 9
    scores = RandomPolicy(0.5)(torch.zeros(draws, tokens, 1), torch.Generator().manual_seed(0))[:, 1:]
    kept, others = 4, tokens - 1
    single, pair = kept / others, kept * (kept - 1) / (others * (others - 1))
    together = scores.T @ scores / draws
    expected = torch.full_like(together, pair).fill_diagonal_(single)
    assert (together - expected).abs().max() < 4.5 * (single * (1 - single) / draws) ** 0.5


@pytest.mark.parametrize(("heads", "window", "chunk"), [((2, 2), None, 5), ((4, 2), 4, 1), ((6, 1), 1, 100)])
def test_attention_mass_in_chunks_equals_its_naive_twin(heads, window, chunk):
    q, k = normal(2, heads[0], 13, 4), normal(2, heads[1], 13, 4, seed=1)
    fast = attention_mass(q, k, scale=0.7, window=window, query_chunk=chunk)
    torch.testing.assert_close(fast, attention_mass_naive(q, k, scale=0.7, window=window), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(fast.sum(1), torch.full((2,), 13.0 * heads[0], dtype=torch.float64))


def test_the_slots_that_everyone_looks_at_are_kept():
    keys = torch.zeros(1, 1, 8, 2)
    keys[0, 0, [3, 6], 0] = 10.0
    queries = torch.ones(1, 4, 8, 2)
    assert AttentionMassPolicy(3 / 8)(queries, keys, scale=1.0).nonzero()[:, 1].tolist() == [0, 3, 6]


def test_equal_masses_go_to_the_lower_position():
    keys, queries = torch.zeros(1, 1, 12, 2), torch.ones(1, 1, 12, 2)
    scores = AttentionMassPolicy(0.5)(queries, keys, scale=1.0, window=1)
    assert scores.tolist() == [[1.0] * 6 + [0.0] * 6]
