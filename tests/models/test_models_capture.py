"""A dense forward in chunks, for every family, against transformers' own cache and logits."""

import sys
from io import StringIO
from typing import Any

import pytest
import torch
from models_zoo import SUPPORTED, some_ids, supported, tiny
from tqdm import tqdm

from kvcat.cache import CACHE_NAME
from kvcat.models import capture, decoder_layers, logits_from_hidden, output_gains
from kvcat.models.exact_copy import StaysDouble


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("kind", SUPPORTED)
def test_a_capture_in_chunks_is_that_of_one_forward_and_of_the_stock_model(kind):
    model = supported(kind)
    ids = some_ids(24)
    with StaysDouble():
        kept: dict[str, Any] = {"query_positions": torch.arange(9, 24), "hidden_start": 3}
        whole = capture(model, ids, **kept)
        every = capture(model, ids)
        stock = model(input_ids=ids, use_cache=True, output_hidden_states=True)
        for chunk_tokens in (1, 23, 1000) if kind == "llama" else (7,):
            in_chunks = capture(model, ids, **kept, chunk_tokens=chunk_tokens)
            whole_tensors, chunked_tensors = (
                [x.keys, x.values, x.queries, x.hidden] for x in (whole, in_chunks)
            )
            torch.testing.assert_close(whole_tensors, chunked_tensors, rtol=0, atol=1e-12)
            torch.testing.assert_close(whole.stream, in_chunks.stream)
            rounded = capture(
                model, ids, **kept, chunk_tokens=chunk_tokens, first_slot=-5, rounded=True
            )
            for layer, (queries, exact) in enumerate(
                zip(rounded.queries, whole.queries, strict=True)
            ):
                assert ((queries.numbers() - exact).abs() <= 0.501 * queries.scales).all()
                last = whole.keys[layer][:, :, -5:], whole.values[layer][:, :, -5:]
                of_layer = rounded.keys[layer], rounded.values[layer]
                torch.testing.assert_close(of_layer, last, rtol=0, atol=1e-12)
            torch.testing.assert_close(rounded.stream, whole.stream)
    assert whole.hidden.shape[1] == 21
    assert not whole.hidden.requires_grad
    assert torch.allclose(logits_from_hidden(model, every.hidden), stock.logits, atol=1e-6)
    entering = (
        torch.stack(stock.hidden_states[: len(every.stream)]).square().sum(-1).median(-1).values
    )
    if kind != "gemma3_text":  # a norm follows its attention
        assert torch.allclose(torch.stack(every.stream).double(), entering, rtol=1e-5)
    for layer, (keys, cached) in enumerate(zip(every.keys, stock[CACHE_NAME].layers, strict=True)):
        assert cached.keys.shape[2] < 24 or torch.allclose(keys, cached.keys, atol=1e-12)
        assert torch.equal(whole.queries[layer], every.queries[layer][:, :, 9:])
        assert (
            kind == "gpt2" or every.scales[layer] == decoder_layers(model)[layer].self_attn.scaling
        )


NORM_FOLLOWS = {
    "gemma3_text": {**SUPPORTED["gemma3_text"], "hidden_size": 64},
    "olmo2": {"pad_token_id": 0},
    "glm4": {"head_dim": 8, "pad_token_id": 0},
}
NORM_NAMES = {"glm4": "post_self_attn_layernorm"}


@pytest.mark.parametrize("kind", NORM_FOLLOWS)
def test_where_a_norm_follows_the_attention_the_stream_is_as_much_smaller_as_the_norm_enlarges(
    kind,
):
    model = tiny(kind, **NORM_FOLLOWS[kind])
    ids = some_ids(24)
    entering, outputs, added = [], [], []
    handles = []
    for layer in decoder_layers(model):
        handles += [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: entering.append(args[0]), with_kwargs=True
            ),
            layer.self_attn.register_forward_hook(
                lambda _layer, _args, output: outputs.append(output[0])
            ),
            getattr(layer, NORM_NAMES.get(kind, "post_attention_layernorm")).register_forward_hook(
                lambda _layer, _args, output: added.append(output)
            ),
        ]
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    squares = [
        torch.stack([states.square().sum(-1) for states in each])
        for each in (entering, outputs, added)
    ]
    expected = squares[0].median(-1).values / (squares[2] / squares[1]).median(-1).values
    actual = torch.stack(capture(model, ids).stream)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=0)


def test_a_long_capture_counts_its_layers_and_chunks(monkeypatch):
    model = supported("llama")
    bars = []

    def bar(**options):
        bars.append(tqdm(**{**options, "disable": False, "file": StringIO()}))
        return bars[0]

    monkeypatch.setattr(sys.modules["kvcat.models.capture"], "tqdm", bar)
    capture(model, some_ids(24), chunk_tokens=7)
    assert bars[0].n == bars[0].total == 4 * len(decoder_layers(model))
    assert bars[0].delay == 2


def test_gains_are_the_mean_squared_columns_of_the_output_projection_and_one_without_it():
    model = supported("llama")
    gpt2 = supported("gpt2")
    counts = [2, *[1] * (len(model.model.layers) - 1)]  # layers may differ
    for layer, heads, gains in zip(
        model.model.layers, counts, output_gains(model, counts), strict=True
    ):
        blocks = layer.self_attn.o_proj.weight.detach().chunk(heads, 1)
        assert gains.tolist() == pytest.approx(
            [block.square().sum(0).mean().item() for block in blocks]
        )
    assert all((gains == 1).all() for gains in output_gains(gpt2, [2] * len(decoder_layers(gpt2))))
