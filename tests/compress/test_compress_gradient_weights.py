"""Queries weighted by gradients: the right weight at the right query, and what it is good for."""

from dataclasses import replace

import pytest
import torch
from structured_heads import eager_attention

import kvcat
from kvcat.compress import AttentionMatching, Session, make_compressor, trace
from kvcat.compress.heads import Heads
from kvcat.compress.protection import protecting
from kvcat.compress.queries import fitted_queries
from kvcat.models import decoder_layers
from tiny import byte_tokenizer, loud_model, refusal

KEEP = 0.25


def norms_by_projection(model, ids):
    """The gradient's norms by plain autograd at the input of each output projection: per layer
    (batch, heads, tokens).
    """
    inputs = []
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for layer in decoder_layers(model)
    ]
    log_probs = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    likelihood = log_probs[:, :-1].gather(2, ids[:, 1:, None]).sum()
    gradients = torch.autograd.grad(likelihood, inputs)
    for handle in handles:
        handle.remove()
    return [gradient.unflatten(-1, (4, -1)).norm(dim=-1).transpose(1, 2) for gradient in gradients]


def scaled(norms):
    return (0.5 + 0.5 * norms / norms.mean(-1, keepdim=True)).sqrt()


@pytest.mark.parametrize("own_weight", [0.0, 1.0])
@pytest.mark.parametrize("supervision", ["suffix", "self"])
def test_every_query_has_the_weight_of_its_token_and_head(double, windows, supervision, own_weight):
    ids = windows if supervision == "suffix" else windows[:, :48]
    traced = trace(double, ids, 48, supervision=supervision)
    weighted, plain = (
        fitted_queries(traced, own_weight, by_share=True, by_gradient=by_gradient)
        for by_gradient in (True, False)
    )
    norms = norms_by_projection(double, ids)
    positions = []
    if supervision == "suffix":
        positions.append(torch.arange(48, 64))
    if own_weight:
        positions.append(traced.prefix_positions[plain.moved.rows])
    elif supervision == "self":
        positions.append(torch.arange(48))
    for layer in range(2):
        by_token = [scaled(norms[layer][:, :, group]) for group in positions]
        expected = torch.cat(by_token, dim=2)  # (batch, heads, queries)
        for example in range(3):
            for head in range(2):
                place = [(layer, example, head)]
                factors = Heads(traced, weighted).load(place).factors
                ratio = factors / Heads(traced, plain).load(place).factors
                of_heads = expected[example, 2 * head : 2 * head + 2]
                torch.testing.assert_close(ratio[0], of_heads.T.flatten(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("factor", [0.0, 1.0, 1e-6, 1e6])
def test_equal_gradients_change_nothing(traced, monkeypatch, factor):
    plain = AttentionMatching()(traced, keep_ratio=KEEP)
    ones = [torch.full((3, 4, 64), factor) for _ in traced.keys]
    monkeypatch.setattr("kvcat.compress.gradient_weights.output_gradients", lambda *_, **__: ones)
    weighted = AttentionMatching(gradient_weights=True)(traced, keep_ratio=KEEP)
    for mine, other in zip(weighted.layers, plain.layers, strict=True):
        for example in range(3):
            for head in range(2):
                pairs = zip(mine.head(example, head), other.head(example, head), strict=True)
                for tensors in pairs:
                    torch.testing.assert_close(*tensors)


def test_outputs_with_large_gradients_are_fitted_more_closely(double, windows, monkeypatch):
    """The share of the squared error, by plain attention, at queries that are said to matter."""
    traced = trace(double, windows, 48)
    matters = torch.zeros(64, dtype=torch.bool)
    matters[[50, 55, 56, 61]] = True
    gradients = [torch.where(matters, 1e4, 1.0).double().expand(3, 4, 64) for _ in traced.keys]
    monkeypatch.setattr(
        "kvcat.compress.gradient_weights.output_gradients", lambda *_, **__: gradients
    )
    shares = []
    for by_gradient in (False, True):
        method = AttentionMatching("known", budgets="equal", gradient_weights=by_gradient)
        cache = method(traced, keep_ratio=0.1)
        errors = torch.zeros(16, dtype=torch.float64)
        for layer, attention in enumerate(eager_attention(double, windows)):
            dense = attention[:, :, 48:, :48]
            share = dense.sum(-1, keepdim=True)
            values = traced.values[layer].repeat_interleave(2, 1)
            expected = dense / share @ values
            slots = cache.layers[layer]
            keys = slots.keys.repeat_interleave(2, 1)
            scores = traced.queries[layer] @ keys.mT * traced.scales[layer]
            scores = scores + slots.log_bias.repeat_interleave(2, 1).unsqueeze(2)
            actual = scores.softmax(-1) @ slots.values.repeat_interleave(2, 1)
            errors += (share * (actual - expected)).square().sum((0, 1, 3))
        shares.append((errors[matters[48:]].sum() / errors.sum()).item())
    assert shares[0] > 0.15
    assert shares[1] < 0.55 * shares[0]


def test_the_cache_says_so_and_the_option_has_a_name_on_the_command_line(traced):
    method = make_compressor("attention-matching", gradient_weights=True)
    assert method == AttentionMatching(gradient_weights=True)
    cache = method(traced, keep_ratio=KEEP)
    assert cache.metadata["gradient_weights"] == "True"
    assert torch.isfinite(kvcat.compare(traced, cache).kl).all()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_protected_slots_are_left_out_of_the_fit(windows, kind):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128} if kind == "gpt2" else {}
    traced = trace(loud_model(kind, **sizes), windows[:, :48], supervision="self")
    protected = protecting(traced, [(3, 5), (40, 48)])
    cache = AttentionMatching(gradient_weights=True)(protected, num_slots=16)
    for layer, keys in zip(cache.ordinary_layers(), traced.keys, strict=True):
        for example in range(3):
            kept, _, _ = layer.head(example, 0)
            first = torch.cat([keys[example, 0, 3:5], keys[example, 0, 40:48]])
            assert torch.equal(kept[:10], first)


def test_text_that_is_already_compact_is_rejected(model, windows, traced):
    past = AttentionMatching()(trace(model, windows, 32), keep_ratio=0.5)
    longer = trace(model, windows, 48, past=past)
    method = AttentionMatching(gradient_weights=True)
    assert "gradient_weights" in refusal(method, longer, num_slots=12)
    tokenizer = byte_tokenizer(60, chat=False)
    message = refusal(Session, model, tokenizer, budget=40, tail=8, method=method)
    assert "gradient_weights" in message
    alone = replace(traced, input_ids=traced.input_ids)
    assert method(alone, num_slots=12).num_slots == 12
