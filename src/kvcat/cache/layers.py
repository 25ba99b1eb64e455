"""A compact prefix as one layer of a transformers cache."""

# pyright: reportIncompatibleVariableOverride=false

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin

from kvcat.attention import Carried, attach
from kvcat.cache.quantized import QuantizedLayer
from kvcat.cache.slots import Layer, RaggedLayer, repeated
from kvcat.errors import InputError
from kvcat.types import Float, Int, Tensor

_RECURRENT_KINDS = ("linear_attention", "conv")


class PrefixLayer(CacheLayerMixin):
    """One layer's compact prefix and the tokens after it, as transformers' attention sees them.

    Positions continue from ``num_tokens`` (the prefix length), however few slots there are.
    The returned keys carry (``Carried``) what only kvcat's attention function understands. This is
    the log-bias or, if heads hold different numbers of slots or packed codes, the slots themselves,
    which are never padded or copied. In the second case the keys are those of the new tokens alone.

    Args:
        num_tokens: prefix length.
        window: sliding window of this layer in tokens, None without one.
        read_only: updates store nothing.
    """

    keys: Tensor
    values: Tensor
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        slots: Layer | QuantizedLayer,
        num_tokens: int,
        *,
        window: int | None = None,
        read_only: bool = False,
    ):
        super().__init__()
        if isinstance(slots, RaggedLayer | QuantizedLayer):
            # keys and values of the new tokens alone, at first none: (batch, kv_heads, 0, channels)
            shape = (*slots.counts.shape, 0)
            key_dim, value_dim = slots.dims
            like = {"dtype": slots.dtype, "device": slots.device}
            self.keys = torch.zeros(*shape, key_dim, **like)
            self.values = torch.zeros(*shape, value_dim, **like)
            self.log_bias = None
            self.ragged: RaggedLayer | QuantizedLayer | None = slots
        else:
            self.keys = slots.keys
            self.values = slots.values
            self.log_bias = slots.log_bias
            self.ragged = None
        self.rows = torch.arange(slots.batch_size, device=self.keys.device)
        self.max_slots = slots.max_slots
        self.num_tokens = num_tokens
        self.num_new = 0
        self.window = window
        self.read_only = read_only
        self.dtype = self.keys.dtype
        self.device = self.keys.device
        self.is_initialized = True
        self._sent: Carried | None = None

    @property
    def needs_attention(self) -> bool:
        """Whether only kvcat's attention reads the slots as they are."""
        return self.log_bias is not None or self.ragged is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the slots exist from the start."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args, **_kwargs
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of slots and all tokens so far, with the new tokens appended.

        A cache of batch b fits a batch that is a multiple of b: every row is repeated, as beams
        are. Any other batch is rejected, and so is a sliding window that is too short.
        """
        _check_window(self.window, self.num_tokens + self.num_new + key_states.shape[-2])
        batch = len(key_states)
        earlier_keys = repeated(self.keys, batch).to(key_states.dtype)
        earlier_values = repeated(self.values, batch).to(value_states.dtype)
        keys = torch.cat([earlier_keys, key_states], dim=-2)
        values = torch.cat([earlier_values, value_states], dim=-2)
        log_bias = None if self.log_bias is None else repeated(self.log_bias, batch)
        rows = repeated(self.rows, batch)
        # a read-only prefix is trained: its keys are parameters, and no step may add tokens to them
        if not self.read_only:
            self.keys = keys
            self.values = values
            self.log_bias = log_bias
            self.rows = rows
            self.num_new += key_states.shape[-2]
        carried = None if log_bias is None else Carried(log_bias)
        if self.ragged is not None:
            carried = Carried(slots=self.ragged.example, rows=rows)
        return self._carrying(keys, carried), values

    def hold(
        self,
        keys: Float[Tensor, "batch kv_heads new head_dim"],
        values: Float[Tensor, "batch kv_heads new value_dim"],
    ) -> None:
        """Append the keys and values of tokens that ran before, without attention."""
        _check_window(self.window, self.num_tokens + self.num_new + keys.shape[-2])
        self.keys = torch.cat([self.keys, keys], dim=-2)
        self.values = torch.cat([self.values, values], dim=-2)
        self.num_new += keys.shape[-2]

    def _carrying(self, keys: Tensor, carried: Carried | None) -> Tensor:
        if self._sent is not None and not self._sent.taken:
            raise InputError(
                "the slots of a compact cache did not reach attention: this model is not supported"
            )
        # attention takes what the last keys carried; if it did not, the model copied the keys, and
        # answers would lack the slots without an error
        self._sent = carried
        return keys if carried is None else attach(keys, carried)

    def get_seq_length(self) -> int:
        """Position of the next token."""
        return self.num_tokens + self.num_new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys, and the position of the first one in the mask."""
        # transformers masks by position: the last slot is at num_tokens - 1, and so the first at
        # num_tokens - max_slots, whatever tokens they represent
        return self.max_slots + self.num_new + query_length, self.num_tokens - self.max_slots

    def get_max_length(self) -> int:
        """-1: the cache grows without bound."""
        return -1

    def reset(self) -> None:
        """Drop the new tokens and keep the prefix."""
        self.crop(-self.num_new)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last new tokens.

        Args:
            tokens_to_remove: minus their number; older transformers pass the length that is kept,
                and a longer one than that of the text so far changes nothing.

        Raises:
            InputError: the length that is kept would be shorter than the prefix, whose slots are
                not its tokens.
        """
        length = self.get_seq_length()
        change = tokens_to_remove
        if change > 0:
            change = min(0, change - length)
        if change < -self.num_new:
            raise InputError(
                f"the cache holds {length} tokens, the first {self.num_tokens} of them in a "
                f"compact prefix: it cannot be cut to {length + change}"
            )
        # slots come first among the keys, and are never cut
        stop = self.keys.shape[-2] + change
        self.keys = self.keys[..., :stop, :]
        self.values = self.values[..., :stop, :]
        self.num_new += change

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.batch_select_indices(torch.arange(len(self.keys)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Int[Tensor, " rows"]) -> None:
        """Keep the given rows."""
        rows = indices.to(self.keys.device)
        self.keys = self.keys[rows]
        self.values = self.values[rows]
        self.rows = self.rows[rows]
        self.log_bias = None if self.log_bias is None else self.log_bias[rows]

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Put the rows in the order of the surviving beams."""
        self.batch_select_indices(beam_idx)


