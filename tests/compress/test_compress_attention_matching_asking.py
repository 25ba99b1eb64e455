"""Which queries Attention Matching fits to, and how much each counts."""

import argparse
import inspect
import math

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear
from structured_heads import positions_of, structured_head
from transformers import GPT2Config, GPT2LMHeadModel

from kvcat.compress import AttentionMatching, Eviction, asking, split_supervision, supervised_kl, trace
from kvcat.compress.asking import ask, log_mass, own_queries, suffix_keys
from kvcat.compress.fitting import FitOptions, KeptKeys, fit_slots, output_error
from kvcat.compress.heads import HeadBlock, head_groups, load_block
from kvcat.compress.selection import KeySelection, summarise
from kvcat.models import load
from kvcat.models.rotation import KeyRotation

PLAIN = {"weights": "equal", "own_weight": 0.0}


@pytest.fixture(scope="module")
def double(make_model):
    return make_model(torch.float64)


@pytest.fixture
def found(double, windows):
    return trace(double, windows, 48)


def attention_of(model, ids):
    """Attention weights of every layer by transformers' own eager path: (batch, heads, tokens, tokens)."""
    eager = type(model)._from_config(model.config, attn_implementation="eager").to(model.dtype)
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        return eager(ids, output_attentions=True).attentions


