"""Where things are in an unmodified transformers model."""

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcat.errors import InputError
from kvcat.types import Float, Tensor


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers, first to last.

    Raises:
        InputError: the model has no list of that many layers.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise InputError(f"{type(model).__name__} is not supported: it has no list of {count} decoder layers")


def model_name(model: PreTrainedModel) -> str:
    """What the model was loaded as: its Hub name, or the last part of its folder; its class where it was not loaded."""
    name = model.config.name_or_path
    if not name:
        return type(model).__name__
    folder = Path(name).expanduser()
    return folder.resolve().name if folder.is_absolute() or folder.exists() else name


def logits_from_hidden(model: PreTrainedModel, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
    """Logits from the input of the head: its matrix and bias, then the model's own scale and soft-cap.

    Cohere multiplies by ``logit_scale``, Granite divides by ``logits_scaling``, Gemma's cap c is c tanh(logits / c).
    ``self_test`` compares the result with the model's.

    Args:
        model: a causal LM.
        hidden: ``last_hidden_state`` of the model without head, in any dtype.

    Raises:
        InputError: the model has no linear head.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise InputError(f"{type(model).__name__} is not supported: it has no language-model head")
    text = model.config.get_text_config(decoder=True)
    weight = getattr(head, "weight", None)
    logits = head(
        hidden if weight is None or torch.is_autocast_enabled(hidden.device.type) else hidden.to(weight.dtype)
    )
    if (multiplier := getattr(text, "logit_scale", None)) is not None:
        logits = logits * multiplier
    if (divisor := getattr(text, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(text, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


def hidden_states(model: PreTrainedModel, **inputs: object) -> Float[Tensor, "batch tokens hidden"]:
    """The input of the head for every token.

    Args:
        model: a causal LM.
        inputs: keywords of its forward.
    """
    return model.base_model(**inputs).last_hidden_state
