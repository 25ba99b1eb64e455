"""The presses of NVIDIA's kvpress as compressors, with slots that are really gone.

kvpress is imported when the first press is made; its effect on transformers is undone.
"""

import importlib
import importlib.metadata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcat.cache import CompactCache, CompactLayer, RaggedLayer
from kvcat.compress.base import Compressor, compact_cache, example_generators, slots_for
from kvcat.compress.trace import Trace
from kvcat.errors import InputError
from kvcat.hub import BASE_NAME, local_folder
from kvcat.models import frozen
from kvcat.models.rotation import KeyRotation
from kvcat.types import Float, Tensor

_OWN_SIZE = "its size follows from its own options, not from a keep ratio"
_DECODING = "it compresses while tokens are generated, not a prefix"
REFUSED = {
    "CAMPress": _DECODING,
    "CompressionRatioDecodingPress": _DECODING,
    "DecodingPress": _DECODING,
    "PrefillDecodingPress": _DECODING,
    "ComposedPress": _OWN_SIZE,
    "DMSPress": _OWN_SIZE,
    "PerLayerCompressionPress": _OWN_SIZE,
    "SimLayerKVPress": _OWN_SIZE,
    "FinchPress": "it wants a delimiter token between text and question",
    "ThinKPress": "it zeroes channels of the keys and removes no slots",
}
_ABSTRACT = ("BasePress", "ScorerPress")
# far above the rounding of 1 - slots / prefix, far below one slot of any cache
_NUDGE = 1e-12


@dataclass(frozen=True)
class Kept:
    """What a press leaves of one layer of one example, per KV head."""

    keys: list[Float[Tensor, "_ head_dim"]]
    values: list[Float[Tensor, "_ value_dim"]]


@dataclass(frozen=True, init=False)
class KVPress(Compressor):
    """A press of kvpress: what it keeps of the prefix becomes a compact cache of as many slots.

    Presses that choose per head only hide the other slots in kvpress; here they are removed, and heads hold as many
    slots as the press left them. Each example is pressed alone, in one more forward over its prefix (some presses take
    several). kvpress is imported when the first press is made, and its patches of transformers are undone.

    Args:
        name: class name of the press; a wrapper and the press inside it are joined by a plus: "SnapKVPress",
            "AdaKVPress+SnapKVPress".
        options: fields of the press but not its compression_ratio, which is 1 - keep ratio. Those of the press after
            the plus begin with "press."; or ``press`` is another ``KVPress``.

    Raises:
        InputError: kvpress is not installed, an unknown press, one that cannot make a compact cache, or options that
            it does not take.
    """

    name: str
    options: dict[str, Any]

    def __init__(self, name: str, **options: Any):
        outer, _, inner = name.partition("+")
        if inner and "press" in options:
            raise InputError(f"{name} with press={options['press']}: give the inner press once")
        if inner:
            its = {key: options.pop(key) for key in list(options) if key.startswith("press.")}
            options["press"] = KVPress(inner, **{key.removeprefix("press."): value for key, value in its.items()})
        object.__setattr__(self, "name", outer)
        object.__setattr__(self, "options", options)
        self._build()

    def compress(self, trace: Trace, sizes: Sequence[int]) -> Iterator[CompactCache]:
        """The caches of several sizes; every size presses each example anew.

        Presses that choose per layer or per head keep so many slots on average; presses that keep whole chunks come
        near it.
        """
        if trace.past_len:
            raise InputError("kvpress presses whole prefixes, and part of this one is compact already")
        for size in sizes:
            examples = [_press_prefix(self._build(), trace, row, size) for row in range(trace.batch_size)]
            layers = [_layer([kept[index] for kept in examples]) for index in range(len(trace.keys))]
            facts = {"kvpress": library().version, **self._facts()}
            yield compact_cache(trace, layers, f"kvpress:{self}", facts)

    def scores(self, trace: Trace, num_slots: int) -> list[Float[Tensor, "batch kv_heads prefix"]]:
        """Per layer the score of each position and KV head: a press that scores keeps the highest.

        Args:
            trace: of the windows; its suffix plays no part.
            num_slots: slots per head; some scores depend on it.

        Raises:
            InputError: a press that ranks nothing, or a model or size that it does not take.
        """
        slots_for(trace.prefix_len, None, num_slots)
        examples = [_score_prefix(self._build(), trace, row, num_slots) for row in range(trace.batch_size)]
        return [torch.cat(rows) for rows in zip(*examples, strict=True)]

    def __str__(self) -> str:
        inner = self.options.get("press")
        return self.name if inner is None else f"{self.name}+{inner}"

    def _facts(self) -> dict[str, object]:
        facts: dict[str, object] = {}
        for key, option in self.options.items():
            inner = option._facts() if isinstance(option, KVPress) else {}
            facts |= {f"{key}.{name}": value for name, value in inner.items()}
            facts |= {} if isinstance(option, KVPress) else {key: option}
        return facts

    def _build(self) -> Any:
        made = {key: option._build() if isinstance(option, KVPress) else option for key, option in self.options.items()}
        return _build(self.name, made)


