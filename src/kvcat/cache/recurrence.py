"""Recurrent states that transformers does not continue as a model reads a text, continued here.

Two families need help after a cache (transformers 5.23 and 5.24):

- Jamba: with several tokens after a state, ``JambaMambaMixer`` starts its state space at zero
  again. Here such a call continues from the state. The state space advances token by token; the
  projections, the convolution and the rest of the model still run on all tokens at once.
- Bamba: without explicit positions the model counts them from 0 after every cache. Here it gets
  those that follow the cache.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import conv1d, silu, softplus
from transformers import PreTrainedModel

from kvcat.attention import exclusive
from kvcat.cache.forward import CACHE_NAME
from kvcat.types import Float, Tensor, at_least_float32

_MIXER = "JambaMambaMixer"
_COUNTS_FROM_ZERO = ("bamba",)


def continue_states(model: PreTrainedModel) -> None:
    """Make a model read tokens after a cache as it reads them in one text, in memory only.

    Nothing changes for a model that does so already, nor in forwards without a cache. A second call
    changes nothing.
    """
    base: Any = model.base_model
    counts_from_zero = model.config.get_text_config(decoder=True).model_type in _COUNTS_FROM_ZERO
    with exclusive(model):
        if counts_from_zero and _with_positions not in base._forward_pre_hooks.values():
            base.register_forward_pre_hook(_with_positions, with_kwargs=True)
        for module in base.modules():
            if type(module).__name__ != _MIXER:
                continue
            forward: Any = module.forward
            if getattr(forward, "func", None) is not _forward:
                module.forward = partial(_forward, module, forward)


def _with_positions(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments with the positions of tokens that follow a cache."""
    past = kwargs.get(CACHE_NAME)
    if past is None or kwargs.get("position_ids") is not None:
        return None
    new_inputs = args[0] if args else kwargs.get("input_ids")
    if new_inputs is None:
        new_inputs = kwargs["inputs_embeds"]
    length = int(past.get_seq_length())
    positions = torch.arange(length, length + new_inputs.shape[1], device=new_inputs.device)
    return args, {**kwargs, "position_ids": positions.unsqueeze(0)}


def _forward(
    mixer: Any,
    stock_forward: Any,
    hidden_states: Float[Tensor, "batch tokens hidden"],
    *args: Any,
    **kwargs: Any,
) -> Float[Tensor, "batch tokens hidden"]:
    """The mixer's forward; several tokens after a state continue it."""
    past = kwargs.get("cache_params", kwargs.get("cache"))
    if past is None or args or hidden_states.shape[1] == 1:
        return stock_forward(hidden_states, *args, **kwargs)
    state: Any = past.layers[mixer.layer_idx]
    if not state.has_previous_state[0] or state.recurrent_states[0] is None:
        return stock_forward(hidden_states, *args, **kwargs)
    return _continued(mixer, hidden_states, past, kwargs.get("attention_mask"))


def _continued(
    mixer: Any,
    hidden_states: Float[Tensor, "batch tokens hidden"],
    past: Any,
    mask: Tensor | None,
) -> Float[Tensor, "batch tokens hidden"]:
    """What the mixer computes for tokens after its state, which it also advances.

    With the state h (channels, state size) and, for each token, the input x, the step dt and the
    vectors B and C: h <- exp(dt A) h + dt x B, and the output is (h C + D x) silu(gate).

    Args:
        mixer: a ``JambaMambaMixer``.
        mask: 1 for tokens, 0 for padding; None: no padding.
    """
    num_tokens = hidden_states.shape[1]
    is_token = None if mask is None else mask.unsqueeze(-1).to(hidden_states.dtype)
    if is_token is not None:
        # padding must not enter the convolution, nor, below, the state
        hidden_states = hidden_states * is_token
    # both (batch, channels, tokens)
    inner, gate = mixer.in_proj(hidden_states).transpose(1, 2).chunk(2, dim=1)
    with_earlier = past.update_conv_state(
        inner, mixer.layer_idx, conv_kernel_size=mixer.conv_kernel_size
    )
    convolution: nn.Conv1d = mixer.conv1d
    convolved = conv1d(
        with_earlier.to(convolution.weight.dtype),
        convolution.weight,
        convolution.bias,
        groups=convolution.groups,
    )
    # the outputs of the new tokens: the first ones belong to earlier tokens
    inputs = mixer.act(convolved[:, :, -num_tokens:]).to(inner.dtype).transpose(1, 2)
    if is_token is not None:
        inputs = inputs * is_token
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    steps, to_state, from_state = mixer.x_proj(inputs).split(sizes, dim=-1)
    # (batch, tokens, channels)
    steps = at_least_float32(softplus(mixer.dt_proj(mixer.dt_layernorm(steps))))
    # (batch, tokens, state size)
    to_state = at_least_float32(mixer.b_layernorm(to_state))
    from_state = at_least_float32(mixer.c_layernorm(from_state))
    wide_inputs = at_least_float32(inputs)
    decay = -at_least_float32(mixer.A_log).exp()  # (channels, state size)
    before = past.layers[mixer.layer_idx].recurrent_states[0]
    state = at_least_float32(before)
    outputs = []
    # one token after another: the fused scan of transformers starts from a state of zeros
    for token in range(num_tokens):
        step = steps[:, token, :, None]  # (batch, channels, 1)
        added = step * wide_inputs[:, token, :, None] * to_state[:, token, None]
        state = (step * decay).exp() * state + added
        outputs.append((state @ from_state[:, token, :, None]).squeeze(-1))
    past.update_recurrent_state(state.to(before.dtype), mixer.layer_idx)
    mixed = torch.stack(outputs, dim=1) + wide_inputs * mixer.D
    mixed = mixed * silu(gate.transpose(1, 2))
    return mixer.out_proj(mixed.to(hidden_states.dtype))
