"""Attention sinks: one more logit per query head in the softmax, without a value."""

import itertools

import pytest
import torch
from torch.nn.functional import pad

from kvcat.attention import attend, attend_biased, attend_ragged, attend_reference, attention_mass
from kvcat.attention.kernels import with_sinks
from kvcat.cache import HeadSlots
from naive import allowed, masked_attention, normal, with_gradients
from naive import attention_mass as naive_mass

HEADS, KV_HEADS, TOKENS = 4, 2, 9
SINKS = torch.tensor([-2.0, 0.0, 1.0, 4.0], dtype=torch.float64)


def example(queries=TOKENS, keys=TOKENS):
    q = normal(2, HEADS, queries, 8)
    k = normal(2, KV_HEADS, keys, 8, seed=1)
    v = normal(2, KV_HEADS, keys, 6, seed=2)
    bias = 2 * normal(2, KV_HEADS, keys, seed=3)
    keep = (torch.rand(2, keys, generator=torch.Generator().manual_seed(0)) < 0.4).double()
    keep[:, :2] = 0.0  # so the first queries see no kept key
    return q, k, v, keep, bias


def test_a_sink_takes_its_share_of_the_attention_and_adds_nothing():
    # scores log 1 and log 2, and sinks log 3 and log 1: the shares are (1, 2) / 6 and (1, 2) / 4
    q = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    k = torch.tensor([1.0, 2.0], dtype=torch.float64).log().view(1, 1, 2, 1)
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64).view(1, 1, 2, 2)
    sinks = torch.tensor([3.0, 1.0], dtype=torch.float64).log()
    expected = torch.tensor([[1 / 6, 2 / 6], [1 / 4, 2 / 4]], dtype=torch.float64)
    for function in (attend, attend_reference):
        out = function(q, k, v, scale=1.0, sinks=sinks)
        torch.testing.assert_close(out[0, :, 0], expected)
    mass = attention_mass(q, k, scale=1.0, sinks=sinks)
    torch.testing.assert_close(mass[0, 0], expected.sum(0))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("biased", [0, 4])
