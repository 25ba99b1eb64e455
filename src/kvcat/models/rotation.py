"""Keys turned to other positions, with the model's own rotary embedding."""

import copy
import sys
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from kvcat.errors import InputError
from kvcat.models.structure import frozen
from kvcat.types import Float, Tensor

_LENGTH_DEPENDENT = ("dynamic", "longrope")
_PROBE_TOKENS = 8
_TOLERANCE = {torch.float64: 0.01, torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.2}


class KeyRotation:
    """Turns the keys of a model's layers by a number of positions, as if their tokens stood elsewhere.

    With R(p) the rotation that the model's rotary embedding applies at position p, keys R(p) k become R(p + shift) k.
    The rotation comes from the model's own modules, so that every way of scaling and of pairing channels, and rotary
    embeddings of a part of the channels, are theirs. That this holds is tried on the model itself: it reads the same
    few tokens at two positions, and each layer's keys of the one must become those of the other, turned or (layers
    without positions) unturned.

    Args:
        model: a causal LM with rotary position embeddings.
        shift: positions added; negative turns towards the beginning.

    Raises:
        InputError: no rotary embedding, one that depends on the length of the text, or keys that do not turn.
    """

    def __init__(self, model: PreTrainedModel, shift: int):
        self.shift, self.name = shift, type(model).__name__
        self.rotary = rotary_module(model)
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "kv_lora_rank", None):
            raise InputError(f"{self.name}: keys of latent attention cannot be turned")
        types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self.layer_types = types if hasattr(self.rotary, f"{types[0]}_inv_freq") else [None] * len(types)
        self.turned = [True] * len(types)
        if shift:
            self.turned = _layers_that_turn(self, model)

    def __call__(
        self, keys: Float[Tensor, "batch kv_heads slots head_dim"], layer: int
    ) -> Float[Tensor, "batch kv_heads slots head_dim"]:
        """The keys of one layer, rotated at their own positions, after the turn, in their own dtype."""
        return self.turn(keys, layer) if self.shift and self.turned[layer] else keys

    def by(self, shift: int) -> "KeyRotation":
        """The same rotation by another number of positions, not 0, without trying the model again."""
        other = copy.copy(self)
        other.shift = shift
        return other

    def turn(
        self, keys: Float[Tensor, "batch kv_heads slots head_dim"], layer: int
    ) -> Float[Tensor, "batch kv_heads slots head_dim"]:
        """The same for a layer that is known to have rotary positions."""
        wide = keys if keys.dtype == torch.float64 else keys.float()
        kind = self.layer_types[layer]
        at = torch.full((1, 1), self.shift, device=keys.device)
        cos, sin = self.rotary(wide, at) if kind is None else self.rotary(wide, at, kind)
        # the keys have the attention factor of YaRN already
        factor = getattr(self.rotary, f"{kind}_attention_scaling" if kind else "attention_scaling", 1.0)
        apply: Any = sys.modules[type(self.rotary).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
        channels = cos.shape[-1]
        part = wide[..., :channels]
        _, turned = apply(part, part, cos / factor, sin / factor)
        return torch.cat([turned, wide[..., channels:]], dim=-1).to(keys.dtype)


def rotary_module(model: PreTrainedModel) -> nn.Module:
    """The module that makes the model's cosines and sines.

    Raises:
        InputError: none, or one whose rotation of a position depends on the length of the text.
    """
    found = [module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] == "rotary_emb"]
    if not found or not hasattr(sys.modules[type(found[0]).__module__], "apply_rotary_pos_emb"):
        raise InputError(f"{type(model).__name__} has no rotary position embedding: its keys cannot be turned")
    kinds = getattr(found[0], "rope_type", "default")
    for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
        if kind in _LENGTH_DEPENDENT:
            raise InputError(
                f"{type(model).__name__}: rotary embeddings of type {kind!r} depend on the length of the text: "
                "its keys cannot be turned"
            )
    return found[0]


@torch.no_grad()
def _layers_that_turn(rotation: KeyRotation, model: PreTrainedModel) -> list[bool]:
    """For every layer, whether its keys carry rotary positions; read off the model's own keys at two positions."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.arange(_PROBE_TOKENS, device=model.device).unsqueeze(0) * 7 % vocab
    start = max(0, -rotation.shift)
    here, there = (_keys_at(model, tokens, at) for at in (start, start + rotation.shift))
    tolerance, turns = _TOLERANCE.get(model.dtype, 0.01), []
    for layer, (before, after) in enumerate(zip(here, there, strict=True)):
        turned, unturned = _distance(rotation.turn(before, layer), after), _distance(before, after)
        if not min(turned, unturned) <= tolerance:
            error = min(turned, unturned)
            raise InputError(
                f"{rotation.name}: the keys of layer {layer} do not turn with their position (error {error:.2g})"
            )
        turns.append(turned <= unturned)
    return turns


def _distance(made: Tensor, wanted: Tensor) -> float:
    return ((made - wanted).float().norm() / wanted.float().norm()).item()


def _keys_at(model: PreTrainedModel, tokens: Tensor, start: int) -> list[Tensor]:
    cache = DynamicCache()
    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device).unsqueeze(0)
    with frozen(model):
        model.base_model(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True)
    return [layer.keys for layer in cache.layers]  # type: ignore[union-attr]
