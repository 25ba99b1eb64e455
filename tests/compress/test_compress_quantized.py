"""Methods whose caches are in few bits: keys first, then the fit, then values with feedback."""

from dataclasses import replace

import pytest
import torch

from kvcat.cache import CompactCache, Grid, HeadSlots, QuantizedLayer, round_values
from kvcat.cache.codes import PackedHead, round_keys
from kvcat.compress import (
    AttentionMatching,
    GradientCompression,
    compare,
    make_compressor,
    slots_and_bits,
    smallest_cache,
    supervised_kl,
    trace,
)
from kvcat.compress.prefix import protecting
from kvcat.compress.rounding import RoundedHeads, round_keys_together, round_values_together
from tiny import loud_model, refusal

FOUR = 4


def structured_head(seed, slots=90, queries=150, dim=16):
    """Keys and queries in few directions, as those of real heads, with a sink in the first slot."""
    draw = torch.Generator().manual_seed(seed)
    directions = torch.randn(4, dim, generator=draw)
    keys = torch.randn(2, slots, 4, generator=draw) @ directions
    keys += 0.3 * torch.randn(2, slots, dim, generator=draw)
    queries_ = torch.randn(2, queries, 4, generator=draw) @ directions / dim
    keys[:, 0] = 20 * directions[0]
    values = torch.randn(2, slots, dim, generator=draw)
    return keys, queries_, values


def nearest(keys, values):
    """Keys and values of a batch of heads, each number rounded to the nearest code."""
    heads = [
        HeadSlots(k, v, codes=PackedHead.nearest(k, v, FOUR))
        for k, v in zip(keys, values, strict=True)
    ]
    made = HeadSlots.stacked(QuantizedLayer.of_heads([heads], FOUR, torch.float32).heads()[0])
    return made.keys, made.values


@pytest.mark.parametrize("seed", range(5))
def test_feedback_lowers_the_error_of_scores_and_of_outputs(seed):
    keys, queries, values = structured_head(seed)
    attention = torch.softmax(queries @ keys.mT, -1)
    plain_keys, plain_values = nearest(keys, values)
    rounded_keys = round_keys_together(keys, queries, FOUR).numbers
    rounded_values = round_values_together(values, attention, FOUR).numbers
    score_errors = [
        (queries @ (made - keys).mT).square().sum() for made in (rounded_keys, plain_keys)
    ]
    assert score_errors[0] < 0.7 * score_errors[1]
    output_errors = [
        (attention @ (made - values)).square().sum() for made in (rounded_values, plain_values)
    ]
    assert output_errors[0] < 0.9 * output_errors[1]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 64, 65, 130])
def test_rounded_heads_are_what_their_codes_stand_for(num_slots):
    keys, queries, values = structured_head(1, slots=num_slots)
    attention = torch.softmax(queries @ keys.mT, -1)
    rounded_keys = round_keys_together(keys, queries, FOUR)
    rounded_values = round_values_together(values, attention, FOUR)
    codes = RoundedHeads(rounded_keys, rounded_values).split()
    heads = [
        replace(head, codes=of_head)
        for head, of_head in zip(HeadSlots(keys, values).split(), codes, strict=True)
    ]
    layer = QuantizedLayer.of_heads([heads], FOUR, torch.float32)
    for index in range(2):
        head = layer.head(0, index)
        head_keys, head_values = head.keys, head.values
        assert torch.allclose(head_keys, rounded_keys.numbers[index], atol=1e-6)
        assert torch.allclose(head_values, rounded_values.numbers[index], atol=1e-6)


def test_numbers_on_the_grid_stay_whatever_the_feedback():
    codes = torch.randint(0, 16, (1, 40, 8), generator=torch.Generator().manual_seed(0))
    codes[0, 1] = 0
    codes[0, 2] = 15
    codes[0, 3:, 0] = 0
    codes[0, 3:, 1] = 15
    codes[0, 1, 1] = codes[0, 2, 0] = 0
    codes[0, 1, 1] = 15  # every slot has a 0 and a 15, and so has every channel
    codes[0, 2, 0] = 0
    codes[0, 1, 0] = 15
    states = codes.float() * 0.5 - 2
    queries = torch.randn(1, 30, 8, generator=torch.Generator().manual_seed(1))
    attention = torch.softmax(queries @ states.mT, -1)
    assert torch.equal(round_keys_together(states, queries, FOUR).numbers, states)
    assert torch.equal(round_values_together(states, attention, FOUR).numbers, states)


