import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kvcat.attention import (
    COUPLINGS,
    attend,
    attend_coupled_reference,
    attend_extended,
    attend_reference,
    extend_keys,
)

KINDS = {
    "causal": {"causal": True},
    "all keys": {"causal": False},
    "window": {"causal": True, "window": 3},
    "causal, sees itself": {"causal": True, "keep_self": True},
    "window, sees itself": {"causal": True, "window": 3, "keep_self": True},
}


def example(seed=0, *, batch=2, heads=4, kv_heads=2, queries=9, keys=9, head_dim=8, keep_ratio=0.4):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = (
        normal(batch, heads, queries, head_dim),
        normal(batch, kv_heads, keys, head_dim),
        normal(batch, kv_heads, keys, head_dim),
    )
    keep = (torch.rand(batch, keys, generator=generator, dtype=torch.float64) < keep_ratio).double()
    keep[:, :2] = 0.0  # the first queries are blind under causality
    return q, k, v, keep, 2 * normal(batch, kv_heads, keys)


def by_hand(q, k, v, keep, t, j_from, causal, keep_self=False):
    seen = [j for j in range(j_from, t + 1 if causal else k.shape[0]) if keep[j] or (keep_self and j == t)] or [t]
    weights = torch.stack([(q @ k[j]) / len(q) ** 0.5 for j in seen]).softmax(0)
    return sum(w * v[j] for w, j in zip(weights, seen, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_what_a_loop_over_visible_slots_computes(kind):
    q, k, v, keep, _ = example(heads=1, kv_heads=1)
    options = KINDS[kind]
    out = attend_reference(q, k, v, keep, **options)
    for b, t in itertools.product(range(2), range(9)):
        start = max(0, t - options.get("window", 9) + 1)
        expected = by_hand(
            q[b, 0, t], k[b, 0], v[b, 0], keep[b], t, start, options["causal"], options.get("keep_self", False)
        )
        assert torch.allclose(out[b, 0, t], expected, atol=1e-12)


def test_a_query_that_sees_nothing_gets_its_own_value():
    q, k, v, _, _ = example()
    keep = torch.zeros(2, 9, dtype=torch.float64)
    for path in ("bias", "mask"):
        out = attend(q, k, v, keep, path=path)
        assert torch.allclose(out, v.repeat_interleave(2, dim=1), atol=1e-12)


def test_a_log_bias_of_log_two_counts_a_slot_twice():
    q, k, v, _, _ = example(queries=1)
    bias = torch.zeros(2, 2, 9, dtype=torch.float64)
    bias[..., 4] = torch.tensor(2.0, dtype=torch.float64).log()
    twice = torch.cat([k, k[:, :, 4:5]], dim=2), torch.cat([v, v[:, :, 4:5]], dim=2)
    for path in ("bias", "mask"):
        out = attend(q, k, v, log_bias=bias, causal=False, path=path)
        assert torch.allclose(out, attend_reference(q, *twice, causal=False), atol=1e-12)


def test_log_bias_through_extra_channels_equals_the_reference():
    q, k, v, _, bias = example()
    out = attend_extended(q, extend_keys(k, bias, 0.3), v, None, causal=True, scale=0.3)
    assert torch.allclose(out, attend_reference(q, k, v, log_bias=bias, scale=0.3), atol=1e-12)


def test_bfloat16_keys_hold_a_log_bias_to_a_thousandth():
    bias = torch.linspace(-3, 3, 50)[None, None]
    keys = extend_keys(torch.zeros(1, 1, 50, 8, dtype=torch.bfloat16), bias, 0.125)
    assert (keys[..., 8:].float().sum(-1) * 0.125 - bias).abs().max() < 1e-3


def test_fewer_queries_than_keys_are_the_last_positions():
    q, k, v, keep, bias = example()
    for options in ({}, {"window": 4}, {"causal": False}, {"keep_self": True}):
        whole = attend(q, k, v, keep, bias, **options)
        for count in (1, 4):
            part = attend(q[:, :, -count:], k, v, keep, bias, **options)
            assert torch.allclose(part, whole[:, :, -count:], atol=1e-12), (options, count)


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(
    ("kind", "path"), [*((kind, "mask") for kind in KINDS), ("causal", "bias"), ("all keys", "bias")]
)
@pytest.mark.parametrize("biased", [False, True])
def test_output_and_all_gradients_equal_the_naive_twin(kind, path, coupling, biased):
    options = KINDS[kind]
    q, k, v, keep, bias = example()
    inputs = [q, k, v, keep, bias] if biased else [q, k, v, keep]
    weight = torch.randn(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for function, extra in ((attend, {"path": path}), (attend_coupled_reference, {})):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves, **options, coupling=coupling, **extra)
        gradients = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
        results.append([out, *gradients])
    for name, fast, naive in zip(["out", "q", "k", "v", "keep", "bias"][: len(inputs) + 1], *results, strict=True):
        assert (fast is None) == (naive is None), name
        if fast is not None:
            assert torch.allclose(fast, naive, atol=1e-10), name
    assert (results[0][4] is None) == (coupling == "none")


def test_chunks_of_the_backward_do_not_change_the_gradient(monkeypatch):
    from kvcat.attention import coupling as module

    q, k, v, keep, _ = example()
    results = []
    for elements in (1, 2**20):
        monkeypatch.setattr(module, "_CPU_ELEMENTS", elements)
        for options in KINDS.values():
            leaf = keep.clone().requires_grad_()
            attend(q, k, v, leaf, **options).square().sum().backward()
            results.append(leaf.grad)
    for one, whole in zip(results[: len(KINDS)], results[len(KINDS) :], strict=True):
        assert torch.allclose(one, whole, atol=1e-12)


def test_the_surrogate_is_the_dense_derivative_and_bounded_where_the_exact_one_explodes():
    q, k, v, _, _ = example(heads=1, kv_heads=1)
    k = k.clone()
    k[:, :, 5] = 40 * q[:, :, 8]  # the last query would look at slot 5 only, and slot 5 is dropped
    keep = torch.ones(2, 9, dtype=torch.float64)
    keep[:, 5] = 0.0
    norms = {}
    for coupling in ("surrogate", "exact"):
        leaf = keep.clone().requires_grad_()
        attend(q, k, v, leaf, coupling=coupling).sum().backward()
        norms[coupling] = leaf.grad.norm().item()
    assert norms["surrogate"] < 100
    assert norms["exact"] > 1e8


def test_keeping_everything_is_plain_attention():
    q, k, v, _, _ = example()
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(attend(q, k, v, torch.ones(2, 9)), plain, atol=1e-12)
    assert torch.allclose(attend(q, k, v), plain, atol=1e-12)


def test_huge_scores_of_dropped_slots_stay_invisible():
    q, k, v, keep, _ = (x.float() for x in example())
    keep[:, 0] = 1
    loud = torch.where(keep[:, None, :, None] > 0, k, 300 * k)
    assert torch.allclose(attend(q, loud, v, keep, path="bias"), attend_reference(q, k, v, keep), atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    at=st.integers(1, 8),
    kind=st.sampled_from([name for name in KINDS if name != "all keys"]),
)
def test_no_output_depends_on_later_positions(seed, at, kind):
    q, k, v, keep, bias = example(seed)
    before = attend(q, k, v, keep, bias, **KINDS[kind])[:, :, :at]
    k[:, :, at:], v[:, :, at:], bias[:, :, at:], keep[:, at:] = 7.0, -7.0, 3.0, 1.0
    after = attend(q, k, v, keep, bias, **KINDS[kind])[:, :, :at]
    assert torch.allclose(before, after, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_the_order_of_slots_does_not_matter_without_causality(seed):
    q, k, v, keep, bias = example(seed)
    keep[:, 0] = 1.0
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    shuffled = attend(q, k[:, :, order], v[:, :, order], keep[:, order], bias[:, :, order], causal=False)
    assert torch.allclose(attend(q, k, v, keep, bias, causal=False), shuffled, atol=1e-12)


def test_a_mistake_is_named():
    q, k, v, keep, _ = example()
    with pytest.raises(ValueError, match="'hard'"):
        attend(q, k, v, keep, coupling="hard")
    with pytest.raises(ValueError, match="'hard'"):
        attend_coupled_reference(q, k, v, keep, coupling="hard")
    with pytest.raises(ValueError, match="'flash'"):
        attend(q, k, v, keep, path="flash")
    with pytest.raises(ValueError, match="bias"):
        attend(q, k, v, keep, window=3, path="bias")
    with pytest.raises(ValueError, match="window=0"):
        attend(q, k, v, keep, window=0)
    with pytest.raises(ValueError, match="9 queries"):
        attend_reference(q, k[:, :, :5], v[:, :, :5])
