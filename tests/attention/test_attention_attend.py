"""The fast path against the naive reference, and the reference against a loop."""

import itertools

import pytest
import torch

from kvcat.attention import (
    COUPLINGS,
    attend,
    attend_ragged,
    attend_reference,
    attend_twice,
    extend_keys,
    mask_gradient,
    reachable,
)
from kvcat.cache import CompactLayer
from naive import allowed, masked_attention

KINDS = {"causal": {"causal": True}, "all keys": {"causal": False}, "window": {"causal": True, "window": 3}}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def example(seed=0, *, heads=4, kv_heads=2, queries=9, keys=9):
    q, k, v, bias = (normal(2, *shape, seed=4 * seed + i) for i, shape in enumerate(
        [(heads, queries, 8), (kv_heads, keys, 8), (kv_heads, keys, 8), (kv_heads, keys)]))  # fmt: skip
    keep = (torch.rand(2, keys, generator=torch.Generator().manual_seed(seed)) < 0.4).double()
    keep[:, :2] = 0.0  # the first queries are blind under causality
    return q, k, v, keep, 2 * bias


def with_gradients(function, tensors):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out, *torch.autograd.grad((out * normal(*out.shape, seed=1)).sum(), leaves)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_what_a_loop_over_visible_slots_computes(kind):
    q, k, v, keep, bias = example(heads=1, kv_heads=1)
    options = KINDS[kind]
    out = attend_reference(q, k, v, keep, bias, **options)
    for b, t in itertools.product(range(2), range(9)):
        stop = t + 1 if options["causal"] else 9
        seen = [j for j in range(max(0, t - options.get("window", 9) + 1), stop) if keep[b, j]] or [t]
        scores = torch.stack([q[b, 0, t] @ k[b, 0, j] / 8**0.5 + bias[b, 0, j] for j in seen])
        expected = sum(w * v[b, 0, j] for w, j in zip(scores.softmax(0), seen, strict=True))
        assert torch.allclose(out[b, 0, t], expected, atol=1e-12)


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [0, 4, 9])
def test_output_and_all_gradients_equal_the_naive_twin(kind, coupling, biased):
    q, k, v, keep, bias = example()
    inputs = [q, k, v, keep, bias[..., :biased]] if biased else [q, k, v, keep]
    options = {**KINDS[kind], "coupling": coupling}
    reach = allowed(9, options.get("window")) if options["causal"] else torch.ones(9, 9)

    def naive(q, k, v, keep, bias=None):
        bias = None if bias is None else torch.nn.functional.pad(bias, (0, 9 - biased))
        return masked_attention(q, k, v, keep[:, None, None], reach, 8**-0.5, coupling, bias)

    fast, slow = (with_gradients(f, inputs) for f in (lambda *x: attend(*x, **options), naive))
    for name, one, other in zip(["out", "q", "k", "v", "keep", "bias"][: len(fast)], fast, slow, strict=True):
        assert torch.allclose(one, other, atol=1e-10), name


def test_chunks_of_the_backward_do_not_change_the_gradient(monkeypatch):
    q, k, v, keep, _ = example()
    for options in KINDS.values():
        results = []
        for elements in (1, 2**20):
            monkeypatch.setattr(mask_gradient, "_CPU_ELEMENTS", elements)
            results.append(with_gradients(lambda keep, o=options: attend(q, k, v, keep, **o), [keep])[1])
        assert torch.allclose(*results, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"causal": False}])
def test_fewer_queries_than_keys_are_the_last_positions(options):
    q, k, v, keep, bias = example()
    whole = attend(q, k, v, keep, bias, **options)
    for count in (1, 4):
        part = attend(q[:, :, -count:], k, v, keep, bias, **options)
        assert torch.allclose(part, whole[:, :, -count:], atol=1e-12), count


@pytest.mark.parametrize("window", [None, 3])
def test_suffixes_run_again_see_the_kept_slots_of_the_prefix_and_their_own(window):
    q, k, v, keep, _ = example(queries=14, keys=14)  # 9 tokens, and the last 5 again
    out = attend_twice(q, k, v, keep[:, :4], 4, scale=0.3, window=window)
    dense = attend_reference(*(x[:, :, :9] for x in (q, k, v)), scale=0.3, window=window)
    again = [torch.cat([x[:, :, :4], x[:, :, 9:]], dim=2) for x in (q, k, v)]
    seen = torch.cat([keep[:, :4], torch.ones(2, 5)], dim=1)
    masked = attend_reference(*again, seen, scale=0.3, window=window)[:, :, 4:]
    assert torch.allclose(out, torch.cat([dense, masked], dim=2), atol=1e-12)


