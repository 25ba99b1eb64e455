"""The presses of NVIDIA's kvpress as compressors that actually remove slots.

kvpress is imported when the first press is made. Its changes to transformers are undone.
"""

import importlib
import importlib.metadata
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcat.cache import CompactLayer, HeadSlots, Layer, cache_argument, held_factors
from kvcat.compress.base import Compressor, example_generators
from kvcat.compress.prefix import Prefix
from kvcat.compress.press_arguments import as_kvpress_expects
from kvcat.compress.press_queries import checked_queries
from kvcat.compress.trace import Trace
from kvcat.errors import InputError, unknown_name
from kvcat.extras import install_command
from kvcat.models import frozen
from kvcat.models.rotation import KeyRotation
from kvcat.text.template import chat_parts
from kvcat.types import Tensor

_DECODING = ("CAMPress", "CompressionRatioDecodingPress", "DecodingPress", "PrefillDecodingPress")
_OWN_SIZE = ("ComposedPress", "DMSPress", "PerLayerCompressionPress", "SimLayerKVPress")
REFUSED = {
    **dict.fromkeys(_DECODING, "it compresses while tokens are generated, not a prefix"),
    **dict.fromkeys(_OWN_SIZE, "its options set its size, not a keep ratio"),
    "DuoAttentionPress": "it keeps some heads whole and sets how many, not a keep ratio",
    "FinchPress": "it needs a delimiter token between text and question",
    "ThinKPress": "it zeroes channels of the keys and removes no slots",
}
_CHOOSES_LAST = "compress_post"  # method of presses that hide slots after scoring all layers
_UNSCORED = "prefix_length"  # attribute of presses: first tokens that they give no score
# far above the rounding of 1 - slots / prefix, far below one slot of any cache
_NUDGE = 1e-12
# the functions of kvpress that are replaced, and the random state, belong to the whole process
_PRESSING = threading.RLock()


# errors of presses for a prefix or a model that they cannot press
_PRESS_ERRORS = (
    AssertionError, ValueError, NotImplementedError, OSError, TypeError, RuntimeError,
)  # fmt: skip


@dataclass(frozen=True, init=False)
class KVPress(Compressor):
    """A press of kvpress as a compressor: the slots that it keeps become a compact cache.

    In kvpress, presses that choose per head only hide the other slots. Here these slots are
    removed, so that every head holds only the slots that the press keeps. Each example is pressed
    separately, in one or several further forward passes over its prefix.

    Args:
        name: class name of the press. A wrapper and the press inside it are joined by a plus:
            "SnapKVPress", "AdaKVPress+SnapKVPress".
        options: fields of the press, except compression_ratio, which is 1 - keep ratio. Names for
            the press after the plus begin with "press.".

    Raises:
        InputError: kvpress is not installed, the press is unknown or cannot make a compact cache,
            or it does not have one of the options.
    """

    press_name: str
    options: dict[str, Any]

    needs_all_queries: ClassVar[bool] = True
    protects: ClassVar[bool] = False

    def __init__(self, name: str, /, *, bits: int | None = None, **options: Any):
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "press_name", name)
        object.__setattr__(self, "options", options)
        self._build()

    @property
    def name(self) -> str:
        """The press, as on the command line."""
        return f"kvpress:{self.press_name}"

    def facts(self, prefix: Prefix) -> dict[str, object]:  # noqa: ARG002
        """The version of kvpress, and the press' options."""
        return {"kvpress": version(), **self.options}

    def fit(self, prefix: Prefix, sizes: Sequence[int]) -> Iterator[Sequence[Layer]]:
        """The kept slots; presses that choose per layer or head keep ``size`` slots on average.

        Presses that keep whole chunks keep approximately that many.
        """
        trace = prefix.trace
        if trace.past is not None:
            raise InputError(
                "kvpress presses whole prefixes, and part of this one is already compact"
            )
        groups = [[size] for size in sizes]
        if sizes and hasattr(self._build(), _CHOOSES_LAST):
            # such a press scores first and chooses at the end, so one scoring serves all sizes
            groups = [list(sizes)]
        for group in groups:
            pressed = [
                _press_prefix(self._build(), trace, example, group)
                for example in range(trace.batch_size)
            ]
            for index in range(len(group)):
                yield _joined_layers([by_size[index] for by_size in pressed])

    def _build(self) -> Any:
        """A new press object, because a press holds the state of one use."""
        outer, _, inner = self.press_name.partition("+")
        outer_options: dict[str, Any] = {}
        inner_options: dict[str, Any] = {}
        for key, value in self.options.items():
            if inner and key.startswith("press."):
                inner_options[key.removeprefix("press.")] = value
            else:
                outer_options[key] = value
        if inner:
            outer_options["press"] = _make(inner, inner_options)
        return _make(outer, outer_options)


