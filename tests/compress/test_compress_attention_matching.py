"""Attention Matching: what it keeps, what it fits and what it promises."""

import argparse
import difflib
import inspect
from dataclasses import replace

import pytest
import torch
from structured_heads import eager_attention, head_batch, plain_error, structured_head, tensors

from kvcat.compress import (
    AttentionMatching,
    Eviction,
    Reconstruction,
    budgets,
    fit_log_bias,
    fit_values,
    split_supervision,
    supervised_kl,
    trace,
)
from kvcat.compress.drawn import draw_rows
from kvcat.compress.fitting import match_attention
from kvcat.compress.head_attention import dense_attention
from kvcat.compress.heads import Heads
from kvcat.compress.methods import attention_matching
from kvcat.compress.prefix import Prefix
from kvcat.compress.queries import fitted_queries
from kvcat.models import load
from tiny import loud_model, refusal


def loaded(traced, own_weight=0.0):
    """All heads of a trace whose heads are of one shape."""
    fitted = fitted_queries(Prefix.of(traced), own_weight, by_share=True)
    heads = Heads(Prefix.of(traced), fitted)
    (group,) = heads.groups_for_scores()
    return heads.load(group)


def output_error(batch, fit):
    """Weighted squared error of the attention outputs, computed from the formula."""
    scores = (batch.queries @ batch.keys.mT).double()
    kept = scores.gather(
        2, fit.positions.unsqueeze(1).expand(-1, scores.shape[1], -1)
    ) + fit.log_bias.unsqueeze(1)
    error = kept.softmax(-1) @ fit.values.double() - scores.softmax(-1) @ batch.values.double()
    return (error * dense_attention(batch).weights.unsqueeze(-1)).square().sum((1, 2))


def test_presets_are_their_options_spelled_out():
    paper = AttentionMatching(
        num_queries=256, num_iters=2, ridge=1e-4, own_weight=0.0, budgets="equal"
    )
    assert AttentionMatching("paper") == AttentionMatching(preset="paper") == paper
    assert AttentionMatching("paper", num_queries=None) != paper
    stable = AttentionMatching(
        num_queries=None,
        num_iters=None,
        ridge=0.05,
        own_weight=None,
        log_bias=True,
        budgets="adaptive",
    )
    assert AttentionMatching() == AttentionMatching("stable") == stable
    assert AttentionMatching("known") == AttentionMatching(own_weight=0.0, ridge=3e-3) != stable


@pytest.mark.parametrize(("source", "own_weight"), [("suffix", 2.0), ("reconstruction", 1.0)])
def test_own_queries_count_once_next_to_a_repetition_and_twice_next_to_other_text(
    double, windows, source, own_weight
):
    traced = trace(double, windows, 48, supervision=source)
    usual = AttentionMatching()(traced, num_slots=6)
    assert usual.metadata["own_weight"] == str(own_weight)
    named = AttentionMatching(own_weight=own_weight)(traced, num_slots=6)
    torch.testing.assert_close(tensors(usual), tensors(named))
    other = AttentionMatching(own_weight=3 - own_weight)(traced, num_slots=6)
    assert not torch.equal(usual.layers[0].values, other.layers[0].values)