class StaticPrefixLayer(PrefixLayer):
    """A prefix with room for a fixed number of tokens, allocated once, as transformers'
    ``StaticLayer``.

    Shapes never change, so that a model is compiled once. Heads with fewer slots are padded. At
    most ``capacity`` tokens may follow the prefix.
    """

    is_compileable = True
    is_croppable = False

    def __init__(
        self,
        slots: Layer | QuantizedLayer,
        num_tokens: int,
        *,
        capacity: int,
        window: int | None = None,
    ):
        super().__init__(slots.padded(), num_tokens, window=window)
        _check_window(window, num_tokens + capacity)
        self.capacity = capacity
        self.is_initialized = False
        self.cumulative_length = torch.tensor(0, device=self.device)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the room, in the dtype and for the batch of the first tokens."""
        batch = len(key_states)
        room = (0, 0, 0, self.capacity)
        self.keys = nn.functional.pad(repeated(self.keys, batch).to(key_states), room)
        self.values = nn.functional.pad(repeated(self.values, batch).to(value_states), room)
        self.log_bias = None if self.log_bias is None else repeated(self.log_bias, batch)
        self.rows = repeated(self.rows, batch)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args, **_kwargs
    ) -> tuple[Tensor, Tensor]:
        """The whole room, the new tokens written after those before."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_added = key_states.shape[-2]
        first_place = self.max_slots + self.cumulative_length
        places = torch.arange(num_added, device=self.device) + first_place
        if not torch.compiler.is_compiling() and int(places[-1]) >= self.keys.shape[-2]:
            raise InputError(f"more tokens than the static cache has room for: {self.capacity}")
        self.cumulative_length.add_(num_added)
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        carried = None if self.log_bias is None else Carried(self.log_bias)
        return self._carrying(self.keys.view_as(self.keys), carried), self.values

    def get_seq_length(self) -> Tensor:  # type: ignore[override]
        """Position of the next token, as a tensor: a compiled model is not compiled again."""
        return self.num_tokens + self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        """Number of keys, and the position of the first one in the mask."""
        return self.max_slots + self.capacity, self.num_tokens - self.max_slots

    def get_max_length(self) -> int:
        """Prefix and room."""
        return self.num_tokens + self.capacity

    def reset(self) -> None:
        """Drop the new tokens and keep the prefix."""
        self.cumulative_length.zero_()


def layer_windows(config: Any) -> list[int | None]:
    """Sliding window of every layer in tokens; None if a layer sees all earlier tokens.

    A layer with a recurrent state has None as well (``recurrent_layers``).

    Raises:
        InputError: a layer of another kind, one that shares another's keys and values, or no layer
            with keys and values.
    """
    config = config.get_text_config(decoder=True)
    windows = _windows_of_kinds(config)
    kinds = _layer_kinds(config)
    has_keys = any(kind in windows for kind in kinds)
    for kind in kinds:
        if kind not in windows and not (has_keys and kind in _RECURRENT_KINDS):
            raise InputError(
                f"{config.model_type}: layers of type {kind!r} keep no keys and values to compress"
            )
    if getattr(config, "num_kv_shared_layers", 0):
        raise InputError(
            f"{config.model_type}: layers that share keys and values are not supported"
        )
    return [windows.get(kind) for kind in kinds]


def recurrent_layers(config: Any) -> list[int]:
    """The layers that have a recurrent state of fixed size instead of keys and values."""
    kinds = _layer_kinds(config.get_text_config(decoder=True))
    return [layer for layer, kind in enumerate(kinds) if kind in _RECURRENT_KINDS]


def state_layers(config: Any, num_tokens: int) -> list[int]:
    """The layers whose state after a text is not compressed, for a text of ``num_tokens`` tokens.

    These are the layers with a recurrent state or with a sliding window shorter than the text.
    """
    recurrent = recurrent_layers(config)
    layers = []
    for layer, window in enumerate(layer_windows(config)):
        is_short = window is not None and window < num_tokens
        if is_short or layer in recurrent:
            layers.append(layer)
    return layers


def _layer_kinds(config: Any) -> list[str]:
    """The type of every layer."""
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        if window:
            kind = "sliding_attention"
        elif chunk:
            kind = "chunked_attention"
        else:
            kind = "full_attention"
        types = [kind] * config.num_hidden_layers
    return types


def _windows_of_kinds(config: Any) -> dict[str, int | None]:
    """The window of every type of layers that have keys and values."""
    return {
        "full_attention": None,
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }


def _check_window(window: int | None, total: int) -> None:
    if window is not None and total > window:
        raise InputError(
            f"{total} tokens exceed the sliding window of {window}: "
            "not supported with a compact cache"
        )
