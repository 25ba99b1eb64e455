"""PEFT adapters inside a model: the tensors of the model itself and those of active adapters.

PEFT replaces a layer by one that holds the old layer and the adapters' tensors by name. Such layers
are recognised by their attributes, so that peft need not be installed.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from kvcat.attention import check_not_wrapped
from kvcat.errors import InputError
from kvcat.types import Tensor

_KEPT_LAYERS = ("base_layer", "original_module")  # where PEFT keeps the layer that it replaced
_SETTINGS = (bool, int, float, str)  # types of settings that count


class Tensors(NamedTuple):
    """Tensors of a model by name, as the model without adapters names them."""

    base: dict[str, Tensor]
    active: dict[str, dict[str, Tensor]]  # by adapter
    settings: dict[str, dict[str, Any]]  # by adapter: scaling, rank, ... of each layer


def check_no_adapters(model: nn.Module, doing: str) -> None:
    """Raise ``InputError`` for a model that holds adapters, active or not.

    Args:
        model: any model.
        doing: the participle in the message, such as "saved".
    """
    check_not_wrapped(model)
    if _adapted_layers(model):
        raise InputError(
            f"{type(model).__name__} holds PEFT adapters and cannot be {doing}: merge them "
            "(peft's merge_and_unload), or load the model without them"
        )


def tensors_of(model: nn.Module) -> Tensors:
    """Parameters and buffers of a model and of its active adapters.

    Adapters that are off, or merged into the weights, add nothing. No tensor's name contains the
    name of an adapter.
    """
    layers = _adapted_layers(model)
    tensors = Tensors({}, {}, {})
    for name, tensor in _named_tensors(model):
        layer_name = next((outer for outer in layers if name.startswith(f"{outer}.")), None)
        if layer_name is None:
            tensors.base[_plain_name(name)] = tensor
            continue
        words = name.removeprefix(f"{layer_name}.").split(".")
        if words[0] in _KEPT_LAYERS:
            tensors.base[_plain_name(name)] = tensor
            continue
        active = _active(layers[layer_name])
        adapter = next((word for word in words if word in active), None)
        if adapter is not None:
            words.remove(adapter)
            adapter_tensors = tensors.active.setdefault(adapter, {})
            adapter_tensors[_plain_name(".".join([layer_name, *words]))] = tensor
    for name, layer in layers.items():
        for adapter in _active(layer):
            if not _holds(layer, adapter):
                continue
            adapter_settings = tensors.settings.setdefault(adapter, {})
            adapter_settings[_plain_name(name)] = _settings_of(layer, adapter)
    return tensors


def _holds(layer: nn.Module, adapter: str) -> bool:
    """Whether a layer has tensors or settings of an adapter.

    PEFT makes an adapter active in the layers of all adapters, even in layers that this adapter
    does not change.
    """
    names = [name.split(".") for name, _ in _named_tensors(layer)]
    return any(adapter in words for words in names) or bool(_settings_of(layer, adapter))


def _settings_of(layer: nn.Module, adapter: str) -> dict[str, Any]:
    """The scaling, rank and other plain settings that a layer keeps for an adapter."""
    settings = {}
    for key, value in vars(layer).items():
        if isinstance(value, dict) and isinstance(value.get(adapter), _SETTINGS):
            settings[key] = value[adapter]
    return settings


def _adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost layers that PEFT put in place of layers of the model, by name."""
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in layers)
        if hasattr(type(module), "adapter_layer_names") and not is_inside:
            layers[name] = module
    return layers


def _active(layer: Any) -> list[str]:
    """Adapters that change a layer's output now."""
    is_off = layer.disable_adapters or getattr(layer, "merged", False)
    active = [] if is_off else layer.active_adapters
    return [active] if isinstance(active, str) else list(active)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _plain_name(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in _KEPT_LAYERS)