def test_both_forms_are_the_public_solvers_one_head_at_a_time(traced):
    """The paper's form by its formulas; the stable form by weighted relative masses, pulled to the
    kept slots."""
    batch = loaded(traced)
    dense = dense_attention(batch)
    for num_iters, ridge in ((2, 1e-4), (None, 1e-2)):
        fit = match_attention(batch, dense, 9, num_iters=num_iters, ridge=ridge)
        slots, values, log_bias = fit.positions, fit.values, fit.log_bias
        for head in range(len(slots)):
            queries = batch.queries[head]
            keys = batch.keys[head, slots[head]]
            kept_values = batch.values[head, slots[head]]
            weight = dense.weights[head]
            kept = queries @ keys.mT
            every = queries @ batch.keys[head].mT
            if num_iters is None:
                whole = every.logsumexp(-1, keepdim=True)
                expected = fit_log_bias(
                    kept, whole, pull=0.15, relative_to="columns", weights=weight
                )
            else:
                expected = fit_log_bias(kept, every, num_iters=2, weights=weight)
            assert torch.allclose(log_bias[head], expected, atol=2e-2 if num_iters else 1e-3)
            attention = (kept + log_bias[head]).softmax(-1) * weight.unsqueeze(-1)
            outputs = every.softmax(-1) @ batch.values[head] * weight.unsqueeze(-1)
            if num_iters is None:
                expected = fit_values(
                    attention, outputs, ridge=ridge, towards=kept_values, relative_to="columns"
                )
            else:
                expected = fit_values(attention, outputs, ridge=ridge)
            assert torch.allclose(values[head], expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("log_bias", [True, False])
@pytest.mark.parametrize("has_earlier_bias", [True, False])
def test_a_fit_to_some_queries_at_a_time_is_the_fit_to_all_of_them(
    traced, monkeypatch, log_bias, has_earlier_bias
):
    """More slots than a chunk has queries, and a last chunk of fewer."""
    batch = loaded(traced)
    if has_earlier_bias:
        batch = replace(
            batch, log_bias=torch.linspace(-1, 1, batch.keys.shape[1]) + 0 * batch.keys[..., 0]
        )
    dense = dense_attention(batch)
    whole = match_attention(batch, dense, 9, log_bias=log_bias)
    monkeypatch.setattr(Heads, "group_elements", 7 * 9 * len(batch.keys))
    num_queries = batch.queries.shape[1]
    assert num_queries > 9
    assert num_queries % 7
    in_chunks = match_attention(batch, dense, 9, log_bias=log_bias)
    assert torch.equal(in_chunks.positions, whole.positions)
    assert torch.allclose(in_chunks.log_bias, whole.log_bias, atol=1e-4)
    assert bool(whole.log_bias.any()) == log_bias
    assert torch.allclose(in_chunks.values, whole.values, atol=1e-4)


def test_the_kept_keys_are_those_of_the_largest_rms_attention(traced):
    cache = AttentionMatching("paper", num_queries=None)(traced, num_slots=6)
    for index in range(2):
        queries = traced.queries[index].unflatten(1, (2, 2)).flatten(2, 3)
        weights = (queries @ traced.keys[index].mT * traced.scales[index]).softmax(-1)
        kept = weights.square().mean(2).sqrt().topk(6).indices.sort(-1).values
        assert torch.equal(cache.layers[index].positions, kept)
        expected = traced.keys[index].gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, 8))
        assert torch.equal(cache.layers[index].keys, expected)


def test_a_repetition_keeps_the_slots_that_any_head_attends_to_most(model, windows, monkeypatch):
    """A fifth of the slots, by transformers' own attention weights."""
    prefix_len = 40
    copy = windows[:2, :prefix_len]
    repeated = Reconstruction(torch.cat([copy, windows[:2, 40:44], copy], 1), prefix_len, 44)
    kept = {}

    def add_peaks(attentions, slots, count):
        for head, num_slots in slots[0].items():
            kept[head] = attentions[0][head].order[:num_slots].tolist()
        return budgets.add_peaks(attentions, slots, count)

    monkeypatch.setattr(budgets, "PEAK_RATIO", 1.0)
    monkeypatch.setattr(attention_matching, "add_peaks", add_peaks)
    cache = AttentionMatching()(trace(model, repeated), num_slots=10)
    layers = eager_attention(model, repeated.input_ids)
    for example in range(2):
        heads = [(layer, example, head) for layer in range(2) for head in range(2)]
        assert sum(len(kept[head]) for head in heads) == 8 * len(heads)
        weights = {
            (*head, slot): layers[head[0]][example, 2 * head[2] : 2 * head[2] + 2, 44:, slot].max()
            for head in heads
            for slot in set(range(prefix_len)) - set(kept[head])
        }
        for *head, slot in sorted(weights, key=weights.__getitem__)[-2 * len(heads) :]:
            kept[tuple(head)].append(slot)
        for layer, _, head in heads:
            positions = cache.layers[layer].head(example, head).positions.tolist()
            assert positions == sorted(kept[layer, example, head])


