"""The layers and the hidden states of an unmodified transformers model."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvcat.attention import exclusive
from kvcat.errors import InputError
from kvcat.files import expanded
from kvcat.types import Float, Tensor

_OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense")
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers, first to last.

    Raises:
        InputError: the model has no list of as many layers as its configuration names.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise InputError(
        f"{type(model).__name__} is not supported: it has no list of {count} decoder layers"
    )


def attention_sinks(model: PreTrainedModel) -> list[Float[Tensor, " heads"] | None]:
    """Per layer, the logits of its query heads' attention sinks in nats; None where it has none.

    A sink is one more logit in the softmax, without a value. ``kvcat_attention`` rejects sinks that
    are not the attribute ``sinks`` of the attention module.
    """
    sinks: list[Tensor | None] = []
    for layer in decoder_layers(model):
        of_modules = [getattr(module, "sinks", None) for module in layer.modules()]
        of_layer = [logits for logits in of_modules if isinstance(logits, Tensor)]
        sinks.append(of_layer[0].detach() if of_layer else None)
    return sinks


def output_gains(
    model: PreTrainedModel, kv_heads: Sequence[int], layers: Sequence[int] | None = None
) -> list[Float[Tensor, " kv_heads"]]:
    """Per layer, how much each KV head's attention output moves the residual stream.

    This is the mean squared norm of the head's columns in the attention's output projection. It is
    1 where a layer has no projection of a usual name.

    Args:
        kv_heads: number of KV heads of each layer.
        layers: numbers of these layers; None: all.
    """
    gains = []
    modules = decoder_layers(model)
    numbers = range(len(modules)) if layers is None else layers
    for number, num_heads in zip(numbers, kv_heads, strict=True):
        columns = torch.ones(num_heads)
        _, projection = next(_output_projections(modules[number]), ("", None))
        if projection is not None and projection.in_features % num_heads == 0:
            columns = projection.weight.detach().float().square().sum(0)
        gains.append(columns.reshape(num_heads, -1).mean(1))
    return gains


def attention_child(layer: nn.Module) -> nn.Module | None:
    """The direct child of a layer with the output projection; None if it has no usual name."""
    for name, _ in _output_projections(layer):
        return layer.get_submodule(name.partition(".")[0])
    return None


def _output_projections(layer: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear modules of a layer that have a usual name of an output projection."""
    for name, module in layer.named_modules():
        if name.rpartition(".")[2] in _OUTPUT_PROJECTIONS and isinstance(module, nn.Linear):
            yield name, module


def positions_of(config: PreTrainedConfig) -> int:
    """Longest sequence of a model; ``sys.maxsize`` if its configuration sets no limit."""
    text = config.get_text_config(decoder=True)
    return getattr(text, "max_position_embeddings", None) or sys.maxsize


def check_length(what: str, num_tokens: int, config: PreTrainedConfig) -> None:
    """Raise an ``InputError`` if a sequence has more tokens than a model has positions."""
    positions = positions_of(config)
    if num_tokens > positions:
        raise InputError(f"{what}: {num_tokens} tokens exceed the model's {positions} positions")


def model_name(model: PreTrainedModel) -> str:
    """The model's Hub name, or the name of its folder; its class if it was not loaded."""
    name = model.config.name_or_path
    if not name:
        return type(model).__name__
    folder = expanded(name)
    return folder.resolve().name if folder.is_absolute() or folder.exists() else name


def hidden_states(model: PreTrainedModel, **inputs: object) -> Float[Tensor, "batch tokens hidden"]:
    """The input of the head for every token."""
    return model.base_model(**inputs).last_hidden_state


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """A block in which a model is in evaluation mode and its parameters get no gradients.

    One thread at a time is in such a block of a model (``exclusive``).
    """
    with exclusive(model):
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        training = [module for module in model.modules() if module.training]
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


def same(actual: Tensor, expected: Tensor) -> bool:
    """Whether the two differ by no more than rounding."""
    return relative_error(actual, expected) <= _TOLERANCE.get(expected.dtype, 5e-2)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of ``expected``."""
    error = (actual.double() - expected.double()).norm()
    size = expected.double().norm().clamp_min(1e-30)
    return (error / size).item()
