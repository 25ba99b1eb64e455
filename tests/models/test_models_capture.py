"""A dense forward in chunks, for every family."""

import pytest
import torch
from models_zoo import SUPPORTED, StaysDouble, supported

from kvcat.errors import InputError
from kvcat.models import capture


def windows_of(sequence, tokens):
    return torch.randint(3, 61, (2, tokens), generator=torch.Generator().manual_seed(sequence))


@pytest.mark.parametrize(
    ("kind", "chunk_tokens"),
    [("llama", 1), ("llama", 23), ("llama", 1000), *((kind, 7) for kind in SUPPORTED if kind != "llama")],
)
def test_a_capture_in_chunks_is_that_of_one_forward(kind, chunk_tokens):
    model, ids = supported(kind), windows_of(0, 24)
    with StaysDouble():
        whole = capture(model, ids, query_start=9, hidden_start=3)
        parts = capture(model, ids, query_start=9, hidden_start=3, chunk_tokens=chunk_tokens)
    assert torch.allclose(whole.hidden, parts.hidden, atol=1e-12)
    assert whole.hidden.shape[1] == 21
    for name in ("keys", "values", "queries"):
        for left, right in zip(getattr(whole, name), getattr(parts, name), strict=True):
            assert torch.allclose(left, right, atol=1e-12)
            assert torch.equal(left, right) or chunk_tokens < 24


@pytest.mark.parametrize(("kind", "masked"), [("llama", 0), ("qwen3", 0), ("mistral", 3), ("gemma3_text", 3)])
def test_chunks_need_a_mask_only_where_a_window_is_shorter_than_the_text(kind, masked):
    model, seen = supported(kind), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _module, _args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
    capture(model, windows_of(0, 40), chunk_tokens=16)
    for chunk in range(3):
        masks = [mask for mask in seen[3 * chunk : 3 * chunk + 3] if mask is not None]
        assert len(masks) == masked
        assert all(mask.shape[2] == (16, 16, 8)[chunk] for mask in masks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, not 0"),
        ({"hidden_start": 24}, r"hidden_start must lie in 0..23, got 24"),
        ({"query_start": -1}, r"query_start must lie in 0..23, got -1"),
    ],
)
def test_captures_that_cannot_be_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        capture(supported("llama"), windows_of(0, 24), **options)
