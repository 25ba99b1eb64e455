"""A compact prefix as one layer of a transformers cache."""

# pyright: reportIncompatibleVariableOverride=false

import torch
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin

from kvcat.errors import InputError
from kvcat.types import Float, Int, Tensor

EXTRA_CHANNELS = 8


def bias_channels(
    keys: Float[Tensor, "batch kv_heads slots head_dim"],
    log_bias: Float[Tensor, "batch kv_heads slots"] | None,
    scale: float,
) -> Float[Tensor, "batch kv_heads slots extended_dim"]:
    """Keys [k, log_bias / scale, 0...] with 8 more channels: a query [q, 1, 0...] adds the bias to its scaled score.

    Args:
        keys: keys after rotation.
        log_bias: nats added to the score of each slot; None adds none.
        scale: factor the attention applies to q.k, larger than 0.
    """
    if log_bias is None:
        return pad(keys, (0, EXTRA_CHANNELS))
    channel = (log_bias.to(torch.promote_types(keys.dtype, torch.float32)) / scale).to(keys.dtype).unsqueeze(-1)
    return torch.cat([keys, pad(channel, (0, EXTRA_CHANNELS - 1))], dim=-1)


class PrefixLayer(CacheLayerMixin):
    """One layer's compact prefix and the tokens after it, as transformers' attention sees them.

    Positions go on from ``num_tokens`` (the prefix length), however few slots stand for the prefix. With a log-bias the
    keys it returns have extra channels (``bias_channels``), which only kvcat's attention function understands.

    Args:
        keys: keys of the slots, already extended if ``extended``.
        values: values of the slots.
        num_tokens: prefix length in tokens, at least the number of slots.
        extended: whether keys carry extra channels.
        window: sliding window of this layer in tokens, None without one.
        read_only: updates return slots and new tokens but store nothing (for optimisation and scoring).
    """

    keys: Tensor
    values: Tensor
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        keys: Float[Tensor, "batch kv_heads slots key_dim"],
        values: Float[Tensor, "batch kv_heads slots value_dim"],
        num_tokens: int,
        *,
        extended: bool = False,
        window: int | None = None,
        read_only: bool = False,
    ):
        super().__init__()
        self.keys, self.values = keys, values
        self.num_slots, self.num_tokens, self.num_new = keys.shape[-2], num_tokens, 0
        self.extended, self.window, self.read_only = extended, window, read_only
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the slots are there from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        """Keys and values of slots and all tokens so far, with the new tokens appended.

        A cache of batch b serves a batch that is a multiple of b: every row is repeated, as beams are.

        Raises:
            InputError: the batch is no multiple of the cache's, or a sliding window no longer covers everything.
        """
        batch, rows = key_states.shape[0], self.keys.shape[0]
        total = self.num_tokens + self.num_new + key_states.shape[-2]
        if batch % rows:
            raise InputError(f"a cache of {rows} examples cannot serve a batch of {batch}")
        if self.window is not None and total > self.window:
            raise InputError(
                f"{total} tokens exceed the sliding window of {self.window}: not supported with a compact cache"
            )
        if self.extended:
            key_states = pad(key_states, (0, EXTRA_CHANNELS))
        repeats = batch // rows
        keys = self.keys.repeat_interleave(repeats, dim=0) if repeats > 1 else self.keys
        values = self.values.repeat_interleave(repeats, dim=0) if repeats > 1 else self.values
        keys = torch.cat([keys.to(key_states.dtype), key_states], dim=-2)
        values = torch.cat([values.to(value_states.dtype), value_states], dim=-2)
        if not self.read_only:
            self.keys, self.values, self.num_new = keys, values, self.num_new + key_states.shape[-2]
        return keys, values

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
        self.keys = self.keys.repeat_interleave(repeats, dim=0)
        self.values = self.values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Int[Tensor, " rows"]) -> None:
        """Keeps the given rows."""
        self.keys = self.keys[indices]
        self.values = self.values[indices]