def test_plain_rounding_keeps_the_nearest_codes():
    values = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    codes, grid = round_values(values, 4)
    steps = torch.arange(16.0)
    levels = grid.offsets.float() + grid.scales.float() * steps  # (slots, levels)
    distances = (values.unsqueeze(-1) - levels.unsqueeze(1)).abs()
    assert torch.equal(codes.long(), distances.argmin(-1))
    assert round_keys(values[:0], 4)[1].scales.shape == (0, 8)
    assert isinstance(grid, Grid)


@pytest.mark.parametrize("budgets", ["adaptive", "equal"])
@pytest.mark.parametrize("bits", [8, 4])
def test_attention_matching_in_few_bits_holds_codes_of_its_own_kept_keys(traced, bits, budgets):
    plain = AttentionMatching(budgets=budgets)(traced, num_slots=9)
    cache = make_compressor("attention-matching", budgets=budgets, bits=bits)(traced, num_slots=9)
    assert cache.bits == bits
    assert cache.metadata["bits"] == str(bits)
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(layer.counts.long(), other.counts.long())
        limit = 0.02 if bits == 8 else 0.3
        for row in range(3):
            for head in range(2):
                keys = layer.head(row, head).keys
                wanted = other.head(row, head).keys
                assert (keys - wanted).norm() <= limit * wanted.norm() + 1e-2


def test_fitting_to_rounded_keys_is_better_than_rounding_the_fit():
    model = loud_model(hidden_size=64, num_hidden_layers=3)
    ids = torch.randint(0, 67, (4, 100), generator=torch.Generator().manual_seed(5))
    traced = trace(model, ids, 60)
    fitted = make_compressor("attention-matching", bits=4)(traced, keep_ratio=0.5)
    rounded = AttentionMatching()(traced, keep_ratio=0.5).quantize(4)
    assert fitted.nbytes == rounded.nbytes
    losses = [supervised_kl(traced, cache).mean() for cache in (fitted, rounded)]
    assert losses[0] < losses[1]


def test_examples_of_a_batch_are_compressed_as_alone(model, windows):
    method = make_compressor("attention-matching", bits=4)
    together = method(trace(model, windows, 48), num_slots=9)
    for row in range(3):
        alone = method(trace(model, windows[row : row + 1], 48), num_slots=9)
        for layer, other in zip(together.select([row]).layers, alone.layers, strict=True):
            assert torch.equal(layer.counts, other.counts)
            assert torch.allclose(layer.keys, other.keys, atol=0.05)


def test_all_slots_in_8_bits_are_nearly_the_dense_cache(traced):
    for method in ("attention-matching", "snapkv"):
        cache = make_compressor(method, bits=8)(traced, keep_ratio=1)
        assert cache.num_slots == 48
        assert compare(traced, cache).kl.max() < 1e-3


def test_without_bits_the_dense_cache_is_returned_unchanged(traced):
    cache = AttentionMatching()(traced, keep_ratio=1)
    assert cache.bits is None
    assert torch.equal(cache.layers[0].keys, traced.keys[0])


@pytest.mark.parametrize(
    ("method", "options", "bits"),
    [
        ("snapkv", {"window": 8}, 4),
        ("h2o", {}, 4),
        ("keynorm", {}, 4),
        ("random", {"seed": 1}, 4),
        ("attention-matching", {}, 8),
    ],
)
def test_eviction_in_few_bits_and_a_fit_in_8_are_the_cache_rounded(traced, method, options, bits):
    sizes = [0.2, 0.5]
    packed = make_compressor(method, bits=bits, **options).each(traced, sizes)
    plain = make_compressor(method, **options).each(traced, sizes)
    for cache, other in zip(packed, plain, strict=True):
        expected = other.quantize(bits)
        for layer, wanted in zip(cache.layers, expected.layers, strict=True):
            assert torch.equal(layer.key_codes, wanted.key_codes)
            assert torch.equal(layer.value_codes, wanted.value_codes)