def _joined_layers(examples: list[list[list[HeadSlots]]]) -> list[Layer]:
    """The layers of a cache, from the slots that each example keeps in each layer."""
    return [CompactLayer.of_heads(list(of_layer)) for of_layer in zip(*examples, strict=True)]


def library() -> Any:
    """The module of the installed kvpress; transformers' attention functions are unchanged.

    Raises:
        InputError: it is not installed, or cannot be imported with the installed transformers.
    """
    before = dict(ALL_ATTENTION_FUNCTIONS)
    try:
        with warnings.catch_warnings():
            # fire 0.6, which kvpress pins, imports a module that Python 3.13 removed
            warnings.filterwarnings("ignore", "'pipes' is deprecated", DeprecationWarning)
            return importlib.import_module("kvpress")
    except ImportError as error:
        raise InputError(
            f"kvpress cannot be imported ({error}): {install_command('kvpress')}"
        ) from error
    finally:
        for name, function in before.items():
            if ALL_ATTENTION_FUNCTIONS[name] is not function:
                # kvpress overrides entries of this mapping; most functions had no entry
                del ALL_ATTENTION_FUNCTIONS[name]
                if ALL_ATTENTION_FUNCTIONS.get(name) is not function:
                    ALL_ATTENTION_FUNCTIONS[name] = function


def version() -> str:
    """The version of the installed kvpress."""
    return importlib.metadata.version("kvpress")


def presses() -> dict[str, type]:
    """The presses that the installed kvpress exports, by class name."""
    module = library()
    classes = {}
    for name in module.__all__:
        exported = getattr(module, name)
        is_press = isinstance(exported, type) and issubclass(exported, module.BasePress)
        if is_press and name not in ("BasePress", "ScorerPress"):
            classes[name] = exported
    return classes


def removed_fraction(num_slots: int, prefix_len: int, *, counts_removed: bool) -> float:
    """The compression ratio at which kvpress, which rounds down, keeps exactly ``num_slots``."""
    return 1 - num_slots / prefix_len + (_NUDGE if counts_removed else -_NUDGE)


def _make(name: str, options: dict[str, Any]) -> Any:
    available = presses()
    if name not in available:
        raise unknown_name(f"press of kvpress {version()}", name, sorted(available))
    if name in REFUSED:
        raise InputError(f"{name} cannot make a compact cache: {REFUSED[name]}")
    for option in options:
        if option.endswith("compression_ratio"):
            raise InputError(
                f"{name}: {option} follows from the keep ratio; give keep_ratio or num_slots to "
                "the call"
            )
    try:
        return available[name](**options)
    except (TypeError, AssertionError, ValueError) as error:
        raise InputError(f"{name}: {error}") from error


class _PressCache(DynamicCache):
    """A cache that passes only keys and values to its layers.

    The layer classes of kvpress accept no further arguments.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer, with the new ones appended."""
        return super().update(key_states, value_states, layer_idx)


def _press_prefix(
    press: Any, trace: Trace, example: int, sizes: list[int]
) -> list[list[list[HeadSlots]]]:
    """The slots that the press keeps from one example's prefix, by size and layer.

    Only a press that chooses at the end supports several sizes.
    """
    model = trace.model
    name = type(press).__name__
    if trace.states:
        raise InputError(
            f"{name}: kvpress compresses all layers of {type(model).__name__} or none, and here "
            "some keep the state of a sliding window or a recurrence"
        )
    if any(sinks is not None for sinks in trace.sinks):
        raise InputError(
            f"{name}: kvpress computes attention without the sinks of {type(model).__name__}"
        )
    attentions = _attentions(model)
    cache = _PressCache()
    prefix = trace.input_ids[example : example + 1, : trace.prefix_len]
    devices = [prefix.device] if prefix.device.type == "cuda" else []
    pressing = (press, getattr(press, "press", None))
    is_eager = any(isinstance(each, library().ObservedAttentionPress) for each in pressing)
    with (
        frozen(model),
        _PRESSING,
        torch.no_grad(),
        # some presses draw from the global random state: make the draws depend only on the example,
        # and restore the state
        torch.random.fork_rng(devices),
        checked_queries(model, attentions),
        as_kvpress_expects(model, attentions, is_eager),
    ):
        torch.manual_seed(example_generators(trace, 0)[example].initial_seed())
        try:
            press.post_init_from_model(model)
        except Exception as error:  # a download or a table of known models may raise anything
            label = model.config.name_or_path
            raise InputError(f"{name} has no trained component for {label!r}: {error}") from error
        hidden = _HiddenSlots(press, attentions, sizes, trace.prefix_len)
        setattr(press, _CHOOSES_LAST, hidden.choose_all)
        _set_size(press, sizes[0], trace.prefix_len)
        try:
            # some presses run the model again when their block ends
            with held_factors(model, trace.text.rope), press(model):
                _score_all_but_a_chat_opening(press, model, prefix)
                model.model(input_ids=prefix, use_cache=True, **cache_argument(cache))
            if not hidden.by_size:
                hidden.choose_all(model)
        except _PRESS_ERRORS as error:
            raise InputError(f"{name} on a prefix of {trace.prefix_len} tokens: {error}") from error
        rotation = _rotation_to_the_end(press, trace, sizes[0])
        return [_kept(cache, masks, rotation) for masks in hidden.by_size]


