"""A dense forward in chunks, for every family, against transformers' own cache and logits."""

import pytest
import torch
from models_zoo import SUPPORTED, StaysDouble, supported

from kvcat.errors import InputError
from kvcat.models import capture, decoder_layers, logits_from_hidden


def some_ids(length):
    return torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", SUPPORTED)
def test_a_capture_in_chunks_is_that_of_one_forward_and_of_the_stock_model(kind):
    model, ids = supported(kind), some_ids(24)
    with StaysDouble():
        whole = capture(model, ids, query_start=9, hidden_start=3)
        every = capture(model, ids)
        stock = model(input_ids=ids, use_cache=True)
        for chunk_tokens in (1, 23, 1000) if kind == "llama" else (7,):
            parts = capture(model, ids, query_start=9, hidden_start=3, chunk_tokens=chunk_tokens)
            for name in ("keys", "values", "queries"):
                for left, right in zip(getattr(whole, name), getattr(parts, name), strict=True):
                    assert torch.allclose(left, right, atol=1e-12)
            assert torch.allclose(whole.hidden, parts.hidden, atol=1e-12)
    assert whole.hidden.shape[1] == 21
    assert not whole.hidden.requires_grad
    assert torch.allclose(logits_from_hidden(model, every.hidden), stock.logits, atol=1e-6)
    for layer, (keys, cached) in enumerate(zip(every.keys, stock.past_key_values.layers, strict=True)):
        assert cached.keys.shape[2] < 24 or torch.allclose(keys, cached.keys, atol=1e-12)
        assert torch.equal(whole.queries[layer], every.queries[layer][:, :, 9:])
        assert kind == "gpt2" or every.scales[layer] == decoder_layers(model)[layer].self_attn.scaling


@pytest.mark.parametrize(("kind", "masked"), [("llama", 0), ("gemma3_text", 3)])
def test_chunks_need_a_mask_only_where_a_window_is_shorter_than_the_text(kind, masked):
    model, seen = supported(kind), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _module, _args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
    capture(model, some_ids(40), chunk_tokens=16)
    for chunk in range(3):
        masks = [mask for mask in seen[3 * chunk : 3 * chunk + 3] if mask is not None]
        assert len(masks) == masked
        assert all(mask.shape[2] == (16, 16, 8)[chunk] for mask in masks)


def test_captures_that_cannot_be_are_refused():
    for options, message in (
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, not 0"),
        ({"hidden_start": 24}, r"hidden_start must lie in 0..23, got 24"),
        ({"query_start": -1}, r"query_start must lie in 0..23, got -1"),
    ):
        with pytest.raises(InputError, match=message):
            capture(supported("llama"), some_ids(24), **options)