@pytest.mark.parametrize(
    "options", [{}, {"budgets": "equal"}, {"num_iters": 2}, {"num_queries": 20}], ids=str
)
def test_only_adaptive_budgets_of_a_repetition_keep_slots_for_their_peaks(
    traced, monkeypatch, options
):
    monkeypatch.setattr(budgets, "PEAK_RATIO", 1.0)
    monkeypatch.setattr(attention_matching, "add_peaks", None)
    AttentionMatching(**options)(traced, num_slots=9)
    if options:
        text = Reconstruction(traced.input_ids, 20, 24)
        AttentionMatching(**options)(trace(traced.model, text), num_slots=9)


def test_dropping_copies_of_a_token_loses_nothing_while_one_of_each_is_kept():
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 6, 8, generator=draw).repeat_interleave(5, 1) for _ in range(2))
    batch = head_batch(torch.randn(1, 50, 8, generator=draw), keys, values)
    # without a pull in the way the five copies' mass is exact
    fit = match_attention(batch, dense_attention(batch), 26, num_iters=2, ridge=1e-6)
    assert output_error(batch, fit).item() < 1e-3


def test_the_stable_fit_improves_with_every_slot_count_and_beats_eviction_of_the_same_keys():
    batch = structured_head()
    dense = dense_attention(batch)
    errors = []
    for num_slots in (8, 16, 32, 64, 128):
        fit = match_attention(batch, dense, num_slots)
        errors.append(output_error(batch, fit).item())
        assert errors[-1] <= 1.0001 * plain_error(batch, dense, fit.positions).item()
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("log_bias", [True, False])
def test_a_query_of_weight_root_two_counts_as_that_query_twice(log_bias):
    head = structured_head(prefix=60, queries=50, dim=8)
    queries, keys, values = (x.double() for x in (head.queries, head.keys, head.values))
    weights = torch.ones(1, 50).double().index_fill(1, torch.arange(10, 20), 2**0.5)
    weighted = head_batch(queries, keys, values, weights)
    twice = head_batch(torch.cat([queries, queries[:, 10:20]], 1), keys, values)
    fits = [
        match_attention(b, dense_attention(b), 12, log_bias=log_bias) for b in (weighted, twice)
    ]
    torch.testing.assert_close(*map(vars, fits), rtol=0, atol=1e-4)