def test_snapshots_of_a_gradient_run_are_in_few_bits(traced):
    method = make_compressor("gradient", num_steps=2, bits=8)
    assert method.last_step == 2
    steps = list(method.snapshots(traced, num_slots=6))
    assert [step for step, _ in steps] == [0, 1, 2]
    assert all(str(cache.bits) == "8" for _, cache in steps)
    plain = GradientCompression(num_steps=2)(traced, num_slots=6).quantize(8)
    assert torch.equal(steps[-1][1].layers[0].key_codes, plain.layers[0].key_codes)


def test_a_cache_in_few_bits_is_compressed_again_with_the_tokens_behind_it(model, windows):
    past = make_compressor("attention-matching", bits=8)(trace(model, windows, 32), num_slots=12)
    longer = trace(model, windows, 48, past=past)
    unpacked = trace(model, windows, 48, past=past.unpacked())
    assert torch.equal(longer.keys[1], unpacked.keys[1])
    again = make_compressor("attention-matching", bits=4)(longer, num_slots=14)
    assert (again.num_slots, again.num_tokens, str(again.bits)) == (14, 48, "4")
    assert compare(longer, again).kl.isfinite().all()


def test_the_smallest_cache_may_be_in_few_bits(traced):
    result = smallest_cache(traced, make_compressor("attention-matching", bits=8), 0.5)
    assert result.kl <= 0.5
    assert str(result.cache.bits) == "8"


def test_heads_that_do_not_fill_bytes_are_rejected_before_the_fit(windows):
    traced = trace(loud_model(head_dim=10, num_key_value_heads=1), windows, 48)
    make_compressor("attention-matching", bits=4)(traced, num_slots=5)
    odd = trace(loud_model("gpt_neox", hidden_size=36, rotary_pct=0.5), windows, 48)
    assert odd.keys[0].shape[-1] == 9
    assert "9 channels" in refusal(make_compressor("snapkv", bits=4), odd, num_slots=5)


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("bits", [None, 8, FOUR])
@pytest.mark.parametrize("num_bytes", [6_000, 8_000, 20_000])
@pytest.mark.parametrize("protect", [[], [(0, 2), (7, 10)]])
def test_a_number_of_bytes_is_kept_and_nearly_used(traced, bits, num_bytes, protect):
    traced = protecting(traced, protect)
    slots, chosen = slots_and_bits(traced, num_bytes, [bits])
    assert chosen == bits
    method = AttentionMatching() if bits is None else AttentionMatching(bits=bits)
    cache = method(traced, num_slots=slots)
    assert cache.nbytes <= num_bytes
    num_heads = 3 * 2 * 2
    if slots < 48:
        one_more = method(traced, num_slots=slots + 1).nbytes
        assert one_more > num_bytes - num_heads * 8 * 4  # a group of keys in every head


def test_a_number_of_bytes_chooses_4_bits_for_small_caches_and_8_for_large_ones(traced):
    dense = sum(2 * states.numel() for states in (*traced.keys, *traced.values))
    assert slots_and_bits(traced, int(dense / 8.6))[1] == FOUR
    assert slots_and_bits(traced, int(dense / 8.4))[1] == 8
    assert slots_and_bits(traced, 10**7) == (48, 8)
    assert "one slot in every head" in refusal(slots_and_bits, traced, 100)


def test_the_cache_is_a_value_that_load_gives_again(tmp_path, traced):
    cache = make_compressor("attention-matching", bits=4)(traced, num_slots=9)
    cache.save(tmp_path / "doc")
    again = CompactCache.load(tmp_path / "doc", traced.model)
    scores = [compare(traced, made).kl for made in (cache, again)]
    assert torch.equal(*scores)


@pytest.mark.slow
def test_a_log_bias_that_overflows_where_keys_are_rounded_is_an_error(windows):
    model = loud_model()
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data *= 40  # scores of thousands of nats, which 4 bits change by hundreds
    traced = trace(model, windows, 32)
    message = refusal(AttentionMatching(bits=4), traced, num_slots=12)
    assert "gives log-bias in layer 0 that are not finite in float16: leave out the bits" in message
    assert compare(traced, AttentionMatching(bits=8)(traced, num_slots=12)).kl.isfinite().all()
