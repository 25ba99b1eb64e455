"""Attention mass against its naive twin."""

import math

import numpy as np
import pytest
import torch

from kvcat.attention.mass import attention_mass, log_mass
from naive import attention_mass as naive_mass
from naive import normal


@pytest.mark.parametrize(
    ("heads", "window", "chunk"), [((2, 2), None, 5), ((4, 2), 4, 1), ((6, 1), 1, 100)]
)
def test_attention_mass_in_chunks_equals_its_naive_twin(heads, window, chunk):
    options = {"scale": 0.7, "window": window, "cpu_elements": chunk * 2 * heads[0] * 13}
    q = normal(2, heads[0], 13, 4)
    k = normal(2, heads[1], 13, 4, seed=1)
    fast = attention_mass(q, k, **options)
    torch.testing.assert_close(fast.sum(1), naive_mass(q, k, 0.7, window), rtol=1e-12, atol=1e-13)
    groups = zip(q.unflatten(1, (heads[1], -1)).unbind(1), k.unbind(1), strict=True)
    by_head = torch.stack(
        [naive_mass(group_queries, keys[:, None], 0.7, window) for group_queries, keys in groups], 1
    )
    torch.testing.assert_close(fast, by_head, rtol=1e-12, atol=1e-13)
    last = attention_mass(q[:, :, -3:], k, **options)
    before = attention_mass(q[:, :, :-3], k[:, :, :-3], **options)
    torch.testing.assert_close(torch.nn.functional.pad(before, (0, 3)) + last, fast)


def test_the_mass_of_keys_is_that_of_the_plain_sum():
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 4, 9, 5, generator=draw)
    keys = torch.randn(2, 2, 7, 5, generator=draw)
    last = torch.tensor([0, 6, 2, 3, 3, 1, 5, 4, 6])
    expected = torch.zeros(2, 4, 9)
    for b, h, i in np.ndindex(2, 4, 9):
        terms = [
            math.exp(0.3 * float(queries[b, h, i] @ keys[b, h // 2, j]))
            for j in range(int(last[i]) + 1)
        ]
        expected[b, h, i] = math.log(sum(terms))
    for elements in (2**21, 2 * 4 * 7 * 2):
        mass = log_mass(queries, keys, 0.3, last, cpu_elements=elements)
        assert torch.allclose(mass, expected, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("num_queries", [1, 3, 7])
def test_the_mass_of_all_keys_and_that_up_to_the_own_one_are_plain_sums(kv_heads, num_queries):
    """The cases of the fused kernel, with keys of large norm and heads that share keys."""
    draw = torch.Generator().manual_seed(1)
    queries = 4 * torch.randn(2, 4, num_queries, 8, generator=draw).double()
    keys = 4 * torch.randn(2, kv_heads, 7, 8, generator=draw).double()
    scores = 0.7 * queries @ keys.repeat_interleave(4 // kv_heads, 1).mT
    everything = torch.full([num_queries], 6)
    up_to_own = torch.arange(7 - num_queries, 7)
    for last in (everything, up_to_own):
        seen = scores.masked_fill(torch.arange(7) > last.unsqueeze(1), -torch.inf)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
            mass = log_mass(queries.to(dtype), keys.to(dtype), 0.7, last)
            assert mass.dtype == dtype
            torch.testing.assert_close(mass.double(), seen.logsumexp(-1), rtol=tolerance, atol=0)
