"""Attention Matching: what it keeps, what it fits and what it promises."""

import argparse
import difflib
import inspect
from pathlib import Path

import pytest
import torch
from structured_heads import plain_error, positions_of, structured_head

from kvcat.cache import CompactCache, CompactLayer
from kvcat.compress import (
    AttentionMatching,
    Eviction,
    compare,
    fit_log_bias,
    fitting,
    split_supervision,
    supervised_kl,
    trace,
)
from kvcat.compress.heads import HeadBlock, draw_queries, head_groups, load_block
from kvcat.compress.selection import summarise
from kvcat.errors import InputError
from kvcat.models import load

ASSETS = Path(__file__).parents[3] / "shared" / "assets"
needs_assets = pytest.mark.skipif(not ASSETS.exists(), reason="../shared/assets is absent")


def output_error(block, slots, values, log_bias):
    return fitting.output_error(fitting.KeptKeys(block, summarise(block), slots), values, log_bias)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_stable_fit_improves_with_every_slot_count_and_beats_eviction_of_the_same_keys(seed):
    block = structured_head(seed=seed)
    errors = []
    for num_slots in (8, 16, 32, 64, 128):
        fit = fitting.fit_slots(block, summarise(block), num_slots, fitting.FitOptions())
        errors.append(output_error(block, *fit).item())
        assert errors[-1] <= 1.0001 * plain_error(block, summarise(block), fit[0]).item()
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("num_slots", [8, 32, 64])
def test_the_stable_log_bias_is_solved_to_convergence(num_slots):
    block = structured_head()
    options = fitting.FitOptions(guard=False)
    slots, _, log_bias = fitting.fit_slots(block, summarise(block), num_slots, options)
    every = slice(None)
    assert torch.allclose(log_bias, fit_log_bias(block.scores(every, slots), block.scores(every)), atol=1e-4)


def test_dropping_copies_of_a_token_loses_nothing_while_one_of_each_is_kept():
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 6, 8, generator=draw).repeat_interleave(5, 1)
    values = torch.randn(1, 6, 8, generator=draw).repeat_interleave(5, 1)
    block = HeadBlock(torch.randn(1, 50, 8, generator=draw), keys, values, None)
    dense = summarise(block)
    fit = fitting.fit_slots(block, dense, 26, fitting.FitOptions())
    assert output_error(block, *fit).item() < 1e-3


def test_the_kept_keys_are_those_of_the_largest_rms_attention(traced):
    cache = AttentionMatching(weights="equal", own_weight=0.0)(traced, num_slots=6)
    for index in range(2):
        queries = traced.queries[index].unflatten(1, (2, 2)).flatten(2, 3)
        weights = (queries @ traced.keys[index].mT * traced.scales[index]).softmax(-1)
        kept = weights.square().mean(2).sqrt().topk(6).indices.sort(-1).values
        expected = traced.keys[index].gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, 8))
        assert torch.equal(cache.layers[index].keys, expected)


def test_the_log_bias_makes_the_kept_mass_the_dense_mass(traced):
    layer = AttentionMatching(weights="equal", own_weight=0.0)(traced, num_slots=24).layers[0]
    assert layer.log_bias.abs().max() <= 3 + 1e-5
    queries = traced.queries[0].unflatten(1, (2, 2)).flatten(2, 3) * traced.scales[0]
    dense = (queries @ traced.keys[0].mT).logsumexp(-1)
    plain = (queries @ layer.keys.mT).logsumexp(-1)
    fitted = (queries @ layer.keys.mT + layer.log_bias.unsqueeze(2)).logsumexp(-1)
    assert (fitted - dense).square().mean() < 0.25 * (plain - dense).square().mean()


def test_small_blocks_and_chunks_of_queries_change_nothing(traced, monkeypatch):
    whole = AttentionMatching()(traced, num_slots=9)
    monkeypatch.setattr("kvcat.compress.heads._BLOCK_ELEMENTS", 48 * 10)
    traced._memo.clear()
    pieces = AttentionMatching()(traced, num_slots=9)
    for left, right in zip(whole.layers, pieces.layers, strict=True):
        assert torch.equal(left.keys, right.keys)
        assert torch.allclose(left.log_bias, right.log_bias, atol=1e-3)
        assert torch.allclose(left.values, right.values, atol=1e-2, rtol=1e-2)


def test_a_query_of_the_prefix_sees_no_later_key(model, windows):
    found = trace(model, windows[:1, :20], supervision="self")
    block = load_block(found, head_groups(found)[0], None)
    scores = block.scores(slice(None))
    assert scores.shape == (4, 40, 20)
    assert torch.equal(scores[0] > -torch.inf, torch.ones(20, 20).tril().bool().repeat(2, 1))
    with torch.no_grad():
        eager = type(model)._from_config(model.config, attn_implementation="eager")
        eager.load_state_dict(model.state_dict())
        attention = eager(windows[:1, :20], output_attentions=True).attentions
    assert torch.allclose(scores[2].softmax(-1).view(2, 20, 20), attention[1][0, :2], atol=1e-5)


