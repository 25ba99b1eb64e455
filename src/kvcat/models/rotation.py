"""Moves keys to other positions with the model's rotary embedding."""

import inspect
import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from kvcat.cache import cache_argument, recurrent_layers
from kvcat.errors import InputError
from kvcat.models.exact_copy import exact_copy
from kvcat.models.structure import frozen, relative_error
from kvcat.types import Float, Int, Tensor

_LENGTH_DEPENDENT = ("dynamic", "longrope")
_WITHOUT_POSITIONS = ("jamba",)
_PROBE_TOKENS = 8
_TOLERANCE = 0.01  # float32 angles of far positions
_TURNED: WeakKeyDictionary[PreTrainedModel, dict[int, list[bool]]] = WeakKeyDictionary()


class KeyRotation:
    """Rotates a model's keys to other positions, as if their tokens were ``shift`` positions later.

    With R(p) the rotation that the model's rotary embedding applies at position p, keys R(p) k
    become R(p + shift) k. The rotation comes from the model's modules, with their scaling and
    pairing of channels. The constructor tests it once for every shift on an ``exact_copy``: the
    keys of a few tokens at one position, after the rotation, must equal those of the same tokens
    ``shift`` positions later. In layers without positions the keys must be equal without the
    rotation.

    Args:
        model: a causal LM with rotary position embeddings, or one whose attention has no positions
            (Jamba), where keys do not change.
        shift: positions added; negative turns towards the beginning.

    Raises:
        InputError: positions without a rotary embedding, one that depends on the length of the
            text, or keys that do not turn.
    """

    def __init__(self, model: PreTrainedModel, shift: int):
        self.shift = shift
        config = model.config.get_text_config(decoder=True)
        # attention of Jamba and of some Granite hybrids does not depend on positions
        has_positions = config.model_type not in _WITHOUT_POSITIONS
        if config.model_type == "granitemoehybrid":
            has_positions = config.position_embedding_type == "rope"
        self.rotary = rotary_module(model) if has_positions else None
        if getattr(config, "kv_lora_rank", None):
            name = type(model).__name__
            raise InputError(f"{name}: keys of latent attention cannot be moved")
        num_layers = config.num_hidden_layers
        types = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
        # some modules have one set of frequencies for each type of layers
        by_type = any(hasattr(self.rotary, f"{kind}_inv_freq") for kind in types)
        self.layer_types = types if by_type else [None] * len(types)
        self.turned = [True] * len(types)
        tested = _TURNED.setdefault(model, {})
        if shift and shift not in tested:
            exact = exact_copy(model)
            if exact.model is model:
                self._test(model)
                tested[shift] = self.turned
            else:
                of_copy = KeyRotation(exact.model, shift).turned
                tested[shift] = [of_copy[layer] for layer in exact.layers]
        if shift:
            self.turned = tested[shift]

    def _test(self, model: PreTrainedModel) -> None:
        """Set ``turned``: whether each layer's keys depend on their position by a rotation."""
        start = max(0, -self.shift)
        for layer, (before, after) in _keys_at(model, start, start + self.shift).items():
            error_turned = relative_error(self(before, layer), after)
            error_unturned = relative_error(before, after)
            error = min(error_turned, error_unturned)
            if not error <= _TOLERANCE:
                raise InputError(
                    f"{type(model).__name__}: keys of its layers do not rotate with their "
                    f"position (error {error:.2g})"
                )
            self.turned[layer] = error_turned <= error_unturned

    def __call__(
        self,
        keys: Float[Tensor, "batch kv_heads slots head_dim"],
        layer: int,
        shift: int | Int[Tensor, " slots"] | None = None,
    ) -> Float[Tensor, "batch kv_heads slots head_dim"]:
        """One layer's keys, which are rotated at their positions, moved by ``shift``.

        Args:
            keys: after rotation.
            shift: one for all slots or one for each slot; None: ``self.shift``.
        """
        shifts = torch.as_tensor(self.shift if shift is None else shift).view(-1)
        # cosines of each shift are made once; shift_of_slot says which of them a slot has
        shifts, shift_of_slot = shifts.unique(return_inverse=True)
        kind = self.layer_types[layer]
        has_positions = kind is None or hasattr(self.rotary, f"{kind}_inv_freq")
        is_turned = has_positions and self.turned[layer]
        if self.rotary is None or not (shifts.any() and is_turned):
            return keys
        precise = keys if keys.dtype == torch.float64 else keys.float()
        positions = shifts.unsqueeze(0).to(keys.device)
        layer_type = () if kind is None else (kind,)
        cos, sin = self.rotary(precise, positions, *layer_type)  # (1, shifts, cosines)
        # the keys have the attention factor of YaRN already
        factor_name = f"{kind}_attention_scaling" if kind else "attention_scaling"
        factor = getattr(self.rotary, factor_name, 1.0)
        # some modules give a cosine per pair of channels, the others one per channel
        frequencies = getattr(self.rotary, f"{kind}_inv_freq" if kind else "inv_freq", None)
        num_rotated = cos.shape[-1] if frequencies is None else 2 * len(frequencies)
        rotated, unrotated = precise.tensor_split([num_rotated], dim=-1)
        cos = (cos / factor).index_select(1, shift_of_slot.to(cos.device))
        sin = (sin / factor).index_select(1, shift_of_slot.to(sin.device))
        turned = self._apply(rotated, cos, sin)
        if unrotated.shape[-1]:
            turned = torch.cat([turned, unrotated], dim=-1)
        return turned.to(keys.dtype)

    def _apply(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The keys after the rotation of the model's module.

        Its function is one of (q, k, cos, sin) or, in Gemma 4, of (x, cos, sin).
        """
        module: Any = sys.modules[type(self.rotary).__module__]
        apply = module.apply_rotary_pos_emb
        if list(inspect.signature(apply).parameters)[1] == "cos":
            return apply(keys, cos, sin)
        any_queries = keys[:, :1]
        return apply(any_queries, keys, cos, sin)[1]


def rotary_module(model: PreTrainedModel) -> nn.Module:
    """The module that makes the model's cosines and sines.

    Raises:
        InputError: none, or one whose rotation of a position depends on the length of the text.
    """
    class_name = type(model).__name__
    module = _named_rotary(model)
    if module is None:
        raise InputError(f"{class_name} has no rotary position embedding: its keys cannot be moved")
    types = getattr(module, "rope_type", "default")
    text = model.config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or {}
    # factors that are the same for short and long texts depend on no length
    is_fixed = "short_factor" in parameters and (
        parameters["short_factor"] == parameters.get("long_factor")
    )
    for kind in types.values() if isinstance(types, dict) else [types]:
        if kind in _LENGTH_DEPENDENT and not is_fixed:
            raise InputError(
                f"{class_name}: rotary embeddings of type {kind!r} depend on the length of the "
                "text: its keys cannot be moved"
            )
    return module


def _named_rotary(model: nn.Module) -> nn.Module | None:
    """The first module with the usual name; None if there is none or its function is missing."""
    for name, module in model.named_modules():
        if name.split(".")[-1] == "rotary_emb":
            source = sys.modules[type(module).__module__]
            return module if hasattr(source, "apply_rotary_pos_emb") else None
    return None


@torch.no_grad()
def _keys_at(model: PreTrainedModel, *starts: int) -> dict[int, tuple[Tensor, ...]]:
    """The keys of a few tokens at several start positions, by one forward, for every layer that has
    keys.
    """
    vocab = model.config.get_text_config(decoder=True).vocab_size
    recurrent = recurrent_layers(model.config)
    cache = DynamicCache(config=model.config) if recurrent else DynamicCache()
    tokens = torch.arange(_PROBE_TOKENS, device=model.device).expand(len(starts), -1) * 7 % vocab
    offsets = torch.arange(_PROBE_TOKENS, device=tokens.device)
    positions = torch.stack([start + offsets for start in starts])
    inputs = {"input_ids": tokens, "position_ids": positions, **cache_argument(cache)}
    with frozen(model):
        model.base_model(**inputs, use_cache=True)
    layers: Any = cache.layers
    return {
        number: layer.keys.split(1)
        for number, layer in enumerate(layers)
        if number not in recurrent
    }
