"""One press over one prefix, as kvpress would run it, and what it leaves."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from kvcat.compress.common import example_generators
from kvcat.compress.freezing import frozen
from kvcat.compress.kvpress.library import library
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.hub import BASE_NAME, local_folder
from kvcat.models.rotation import KeyRotation
from kvcat.types import Float, Tensor

# far above the rounding of 1 - slots / prefix, far below one slot of any cache
_NUDGE = 1e-12


@dataclass(frozen=True)
class Kept:
    """What a press leaves of one layer of one example, per KV head.

    Args:
        keys: after rotation at their original positions.
        values: of the same slots.
    """

    keys: list[Float[Tensor, "_ head_dim"]]
    values: list[Float[Tensor, "_ value_dim"]]


def press_prefix(press: Any, trace: Trace, row: int, num_slots: int) -> list[Kept]:
    """Per layer what the press keeps of one example's prefix.

    Args:
        press: a fresh press.
        trace: the example's model and tokens.
        row: which example.
        num_slots: slots per head, in [1, prefix_len).

    Raises:
        InputError: a model or size that the press does not take.
    """
    with _pressed(press, trace, row, num_slots) as (cache, attentions):
        kept = []
        layers: list[Any] = cache.layers
        # this press counts positions within the cache; ours end where the prefix does
        counts = isinstance(press, library().base("KeyRerotationPress"))
        rotation = KeyRotation(trace.model, trace.prefix_len - num_slots) if counts else None
        for index, (layer, attention) in enumerate(zip(layers, attentions, strict=True)):
            keys = (layer.keys if rotation is None else rotation(layer.keys, index))[0]
            values = layer.values[0]
            there = torch.ones(keys.shape[:2], dtype=torch.bool)
            if getattr(attention, "masked_key_indices", None) is not None:
                _, heads, positions = attention.masked_key_indices
                there[heads.cpu(), positions.cpu()] = False
            there = there.to(keys.device)
            kept.append(Kept(*([part[h, there[h]] for h in range(len(keys))] for part in (keys, values))))
    return kept


def score_prefix(press: Any, trace: Trace, row: int, num_slots: int) -> list[Float[Tensor, "1 kv_heads prefix"]]:
    """Per layer the scores of one example's positions.

    Args:
        press: a fresh press, a ``ScorerPress``.
        trace: the example's model and tokens.
        row: which example.
        num_slots: slots per head, in [1, prefix_len].

    Raises:
        InputError: a press that ranks nothing, or a model or size that it does not take.
    """
    if not isinstance(press, library().base("ScorerPress")):
        raise InputError(f"{type(press).__name__} gives no scores: it is no ScorerPress")
    seen = []

    def record(module, hidden_states, keys, values, attentions, kwargs):
        seen.append(press.score(module, hidden_states, keys, values, attentions, kwargs).clone())
        return keys, values

    press.compress = record
    with _pressed(press, trace, row, num_slots):
        return seen


def set_size(press: Any, trace: Trace, num_slots: int) -> None:
    """Gives a press the fraction to remove that leaves so many slots per head, on average.

    DuoAttention keeps some heads whole, the others' sinks and recent positions: the number of the latter heads follows.

    Args:
        press: initialised for the trace's model.
        trace: the prefix.
        num_slots: slots per head, in [1, prefix_len].

    Raises:
        InputError: fewer slots than DuoAttention leaves at least, or a prefix too short for it.
    """
    if not isinstance(press, library().base("DuoAttentionPress")):
        press.compression_ratio = removed_fraction(
            num_slots, trace.prefix_len, counts_removed=hasattr(press, "layerwise")
        )
        return
    window = press.sink_size + press.recent_size
    if num_slots < window:
        raise InputError(f"DuoAttentionPress keeps {window} slots or more in every head: {num_slots} are too few")
    press.head_compression_ratio = (trace.prefix_len - num_slots) / (trace.prefix_len - window)


def removed_fraction(num_slots: int, prefix_len: int, *, counts_removed: bool) -> float:
    """The compression ratio at which kvpress, which rounds down, keeps so many slots per head and not one less.

    Args:
        num_slots: in [1, prefix_len).
        prefix_len: tokens of the prefix.
        counts_removed: the press rounds the number it removes, in place of the number it keeps.
    """
    return 1 - num_slots / prefix_len + (_NUDGE if counts_removed else -_NUDGE)


@contextmanager
def _pressed(press: Any, trace: Trace, row: int, num_slots: int) -> Iterator[tuple[DynamicCache, list[Any]]]:
    model, name, label = trace.model, type(press).__name__, trace.model.config.name_or_path
    attentions = _attentions(model)
    prefix = trace.input_ids[row : row + 1, : trace.prefix_len]
    cache = DynamicCache()
    eager = _holds(press, library().base("ObservedAttentionPress"))
    with frozen(model), torch.no_grad(), _seeded(trace, row), _as_kvpress_expects(model, attentions, eager=eager):
        try:
            press.post_init_from_model(model)
        except Exception as error:  # whatever a download or a table of known models raises
            raise InputError(f"{name} has no part trained for {label!r}: {error}") from error
        set_size(press, trace, num_slots)
        try:
            with press(model):
                model.model(input_ids=prefix, past_key_values=cache, use_cache=True)
        except (AssertionError, ValueError, NotImplementedError, OSError, TypeError, RuntimeError) as error:
            raise InputError(f"{name} on a prefix of {trace.prefix_len} tokens: {error}") from error
        yield cache, attentions


def _attentions(model: PreTrainedModel) -> list[Any]:
    layers = getattr(getattr(model, "model", None), "layers", ())
    attentions = [getattr(layer, "self_attn", None) for layer in layers]
    if not attentions or not all(hasattr(a, "layer_idx") and hasattr(a, "head_dim") for a in attentions):
        raise InputError(
            f"kvpress does not support {type(model).__name__}: it wants model.layers with a self_attn each"
        )
    return attentions


def _holds(press: Any, kind: type) -> bool:
    inner = getattr(press, "press", None)
    return isinstance(press, kind) or (inner is not None and _holds(inner, kind))


@contextmanager
def _seeded(trace: Trace, row: int) -> Iterator[None]:
    """Global random numbers, which some presses draw, are the example's own and leave no trace."""
    devices = [trace.input_ids.device] if trace.input_ids.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(example_generators(trace, 0)[row].initial_seed())
        yield