def test_queries_are_drawn_without_replacement_and_at_most_as_many_as_asked(traced):
    drawn = draw_queries(traced, 20, seed=0)
    assert {len(set(rows.tolist())) for rows in drawn.values()} == {20}
    assert {len(rows) for rows in draw_queries(traced, 999, seed=0).values()} == {32}
    other = draw_queries(traced, 20, seed=1)
    assert any(not torch.equal(drawn[head], other[head]) for head in drawn)


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "fast"},
        {"num_queries": 0},
        {"ridge": -1.0},
        {"bounds": (1.0, 1.0)},
        {"num_iters": -2},
        {"bias_ridge": -1.0},
        {"towards": "keys"},
        {"budgets": "fair"},
        {"weights": "mass"},
        {"own_weight": -0.1},
        {"own_weight": float("nan")},
    ],
)
def test_attention_matching_refuses_options_it_cannot_take(options):
    with pytest.raises(InputError, match=next(iter(options))):
        AttentionMatching(**options)


def test_no_head_of_the_stable_fit_loses_to_eviction_of_its_keys(traced):
    (heads,) = head_groups(traced)
    block = load_block(traced, heads, None)
    dense = summarise(block)
    guarded = 0
    for num_slots, ridge in [(2, 1e-6), (10, 1e-6), (40, 1e-6), (47, 1e-6), (40, 1e-2), (47, 1.0)]:
        slots, values, log_bias = fitting.fit_slots(block, dense, num_slots, fitting.FitOptions(ridge=ridge))
        guarded += (log_bias == 0).all(-1).sum().item()
        plain = plain_error(block, dense, slots)
        found = fitting.output_error(fitting.KeptKeys(block, dense, slots), values, log_bias)
        assert (found <= 1.0001 * plain + 1e-9 * dense.outputs.square().sum((1, 2))).all()
    assert guarded > 0


def test_a_strong_pull_leaves_slots_as_they_were(traced):
    cache = AttentionMatching(bias_ridge=1e9, ridge=1e9)(traced, num_slots=9)
    for index, layer in enumerate(cache.layers):
        kept = positions_of(layer.keys, traced.keys[index]).unsqueeze(-1).expand_as(layer.values)
        assert layer.log_bias.abs().max() < 1e-6
        assert torch.allclose(layer.values, traced.values[index].gather(2, kept), atol=1e-5)


def test_on_a_real_model_what_is_fitted_to_few_queries_serves_others_better_than_eviction():
    model, tokenizer = load("kvcat-base")
    texts = [inspect.getsource(module) for module in (argparse, difflib, inspect)]
    ids = torch.tensor([tokenizer.encode(text, verbose=False)[2000:2768] for text in texts])
    fitted, judge = split_supervision(trace(model, ids, 512), 0.5)

    def held_out(**options):
        return supervised_kl(judge, AttentionMatching(**options)(fitted, keep_ratio=0.4)).mean().item()

    alone = {"weights": "equal", "own_weight": 0.0}
    pulled = held_out(**alone)
    assert pulled < 0.8 * held_out(**alone, bias_ridge=0.0, ridge=1e-6, towards="zero")
    assert pulled < held_out(**alone, log_bias=False, values="original")
    stable = held_out()
    assert stable < 0.5 * pulled
    assert stable < 0.5 * supervised_kl(judge, Eviction("streaming")(fitted, keep_ratio=0.4)).mean().item()


@needs_assets
def test_on_a_real_model_stable_matching_improves_with_every_ratio_and_beats_eviction_of_its_keys():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ASSETS / "models" / "stories260K"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 20
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder).encode(text)[:256]])
    found = trace(model, ids, 192)
    losses = []
    for keep_ratio in (0.05, 0.1, 0.2, 0.4):
        cache = AttentionMatching()(found, keep_ratio=keep_ratio)
        losses.append(compare(found, cache).kl.item())
        plain = []
        for index, layer in enumerate(cache.layers):
            at = positions_of(layer.keys, found.keys[index]).unsqueeze(-1).expand(-1, -1, -1, 8)
            plain.append(CompactLayer(layer.keys, found.values[index].gather(2, at)))
        evicted = CompactCache(plain, found.num_tokens, found.fingerprint)
        assert losses[-1] < compare(found, evicted).kl.item()
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("options", [{}, {"budgets": "adaptive"}, {"on_policy": True}], ids=str)
def test_slots_tell_the_positions_of_their_tokens(traced, options):
    cache = AttentionMatching(**options)(traced, num_slots=6)
    for index, layer in enumerate(cache.layers):
        counts = layer.counts.flatten().tolist()
        keys, positions = (part.reshape(sum(counts), -1).split(counts) for part in (layer.keys, layer.positions))
        for head, (kept, at) in enumerate(zip(keys, positions, strict=True)):
            assert torch.equal(kept, traced.keys[index].flatten(0, 1)[head][at[:, 0]])
