"""A small copy of a model, on which a wrong computation cannot be confused with rounding.

In half precision even transformers' own attention functions differ by some per cent, because large
activations are rounded in every layer. A check of what a class computes, not of how its weights are
rounded, runs on this copy. It computes in float64, with random weights of ordinary size, so that no
activation is large and every attention reaches many tokens. It has one layer of each kind and few
tokens in its vocabulary, so that it needs little memory, and it is on the CPU, whatever the model's
device.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from kvcat.attention import exclusive
from kvcat.cache import recurrent_layers
from kvcat.models.structure import decoder_layers
from kvcat.types import Float, Tensor

_VOCABULARY = 1024
_NUM_LAYERS = 2  # at least, if the model has them: one layer may depend on another
_LARGEST = 2.0  # of the biases and of the norms' weights
_COPIES: WeakSet[PreTrainedModel] = WeakSet()


@dataclass(frozen=True, eq=False)
class ExactCopy:
    """A copy of a model that computes in float64, with random weights and one layer of each kind.

    Args:
        model: the copy, in evaluation mode, without gradients, on the CPU.
        layers: for each layer of the original, the copy's layer of the same kind.
    """

    model: PreTrainedModel
    layers: list[int]


def exact_copy(model: PreTrainedModel) -> ExactCopy:
    """The float64 copy of a model; a copy itself is returned as it is.

    A model with recurrent states on an accelerator may have kernels that run neither in float64 nor
    on the CPU: its copy keeps dtype, device and weights.
    """
    layers = decoder_layers(model)
    if model in _COPIES:
        return ExactCopy(model, list(range(len(layers))))
    kinds = _layer_kinds(layers, model.config.get_text_config(decoder=True))
    is_exact = model.device.type == "cpu" or not recurrent_layers(model.config)
    numbers = _first_layers(kinds)
    with exclusive(model):  # another thread's hooks would be copied
        shallow = _shallow_copy(model, layers, numbers, exact=is_exact)
    if is_exact and type(shallow)._can_set_experts_implementation():
        shallow.set_experts_implementation("eager")  # the others have no float64
    _COPIES.add(shallow)
    kinds_of_copy = [kinds[number] for number in numbers]
    return ExactCopy(shallow, [kinds_of_copy.index(kind) for kind in kinds])


def few_layers(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the layers and the vocabulary of ``exact_copy`` and the model's dtype and device.

    Its layers have the model's own weights: nothing large is copied.
    """
    layers = decoder_layers(model)
    kinds = _layer_kinds(layers, model.config.get_text_config(decoder=True))
    with exclusive(model):
        return _shallow_copy(model, layers, _first_layers(kinds), exact=False)


class StaysDouble(TorchFunctionMode):
    """A block in which float64 stays float64 in transformers.

    Norms, rotary embeddings and softmax of transformers otherwise compute in float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function's result, without a conversion from float64 to float32."""
        kwargs = dict(kwargs or {})
        is_double = bool(args) and getattr(args[0], "dtype", None) == torch.float64
        if is_double and func in (torch.Tensor.to, torch.Tensor.float):
            dtypes = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, torch.dtype)]
            if func is torch.Tensor.float or dtypes == [torch.float32]:
                return args[0]
        if is_double and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def _layer_kinds(layers: nn.ModuleList, text: PreTrainedConfig) -> list[Any]:
    """A description of each layer; layers with equal ones compute alike.

    It has the classes, the settings and the shapes of the layer's modules, and the layer's entries
    in the configuration's lists.
    """
    lists = _lists_by_layer(text)
    kinds = []
    for number, layer in enumerate(layers):
        kind: list[Any] = [(name, repr(values[number])) for name, values in lists.items()]
        for path, module in layer.named_modules():
            kind.append((path, type(module)))
            for name, value in sorted(vars(module).items()):
                is_number_of_layer = _counts_layers(name) and type(value) is int
                if isinstance(value, bool | int | float | str) and not is_number_of_layer:
                    kind.append((path, name, value))
                elif name == "forward":
                    kind.append((path, name, number))  # replaced on this module alone
        kind += [(path, tuple(weight.shape)) for path, weight in layer.named_parameters()]
        kinds.append(kind)
    return kinds


def _counts_layers(name: str) -> bool:
    return "idx" in name or "index" in name or name.startswith("layer")


def _lists_by_layer(text: PreTrainedConfig) -> dict[str, list[Any]]:
    """The lists of a configuration with one entry for each layer."""
    lists = {}
    for name, values in vars(text).items():
        if isinstance(values, list | tuple) and len(values) == text.num_hidden_layers:
            lists[name] = list(values)
    return lists


def _first_layers(kinds: list[Any]) -> list[int]:
    """The numbers of the first layer of each kind, and of as many more as are needed."""
    numbers = [number for number, kind in enumerate(kinds) if kind not in kinds[:number]]
    others = [number for number in range(len(kinds)) if number not in numbers]
    return sorted(numbers + others[: max(0, _NUM_LAYERS - len(numbers))])