def test_small_groups_of_heads_change_nothing(traced, monkeypatch):
    whole = AttentionMatching()(traced, num_slots=9)
    monkeypatch.setattr(Heads, "group_elements", 48 * 10)
    pieces = AttentionMatching()(traced, num_slots=9)
    torch.testing.assert_close(tensors(whole, "keys"), tensors(pieces, "keys"), rtol=0, atol=0)
    torch.testing.assert_close(
        tensors(whole, "log_bias"), tensors(pieces, "log_bias"), rtol=0, atol=1e-3
    )
    torch.testing.assert_close(
        tensors(whole, "values"), tensors(pieces, "values"), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize(
    "options", [{"budgets": "adaptive"}, {"preset": "paper", "num_queries": 20}], ids=str
)
def test_caches_of_several_keep_ratios_are_those_of_single_calls(
    traced, windows, monkeypatch, options
):
    monkeypatch.setattr(budgets, "PEAK_RATIO", 1.0)
    method = AttentionMatching(**options)
    ratios = [0.7, 1, 0.1, 0.85]
    copied = torch.cat([windows[:, :44], windows[:, :40]], 1)
    repeated = trace(traced.model, Reconstruction(copied, 40, 44))
    for each in (traced, repeated):
        for ratio, cache in zip(ratios, method.each(each, ratios), strict=True):
            alone = method(each, keep_ratio=ratio)
            assert cache.metadata == alone.metadata
            torch.testing.assert_close(tensors(cache), tensors(alone), rtol=1e-5, atol=1e-6)


def test_slots_of_unequal_heads_record_the_positions_of_their_tokens(traced):
    cache = AttentionMatching(budgets="adaptive")(traced, num_slots=6)
    for index, layer in enumerate(cache.layers):
        positions = layer.positions.split(layer.counts.flatten().tolist())
        for head, at in enumerate(positions):
            assert torch.equal(
                layer.head(head // 2, head % 2).keys, traced.keys[index].flatten(0, 1)[head][at]
            )


def test_a_layer_whose_stream_is_larger_gets_fewer_slots(traced):
    first = replace(traced.layers[0], stream=traced.layers[0].stream * 100)
    louder = replace(traced, layers=[first, *traced.layers[1:]])
    before, after = (
        AttentionMatching()(one_trace, num_slots=6).layers[0].counts.sum()
        for one_trace in (traced, louder)
    )
    assert after < before


def test_queries_are_drawn_without_replacement_and_at_most_as_many_as_there_are(traced):
    fitted = fitted_queries(Prefix.of(traced), 0.0, by_share=False)
    drawn, other = (draw_rows(traced, fitted, 20, seed=seed) for seed in (0, 1))
    assert {len(set(rows.tolist())) for rows in drawn.values()} == {20}
    assert {len(rows) for rows in draw_rows(traced, fitted, 999, seed=0).values()} == {32}
    assert any(not torch.equal(drawn[head], other[head]) for head in drawn)
    assert AttentionMatching("paper").draws
    assert not AttentionMatching().draws


def test_a_prefix_that_supervises_itself_in_place_sees_no_later_key(model, windows):
    traced = trace(model, windows[:1, :20], supervision="self")
    fitted = fitted_queries(Prefix.of(traced), 0.0, by_share=True)
    heads = Heads(Prefix.of(traced), fitted)
    batch = heads.load(heads.groups_for_scores()[0])
    scores = batch.scores()
    assert torch.equal(
        scores[0] > -torch.inf, torch.ones(20, 20).tril().bool().repeat_interleave(2, 0)
    )
    attention = eager_attention(model, windows[:1, :20])
    assert torch.allclose(
        scores[2].softmax(-1).view(20, 2, 20).transpose(0, 1), attention[1][0, :2], atol=1e-5
    )
    for options in ({"own_weight": 0.0}, {"preset": "paper"}):
        cache = AttentionMatching(**options)(traced, num_slots=4)
        assert all(x.isfinite().all() for layer in cache.layers for x in layer.tensors().values())


@pytest.mark.slow
def test_on_a_real_model_a_fit_to_few_queries_is_better_for_others_than_eviction():
    model, tokenizer = load("kvcat-base")
    texts = [inspect.getsource(module) for module in (argparse, difflib, inspect)]
    ids = torch.tensor([tokenizer.encode(text, verbose=False)[2000:2768] for text in texts])
    fitted, judge = split_supervision(trace(model, ids, 512), 0.5)

    def held_out(method):
        return supervised_kl(judge, method(fitted, keep_ratio=0.4)).mean().item()

    alone = held_out(AttentionMatching(own_weight=0.0))
    stable = held_out(AttentionMatching())
    assert alone < 0.8 * held_out(AttentionMatching("paper", num_queries=None, ridge=1e-6))
    assert stable < 0.5 * held_out(Eviction("streaming"))
    assert stable < alone


@pytest.mark.parametrize("preset", ["stable", "known", "paper"])
def test_how_many_heads_are_solved_together_does_not_change_the_cache(
    preset, model, windows, monkeypatch
):
    traced = trace(model, windows, 48)
    caches = []
    for group_elements in (Heads.group_elements, 48 * 10):
        monkeypatch.setattr(Heads, "group_elements", group_elements)
        caches.append(AttentionMatching(preset)(traced, num_slots=8))
    for together, apart in zip(*(cache.layers for cache in caches), strict=True):
        for name, tensor in together.tensors().items():
            assert torch.allclose(tensor, apart.tensors()[name], atol=1e-4), name


@pytest.mark.slow
def test_values_that_a_type_of_few_bits_cannot_hold_are_rejected_with_the_setting(windows):
    half = trace(loud_model(dtype=torch.float16, std=1.0), windows[:1], 48)
    whole = trace(loud_model(std=1.0), windows[:1], 48)
    unregularised = [
        AttentionMatching("paper", ridge=None),
        AttentionMatching("stable", ridge=None, own_weight=1.0),
        AttentionMatching("known", ridge=None),
    ]
    for method in unregularised:
        assert method(whole, num_slots=36)
        message = refusal(method, half, num_slots=36)
        assert "ridge=None" in message
        assert "that are not finite in float16" in message
        assert AttentionMatching(method.preset)(half, num_slots=36)
