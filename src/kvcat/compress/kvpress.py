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
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcat.cache import CACHE_NAME, CompactCache, CompactLayer, cache_argument, held_factors
from kvcat.compress.base import Compressor, compact_cache, example_generators
from kvcat.compress.trace import Trace
from kvcat.errors import InputError
from kvcat.hub import BASE_NAME, SMOLLM2, local_folder
from kvcat.models import frozen
from kvcat.models.rotation import KeyRotation
from kvcat.types import Tensor

_DECODING = ("CAMPress", "CompressionRatioDecodingPress", "DecodingPress", "PrefillDecodingPress")
_OWN_SIZE = ("ComposedPress", "DMSPress", "PerLayerCompressionPress", "SimLayerKVPress")
REFUSED = {
    **dict.fromkeys(_DECODING, "it compresses while tokens are generated, not a prefix"),
    **dict.fromkeys(_OWN_SIZE, "its size follows from its own options, not from a keep ratio"),
    "DuoAttentionPress": "it keeps some heads whole and sets how many, not a keep ratio",
    "FinchPress": "it wants a delimiter token between text and question",
    "ThinKPress": "it zeroes channels of the keys and removes no slots",
}
_OLD_NAME = "past_key_values"  # of a cache, before transformers 5.24 and in kvpress
_CHOOSES_LAST = "compress_post"  # method of presses that hide slots once all are scored
# far above the rounding of 1 - slots / prefix, far below one slot of any cache
_NUDGE = 1e-12


@dataclass(frozen=True, init=False)
class KVPress(Compressor):
    """A press of kvpress: what it keeps of the prefix becomes a compact cache of as many slots.

    Presses that choose per head only hide the other slots in kvpress; here they are removed, and heads hold as many
    slots as the press left them. Each example is pressed alone, in one or several more forwards over its prefix.

    Args:
        name: class name of the press; a wrapper and the press inside it are joined by a plus: "SnapKVPress",
            "AdaKVPress+SnapKVPress".
        options: fields of the press but not its compression_ratio, which is 1 - keep ratio. Those of the press after
            the plus begin with "press.".

    Raises:
        InputError: kvpress is not installed, an unknown press, one that cannot make a compact cache, or options that
            it does not take.
    """

    name: str
    options: dict[str, Any]

    def __init__(self, name: str, /, **options: Any):
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "options", options)
        self._build()

    def compress(self, trace: Trace, sizes: Sequence[int]) -> Iterator[CompactCache]:
        """The caches; presses that choose per layer or head keep so many slots on average, of whole chunks nearly."""
        if trace.past_len:
            raise InputError("kvpress presses whole prefixes, and part of this one is compact already")
        # a press that scores first and chooses at the end scores once for all sizes
        together = [list(sizes)] if sizes and hasattr(self._build(), _CHOOSES_LAST) else [[size] for size in sizes]
        for group in together:
            examples = [_press_prefix(self._build(), trace, row, group) for row in range(trace.batch_size)]
            for of_size in zip(*examples, strict=True):
                layers = []
                for kept in zip(*of_size, strict=True):
                    keys, values = map(list, zip(*kept, strict=True))
                    if not all(len(head) for row in keys for head in row):
                        raise InputError("the press leaves a head without slots: ask for more, or set its lower bound")
                    layers.append(CompactLayer.ragged(keys, values))
                yield compact_cache(trace, layers, f"kvpress:{self.name}", {"kvpress": version(), **self.options})

    def _build(self) -> Any:
        """A new press, which holds the state of one use."""
        outer, _, inner = self.name.partition("+")
        inside = {key for key in self.options if inner and key.startswith("press.")}
        own = {key: value for key, value in self.options.items() if key not in inside}
        if inner:
            own["press"] = _make(inner, {key.removeprefix("press."): self.options[key] for key in inside})
        return _make(outer, own)


