"""Rejects presses of kvpress that compute queries or keys otherwise than the model does.

Many presses do not receive queries: they project hidden states again, rotate the two halves of a
head and divide scores by sqrt(head_dim). That is right for Llama, Mistral, Phi-3, Qwen2 and Qwen3.
Other models have norms that kvpress does not know (OLMo 2), layers without positions (SmolLM3),
rotations of neighbouring channels (Cohere) or another scale (Granite). There such a press would
choose slots by the attention of other queries.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvcat.errors import InputError
from kvcat.models import capture
from kvcat.models.structure import same
from kvcat.types import Tensor

_PROBE_TOKENS = 8
_QUERIES = "get_prerope_query_states"  # functions of kvpress, imported by the presses that use them
_KEYS = "get_prerope_key_states"
_MOVED_KEYS = "rerotate_keys"  # of the presses that move keys


class _Differences(NamedTuple):
    """What kvpress computes otherwise than a model."""

    states: bool  # queries and keys
    scale: bool  # the factor on q.k


_TESTED: WeakKeyDictionary[PreTrainedModel, _Differences] = WeakKeyDictionary()


@contextmanager
def checked_queries(model: PreTrainedModel, attentions: Sequence[Any]) -> Iterator[None]:
    """A block in which a press that computes states otherwise than the model raises an error.

    The first call for a model compares the queries of a few tokens in every layer.

    Args:
        attentions: its attention modules, first to last.
    """
    if model not in _TESTED:
        _TESTED[model] = _differences(model, attentions)
    differences = _TESTED[model]
    name = type(model).__name__
    replaced = []
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("kvpress.presses."):
            continue
        places = [module, *(value for value in vars(module).values() if isinstance(value, type))]
        for place in places:
            for function in (_QUERIES, _KEYS, _MOVED_KEYS):
                is_wrong = differences.states or (differences.scale and function == _QUERIES)
                if is_wrong and function in vars(place):
                    replaced.append((place, function, vars(place)[function]))
    for place, function, _ in replaced:
        setattr(place, function, _rejecting(name))
    try:
        yield
    finally:
        for place, function, before in replaced:
            setattr(place, function, before)


def _rejecting(name: str) -> Callable[..., Any]:
    """A function in place of one of kvpress that computes states."""

    def reject(*_args: Any, **_kwargs: Any) -> Any:
        raise InputError(f"kvpress computes other queries and keys, or scores, than {name}")

    return reject


def _differences(model: PreTrainedModel, attentions: Sequence[Any]) -> _Differences:
    """What differs in the queries of a few tokens, and in their scale."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.arange(_PROBE_TOKENS, device=model.device).unsqueeze(0) * 7 % vocab
    inputs: dict[int, dict[str, Any]] = {}

    def remember(attention: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        inputs[attention.layer_idx] = kwargs

    hooks = [
        attention.register_forward_pre_hook(remember, with_kwargs=True) for attention in attentions
    ]
    try:
        captured = capture(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    states = False
    scale = False
    layers = zip(attentions, captured.queries, captured.scales, strict=True)
    for attention, queries, factor in layers:
        theirs = _queries_of_kvpress(attention, inputs[attention.layer_idx])
        is_same = theirs is not None and theirs.shape == queries.shape and same(theirs, queries)
        states = states or not is_same
        scale = scale or not math.isclose(factor, attention.head_dim**-0.5, rel_tol=1e-3)
    return _Differences(states, scale)


@torch.no_grad()
def _queries_of_kvpress(attention: Any, inputs: dict[str, Any]) -> Tensor | None:
    """The queries after rotation as kvpress computes them; None where it cannot."""
    utilities = sys.modules["kvpress.utils"]
    try:
        queries = getattr(utilities, _QUERIES)(attention, inputs["hidden_states"])
        cos, sin = (table.unsqueeze(1) for table in inputs["position_embeddings"])
        first, second = queries.chunk(2, dim=-1)
        return queries * cos + torch.cat([-second, first], dim=-1) * sin
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError):
        return None