def _score_all_but_a_chat_opening(press: Any, model: Any, prefix: Tensor) -> None:
    """Let a press leave out the opening of a chat only if the prefix begins with it.

    KVzip and KVgrad count the tokens of the opening in the model's chat template, and give as many
    first tokens of any prefix no score. In a text without the template they would drop its
    beginning at every size.
    """
    num_unscored = getattr(press, _UNSCORED, 0)
    if num_unscored == 0:
        return
    opening = _chat_opening(model.config.name_or_path)
    first_ids = prefix[0, :num_unscored].tolist()
    if first_ids != opening or prefix.shape[1] == num_unscored:
        setattr(press, _UNSCORED, 0)


def _chat_opening(folder: str) -> list[int]:
    """The token ids before a user's first message in a chat template; none if kvcat rejects it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    try:
        head = chat_parts(tokenizer).head
    except InputError:
        return []
    return tokenizer.encode(head, add_special_tokens=False)


class _HiddenSlots:
    """The slots that a press hides in every layer, by size, as kvpress marks them."""

    def __init__(self, press: Any, attentions: list[Any], sizes: list[int], prefix_len: int):
        self.by_size: list[list[Any]] = []
        self._press = press
        self._attentions = attentions
        self._sizes = sizes
        self._prefix_len = prefix_len
        self._choose = getattr(press, _CHOOSES_LAST, None)

    def choose_all(self, pressed: Any) -> None:
        """Let the press choose for every size, and record the slots that it hides."""
        for size in self._sizes:
            _set_size(self._press, size, self._prefix_len)
            if self._choose is not None:
                self._choose(pressed)
            masks = [getattr(each, "masked_key_indices", None) for each in self._attentions]
            self.by_size.append(masks)


def _rotation_to_the_end(press: Any, trace: Trace, num_slots: int) -> KeyRotation | None:
    """The rotation that moves the kept keys to the end of the prefix; None if not needed.

    It is needed for presses that count positions within the cache.
    """
    shift = trace.prefix_len - num_slots
    if shift and isinstance(press, library().KeyRerotationPress):
        return KeyRotation(trace.model, shift)
    return None


def _kept(
    cache: DynamicCache, masks: list[Any], rotation: KeyRotation | None
) -> list[list[HeadSlots]]:
    """The slots that the masks do not hide in a cache of one example, per layer.

    A head whose slots are all hidden keeps that of the first token: a compact cache has at least
    one in each.
    """
    kept = []
    layers: Any = cache.layers  # layers of keys and values; transformers has other kinds as well
    for index, layer in enumerate(layers):
        keys = layer.keys if rotation is None else rotation(layer.keys, index)
        keys = keys[0]  # (kv_heads, slots, head_dim)
        values = layer.values[0]
        is_kept = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
        if masks[index] is not None:
            _, heads, slots = masks[index]
            is_kept[heads.to(keys.device), slots.to(keys.device)] = False
            is_kept[~is_kept.any(dim=1), 0] = True
        heads = zip(keys, values, is_kept, strict=True)
        kept.append([HeadSlots(of_head[at], its_values[at]) for of_head, its_values, at in heads])
    return kept


def _set_size(press: Any, num_slots: int, prefix_len: int) -> None:
    press.compression_ratio = removed_fraction(
        num_slots, prefix_len, counts_removed=hasattr(press, "layerwise")
    )


def _attentions(model: PreTrainedModel) -> list[Any]:
    layers = getattr(getattr(model, "model", None), "layers", ())
    attentions = [getattr(layer, "self_attn", None) for layer in layers]
    if not attentions or not all(
        hasattr(a, "layer_idx") and hasattr(a, "head_dim") for a in attentions
    ):
        raise InputError(
            f"kvpress does not support {type(model).__name__}: it needs model.layers with a "
            "self_attn each"
        )
    return attentions
