"""What a session is given: tokens, a method and a model, checked."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import (
    CompactCache,
    check_token_ids,
    layer_windows,
    recurrent_layers,
    rope_border,
)
from kvcat.compress.base import Compressor
from kvcat.compress.documents import template_of
from kvcat.compress.registry import make_compressor
from kvcat.errors import InputError, check_kind
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


def compaction_obstacle(config: PreTrainedConfig) -> str:
    """Why a session with such a model cannot compress what it holds; empty: it can."""
    kind = config.model_type
    if rope_border(config) is not None:
        return f"{kind}: rotary factors that depend on the length are not compressed in sessions"
    if any(window is not None for window in layer_windows(config)):
        return f"{kind}: layers with sliding windows are not compressed in sessions"
    if recurrent_layers(config):
        return f"{kind}: layers with a recurrent state are not compressed in sessions"
    return ""


def checked_document(
    document: CompactCache, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> CompactCache:
    """The document of a session, unquantised, on the model's device.

    Raises:
        InputError: no cache, one of another model or of several examples, or one in another chat
            template than the tokenizer's.
    """
    check_kind(CompactCache, "a CompactCache", document=document)
    document.check_model(model, "the document")
    if document.batch_size != 1:
        raise InputError(
            f"the document's cache holds {document.batch_size} examples: select one of them"
        )
    if document.record.chat:
        template_of(tokenizer, document.record)
    return document.unpacked().to(model.device)
