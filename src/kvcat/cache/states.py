"""States of layers that are not compacted: the last tokens of a sliding window, or a recurrent
state.

A layer with a sliding window reads only its last tokens, and a layer of linear attention, a state
space or a short convolution has a state of fixed size. Such states do not grow with the text. They
are not compressed.
"""

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from kvcat.cache.slots import Rows, in_dtype, repeated
from kvcat.types import Float, Tensor

STATE_TENSORS = r"keys|values|conv\.\d{1,2}|recurrent\.\d{1,2}"
"""Names of a state's tensors in a file."""
_RECURRENT = ("conv", "recurrent")


@dataclass(frozen=True)
class LayerState:
    """What one layer keeps of the prefix besides slots.

    Args:
        tensors: by name, each with the examples first. A sliding window has ``keys`` and
            ``values`` of its last tokens, after rotation. A recurrent layer has ``conv.0`` or
            ``recurrent.0`` or both, and more numbers if it has several states.
    """

    tensors: dict[str, Tensor]

    @property
    def is_window(self) -> bool:
        """Whether the state is that of a sliding window."""
        return "keys" in self.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def batch_size(self) -> int:
        """Number of examples."""
        return len(next(iter(self.tensors.values())))

    def select(self, rows: Rows) -> "LayerState":
        """The given examples."""
        return LayerState({name: tensor[rows] for name, tensor in self.tensors.items()})

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "LayerState":
        """On another device, keys and values in another dtype.

        The dtype of recurrent states does not change, as models choose it.
        """
        tensors = {}
        for name, tensor in self.tensors.items():
            # recurrent sums are float32 in some models of 16 bits: rounding them would add up
            wanted = None if name.startswith("recurrent") else dtype
            tensors[name] = in_dtype(name, tensor.to(device=device), wanted)
        return LayerState(tensors)

    @staticmethod
    def of(layer: Any) -> "LayerState":
        """The state that a layer of a transformers cache holds, copied."""
        if isinstance(layer, DynamicSlidingWindowLayer):
            states: dict[str, Any] = {"keys": layer.keys, "values": layer.values}
            return LayerState({name: tensor.clone() for name, tensor in states.items()})
        tensors = {}  # of a recurrent layer, with the numbers of its states
        for name in _RECURRENT:
            for number, tensor in getattr(layer, f"{name}_states").items():
                if tensor is not None:
                    tensors[f"{name}.{number}"] = tensor.clone()
        return LayerState(tensors)


class WindowState(DynamicSlidingWindowLayer):
    """A sliding window after a compact prefix, as one layer of a transformers cache.

    Args:
        state: the last tokens of the prefix.
        num_tokens: prefix length.
        window: of the layer, tokens.
        read_only: updates store nothing.
    """

    def __init__(self, state: LayerState, num_tokens: int, *, window: int, read_only: bool):
        super().__init__(sliding_window=window)
        self.state = state
        self.num_tokens = num_tokens
        self.read_only = read_only
        self.reset()

    def reset(self) -> None:
        """Drop the tokens after the prefix."""
        self.keys: Tensor = self.state.tensors["keys"]
        self.values: Tensor = self.state.tensors["values"]
        self.dtype = self.keys.dtype
        self.device = self.keys.device
        # positions continue after the whole prefix, of which the window holds the end alone
        self.cumulative_length = self.num_tokens
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the window and of the new tokens."""
        keys = repeated(self.keys, len(key_states)).to(key_states.dtype)
        values = repeated(self.values, len(key_states)).to(value_states.dtype)
        if self.read_only:
            return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)
        self.keys = keys
        self.values = values
        return super().update(key_states, value_states)


class RecurrentState(LinearAttentionLayer):
    """A recurrent state after a compact prefix, as one layer of a transformers cache.

    Args:
        state: after the prefix.
        read_only: updates store nothing.
    """

    def __init__(self, state: LayerState, *, read_only: bool):
        super().__init__(number_of_states=1 + max(_number(name) for name in state.tensors))
        self.state = state
        self.read_only = read_only
        self.reset()

    def reset(self) -> None:
        """Return to the state after the prefix."""
        for name, tensor in self.state.tensors.items():
            kind, number = name.partition(".")[0], _number(name)
            # a clone, because models update these tensors in place
            getattr(self, f"{kind}_states")[number] = tensor.clone()
            getattr(self, f"is_{kind}_states_initialized")[number] = True
            self.has_previous_state[number] = True
            if kind == "conv":
                self.conv_kernel_size[number] = tensor.shape[-1]
            self.device = tensor.device
            self.dtype = tensor.dtype

    def fit_batch(self, batch: int) -> None:
        """Repeat every example as often as a batch needs it; the model reads the state itself."""
        for states in (self.conv_states, self.recurrent_states):
            for number, tensor in states.items():
                if tensor is not None:
                    states[number] = repeated(tensor, batch)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, **options: Any
    ) -> Float[Tensor, "batch ..."]:
        """The state before, followed by the new one."""
        if self.read_only:
            earlier: Any = self.conv_states[state_idx]
            return torch.cat([earlier, conv_states], dim=-1)
        return super().update_conv_state(conv_states, state_idx, **options)

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **options: Any
    ) -> Float[Tensor, "batch ..."]:
        """The new state."""
        if self.read_only:
            return recurrent_states
        return super().update_recurrent_state(recurrent_states, state_idx, **options)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._take(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows."""
        self._take(lambda tensor: tensor[indices.to(tensor.device)])

    def _take(self, function: Callable[[Tensor], Tensor]) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for number, tensor in states.items():
                if tensor is not None:
                    states[number] = function(tensor)


def _number(name: str) -> int:
    return int(name.partition(".")[2] or 0)