def _shallow_copy(
    model: PreTrainedModel, layers: nn.ModuleList, numbers: list[int], *, exact: bool
) -> PreTrainedModel:
    """A copy of a model with some of its layers and the first tokens of its vocabulary.

    Args:
        layers: all of its decoder layers.
        numbers: of the layers that the copy has, ascending.
        exact: give the copy random weights in float64 on the CPU; otherwise it shares the
            model's.
    """
    path = next(path for path, module in model.named_modules() if module is layers)
    # by id, what the copy has in place of a part of the model
    memo: dict[int, Any] = {}
    for number, layer in enumerate(layers):
        if number not in numbers:
            memo[id(layer)] = nn.Identity()
    generator = torch.Generator().manual_seed(0)
    for weight, data in _weights_of_copy(model, layers, numbers):
        values = _ordinary(data, generator) if exact else data
        memo[id(weight)] = nn.Parameter(values, requires_grad=False)
    shallow = copy.deepcopy(model, memo)
    layers_of_copy: Any = shallow.get_submodule(path)
    for number in reversed(range(len(layers_of_copy))):
        if number not in numbers:
            del layers_of_copy[number]
    _renumber(layers_of_copy, numbers)
    _cut_config(shallow.config.get_text_config(decoder=True), numbers)
    for module in shallow.modules():
        if isinstance(module, nn.Embedding) and module.weight.shape[0] == _VOCABULARY:
            module.num_embeddings = _VOCABULARY
            module.padding_idx = None
    if exact:
        shallow.to("cpu", torch.float64)  # type: ignore[arg-type]
    return shallow.eval()


def _weights_of_copy(
    model: PreTrainedModel, layers: nn.ModuleList, numbers: list[int]
) -> Iterator[tuple[nn.Parameter, Float[Tensor, "..."]]]:
    """The weights that a copy with these layers needs, each with the part of it that it needs."""
    in_layers = {id(weight) for weight in layers.parameters()}
    kept = {id(weight) for number in numbers for weight in layers[number].parameters()}
    of_tokens = _weights_of_tokens(model)
    text = model.config.get_text_config(decoder=True)
    # channels of the embedding that each layer has for itself (Gemma 4)
    width = getattr(text, "hidden_size_per_layer_input", None) or 0
    for weight in model.parameters():
        if id(weight) in in_layers - kept:
            continue
        data = weight.detach()
        if id(weight) in of_tokens:
            data = data[:_VOCABULARY]
        if width and id(weight) not in in_layers:
            data = _of_layers(data, numbers, len(layers), width)
        yield weight, data


def _renumber(layers: nn.ModuleList, numbers: list[int]) -> None:
    """Give the modules of a copy's layers their new numbers; the old ones are ``numbers``."""
    for position, number in enumerate(numbers):
        for module in layers[position].modules():
            for name, value in vars(module).items():
                if _counts_layers(name) and type(value) is int and value == number:
                    setattr(module, name, position)


def _ordinary(weight: Float[Tensor, "..."], generator: torch.Generator) -> Float[Tensor, "..."]:
    """A weight of the exact copy: a random matrix, or a vector without large numbers."""
    if weight.dim() < 2:
        return weight.to("cpu", torch.float64, copy=True).clamp_(-_LARGEST, _LARGEST)
    bound = (3 / weight.shape[-1]) ** 0.5
    matrix = torch.empty(weight.shape, dtype=torch.float64, device="cpu")
    return matrix.uniform_(-bound, bound, generator=generator)


def _weights_of_tokens(model: PreTrainedModel) -> set[int]:
    """The ids of the weights with a row for each token, of embeddings and of the head."""
    head = model.get_output_embeddings()
    weights = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module is head:
            weights |= {id(weight) for weight in module.parameters(recurse=False)}
    return weights


def _cut_config(text: PreTrainedConfig, numbers: list[int]) -> None:
    """Give a configuration the layers and the vocabulary of the copy."""
    for name, values in _lists_by_layer(text).items():
        setattr(text, name, [values[number] for number in numbers])
    text.num_hidden_layers = len(numbers)
    text.vocab_size = min(text.vocab_size, _VOCABULARY)


def _of_layers(
    weight: Float[Tensor, "..."], numbers: list[int], num_layers: int, width: int
) -> Float[Tensor, "..."]:
    """A weight with ``width`` rows or columns for each layer, for these layers alone."""
    for dim, size in enumerate(weight.shape):
        if size == num_layers * width:
            by_layer = weight.unflatten(dim, (num_layers, width))
            chosen = torch.tensor(numbers, device=weight.device)
            return by_layer.index_select(dim, chosen).flatten(dim, dim + 1)
    return weight