@contextmanager
def _as_kvpress_expects(model: Any, attentions: list[Any], *, eager: bool) -> Iterator[None]:
    """What newer transformers no longer gives: cache_position, a head_dim in every config; afterwards all is as before.

    The package's own model gets the name of its folder, where presses look for a tokenizer.

    Args:
        model: its attention modules get what they lack.
        attentions: these modules.
        eager: the press reads attention weights.
    """
    modules: list[nn.Module] = [model, model.get_submodule("model"), *attentions]
    before = [(set(vars(module)), set(module._modules)) for module in modules]
    hooks = [attention.register_forward_pre_hook(_with_cache_position, with_kwargs=True) for attention in attentions]
    implementation = model.config._attn_implementation
    lacks_head_dim, label = not hasattr(model.config, "head_dim"), model.config.name_or_path
    try:
        if label == BASE_NAME:
            model.config.name_or_path = str(local_folder(label))
        if lacks_head_dim:
            model.config.head_dim = attentions[0].head_dim
        if eager:
            model.set_attn_implementation("eager")
        yield
    finally:
        model.config.name_or_path = label
        if lacks_head_dim:
            del model.config.head_dim
        if eager:
            model.set_attn_implementation(implementation)
        for hook in hooks:
            hook.remove()
        for module, (names, children) in zip(modules, before, strict=True):
            for name in (set(vars(module)) - names) | (set(module._modules) - children):
                delattr(module, name)


def _with_cache_position(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    states = kwargs["hidden_states"]
    start = kwargs["past_key_values"].get_seq_length(module.layer_idx)
    here = torch.arange(start, start + states.shape[1], device=states.device)
    return args, {"cache_position": here, **kwargs}
