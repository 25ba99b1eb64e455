"""What identifies the weights of a model."""

import hashlib
import json
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from kvcat.types import Tensor

_CONFIG_KEYS = (
    "model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rope_parameters", "rms_norm_eps", "layer_norm_eps", "sliding_window", "layer_types", "attn_logit_softcapping",
    "final_logit_softcapping", "query_pre_attn_scalar", "logit_scale", "logits_scaling", "attention_multiplier",
    "residual_multiplier", "embedding_multiplier",
)  # fmt: skip
# hashed only where a model has them, so that other fingerprints stay what they were
_ADDED_KEYS = ("no_rope_layers", "use_parallel_residual", "norm_epsilon", "num_experts_per_tok")
_known: WeakKeyDictionary[nn.Module, tuple[tuple[tuple[int, int], ...], str]] = WeakKeyDictionary()


def hash_tensor(digest: Any, name: str, tensor: Tensor) -> None:
    """Feeds name, dtype, shape and bytes of a tensor to a hashlib digest."""
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of a model's class, the configuration that shapes its output, and all parameters.

    Remembered until a parameter is replaced or written to (writes through ``.data`` go unnoticed, as to autograd).
    """
    parameters = dict(model.named_parameters())
    traceable = not any(p.is_inference() for p in parameters.values())
    state = tuple((p.data_ptr(), p._version) for p in parameters.values()) if traceable else ()
    if traceable and model in _known and _known[model][0] == state:
        return _known[model][1]
    digest = hashlib.sha256(type(model).__name__.encode())
    config = getattr(model, "config", None)
    text_config = config.get_text_config() if config is not None else None
    shape = {key: getattr(text_config, key, None) for key in _CONFIG_KEYS}
    shape |= {key: getattr(text_config, key) for key in _ADDED_KEYS if hasattr(text_config, key)}
    digest.update(json.dumps(shape, sort_keys=True, default=str).encode())
    for name in sorted(parameters):
        hash_tensor(digest, name, parameters[name])
    if traceable:
        _known[model] = (state, digest.hexdigest())
    return digest.hexdigest()
