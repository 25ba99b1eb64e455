"""Keys turned to other positions, with the model's own rotary embedding."""

import inspect
import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from kvcat.cache import cache_argument
from kvcat.errors import InputError
from kvcat.models.structure import frozen, relative_error
from kvcat.types import Float, Int, Tensor

_LENGTH_DEPENDENT = ("dynamic", "longrope")
_PROBE_TOKENS = 8
_TOLERANCE = {torch.float16: 0.1, torch.bfloat16: 0.2}
_TURNED: WeakKeyDictionary[PreTrainedModel, dict[int, list[bool]]] = WeakKeyDictionary()


class KeyRotation:
    """Turns the keys of a model's layers by a number of positions, as if their tokens stood elsewhere.

    With R(p) the rotation that the model's rotary embedding applies at position p, keys R(p) k become R(p + shift) k.
    The rotation comes from the model's own modules, with their scaling and pairing of channels. It is tried on the
    model itself: of the same few tokens at two positions, each layer's keys of the one must become those of the other,
    turned or (layers without positions) unturned; once for every model and shift.

    Args:
        model: a causal LM with rotary position embeddings.
        shift: positions added; negative turns towards the beginning.

    Raises:
        InputError: no rotary embedding, one that depends on the length of the text, or keys that do not turn.
    """

    def __init__(self, model: PreTrainedModel, shift: int):
        self.shift, self.rotary = shift, rotary_module(model)
        config, name = model.config.get_text_config(decoder=True), type(model).__name__
        if getattr(config, "kv_lora_rank", None):
            raise InputError(f"{name}: keys of latent attention cannot be turned")
        types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        by_type = any(hasattr(self.rotary, f"{kind}_inv_freq") for kind in types)
        self.layer_types = types if by_type else [None] * len(types)
        tried = _TURNED.setdefault(model, {})
        self.turned = tried.get(shift, [True] * len(types))
        if shift in tried or not shift:
            return
        start, tolerance = max(0, -shift), _TOLERANCE.get(model.dtype, 0.01)
        for layer, (before, after) in enumerate(_keys_at(model, start, start + shift)):
            turned, unturned = relative_error(self(before, layer), after), relative_error(before, after)
            if not min(turned, unturned) <= tolerance:
                error = f"(error {min(turned, unturned):.2g})"
                raise InputError(f"{name}: the keys of layer {layer} do not turn with their position {error}")
            self.turned[layer] = turned <= unturned
        tried[shift] = self.turned

    def __call__(
        self,
        keys: Float[Tensor, "batch kv_heads slots head_dim"],
        layer: int,
        shift: int | Int[Tensor, " slots"] | None = None,
    ) -> Float[Tensor, "batch kv_heads slots head_dim"]:
        """One layer's keys, rotated at their own positions, after the turn by ``shift`` (None: ``self.shift``)."""
        at, places = torch.as_tensor(self.shift if shift is None else shift).view(-1).unique(return_inverse=True)
        kind = self.layer_types[layer]
        has_positions = kind is None or hasattr(self.rotary, f"{kind}_inv_freq")
        if not (at.any() and self.turned[layer] and has_positions):
            return keys
        wide = keys if keys.dtype == torch.float64 else keys.float()
        at = at.unsqueeze(0).to(keys.device)
        cos, sin = self.rotary(wide, at) if kind is None else self.rotary(wide, at, kind)
        # the keys have the attention factor of YaRN already
        factor = getattr(self.rotary, f"{kind}_attention_scaling" if kind else "attention_scaling", 1.0)
        rotated, passed = wide.tensor_split([cos.shape[-1]], dim=-1)
        cos, sin = ((x / factor).index_select(1, places.to(x.device)) for x in (cos, sin))
        turned = self._apply(rotated, cos, sin)
        return (torch.cat([turned, passed], dim=-1) if passed.shape[-1] else turned).to(keys.dtype)

    def _apply(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The keys after the model's own rotation, a function of (q, k, cos, sin) or, in Gemma 4, of (x, cos, sin)."""
        apply: Any = sys.modules[type(self.rotary).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
        if list(inspect.signature(apply).parameters)[1] == "cos":
            return apply(keys, cos, sin)
        return apply(keys[:, :1], keys, cos, sin)[1]


def rotary_module(model: PreTrainedModel) -> nn.Module:
    """The module that makes the model's cosines and sines.

    Raises:
        InputError: none, or one whose rotation of a position depends on the length of the text.
    """
    found, kind = [m for name, m in model.named_modules() if name.split(".")[-1] == "rotary_emb"], type(model).__name__
    if not found or not hasattr(sys.modules[type(found[0]).__module__], "apply_rotary_pos_emb"):
        raise InputError(f"{kind} has no rotary position embedding: its keys cannot be turned")
    types = getattr(found[0], "rope_type", "default")
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    # factors that are the same for short and long texts depend on no length
    is_fixed = "short_factor" in parameters and parameters["short_factor"] == parameters.get("long_factor")
    for name in types.values() if isinstance(types, dict) else [types]:
        if name in _LENGTH_DEPENDENT and not is_fixed:
            reason = f"rotary embeddings of type {name!r} depend on the length of the text"
            raise InputError(f"{kind}: {reason}: its keys cannot be turned")
    return found[0]


@torch.no_grad()
def _keys_at(model: PreTrainedModel, *starts: int) -> list[tuple[Tensor, ...]]:
    """Every layer's keys of a few tokens from several positions on, by one forward."""
    vocab, cache = model.config.get_text_config(decoder=True).vocab_size, DynamicCache()
    tokens = torch.arange(_PROBE_TOKENS, device=model.device).expand(len(starts), -1) * 7 % vocab
    positions = torch.stack([torch.arange(start, start + _PROBE_TOKENS, device=tokens.device) for start in starts])
    with frozen(model):
        model.base_model(input_ids=tokens, position_ids=positions, use_cache=True, **cache_argument(cache))
    return [layer.keys.split(1) for layer in cache.layers]  # type: ignore[union-attr]