@dataclass(frozen=True)
class Library:
    """What there is in the installed kvpress.

    Args:
        version: of the package.
        presses: every press it exports, by class name.
    """

    version: str
    presses: dict[str, type]

    def base(self, name: str) -> type:
        """One of the classes that presses derive from or wrap."""
        return getattr(importlib.import_module("kvpress"), name)


def library() -> Library:
    """The installed kvpress; transformers' attention functions stay as they are.

    Raises:
        InputError: it is not installed, or cannot be imported beside the installed transformers.
    """
    try:
        with _attention_functions_restored():
            module = importlib.import_module("kvpress")
    except ImportError as error:
        raise InputError(f"kvpress cannot be imported ({error}): pip install 'kvcat[kvpress]'") from error
    exported = {name: getattr(module, name) for name in module.__all__}
    presses = {
        name: kind
        for name, kind in exported.items()
        if isinstance(kind, type) and issubclass(kind, module.BasePress) and name not in _ABSTRACT
    }
    return Library(importlib.metadata.version("kvpress"), presses)


def _build(name: str, options: dict[str, Any]) -> Any:
    """A new press, which holds the state of one use."""
    found = library()
    if name not in found.presses:
        raise InputError(f"kvpress {found.version} has no press {name!r}; there are {', '.join(sorted(found.presses))}")
    if name in REFUSED:
        raise InputError(f"{name} cannot make a compact cache: {REFUSED[name]}")
    for option in options:
        if option.endswith("compression_ratio"):
            raise InputError(f"{name}: {option} follows from the keep ratio; give keep_ratio or num_slots to the call")
    try:
        return found.presses[name](**options)
    except (TypeError, AssertionError, ValueError) as error:
        raise InputError(f"{name}: {error}") from error


@contextmanager
def _attention_functions_restored() -> Iterator[None]:
    before = dict(ALL_ATTENTION_FUNCTIONS)
    try:
        yield
    finally:
        for name, function in before.items():
            if ALL_ATTENTION_FUNCTIONS[name] is not function:
                # kvpress writes an override of this one mapping; most functions had none
                del ALL_ATTENTION_FUNCTIONS[name]
                if ALL_ATTENTION_FUNCTIONS.get(name) is not function:
                    ALL_ATTENTION_FUNCTIONS[name] = function


def _press_prefix(press: Any, trace: Trace, row: int, num_slots: int) -> list[Kept]:
    """Per layer what the press keeps of one example's prefix."""
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


def _score_prefix(press: Any, trace: Trace, row: int, num_slots: int) -> list[Float[Tensor, "1 kv_heads prefix"]]:
    """Per layer the scores of one example's positions."""
    if not isinstance(press, library().base("ScorerPress")):
        raise InputError(f"{type(press).__name__} gives no scores: it is no ScorerPress")
    seen = []

    def record(module, hidden_states, keys, values, attentions, kwargs):
        seen.append(press.score(module, hidden_states, keys, values, attentions, kwargs).clone())
        return keys, values

    press.compress = record
    with _pressed(press, trace, row, num_slots):
        return seen


def _set_size(press: Any, trace: Trace, num_slots: int) -> None:
    """Gives a press the fraction to remove that leaves so many slots per head, on average.

    DuoAttention keeps some heads whole, the others' sinks and recent positions: the number of the latter heads follows.
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
    """The compression ratio at which kvpress, which rounds down, keeps so many slots per head and not one less."""
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
        _set_size(press, trace, num_slots)
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


def _layer(examples: list[Kept]) -> CompactLayer | RaggedLayer:
    keys, values = ([getattr(kept, name) for kept in examples] for name in ("keys", "values"))
    if not all(len(head) for row in keys for head in row):
        raise InputError("the press leaves a head without slots: ask for more, or set its option for a lower bound")
    return CompactLayer.ragged(keys, values)
