"""PEFT adapters inside a model, which change what it computes without being its weights."""

from torch import nn

from kvcat.attention import check_not_wrapped
from kvcat.errors import InputError


def check_no_adapters(model: nn.Module, doing: str) -> None:
    """Raise ``InputError`` for a model that holds adapters, active or not.

    PEFT replaces a layer by one that holds the old layer and the adapters' tensors. Such layers are
    recognised by an attribute, so that peft need not be installed.

    Args:
        doing: the participle in the message, such as "saved".
    """
    check_not_wrapped(model)
    if any(hasattr(type(module), "adapter_layer_names") for module in model.modules()):
        raise InputError(
            f"{type(model).__name__} holds PEFT adapters and cannot be {doing}: merge them "
            "(peft's merge_and_unload), or load the model without them"
        )