def test_the_mass_of_keys_is_that_of_the_plain_sum(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(2, 4, 9, 5, generator=draw), torch.randn(2, 2, 7, 5, generator=draw)
    bias, last = torch.randn(2, 2, 7, generator=draw), torch.tensor([0, 6, 2, 3, 3, 1, 5, 4, 6])
    expected = torch.zeros(2, 4, 9)
    for b, h, i in np.ndindex(2, 4, 9):
        terms = [
            math.exp(0.3 * float(queries[b, h, i] @ keys[b, h // 2, j]) + float(bias[b, h // 2, j]))
            for j in range(int(last[i]) + 1)
        ]
        expected[b, h, i] = math.log(sum(terms))
    assert torch.allclose(log_mass(queries, keys, 0.3, last=last, log_bias=bias), expected, atol=1e-5)
    monkeypatch.setattr(asking, "_CHUNK_ELEMENTS", 2 * 4 * 7 * 2)
    assert torch.allclose(log_mass(queries, keys, 0.3, last=last, log_bias=bias), expected, atol=1e-5)


def test_the_share_of_a_query_is_the_attention_it_gives_to_the_prefix(double, windows, found):
    asked = ask(found, None, 0.0, by_share=True)
    for layer, attention in enumerate(attention_of(double, windows)):
        assert torch.allclose(asked.weights[layer], attention[:, :, 48:, :48].sum(-1), atol=1e-9)
        assert torch.equal(asked.trace.queries[layer], found.queries[layer])


def test_the_keys_after_the_prefix_are_those_of_the_dense_forward(double, windows, found):
    whole = trace(double, torch.cat([windows, windows[:, :1]], 1), 64)
    for layer, keys in suffix_keys(found).items():
        assert torch.allclose(keys, whole.keys[layer][:, :, 48:], atol=1e-12)


@pytest.mark.parametrize("prefix_len", [48, 46, 2, 1])
def test_own_queries_of_the_first_layer_are_those_of_each_third_written_again_behind_the_prefix(
    double, windows, prefix_len
):
    own = own_queries(trace(double, windows, prefix_len))
    part = -(-prefix_len // 3)
    for stop in range(prefix_len, 0, -part):
        text, rows = slice(max(0, stop - part), stop), slice(prefix_len - stop, prefix_len - max(0, stop - part))
        ids = torch.cat([windows[:, :prefix_len], windows[:, text]], 1)
        again = trace(double, ids, prefix_len)
        # the model makes its rotations in single precision
        assert torch.allclose(own.queries[0][:, :, rows], again.queries[0], atol=1e-5)
        shares = attention_of(double, ids)[0][:, :, prefix_len:, :prefix_len].sum(-1)
        assert torch.allclose(own.shares[0][:, :, rows], shares, atol=1e-5)


def test_own_queries_of_deeper_layers_hold_what_they_held_in_place(double, windows, found):
    """Turned back by the 16 positions that the last third moved, they are the queries of the dense forward."""
    back = KeyRotation(double, -16)(own_queries(found).queries[1][:, :, :16], 1)
    in_place = trace(double, windows[:, :48], supervision="self").queries[1][:, :, 32:]
    assert torch.allclose(back, in_place, atol=1e-5)


def test_of_a_long_prefix_evenly_spaced_positions_ask(found, monkeypatch):
    every = own_queries(found)
    monkeypatch.setattr(asking, "OWN_POSITIONS", 12)
    some = own_queries(found)
    # thirds of 16, the last first: positions 32, 36, ... of 48 are rows 0, 4, ... of the last third
    rows = [third * 16 + row for third in range(3) for row in (0, 4, 8, 12)]
    for layer in range(2):
        assert torch.allclose(some.queries[layer], every.queries[layer][:, :, rows], atol=1e-12)
        assert torch.allclose(some.shares[layer], every.shares[layer][:, :, rows], atol=1e-12)


def test_all_own_queries_together_weigh_what_they_are_said_to(found):
    own = own_queries(found)
    for own_weight in (0.5, 2.0):
        asked = ask(found, own, own_weight, by_share=False)
        for layer in range(2):
            squares = asked.weights[layer].square().sum(2)
            assert torch.allclose(squares[0, 0], torch.tensor(16 * (1 + own_weight), dtype=torch.float64))
            assert torch.equal(asked.trace.queries[layer][:, :, 16:], own.queries[layer])


@pytest.mark.parametrize("score", ["rms", "omp"])
@pytest.mark.parametrize("log_bias", [True, False])
def test_a_query_of_weight_root_two_counts_as_that_query_twice(score, log_bias):
    head = structured_head(prefix=60, queries=50, dim=8)
    block = HeadBlock(*(x.double() for x in (head.queries, head.keys, head.values)), None)
    weights = torch.ones(1, 50, dtype=torch.float64)
    weights[:, 10:20] = math.sqrt(2)
    weighted = HeadBlock(block.queries, block.keys, block.values, None, None, weights)
    twice = HeadBlock(torch.cat([block.queries, block.queries[:, 10:20]], 1), block.keys, block.values, None)
    options = FitOptions(KeySelection(score), log_bias=log_bias, ridge=1e-2, bias_ridge=0.1, towards_kept=True)
    fits = [fit_slots(b, summarise(b, score, relative=True), 12, options) for b in (weighted, twice)]
    assert torch.equal(fits[0][0], fits[1][0])
    assert torch.allclose(fits[0][1], fits[1][1], atol=1e-6)
    assert torch.allclose(fits[0][2], fits[1][2], atol=1e-6)
    errors = [
        output_error(KeptKeys(b, summarise(b), fits[0][0]), *fits[0][1:]) for b in (weighted, twice)
    ]  # fmt: skip
    assert torch.allclose(errors[0], errors[1])


def test_chunks_of_weighted_queries_change_nothing(monkeypatch):
    block = structured_head(prefix=60, queries=50, dim=8)
    weighted = HeadBlock(block.queries, block.keys, block.values, None, None, torch.linspace(0.1, 2, 50)[None])
    options = FitOptions(ridge=1e-2, bias_ridge=0.1, towards_kept=True)
    whole = fit_slots(weighted, summarise(weighted, relative=True), 12, options)
    monkeypatch.setattr("kvcat.compress.heads._BLOCK_ELEMENTS", 60 * 7)
    parts = fit_slots(weighted, summarise(weighted, relative=True), 12, options)
    assert torch.equal(whole[0], parts[0])
    assert torch.allclose(whole[1], parts[1], atol=1e-4)
    assert torch.allclose(whole[2], parts[2], atol=1e-4)


def naive_stable_head(queries, keys, values, weights, num_slots):
    """One head by the formulas: weighted rms selection, relative masses in the box, values pulled to their own."""
    scores = queries @ keys.T
    dense = np.exp(scores - scores.max(1, keepdims=True))
    dense /= dense.sum(1, keepdims=True)
    kept = np.sort(np.argsort(-(weights[:, None] ** 2 * dense**2).sum(0), kind="stable")[:num_slots])
    design = weights[:, None] * dense[:, kept]
    pull = math.sqrt(0.1) * np.linalg.norm(design, 2)
    system = np.concatenate([design, pull * np.eye(num_slots)])
    wanted = np.concatenate([weights, pull * np.ones(num_slots)])
    box = (math.exp(-3), math.exp(3))
    slot_weights = lsq_linear(system, wanted, box, method="bvls", tol=1e-14).x

    def attention(factors):
        mass = dense[:, kept] * factors
        return weights[:, None] * mass / mass.sum(1, keepdims=True)

    def fit(factors):
        rows, outputs = attention(factors), weights[:, None] * (dense @ values)
        ridge = 1e-2 * np.linalg.norm(rows, 2) ** 2
        own = values[kept]
        change = np.linalg.solve(rows.T @ rows + ridge * np.eye(num_slots), rows.T @ (outputs - rows @ own))
        return own + change, ((rows @ (own + change) - outputs) ** 2).sum()

    fitted, error = fit(slot_weights)
    plain = ((attention(np.ones(num_slots)) @ values[kept] - weights[:, None] * (dense @ values)) ** 2).sum()
    if error > plain:
        return kept, fit(np.ones(num_slots))[0], np.zeros(num_slots)
    return kept, fitted, np.log(slot_weights)


@pytest.mark.parametrize("own_weight", [0.0, 1.0])
def test_the_stable_cache_is_that_of_the_formulas_head_by_head(double, windows, found, own_weight):
    cache = AttentionMatching(own_weight=own_weight)(found, num_slots=9)
    own, shares = own_queries(found), [a[:, :, 48:, :48].sum(-1) for a in attention_of(double, windows)]
    for layer, b, h in np.ndindex(2, 3, 2):
        part = slice(2 * h, 2 * h + 2)
        looks = [found.queries[layer][b, part]] + ([own.queries[layer][b, part]] if own_weight else [])
        factors = [shares[layer][b, part]]
        factors += [math.sqrt(own_weight * 16 / 48) * own.shares[layer][b, part]] if own_weight else []
        expected = naive_stable_head(
            torch.cat(looks, 1).flatten(0, 1).numpy() * found.scales[layer],
            found.keys[layer][b, h].numpy(),
            found.values[layer][b, h].numpy(),
            torch.cat(factors, 1).flatten().numpy(),
            9,
        )
        kept = positions_of(cache.layers[layer].keys, found.keys[layer])[b, h]
        assert kept.tolist() == expected[0].tolist()
        assert np.allclose(cache.layers[layer].values[b, h].numpy(), expected[1], atol=1e-5)
        assert np.allclose(cache.layers[layer].log_bias[b, h].numpy(), expected[2], atol=1e-5)


def test_a_prefix_that_supervises_itself_is_asked_by_its_moved_queries_alone(double, windows, found):
    own = trace(double, windows[:, :48], supervision="self")
    asked = ask(own, own_queries(own), 1.0, by_share=True)
    for layer, moved in enumerate(own_queries(found).queries):
        assert torch.allclose(asked.trace.queries[layer], moved, atol=1e-12)
    (heads,) = head_groups(asked.trace)
    assert load_block(asked.trace, heads, None, asked.weights).positions is None
    assert AttentionMatching()(own, num_slots=9).metadata["supervision"] == "self"


@pytest.mark.parametrize("supervision", ["suffix", "self"])
def test_a_model_whose_positions_do_not_turn_is_asked_as_without_own_queries(windows, supervision):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=67, n_positions=96, bos_token_id=0, eos_token_id=0
        )
        model = GPT2LMHeadModel(config).eval()
    seen = trace(model, windows, 48, supervision=supervision)
    assert own_queries(seen) is None
    with_own, without = (AttentionMatching(own_weight=weight)(seen, num_slots=9) for weight in (1.0, 0.0))
    for left, right in zip(with_own.layers, without.layers, strict=True):
        assert torch.equal(left.values, right.values)


def test_the_paper_asks_nothing_but_the_supervising_queries(found, monkeypatch):
    monkeypatch.setattr(asking, "capture", None)
    monkeypatch.setattr(asking, "KeyRotation", None)
    for cache in (AttentionMatching("paper"), AttentionMatching(**PLAIN)):
        assert cache(found, num_slots=9).num_slots == 9
    same = AttentionMatching("paper", weights="equal", own_weight=0.0)(found, num_slots=9)
    assert torch.equal(same.layers[1].values, AttentionMatching("paper")(found, num_slots=9).layers[1].values)


def test_on_a_real_model_a_document_without_a_suffix_is_served_better_than_by_its_most_recent_tokens():
    model, tokenizer = load("kvcat-base")
    text = inspect.getsource(argparse)[3000:9000]
    ids = torch.tensor([tokenizer.encode(text, verbose=False)[:640]])
    real = trace(model, ids, 384)
    own = trace(model, ids[:, :384], supervision="self")
    found, recent, causal = (
        supervised_kl(real, cache).item()
        for cache in (
            AttentionMatching()(own, keep_ratio=0.2),
            Eviction("streaming")(real, keep_ratio=0.2),
            AttentionMatching(**PLAIN)(own, keep_ratio=0.2),
        )
    )
    assert found < 0.7 * recent
    assert found < 0.7 * causal
    fitted, judge = split_supervision(real, 0.5)
    alone, both = (AttentionMatching(own_weight=w)(fitted, keep_ratio=0.2) for w in (0.0, 1.0))
    assert supervised_kl(judge, both).item() < 0.8 * supervised_kl(judge, alone).item()