def test_output_and_all_gradients_equal_the_naive_twin(window, biased):
    q, k, v, keep, bias = example()
    reach = allowed(TOKENS, window)

    def fast(q, k, v, sinks, last):
        name = "log_bias" if biased else "keep"
        return attend(q, k, v, **{name: last}, window=window, sinks=sinks)

    def naive(q, k, v, sinks, last):
        kept = torch.ones(()) if biased else last[:, None, None]
        bias = pad(last, (0, TOKENS - biased)) if biased else None
        return masked_attention(q, k, v, kept, reach, 8**-0.5, bias, sinks)

    inputs = [q, k, v, SINKS, bias[..., :biased] if biased else keep]
    expected = with_gradients(naive, inputs)
    torch.testing.assert_close(with_gradients(fast, inputs), expected, rtol=1e-5, atol=1e-10)
    slots = {"log_bias": pad(bias[..., :biased], (0, TOKENS - biased))} if biased else {}
    hidden = {} if biased else {"keep": keep}
    slow = attend_reference(q, k, v, **hidden, **slots, window=window, sinks=SINKS)
    torch.testing.assert_close(slow, expected[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("cpu_kernel", [True, False])
@pytest.mark.parametrize(("queries", "biased"), [(5, 0), (5, 7), (1, 3), (70, 60)])
def test_kernels_with_a_sink_equal_the_reference(cpu_kernel, queries, biased):
    q, k, v, _, bias = example(queries, 12 + queries)
    log_bias = bias[..., :biased] if biased else None
    first_biased = None if log_bias is None else pad(log_bias, (1, 0))
    inputs = with_sinks(q, k, v, SINKS, 0.3)
    out = attend_biased(*inputs, first_biased, scale=0.3, cpu_kernel=cpu_kernel)
    padded = None if log_bias is None else pad(log_bias, (0, k.shape[2] - biased))
    expected = attend_reference(q, k, v, log_bias=padded, scale=0.3, sinks=SINKS)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)


def test_a_sink_of_minus_infinity_is_no_sink():
    q, k, v, keep, bias = example()
    none = torch.full_like(SINKS, -torch.inf)
    options = [{}, {"keep": keep}, {"log_bias": bias}, {"window": 3}]
    for dtype in (torch.float64, torch.float16):
        tensors = [tensor.to(dtype) for tensor in (q, k, v)]
        for option in options:
            out = attend(*tensors, **option, sinks=none.to(dtype))
            torch.testing.assert_close(out, attend(*tensors, **option), rtol=0, atol=2e-3)
    mass = attention_mass(q, k, scale=0.3, sinks=none)
    torch.testing.assert_close(mass, attention_mass(q, k, scale=0.3))


def test_bfloat16_queries_hold_a_sink_to_a_thousandth():
    q, k, v = (tensor.bfloat16() for tensor in example()[:3])
    sinks = torch.linspace(-9, 9, HEADS)
    wide_q, wide_k, _ = with_sinks(q, k, v, sinks, 0.125)
    scores = 0.125 * wide_q.float() @ wide_k.float().repeat_interleave(2, dim=1).mT
    assert (scores[..., 0] - sinks[:, None]).abs().max() < 1e-3
    plain = 0.125 * q.float() @ k.float().repeat_interleave(2, dim=1).mT
    torch.testing.assert_close(scores[..., 1:], plain)


@pytest.mark.parametrize("queries", [1, 3, 20])  # 2 rows x 20 are computed head by head
def test_heads_with_different_numbers_of_slots_have_the_sinks_of_their_query_heads(queries):
    q, k, v, _, bias = example(queries, keys=TOKENS + queries)
    states = [each.requires_grad_() for each in (q, k, v, bias)]
    counts = [[4, 9], [6, 2]]

    def slots(example, head):
        first = slice(0, counts[example][head])
        of_head = (example, head, first)
        return HeadSlots(k[of_head], v[of_head], bias[of_head])

    def of_example(example):
        return HeadSlots.joined([slots(example, head) for head in range(2)]), counts[example]

    new = slice(TOKENS, None)
    out = attend_ragged(
        q, k[:, :, new], v[:, :, new], of_example, torch.arange(2), None, scale=0.3, sinks=SINKS
    )
    expected = [
        attend_reference(
            q[row, head][None, None],
            torch.cat([before.keys, k[row, head // 2, new]])[None, None],
            torch.cat([before.values, v[row, head // 2, new]])[None, None],
            log_bias=pad(before.log_bias, (0, queries))[None, None],
            scale=0.3,
            sinks=SINKS[head : head + 1],
        )
        for row in range(2)
        for head in range(HEADS)
        for before in [slots(row, head // 2)]
    ]
    same = torch.cat(expected).view_as(out)
    torch.testing.assert_close(out, same, rtol=0, atol=1e-10)
    noise = normal(*out.shape, seed=4)
    gradients, expected_ones = (
        torch.autograd.grad((each * noise).sum(), states) for each in (out, same)
    )
    torch.testing.assert_close(gradients, expected_ones, rtol=0, atol=1e-10)


@pytest.mark.parametrize("queries", [1, 3])
def test_rows_in_any_order_have_their_examples_slots_and_their_masks(queries):
    """In bfloat16, under autocast, with a log-bias that bfloat16 would round by 0.2 nats."""
    counts = [[4, 9], [6, 2]]
    slots = []
    for num_slots in map(sum, counts):
        keys, values = (normal(num_slots, 8, seed=seed).bfloat16() for seed in (1, 2))
        slots.append(HeadSlots(keys, values, 60 + normal(num_slots).float()))
    rows = torch.tensor([1, 0, 1])
    q, k, v = (
        normal(3, heads, tokens, 8, seed=seed).bfloat16()
        for heads, tokens, seed in ((HEADS, queries, 3), (KV_HEADS, 4 + queries, 4), (2, 4, 5))
    )
    v = torch.cat([v, k[:, :, 4:]], dim=2)
    q[..., 0] = 1.0
    for each in slots:
        each.keys[:, 0] = -200.0  # with the scale 0.3 as much as the log-bias
    mask = torch.ones(3, queries, 4 + queries, dtype=torch.bool).tril(4)
    for row, padding in enumerate([3, 0, 1]):
        mask[row, :, :padding] = False

    def of_example(example):
        return slots[example], counts[example]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend_ragged(q, k, v, of_example, rows, mask, scale=0.3, sinks=SINKS.float())
    for row, head in itertools.product(range(3), range(HEADS)):
        example, kv_head = int(rows[row]), head // 2
        first = sum(counts[example][:kv_head])
        before = slots[example].kept(slice(first, first + counts[example][kv_head]))
        keys = torch.cat([before.keys, k[row, kv_head]]).double()
        values = torch.cat([before.values, v[row, kv_head]]).double()
        scores = 0.3 * q[row, head].double() @ keys.T + pad(before.log_bias, (0, len(mask[row, 0])))
        scores = scores.masked_fill(~pad(mask[row], (len(before), 0), value=True), -torch.inf)
        weights = torch.cat([scores, SINKS[head].expand(queries, 1)], 1).softmax(1)[:, :-1]
        torch.testing.assert_close(out[row, head].double(), weights @ values, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("window", [None, 4])
def test_attention_mass_in_chunks_equals_its_naive_twin(window):
    q, k, _, _, _ = example()
    options = {"scale": 0.7, "window": window, "sinks": SINKS}
    fast = attention_mass(q, k, cpu_elements=5 * 2 * HEADS * TOKENS, **options)
    expected = naive_mass(q, k, 0.7, window, SINKS)
    torch.testing.assert_close(fast.sum(1), expected, rtol=1e-12, atol=1e-13)