def library() -> Any:
    """The installed kvpress; transformers' attention functions stay as they are.

    Raises:
        InputError: it is not installed, or cannot be imported beside the installed transformers.
    """
    before = dict(ALL_ATTENTION_FUNCTIONS)
    try:
        return importlib.import_module("kvpress")
    except ImportError as error:
        raise InputError(f"kvpress cannot be imported ({error}): pip install 'kvcat[kvpress]'") from error
    finally:
        for name, function in before.items():
            if ALL_ATTENTION_FUNCTIONS[name] is not function:
                # kvpress writes an override of this one mapping; most functions had none
                del ALL_ATTENTION_FUNCTIONS[name]
                if ALL_ATTENTION_FUNCTIONS.get(name) is not function:
                    ALL_ATTENTION_FUNCTIONS[name] = function


def version() -> str:
    """Of the installed kvpress."""
    return importlib.metadata.version("kvpress")


def presses() -> dict[str, type]:
    """Every press that the installed kvpress exports, by class name."""
    module = library()
    exported = {name: getattr(module, name) for name in module.__all__ if name not in ("BasePress", "ScorerPress")}
    return {k: x for k, x in exported.items() if isinstance(x, type) and issubclass(x, module.BasePress)}


def removed_fraction(num_slots: int, prefix_len: int, *, counts_removed: bool) -> float:
    """The compression ratio at which kvpress, which rounds down, keeps so many slots per head and not one less."""
    return 1 - num_slots / prefix_len + (_NUDGE if counts_removed else -_NUDGE)


def _make(name: str, options: dict[str, Any]) -> Any:
    found = presses()
    if name not in found:
        raise InputError(f"kvpress {version()} has no press {name!r}; there are {', '.join(sorted(found))}")
    if name in REFUSED:
        raise InputError(f"{name} cannot make a compact cache: {REFUSED[name]}")
    for option in options:
        if option.endswith("compression_ratio"):
            raise InputError(f"{name}: {option} follows from the keep ratio; give keep_ratio or num_slots to the call")
    try:
        return found[name](**options)
    except (TypeError, AssertionError, ValueError) as error:
        raise InputError(f"{name}: {error}") from error


class _PressCache(DynamicCache):
    """A cache whose layers are given keys and values alone: layers of kvpress's own take no more."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer so far, with these appended."""
        return super().update(key_states, value_states, layer_idx)


def _press_prefix(
    press: Any, trace: Trace, row: int, sizes: list[int]
) -> list[list[tuple[list[Tensor], list[Tensor]]]]:
    """By size and layer, what the press keeps of one example's prefix: keys and values of every KV head.

    Several sizes are for a press that chooses at the end.
    """
    model, name, label = trace.model, type(press).__name__, trace.model.config.name_or_path
    attentions, cache = _attentions(model), _PressCache()
    prefix = trace.input_ids[row : row + 1, : trace.prefix_len]
    devices = [prefix.device] if prefix.device.type == "cuda" else []
    eager = any(isinstance(p, library().ObservedAttentionPress) for p in (press, getattr(press, "press", None)))
    # random numbers, which some presses draw from the global state, are the example's own and leave no trace
    with frozen(model), torch.no_grad(), torch.random.fork_rng(devices), _as_kvpress_expects(model, attentions, eager):
        torch.manual_seed(example_generators(trace, 0)[row].initial_seed())
        try:
            press.post_init_from_model(model)
        except Exception as error:  # whatever a download or a table of known models raises
            raise InputError(f"{name} has no part trained for {label!r}: {error}") from error
        hidden: list[list[Any]] = []
        choose = getattr(press, _CHOOSES_LAST, lambda _: None)

        def choose_all(pressed: Any) -> None:
            for size in sizes:
                _set_size(press, size, trace.prefix_len)
                choose(pressed)
                hidden.append([getattr(attention, "masked_key_indices", None) for attention in attentions])

        setattr(press, _CHOOSES_LAST, choose_all)
        _set_size(press, sizes[0], trace.prefix_len)
        try:
            with press(model), held_factors(model, trace.rope):
                model.model(input_ids=prefix, use_cache=True, **cache_argument(cache))
            if not hidden:
                choose_all(model)
        except (AssertionError, ValueError, NotImplementedError, OSError, TypeError, RuntimeError) as error:
            raise InputError(f"{name} on a prefix of {trace.prefix_len} tokens: {error}") from error
        # this press counts positions within the cache; ours end where the prefix does
        shift = trace.prefix_len - sizes[0] if isinstance(press, library().KeyRerotationPress) else 0
        rotation = KeyRotation(model, shift) if shift else None
        layers: Any = cache.layers  # of keys and values; transformers knows others
        kept: list[list[Any]] = [[] for _ in sizes]
        for index, layer in enumerate(layers):
            keys, values = (layer.keys if rotation is None else rotation(layer.keys, index))[0], layer.values[0]
            for of_size, masks in zip(kept, hidden, strict=True):
                there = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
                if masks[index] is not None:
                    there[masks[index][1].to(keys.device), masks[index][2].to(keys.device)] = False
                of_size.append(tuple([part[h, there[h]] for h in range(len(keys))] for part in (keys, values)))
        return kept


