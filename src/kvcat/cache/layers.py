"""A compact prefix as one layer of a transformers cache."""

# pyright: reportIncompatibleVariableOverride=false

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin

from kvcat.attention import Carried, attach
from kvcat.cache.slots import CompactLayer, Layer, RaggedLayer
from kvcat.errors import InputError
from kvcat.types import Float, Int, Tensor


class PrefixLayer(CacheLayerMixin):
    """One layer's compact prefix and the tokens after it, as transformers' attention sees them.

    Positions go on from ``num_tokens`` (the prefix length), however few slots stand for the prefix. The keys that it
    returns carry the log-bias (``Carried``), which only kvcat's attention function adds.

    Args:
        slots: the prefix, equally many slots in every head.
        num_tokens: prefix length in tokens, at least the number of slots.
        window: sliding window of this layer in tokens, None without one.
        read_only: updates return slots and new tokens but store nothing (for optimisation and scoring).
    """

    keys: Tensor
    values: Tensor
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, slots: CompactLayer, num_tokens: int, *, window: int | None = None, read_only: bool = False):
        super().__init__()
        self.keys, self.values, self.log_bias = slots.keys, slots.values, slots.log_bias
        self.num_slots, self.num_tokens, self.num_new = slots.num_slots, num_tokens, 0
        self.window, self.read_only = window, read_only
        self.dtype, self.device = slots.keys.dtype, slots.keys.device
        self.is_initialized = True
        self._sent: Carried | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the slots are there from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        """Keys and values of slots and all tokens so far, with the new tokens appended.

        A cache of batch b serves a batch that is a multiple of b: every row is repeated, as beams are.

        Raises:
            InputError: the batch is no multiple of the cache's, or a sliding window no longer covers everything.
        """
        check_window(self.window, self.num_tokens + self.num_new + key_states.shape[-2])
        repeats = repeats_for(key_states.shape[0], self.keys.shape[0])
        keys, values, log_bias = (repeat_rows(x, repeats) for x in (self.keys, self.values, self.log_bias))
        assert keys is not None
        assert values is not None
        keys = torch.cat([keys.to(key_states.dtype), key_states], dim=-2)
        values = torch.cat([values.to(value_states.dtype), value_states], dim=-2)
        if not self.read_only:
            self.keys, self.values, self.log_bias = keys, values, log_bias
            self.num_new += key_states.shape[-2]
        return self._carrying(keys, None if log_bias is None else Carried(log_bias)), values

    def _carrying(self, keys: Tensor, carried: Carried | None) -> Tensor:
        if self._sent is not None and not self._sent.taken:
            raise InputError("the slots of a compact cache did not reach attention: this model is not supported")
        self._sent = carried
        return keys if carried is None else attach(keys, carried)

    def new_tokens(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens that followed the prefix."""
        start = self.keys.shape[-2] - self.num_new
        return self.keys[..., start:, :], self.values[..., start:, :]

    def get_seq_length(self) -> int:
        """Position of the next token."""
        return self.num_tokens + self.num_new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys and the position the first of them stands at in the mask."""
        return self.num_slots + self.num_new + query_length, self.num_tokens - self.num_slots

    def get_max_length(self) -> int:
        """-1: the cache grows without bound."""
        return -1

    def reset(self) -> None:
        """Drops the new tokens and keeps the prefix."""
        self.crop(-self.num_new)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens; the compact prefix itself cannot be cropped.

        Raises:
            InputError: more tokens than were added after the prefix.
        """
        count = -tokens_to_remove
        if not 0 <= count <= self.num_new:
            raise InputError(f"cannot crop {count} tokens: {self.num_new} follow the compact prefix")
        if count:
            self.keys, self.values = self.keys[..., :-count, :], self.values[..., :-count, :]
            self.num_new -= count

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row."""
        self.batch_select_indices(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Int[Tensor, " rows"]) -> None:
        """Keeps the given rows."""
        rows = indices.to(self.keys.device)
        self.keys, self.values = self.keys[rows], self.values[rows]
        self.log_bias = None if self.log_bias is None else self.log_bias[rows]

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Rows in the order of the surviving beams."""
        self.batch_select_indices(beam_idx)


class RaggedPrefixLayer(PrefixLayer):
    """A prefix whose heads keep different numbers of slots; its keys and values are those of the new tokens alone.

    The slots travel beside them (``Carried``) and are never padded or copied.

    Args:
        slots: the prefix.
        num_tokens, window, read_only: as in ``PrefixLayer``.
    """

    def __init__(self, slots: RaggedLayer, num_tokens: int, *, window: int | None = None, read_only: bool = False):
        shape = (slots.batch_size, slots.counts.shape[1], 0)
        empty = CompactLayer(*(x.new_zeros(*shape, x.shape[-1]) for x in (slots.keys, slots.values)))
        super().__init__(empty, num_tokens, window=window, read_only=read_only)
        self.prefix, self.num_slots = slots, slots.num_slots
        self.rows = torch.arange(slots.batch_size, device=slots.keys.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Keys and values of all new tokens so far, carrying the slots."""
        rows = self.rows.repeat_interleave(repeats_for(key_states.shape[0], len(self.rows)))
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if not self.read_only:
            self.rows = rows
        return self._carrying(keys, Carried(slots=self.prefix, rows=rows)), values

    def batch_select_indices(self, indices: Int[Tensor, " rows"]) -> None:
        """Keeps the given rows."""
        super().batch_select_indices(indices)
        self.rows = self.rows[indices.to(self.rows.device)]


class StaticPrefixLayer(PrefixLayer):
    """A prefix with room for a fixed number of tokens, allocated once, as transformers' ``StaticLayer``.

    Shapes never change, so that a compiled model is compiled once. Heads with fewer slots than the fullest are padded.

    Args:
        slots: the prefix.
        num_tokens, window: as in ``PrefixLayer``.
        capacity: most tokens that may follow the prefix, at least 1.
    """

    is_compileable = True
    is_croppable = False

    def __init__(self, slots: Layer, num_tokens: int, *, capacity: int, window: int | None = None):
        super().__init__(slots.padded(), num_tokens, window=window)
        check_window(window, num_tokens + capacity)
        self.capacity, self.is_initialized = capacity, False
        self.cumulative_length = torch.tensor(0, device=self.device)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the room, in the dtype and for the batch of the first tokens."""
        repeats = repeats_for(key_states.shape[0], self.keys.shape[0])

        def roomy(slots: Tensor, like: Tensor) -> Tensor:
            repeated = slots.repeat_interleave(repeats, dim=0).to(like)
            return nn.functional.pad(repeated, (0, 0, 0, self.capacity))

        self.keys, self.values = roomy(self.keys, key_states), roomy(self.values, value_states)
        self.log_bias = repeat_rows(self.log_bias, repeats)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        """All room there is, the new tokens written behind those before.

        Raises:
            InputError: more tokens than there is room for, or a batch that is no multiple of the cache's.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[-2]
        at = torch.arange(count, device=self.device) + self.num_slots + self.cumulative_length
        if not torch.compiler.is_compiling() and int(at[-1]) >= self.keys.shape[-2]:
            raise InputError(f"more tokens than the static cache has room for: {self.capacity}")
        self.cumulative_length.add_(count)
        self.keys.index_copy_(2, at, key_states)
        self.values.index_copy_(2, at, value_states)
        carried = None if self.log_bias is None else Carried(self.log_bias)
        return self._carrying(self.keys.view_as(self.keys), carried), self.values

    def new_tokens(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens that followed the prefix."""
        own = slice(self.num_slots, self.num_slots + int(self.cumulative_length))
        return self.keys[..., own, :], self.values[..., own, :]

    def get_seq_length(self) -> Tensor:  # type: ignore[override]
        """Position of the next token, as a tensor, which a compiled model reads without being compiled anew."""
        return self.num_tokens + self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        """Number of keys and the position the first of them stands at in the mask."""
        return self.num_slots + self.capacity, self.num_tokens - self.num_slots

    def get_max_length(self) -> int:
        """Prefix and room."""
        return self.num_tokens + self.capacity

    def reset(self) -> None:
        """Drops the new tokens and keeps the prefix."""
        self.cumulative_length.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Not there: a static cache forgets all new tokens (``reset``) or none.

        Raises:
            InputError: always.
        """
        raise InputError(f"a static cache cannot be cropped by {-tokens_to_remove} tokens")


def check_window(window: int | None, total: int) -> None:
    """Refuses more tokens than a sliding window covers.

    Args:
        window: sliding window in tokens, None without one.
        total: tokens up to and with the newest.

    Raises:
        InputError: the window no longer covers everything.
    """
    if window is not None and total > window:
        raise InputError(f"{total} tokens exceed the sliding window of {window}: not supported with a compact cache")


def repeats_for(batch: int, rows: int) -> int:
    """How often every row of a cache is repeated to serve a batch.

    Raises:
        InputError: the batch is no multiple of the rows.
    """
    if batch % rows:
        raise InputError(f"a cache of {rows} examples cannot serve a batch of {batch}")
    return batch // rows


def repeat_rows(states: Float[Tensor, "rows ..."] | None, repeats: int) -> Float[Tensor, "batch ..."] | None:
    """Every row so many times, one after the other; None stays None."""
    return states if states is None or repeats == 1 else states.repeat_interleave(repeats, dim=0)
