"""A conversation behind a compact cache, compressed together with it."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from structured_heads import positions_of

from kvcat.cache import CompactCache, CompactLayer
from kvcat.compress import AttentionMatching, compare, replay, trace
from kvcat.compress.fitting import FitOptions, KeptKeys, fit_slots
from kvcat.compress.heads import head_groups, load_block
from kvcat.compress.selection import summarise
from kvcat.errors import InputError

EVERY = slice(None)


@pytest.fixture(scope="module")
def double(make_model):
    return make_model(torch.float64)


@pytest.fixture(scope="module")
def compact(double, windows):
    return AttentionMatching()(trace(double, windows, 32), num_slots=9)


def test_behind_a_cache_of_all_slots_everything_is_as_in_the_dense_forward(double, windows):
    dense = trace(double, windows, 48)
    again = trace(double, windows, 48, past=trace(double, windows, 32).dense_cache())
    assert (again.past_len, again.num_slots) == (32, 48)
    for name in ("keys", "values", "queries", "log_bias"):
        theirs = getattr(dense, name) or [torch.zeros(3, 2, 48)] * 2
        for left, right in zip(getattr(again, name), theirs, strict=True):
            assert torch.allclose(left, right.to(left), atol=1e-12)
    assert torch.allclose(again.logits, dense.logits, atol=1e-12)


def test_all_slots_of_a_grown_cache_replay_what_follows_it(double, windows, compact):
    grown = trace(double, windows, 48, past=compact)
    assert (grown.num_slots, grown.dense_cache().num_slots) == (25, 25)
    with torch.no_grad():
        followed = double(**compact.inputs(double, windows[:, 32:])).logits[:, 16:]
    assert torch.allclose(grown.logits, followed, atol=1e-12)
    assert torch.allclose(replay(double, grown.dense_cache(), windows[:, 48:]), followed, atol=1e-12)
    assert compare(grown, grown.dense_cache()).kl.abs().max() < 1e-12


@pytest.mark.parametrize("supervision", ["suffix", "self"])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
def test_tokens_behind_a_past_run_in_chunks_as_at_once(double, windows, compact, chunk_tokens, supervision):
    whole = trace(double, windows, 48, past=compact, supervision=supervision)
    parts = trace(double, windows, 48, past=compact, supervision=supervision, chunk_tokens=chunk_tokens)
    for name in ("keys", "values", "queries", "tail_queries"):
        for left, right in zip(getattr(whole, name), getattr(parts, name), strict=True):
            assert torch.allclose(left, right, atol=1e-12)
    assert torch.allclose(whole.logits_at(-1, 16), parts.logits_at(-1, 16), atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "prefix_len", "message"),
    [(3, 32, "past holds 32 tokens: the prefix of 32 adds none"), (2, 48, "past holds 3 examples, input_ids 2")],
)
def test_a_past_that_does_not_fit_is_refused(double, windows, compact, rows, prefix_len, message):
    with pytest.raises(InputError, match=message):
        trace(double, windows[:rows], prefix_len, past=compact)


def doubled_and_merged(compact):
    """The same past twice: every slot two times, and once with log 2 more."""
    twice, once = [], []
    for layer in compact.layers:
        copies = [part.repeat_interleave(2, dim=2) for part in (layer.keys, layer.values, layer.log_bias)]
        twice.append(CompactLayer(*copies))
        once.append(CompactLayer(layer.keys, layer.values, layer.log_bias + math.log(2)))
    return replace(compact, layers=twice), replace(compact, layers=once)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"log_bias": False, "original_values": True}, 1e-12),
        ({"log_bias": False, "ridge": None}, 1e-8),
        ({"original_values": True}, 1e-4),
    ],
    ids=str,
)
def test_slots_of_log_bias_log_2_are_fitted_as_those_slots_twice(
    double, windows, compact, monkeypatch, options, tolerance
):
    kept = torch.tensor([0, 2, 3, 7, 11, 20])
    copies = torch.cat([2 * kept[kept < 9], 2 * kept[kept < 9] + 1, kept[kept >= 9] + 9]).sort().values
    found = []
    for past, slots in zip(doubled_and_merged(compact), (copies, kept), strict=True):
        choose = partial(lambda at, block, *_: at.expand(len(block.keys), -1), slots)
        monkeypatch.setattr("kvcat.compress.fitting.select_slots", choose)
        seen = trace(double, windows, 48, past=past)
        block = load_block(seen, head_groups(seen)[0], None)
        dense = summarise(block)
        # the log-bias is fitted to masses relative to the top score, which doubling changes: here relative to them all
        total = dense.mass.log().unsqueeze(-1) + dense.top
        dense = replace(dense, top=total, mass=torch.ones_like(dense.mass))
        chosen, values, log_bias = fit_slots(block, dense, len(slots), FitOptions(guard=False, **options))
        attention, _ = KeptKeys(block, dense, chosen).attention(EVERY, log_bias)
        found.append((dense.outputs, total, attention @ values))
    for twice, once, atol in zip(*found, (1e-12, 1e-12, tolerance), strict=True):
        assert torch.allclose(twice, once, atol=atol)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"preset": "paper"}, {"log_bias": False}, {"values": "original"}, {"selection": "omp"},
        {"on_policy": True}, {"budgets": "adaptive"},
    ],
    ids=str,
)  # fmt: skip
def test_behind_a_past_of_all_slots_every_option_gives_what_the_dense_forward_gives(double, windows, options):
    # behind a past the prefix has no queries of its own
    method = AttentionMatching(**{"own_weight": 0.0, **options})
    dense = method(trace(double, windows, 48), num_slots=7)
    again = method(trace(double, windows, 48, past=trace(double, windows, 32).dense_cache()), num_slots=7)
    for left, right in zip(again.layers, dense.layers, strict=True):
        assert torch.allclose(left.keys, right.keys, atol=1e-12)
        assert torch.allclose(left.values, right.values, atol=1e-6)
        bias = torch.zeros_like(left.log_bias) if right.log_bias is None else right.log_bias
        assert torch.allclose(left.log_bias, bias.to(left.log_bias), atol=1e-6)
        assert left.positions is None
        assert right.positions is not None


def test_a_prefix_that_supervises_itself_has_queries_only_behind_its_past(double, windows, compact):
    dense = trace(double, windows[:, :48], supervision="self")
    again = trace(double, windows[:, :48], supervision="self", past=trace(double, windows, 32).dense_cache())
    scores = [load_block(t, head_groups(t)[0], None).scores(EVERY).unflatten(1, (2, -1)) for t in (dense, again)]
    assert torch.allclose(scores[1], scores[0][:, :, 32:], atol=1e-12)
    grown = trace(double, windows[:, :48], supervision="self", past=compact)
    block = load_block(grown, head_groups(grown)[0], None)
    seen = torch.ones(16, 25).tril(9).bool().repeat(2, 1)
    assert torch.equal(block.scores(EVERY)[0] > -torch.inf, seen)
    cache = AttentionMatching()(grown, num_slots=8)
    assert (cache.num_slots, cache.num_tokens) == (8, 48)


@pytest.mark.parametrize("values", ["fitted", "original"])
def test_without_a_fitted_log_bias_slots_keep_the_one_they_have(double, windows, compact, values):
    grown = trace(double, windows, 48, past=compact)
    cache = AttentionMatching(log_bias=False, values=values)(grown, num_slots=12)
    for index, layer in enumerate(cache.layers):
        at = positions_of(layer.keys, grown.keys[index])
        assert torch.equal(layer.log_bias, grown.log_bias[index].gather(2, at))
        assert (at < 9).any()
    assert any((layer.log_bias != 0).any() for layer in cache.layers)


def test_all_slots_of_a_grown_cache_are_kept_as_they_are(double, windows, compact):
    grown = trace(double, windows, 48, past=compact)
    for slots in (25, 30, 48):
        cache = AttentionMatching()(grown, num_slots=slots)
        assert cache.metadata["method"] == "dense"
        for layer, expected in zip(cache.layers, grown.dense_cache().layers, strict=True):
            assert all(torch.equal(layer.tensors()[name], tensor) for name, tensor in expected.tensors().items())


@pytest.mark.parametrize("options", [{}, {"on_policy": True}, {"budgets": "adaptive"}], ids=str)
def test_more_slots_bring_a_cache_compressed_again_closer_to_the_grown_one(double, windows, compact, options):
    grown = trace(double, windows, 48, past=compact)
    losses = [compare(grown, AttentionMatching(**options)(grown, num_slots=n)).kl.mean().item() for n in (3, 8, 16, 24)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.1 * losses[0]


def test_an_example_behind_its_past_is_compressed_alone_as_in_a_batch(double, windows, compact):
    together = AttentionMatching()(trace(double, windows, 48, past=compact), num_slots=8)
    for row in range(3):
        alone = AttentionMatching()(trace(double, windows[[row]], 48, past=compact.select([row])), num_slots=8)
        for left, right in zip(together.select([row]).layers, alone.layers, strict=True):
            assert all(torch.allclose(left.tensors()[n], right.tensors()[n], atol=1e-8) for n in left.tensors())


def test_a_third_turn_is_answered_from_a_document_and_a_talk_compressed_one_after_the_other(double, windows, tmp_path):
    document = AttentionMatching()(trace(double, windows, 32), num_slots=12)
    talked = trace(double, windows, 52, past=document)
    shorter = AttentionMatching()(talked, num_slots=20)
    shorter.save(tmp_path / "talk")
    again = CompactCache.load(tmp_path / "talk", double)
    grown, third = talked.dense_cache(), windows[:, 52:]
    assert (grown.num_slots, again.num_slots, again.num_tokens) == (32, 20, 52)
    errors = [
        (replay(double, cache, third) - replay(double, grown, third)).square().mean()
        for cache in (again, document_only(talked))
    ]
    assert errors[0] < 0.25 * errors[1]
    assert torch.equal(replay(double, again, third), replay(double, shorter, third))


def document_only(talked):
    """The twin to beat: the document's slots alone, the talk forgotten."""
    layers = [
        CompactLayer(k[:, :, :12], v[:, :, :12], b[:, :, :12])
        for k, v, b in zip(talked.keys, talked.values, talked.log_bias, strict=True)
    ]
    return CompactCache(layers, talked.prefix_len, talked.fingerprint)