def _set_size(press: Any, num_slots: int, prefix_len: int) -> None:
    press.compression_ratio = removed_fraction(num_slots, prefix_len, counts_removed=hasattr(press, "layerwise"))


def _attentions(model: PreTrainedModel) -> list[Any]:
    layers = getattr(getattr(model, "model", None), "layers", ())
    attentions = [getattr(layer, "self_attn", None) for layer in layers]
    if not attentions or not all(hasattr(a, "layer_idx") and hasattr(a, "head_dim") for a in attentions):
        raise InputError(
            f"kvpress does not support {type(model).__name__}: it wants model.layers with a self_attn each"
        )
    return attentions


@contextmanager
def _as_kvpress_expects(model: Any, attentions: list[Any], eager: bool) -> Iterator[None]:
    """What newer transformers no longer gives, and the base model's folder as its name; afterwards all is as before."""
    modules: list[nn.Module] = [model, model.get_submodule("model"), *attentions]
    before = [(set(vars(module)), set(module._modules)) for module in modules]
    hooks = [attention.register_forward_pre_hook(_with_cache_position, with_kwargs=True) for attention in attentions]
    hooks += _with_old_names(model, attentions)
    implementation = model.config._attn_implementation
    lacks_head_dim, label = not hasattr(model.config, "head_dim"), model.config.name_or_path
    try:
        if label in (BASE_NAME, SMOLLM2):
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


def _with_old_names(model: Any, attentions: list[Any]) -> list[RemovableHandle]:
    """Hooks by which kvpress gives and finds a cache as ``past_key_values`` where transformers calls it otherwise.

    The presses call the model, or wrap the forward of ``model.model``, or look into the arguments of the attention
    layers behind these.
    """
    if CACHE_NAME == _OLD_NAME:
        return []
    forward = model.model.forward

    def new_forward(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **_renamed(kwargs, _OLD_NAME, CACHE_NAME))

    def to_new(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, _renamed(kwargs, _OLD_NAME, CACHE_NAME)

    def to_old(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, _renamed(kwargs, CACHE_NAME, _OLD_NAME)

    def add_old(_module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        kwargs[_OLD_NAME] = kwargs[CACHE_NAME]  # for the hooks of the press, which come later

    model.model.forward = new_forward
    return [
        model.register_forward_pre_hook(to_new, with_kwargs=True),
        model.model.register_forward_pre_hook(to_old, with_kwargs=True),
        *(attention.register_forward_hook(add_old, with_kwargs=True) for attention in attentions),
    ]


def _renamed(kwargs: dict[str, Any], before: str, after: str) -> dict[str, Any]:
    return {after if name == before else name: value for name, value in kwargs.items()}


def _with_cache_position(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    states = kwargs["hidden_states"]
    start = kwargs[CACHE_NAME].get_seq_length(module.layer_idx)
    here = torch.arange(start, start + states.shape[1], device=states.device)
    return args, {"cache_position": here, **kwargs}
