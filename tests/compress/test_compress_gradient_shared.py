"""One cache of one prefix, trained on several suffixes together."""

import pytest
import torch
from test_compress_gradient import distance, naive_loop

from kvcat.compress import AttentionMatching, GradientCompression, compare, trace
from kvcat.compress.starting import joined
from kvcat.errors import InputError


@pytest.fixture(scope="module")
def rows(windows):
    """Three windows of one prefix of 48 tokens."""
    return torch.cat([windows[:1, :48].expand(3, -1), windows[:, 48:]], 1)


def test_a_shared_cache_is_the_naive_loop_over_all_suffixes(make_model, rows):
    model = make_model(torch.float64)
    short = rows[1:2, :55]
    found = [trace(model, rows[[0, 2]], 48), trace(model, short, 48)]
    cache = GradientCompression(num_steps=3).shared(found, num_slots=5)
    start = GradientCompression(num_steps=0).shared(found, num_slots=5)
    naive = naive_loop(model, 48, [rows[0], rows[2], short[0]], start.layers, 3)
    assert (cache.batch_size, cache.num_slots, cache.num_tokens) == (1, 5, 48)
    assert distance(cache, naive) < 1e-8 < distance(cache, start)


def test_rows_of_one_trace_and_rows_of_several_give_the_same_cache(model, rows):
    method = GradientCompression(num_steps=3, init="attention")
    together = method.shared([trace(model, rows, 48)], num_slots=5)
    apart = method.shared([trace(model, rows[i : i + 1], 48) for i in range(3)], num_slots=5)
    assert distance(together, apart) < 1e-4


def test_sharing_one_suffix_is_the_plain_call(model, rows):
    one, many = trace(model, rows[:1], 48), trace(model, rows[:1].expand(3, -1).contiguous(), 48)
    method = GradientCompression(num_steps=4)
    assert distance(method.shared([one], num_slots=5), method(one, num_slots=5)) == 0
    assert distance(method.shared([many], num_slots=5), method(one, num_slots=5)) < 1e-4


def test_a_shared_cache_serves_every_suffix_better_than_its_start_does(model, rows):
    found = trace(model, rows, 48)
    start, cache = (GradientCompression(num_steps=n).shared([found], num_slots=5) for n in (0, 20))
    assert (compare(found, cache).kl < compare(found, start).kl).all()
    own = GradientCompression(num_steps=20)(trace(model, rows[:1], 48), num_slots=5)
    assert compare(found, cache).kl.mean() < compare(found, own).kl.mean()


def test_the_kl_told_is_the_mean_over_all_positions(model, rows):
    found, told = [trace(model, rows[:2], 48), trace(model, rows[2:, :52], 48)], []
    start = GradientCompression(num_steps=0).shared(found, num_slots=5)
    GradientCompression(num_steps=1).shared(found, num_slots=5, on_step=lambda step, kl: told.append(kl))
    sums = [compare(t, start).kl.sum().item() * t.suffix_ids.shape[1] for t in found]
    assert told == pytest.approx([sum(sums) / (2 * 16 + 4)], rel=1e-4)


def test_patience_and_held_out_positions_work_on_a_shared_cache(model, rows):
    found = [trace(model, rows[:2], 48), trace(model, rows[2:, :52], 48)]
    method = GradientCompression(num_steps=9, lr=1e4, patience=1, held_out=0.5)
    cache = method.shared(found, num_slots=5)
    assert distance(cache, GradientCompression(num_steps=0).shared(found, num_slots=5)) == 0


def test_the_start_by_attention_sees_the_queries_of_all_rows(model, rows):
    found = [trace(model, rows[:2], 48), trace(model, rows[2:, :52], 48)]
    merged = joined(found)
    assert merged.queries[0].shape == (1, 4, 36, 8)
    for head in range(4):
        own = [t.queries[1][row, head] for t in found for row in range(t.batch_size)]
        assert torch.equal(merged.queries[1][0, head], torch.cat(own))
    start = GradientCompression(num_steps=0, init="attention-matching").shared(found, num_slots=5)
    assert distance(start, AttentionMatching()(merged, num_slots=5)) == 0


def test_keeping_everything_gives_one_dense_cache(model, rows):
    cache = GradientCompression().shared([trace(model, rows, 48)], keep_ratio=1)
    assert (cache.batch_size, cache.num_slots) == (1, 48)


def test_traces_that_share_no_prefix_are_refused(make_model, model, rows, windows):
    method, found = GradientCompression(num_steps=1), trace(model, rows, 48)
    others = [trace(model, windows, 48), trace(model, rows, 40), trace(make_model(rms_norm_eps=1e-2), rows, 48)]
    for other in others:
        with pytest.raises(InputError, match="one prefix only: these 2 traces have several models or prefixes"):
            method.shared([found, other], num_slots=5)
    with pytest.raises(InputError, match="these 1 traces"):
        method.shared([trace(model, windows, 48)], num_slots=5)
    with pytest.raises(InputError, match="no trace to train a shared cache on"):
        method.shared([], num_slots=5)
    with pytest.raises(InputError, match="use AttentionMatching"):
        method.shared([found, trace(model, rows, 48, supervision="self")], num_slots=5)