@pytest.mark.parametrize("queries", [1, 7, 70])
@pytest.mark.parametrize("kind", ["causal", "reach"])
def test_slots_of_log_bias_minus_infinity_are_hidden_and_the_others_seen_by_all(queries, kind):
    q, k, v, _, bias = example(queries=queries, keys=80 + queries)
    bias = bias[..., :60]
    bias[:, :, 5] = -torch.inf
    reach = None if kind == "causal" else reachable(queries, 80 + queries)[None]
    out = attend(q, k, v, None, bias, reach=reach)
    expected = attend_reference(q, k, v, None, torch.nn.functional.pad(bias, (0, 20 + queries)))
    assert torch.allclose(out, expected, atol=1e-10)


@pytest.mark.parametrize(("queries", "masked"), [(1, False), (7, True), (70, False)])
def test_heads_of_unequal_slots_attend_as_each_by_itself(queries, masked):
    q, k, v = (normal(2, heads, n, 8, seed=i) for i, (heads, n) in
               enumerate([(4, queries), (2, queries + 4), (2, queries + 4)]))  # fmt: skip
    counts = [(3, 60), (12, 1)]
    kinds = [[[normal(n, *more, seed=n + len(more)) for n in row] for row in counts] for more in ((8,), (8,), ())]
    mask = reachable(queries, queries + 4).repeat(2, 1, 1)
    mask[1, :, : 2 * masked] = False  # padding of one row
    slots = CompactLayer.ragged(*kinds).head
    out = attend_ragged(q, k, v, slots, torch.tensor([1, 0]), mask if masked else None, scale=0.3)
    for row, source in enumerate([1, 0]):
        for head in range(2):
            keys, values, bias = (kind[source][head] for kind in kinds)
            own, behind = slice(2 * head, 2 * head + 2), 2 * row if masked else 0
            whole = [torch.cat([a, b[row, head, behind:]])[None, None] for a, b in ((keys, k), (values, v))]
            bias = torch.nn.functional.pad(bias, (0, whole[0].shape[2] - len(bias)))[None, None]
            alone = attend_reference(q[row : row + 1, own], *whole, log_bias=bias, scale=0.3)
            assert torch.allclose(out[row, own], alone[0], atol=1e-10)


def test_a_log_bias_of_log_two_counts_a_slot_twice():
    q, k, v, _, _ = example(queries=1)
    bias = torch.zeros(2, 2, 9, dtype=torch.float64)
    bias[..., 4] = torch.tensor(2.0, dtype=torch.float64).log()
    twice = torch.cat([k, k[:, :, 4:5]], dim=2), torch.cat([v, v[:, :, 4:5]], dim=2)
    out = attend(q, k, v, log_bias=bias, causal=False)
    assert torch.allclose(out, attend_reference(q, *twice, causal=False), atol=1e-12)


def test_bfloat16_keys_hold_a_log_bias_to_a_thousandth():
    bias = torch.linspace(-3, 3, 50)[None, None]
    keys = extend_keys(torch.zeros(1, 1, 50, 8, dtype=torch.bfloat16), bias, 0.125)
    assert (keys[..., 8:].float().sum(-1) * 0.125 - bias).abs().max() < 1e-3


def test_huge_scores_of_dropped_slots_stay_invisible():
    q, k, v, keep, _ = (x.float() for x in example())
    keep[:, 0] = 1
    loud = torch.where(keep[:, None, :, None] > 0, k, 300 * k)
    assert torch.allclose(attend(q, loud, v, keep), attend_reference(q, k, v, keep), atol=1e-5)


def test_the_surrogate_is_bounded_where_the_exact_derivative_explodes():
    q, k, v, _, _ = example(heads=1, kv_heads=1)
    k[:, :, 5] = 40 * q[:, :, 8]  # the last query would look at slot 5 only, and slot 5 is dropped
    keep = torch.ones(2, 9, dtype=torch.float64)
    keep[:, 5] = 0.0
    norms = {c: with_gradients(lambda m, c=c: attend(q, k, v, m, coupling=c), [keep])[1].norm() for c in COUPLINGS}
    assert norms["surrogate"] < 100
    assert norms["exact"] > 1e8


def test_a_mistake_is_named():
    q, k, v, keep, _ = example()
    for options, told in (
        ({"coupling": "kept-only"}, "'kept-only'"), ({"window": 0}, "window=0"),
        ({"causal": False, "window": 3}, "causal=False"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            attend(q, k, v, keep, **options)
    with pytest.raises(ValueError, match="9 queries"):
        attend_reference(q, k[:, :, :5], v[:, :, :5])
