"""Other methods that benchmarks compare with."""

import pytest
import torch
from peers import GRKV, method_of

from kvcat.compress import compare, make_compressor, supervised_kl
from kvcat.compress.compare import replay_hidden
from tiny import refusal


@pytest.mark.parametrize("spec", ["kvsculpt", "kvsculpt-adaptive", "grkv", "grkv:h2o"])
def test_a_method_keeps_its_number_of_slots_at_every_size(traced, spec):
    caches = list(method_of(spec).each(traced, [0.25, 0.5, 1]))
    assert [cache.num_slots for cache in caches] == [24, 48, 96]
    assert compare(traced, caches[-1]).kl.item() < 1e-6


def test_kvsculpt_has_no_log_bias_and_is_closer_than_the_fit_it_starts_from(traced):
    (sculpted,) = method_of("kvsculpt").each(traced, [0.25])
    assert not sculpted.has_log_bias
    start = make_compressor(
        "attention-matching", num_iters=0, log_bias=False, own_weight=0.0, budgets="equal"
    )(traced, keep_ratio=0.25)
    assert supervised_kl(traced, sculpted).item() < supervised_kl(traced, start).item()


def objective(trace, cache, layer, head):
    """GRKV's objective of one head by its formula, without the distance to the anchor."""
    queries = GRKV()._queries(trace)[layer][head]
    dense = torch.softmax(queries @ trace.keys[layer][0, head].T, -1)
    targets = dense @ trace.values[layer][0, head]
    slots = cache.layers[layer].head(0, head)
    keys, values = slots.keys, slots.values
    return (torch.softmax(queries @ keys.T, -1) @ values - targets).square().sum().item()


def test_grkv_lowers_its_error_and_moves_no_slot_beyond_its_cap(traced):
    (plain,) = make_compressor("snapkv", window=32, kernel_size=5, pooling="average").each(
        traced, [0.5]
    )
    (updated,) = method_of("grkv").each(traced, [0.5])
    for layer in range(len(traced.keys)):
        for head in range(traced.keys[layer].shape[1]):
            before = plain.layers[layer].head(0, head)
            after = updated.layers[layer].head(0, head)
            assert objective(traced, updated, layer, head) < objective(traced, plain, layer, head)
            for name, cap in (("keys", 0.025), ("values", 0.1)):
                moved = getattr(after, name) - getattr(before, name)
                assert moved.norm() <= cap * getattr(before, name).norm() * 1.0001
                # the slots of the last 32 positions, which this selection always keeps
                assert torch.equal(getattr(after, name)[-32:], getattr(before, name)[-32:])


def test_grkvs_queries_at_the_last_position_are_the_models_own(traced):
    """A query that is there already does not move: that of the last position."""
    queries = GRKV()
    queries.NUM_QUERIES = traced.prefix_len  # every position
    by_layer = queries._queries(traced)
    for layer, of_layer in enumerate(by_layer):
        group = traced.prefix_queries[layer].shape[1] // of_layer.shape[0]
        last = traced.prefix_queries[layer][0, :, -1] * traced.scales[layer]
        moved = of_layer.unflatten(1, (group, -1))[:, :, -1].flatten(0, 1)
        torch.testing.assert_close(moved, last)


def test_the_originals_code_needs_a_checkout():
    assert "--peer" in refusal(method_of, "original-omp")


def test_a_compact_cache_of_a_peer_replays(traced):
    (cache,) = method_of("grkv").each(traced, [0.3])
    assert replay_hidden(traced.model, cache, traced.suffix_ids).isfinite().all()
