"""The fast path against the naive reference, and the reference against a loop."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from kvcat.attention import attend, attend_reference, extend_keys, mask_gradient, reachable
from kvcat.attention.mask_gradient import fused_keep_gradient, keep_gradient
from naive import allowed, masked_attention, normal, with_gradients

KINDS = {"causal": {}, "window": {"window": 3}}


def example(seed=0, *, heads=4, kv_heads=2, queries=9, keys=9):
    q, k, v, bias = (
        normal(2, *shape, seed=4 * seed + i)
        for i, shape in enumerate(
            [(heads, queries, 8), (kv_heads, keys, 8), (kv_heads, keys, 8), (kv_heads, keys)]
        )
    )
    keep = (torch.rand(2, keys, generator=torch.Generator().manual_seed(seed)) < 0.4).double()
    keep[:, :2] = 0.0  # so the first queries see no kept key
    return q, k, v, keep, 2 * bias


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [0, 4, 9])
def test_output_and_all_gradients_equal_the_naive_twin(kind, biased):
    q, k, v, keep, bias = example()
    options = KINDS[kind]
    reach = allowed(9, KINDS[kind].get("window"))
    keep = None if biased else keep

    def fast_twin(q, k, v, last):
        return attend(q, k, v, **{"log_bias" if biased else "keep": last}, **options)

    def naive(q, k, v, last):
        kept = torch.ones(()) if biased else last[:, None, None]
        bias = torch.nn.functional.pad(last, (0, 9 - biased)) if biased else None
        return masked_attention(q, k, v, kept, reach, 8**-0.5, bias)

    inputs = [q, k, v, bias[..., :biased] if biased else keep]
    fast, slow = (with_gradients(f, inputs) for f in (fast_twin, naive))
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-10)
    padded = None if not biased else torch.nn.functional.pad(bias[..., :biased], (0, 9 - biased))
    assert torch.allclose(
        attend_reference(q, k, v, keep, padded, **KINDS[kind]), slow[0], atol=1e-10
    )


def test_chunks_of_the_backward_do_not_change_the_gradient():
    q, k, v, keep, _ = example(queries=40, keys=40)  # three chunks of at least 16 queries
    for options in KINDS.values():
        out, expected = with_gradients(lambda keep, o=options: attend(q, k, v, keep, **o), [keep])
        grad_out = normal(*out.shape, seed=1)  # the weights of with_gradients
        reach = reachable(40, 40, **options)[None] if options else None
        for elements in (1, 2**20):
            gradient = keep_gradient(grad_out, q, k, v, reach, 8**-0.5, cpu_elements=elements)
            assert torch.allclose(gradient, expected, atol=1e-12)


@pytest.mark.parametrize("queries", [40, 7, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_gradient_of_the_mask_is_that_of_chunks(kind, queries):
    options = KINDS[kind]
    for heads, kv_heads in ((4, 2), (4, 4), (3, 1)):
        q, k, v, keep, _ = example(heads=heads, kv_heads=kv_heads, queries=queries, keys=40)
        v = v[..., :6]
        _, expected = with_gradients(lambda m, s=(q, k, v): attend(*s, m, **options), [keep])
        grad_out = normal(2, heads, queries, 6, seed=1)  # the weights of with_gradients
        reach = reachable(queries, 40, **options)[None] if options else None
        fused = fused_keep_gradient(grad_out, q, k, v, reach, 8**-0.5)
        assert expected.abs().max() > 0.1
        assert torch.allclose(fused, expected, atol=1e-12)
        half = [x.bfloat16() for x in (grad_out, q, k, v)]
        exact = keep_gradient(*(x.double() for x in half), reach, 8**-0.5)
        autocast = [half[0], half[1].float(), half[2].float(), half[3]]
        for inputs in (half, autocast):
            for gradient in (keep_gradient, fused_keep_gradient):
                rounded = gradient(*inputs, reach, 8**-0.5)
                assert rounded.dtype == torch.float32
                assert (rounded - exact).norm() < 0.01 * exact.norm()


def compiled_and_plain(num_queries):
    """Output and gradients of a layer, the gradient of the mask by chunks and fused, each compiled
    as one graph and not."""

    def layer(states, keep):
        q, k, v = states[:, :, -num_queries:] * 2.0, states[:, :2] * 1.5, states[:, 2:].sin()
        return attend(q, k, v, keep, scale=0.3).cos()

    states = normal(2, 4, 24, 8, seed=0)
    keep = (torch.rand(2, 24, generator=torch.Generator().manual_seed(0)) < 0.6).double()

    def in_both_ways():
        torch.compiler.reset()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        return [with_gradients(compiled, [states, keep]), with_gradients(layer, [states, keep])]

    by_chunks = in_both_ways()
    mask_gradient.keep_gradient = mask_gradient.fused_keep_gradient
    return [*by_chunks, *in_both_ways()]


@pytest.mark.slow
@pytest.mark.parametrize("num_queries", [24, 9])
def test_the_gradient_of_the_mask_is_one_operator_of_a_compiled_layer(num_queries):
    # in a process where no type checks meet the compiler
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = pool.submit(compiled_and_plain, num_queries).result()
    compiled, plain, fused_and_compiled, fused = results
    for other in (compiled, fused_and_compiled, fused):
        torch.testing.assert_close(other, plain)


@pytest.mark.parametrize("options", [{}, {"window": 4}])
def test_fewer_queries_than_keys_are_the_last_positions(options):
    q, k, v, keep, bias = example()
    for arguments in ({"keep": keep}, {"log_bias": bias}):
        whole = attend(q, k, v, **arguments, **options)
        for count in (1, 4):
            last = attend(q[:, :, -count:], k, v, **arguments, **options)
            assert torch.allclose(last, whole[:, :, -count:], atol=1e-12), count


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


def test_bfloat16_keys_hold_a_log_bias_to_a_thousandth():
    bias = torch.linspace(-3, 3, 50)[None, None]
    keys = extend_keys(torch.zeros(1, 1, 50, 8, dtype=torch.bfloat16), bias, 0.125)
    assert (keys[..., 8:].float().sum(-1) * 0.125 - bias).abs().max() < 1e-3


def test_huge_scores_of_dropped_slots_stay_invisible():
    q, k, v, keep, _ = (x.float() for x in example())
    keep[:, 0] = 1
    loud = torch.where(keep[:, None, :, None] > 0, k, 300 * k)
    assert torch.allclose(attend(q, loud, v, keep), attend_reference(q, k, v, keep), atol=1e-5)


def test_the_masks_gradient_is_bounded_where_the_masked_pass_has_an_exploding_derivative():
    q, k, v, _, _ = example(heads=1, kv_heads=1)
    k[:, :, 5] = 40 * q[:, :, 8]  # the last query would see slot 5 only, and slot 5 is dropped
    keep = torch.ones(2, 9, dtype=torch.float64)
    keep[:, 5] = 0.0

    def masked_pass(keep):
        mass = keep[:, None, None] * (q @ k.mT * 8**-0.5).exp() * allowed(9)
        return mass @ v / mass.sum(-1, keepdim=True)

    ours, exact = (
        with_gradients(f, [keep])[1].norm() for f in (lambda m: attend(q, k, v, m), masked_pass)
    )
    assert ours < 100
    assert exact > 1e8


def test_a_mistake_is_named():
    q, k, v, keep, bias = example()
    with pytest.raises(ValueError, match="keep or log_bias, not both"):
        attend(q, k, v, keep, bias)
    with pytest.raises(ValueError, match="window=0"):
        attend(q, k, v, keep, window=0)
    with pytest.raises(ValueError, match="9 queries"):
        attend_reference(q, k[:, :, :5], v[:, :, :5])
