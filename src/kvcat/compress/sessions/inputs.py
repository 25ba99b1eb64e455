"""What a session is given: tokens, a method and a model, checked."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import (
    check_token_ids,
    fingerprint,
    layer_windows,
    recurrent_layers,
    rope_border,
)
from kvcat.compress.base import Compressor
from kvcat.compress.registry import make_compressor
from kvcat.errors import InputError
from kvcat.options import parse_spec
from kvcat.text.encoder import TextEncoder, check_text, opening_ids
from kvcat.types import Int, Tensor

Tokens = str | Sequence[int] | Int[Tensor, "*batch tokens"]
"""A text, or token ids: numbers, or a tensor of one row."""


def token_ids(
    tokens: Tokens, model: PreTrainedModel, encoder: TextEncoder, *, is_first: bool
) -> Int[Tensor, " new"]:
    """Token ids on the model's device, one row.

    Args:
        tokens: text or token ids.
        model: of the session.
        encoder: with its tokenizer.
        is_first: no token comes before, so that a text begins as the tokenizer begins a text.

    Raises:
        InputError: no token, one without an embedding, more than one row, or a text that is not
            Unicode.
    """
    if isinstance(tokens, str):
        check_text(tokens, "the text")
        numbers = _of_first_text(tokens, encoder) if is_first else encoder.behind(tokens)
        ids = torch.tensor(numbers, dtype=torch.long)
    else:
        ids = torch.as_tensor(tokens)
    if not ids.numel():
        raise InputError("no token to append or score")
    if ids.dim() == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.dim() != 1 or ids.is_floating_point():
        raise InputError(
            f"tokens of shape {tuple(ids.shape)} and type {ids.dtype}: a session has one row of "
            "whole numbers"
        )
    ids = ids.long().to(model.device)
    check_token_ids(model, ids.unsqueeze(0))
    return ids


def _of_first_text(text: str, encoder: TextEncoder) -> list[int]:
    """Token ids of a whole text, with those that the tokenizer puts before it."""
    tokenizer: PreTrainedTokenizerBase = encoder.tokenizer
    opening = opening_ids(tokenizer)
    body = encoder(text)
    begins_so = body[: len(opening)] == opening
    return body if begins_so else [*opening, *body]


def checked_method(method: str | Compressor) -> Compressor:
    """The compressor, which must be able to compress what is compact already.

    Raises:
        InputError: no such compressor, or one that cannot.
    """
    if isinstance(method, Compressor):
        compressor = method
    else:
        name, options = parse_spec(method)
        compressor = make_compressor(name, **options)
    if compressor.needs_all_queries:
        raise InputError(
            f"{compressor.name} needs all queries of the prefix, and a session compresses what is "
            "compact already: choose another method"
        )
    return compressor


def checked_model(model: PreTrainedModel) -> str:
    """The fingerprint of a model that has sessions.

    Raises:
        InputError: layers or rotary factors that sessions do not support.
    """
    kind = model.config.model_type
    if rope_border(model.config) is not None:
        raise InputError(f"{kind}: rotary factors that depend on the length have no sessions")
    if any(window is not None for window in layer_windows(model.config)):
        raise InputError(f"{kind}: layers with sliding windows have no sessions")
    if recurrent_layers(model.config):
        raise InputError(f"{kind}: layers with a recurrent state have no sessions")
    return fingerprint(model)
