"""Slots that are hidden from queries far enough after them, by a learned gate per KV head.

DMS and SP-KV share this attention and differ in the gate and in the loss (``train.py``). A query at
i sees the slot at j as usual if i - j < window. Beyond the window, log g_j is added to the score,
with a gate g_j in (0, 1] for each KV head: 0 hides the slot, 1 leaves it. The gate is soft in
training, so that its gradient is the exact one of the loss.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvcat.errors import InputError
from kvcat.models import decoder_layers

NAME = "peer-gated"
LogGate = Callable[[torch.Tensor], torch.Tensor]
"""Makes log gates, at most 0, from the predictor's logits (rows, tokens, kv_heads)."""


class GatePredictors(nn.Module):
    """One linear map per layer, from the input of its attention to a logit for each KV head.

    A logit is ``bias`` plus ``scale`` times the map, which starts at zero: all gates start almost
    open. The scale lets few steps move a logit far.

    Args:
        model: a causal LM, switched to this attention, in memory only.
        window: tokens during which every slot is visible.
        bias: first logit of every gate.
        scale: factor on the map.
    """

    def __init__(self, model: PreTrainedModel, *, window: int, bias: float, scale: float) -> None:
        super().__init__()
        text = model.config.get_text_config(decoder=True)
        self.window = window
        self.bias = bias
        self.scale = scale
        self.linears = nn.ModuleList()
        self.log_gates: list[torch.Tensor] = []
        """Of the last gated forward pass, by layer: (rows, tokens, kv_heads), with gradient."""
        self._log_gate: LogGate | None = None
        model.set_attn_implementation(NAME)
        for layer in decoder_layers(model):
            linear = nn.Linear(text.hidden_size, text.num_key_value_heads)
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
            self.linears.append(linear)
            hook = self._hook_of(linear)
            layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)

    def open_gates(self) -> None:
        """From now on the model is dense."""
        self._log_gate = None

    def use(self, log_gate: LogGate) -> None:
        """From now on the model's slots are gated."""
        self._log_gate = log_gate
        self.log_gates = []

    def _hook_of(self, linear: nn.Linear) -> Callable[..., None]:
        """A hook that gives a layer's attention its gates."""

        def hook(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            attention.peer_gate = None
            if self._log_gate is None:
                return
            hidden = args[0] if args else kwargs["hidden_states"]
            log_gate = self._log_gate(self.bias + self.scale * linear(hidden.float()))
            self.log_gates.append(log_gate)
            attention.peer_gate = (log_gate, self.window)

        return hook


def gate_bias(log_gate: torch.Tensor, window: int) -> torch.Tensor:
    """What is added to the scores: (rows, kv_heads, queries, slots), -inf where not causal.

    Args:
        log_gate: (rows, tokens, kv_heads).
        window: tokens during which a slot is visible whatever its gate.
    """
    num_tokens = log_gate.shape[1]
    positions = torch.arange(num_tokens, device=log_gate.device)
    distance = positions[:, None] - positions[None, :]  # (queries, slots)
    by_slot = log_gate.transpose(1, 2)[:, :, None, :]  # (rows, kv_heads, 1, slots)
    bias = torch.where(distance >= window, by_slot, 0.0)
    return bias.masked_fill(distance < 0, -torch.inf)


def gated_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA attention as transformers computes it, and the gates of the layer where it has some.

    Args are those of transformers; the text has neither padding nor a cache where gates are used.

    Raises:
        InputError: attention with a soft-cap or sinks, which SDPA would leave out.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise InputError(f"{type(module).__name__} is not supported: it has {name}")
    gate = getattr(module, "peer_gate", None)
    if gate is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    assert query.shape[2] == key.shape[2], "gated attention has no cache"
    num_queries_per_head = query.shape[1] // key.shape[1]
    bias = gate_bias(*gate).to(query.dtype)
    if attention_mask is not None:  # that of a sliding window
        bias = bias.masked_fill(~attention_mask, -torch.inf)
    out = functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(num_queries_per_head, dim=1),
        value.repeat_interleave(num_queries_per_head, dim=1),
        attn_mask=bias.repeat_interleave(num_queries_per_head, dim=1),
        scale=scaling,
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, gated_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
