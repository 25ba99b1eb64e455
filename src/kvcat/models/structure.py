"""Where things are in an unmodified transformers model, and how its weights stay as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def hidden_states(model: PreTrainedModel, **inputs: object) -> Float[Tensor, "batch tokens hidden"]:
    """The input of the head for every token.

    Args:
        model: a causal LM.
        inputs: keywords of its forward.
    """
    return model.base_model(**inputs).last_hidden_state


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Freeze a model for the duration of a block: evaluation mode, no gradients of its parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    training = [m for m in model.modules() if m.training]
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        model.eval()
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True
