"""Fixes one set of factors for rotary embeddings whose factors depend on the length of the text.

LongRoPE (Phi-3, Phi-4-mini, MiniCPM) has two sets of factors: a short one for texts of at most
``original_max_position_embeddings`` tokens, which is called the border here, and a long one for
longer texts. transformers chooses the set again in every forward, by the highest position. Keys
that were rotated with one set are wrong for queries of the other, so every forward with a compact
cache uses the set that its keys have. Dynamic NTK has different factors for every length beyond the
border, so only lengths up to the border are supported.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig

from kvcat.errors import InputError
from kvcat.types import Float, Tensor

Factors = Literal["short", "long"]
_TESTED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def rope_border(config: PreTrainedConfig) -> int | None:
    """Longest text with the short factors, in tokens.

    None for a model whose factors do not depend on the length.

    Raises:
        InputError: types of layers with different borders.
    """
    borders: set[int] = set()
    text = config.get_text_config(decoder=True)
    for parameters in _rope_parameters(text):
        kind = _kind(parameters)
        # equal for all lengths, as in a widened checkpoint (kvcat widen)
        has_one_set = all(
            parameters.get(f"short_{name}") == parameters.get(f"long_{name}")
            for name in ("factor", "mscale")
        )
        if kind == "longrope" and not has_one_set:
            original = parameters.get("original_max_position_embeddings")
            borders.add(original or text.max_position_embeddings)
        elif "dynamic" in kind:
            borders.add(text.max_position_embeddings)
    if len(borders) > 1:
        lengths = " and ".join(str(border) for border in sorted(borders))
        raise InputError(
            f"{config.model_type}: rotary factors that change at {lengths} tokens are not supported"
        )
    return next(iter(borders), None)


def rope_factors(config: PreTrainedConfig, num_tokens: int) -> Factors | None:
    """The factors that transformers uses for a text of ``num_tokens`` tokens.

    None if they do not depend on the length.

    Raises:
        InputError: more tokens than dynamic NTK has fixed factors for.
    """
    border = rope_border(config)
    if border is None:
        return None
    if num_tokens <= border:
        return "short"
    text = config.get_text_config(decoder=True)
    if any("dynamic" in _kind(parameters) for parameters in _rope_parameters(text)):
        raise InputError(
            f"{config.model_type}: the factors of its dynamic rotary embeddings change with every "
            f"length beyond {border} tokens: {num_tokens} tokens are not supported"
        )
    return "long"


def check_length(config: PreTrainedConfig, factors: Factors, num_tokens: int) -> None:
    """Raise ``InputError`` for a text that is too long for keys of the short factors."""
    border = rope_border(config)
    if factors == "short" and border is not None and num_tokens > border:
        rope_factors(config, num_tokens)  # rejects dynamic NTK, where more room would not help
        raise InputError(
            f"{config.model_type}: the cache was made with the rotary factors for at most {border} "
            f"tokens, and here are {num_tokens}: make it again with room for the text that follows "
            "(room=, kvcat compress --room)"
        )


@contextmanager
def held_factors(model: nn.Module, factors: Factors | None) -> Iterator[None]:
    """A block in which every forward has these rotary factors, whatever its positions.

    The buffers of the model's rotary modules are replaced and put back afterwards. The first call
    for a model tests whether its modules then rotate as they should.

    Args:
        model: a model or its ``base_model``.
        factors: which set; None: nothing changes.

    Raises:
        InputError: no rotary modules, or some that choose their factors in another way.
    """
    if factors is None:
        yield
        return
    border = rope_border(model.config)  # type: ignore[arg-type]
    modules = _rotary_modules(model)
    kind = type(model).__name__
    if border is None or not modules:
        raise InputError(
            f"{kind} is not supported: it has no rotary modules whose factors could be held"
        )
    if factors not in _TESTED.setdefault(model, set()):
        for module, layer_type in modules:
            if not _can_hold(module, layer_type, factors, border):
                raise InputError(
                    f"{kind} is not supported: its rotary factors follow the length of the text "
                    "in a way that kvcat does not know"
                )
        _TESTED[model].add(factors)
    restores = [_hold(module, layer_type, factors, border) for module, layer_type in modules]
    try:
        yield
    finally:
        for restore in reversed(restores):
            restore()


def _rope_parameters(text: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rotary parameters of a configuration, one table for each type of layers."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [table for table in parameters.values() if isinstance(table, dict)]
    return nested or [parameters]


def _kind(parameters: dict[str, Any]) -> str:
    return str(parameters.get("rope_type", "default"))


def _rotary_modules(model: nn.Module) -> list[tuple[nn.Module, str | None]]:
    """Modules whose factors depend on the length, with the type of layers that they serve."""
    modules: list[tuple[nn.Module, str | None]] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_type = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in by_type.items():
            if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
                modules.append((module, layer_type))
    return modules


def _hold(module: Any, layer_type: str | None, factors: Factors, border: int) -> Callable[[], None]:
    """Give a rotary module fixed factors; returns a function that undoes this."""
    name = _buffer_name(layer_type)
    # one call with a position in the right range makes the module choose the factors
    _cosines(module, layer_type, [border if factors == "long" else 0])
    buffer = getattr(module, name)
    kinds = module.rope_type
    setattr(module, name, buffer.clone())
    # with this type the module's forward leaves its frequencies alone
    module.rope_type = "default" if layer_type is None else {**kinds, layer_type: "default"}

    def restore() -> None:
        module.rope_type = kinds
        setattr(module, name, buffer)

    return restore


def _can_hold(module: nn.Module, layer_type: str | None, factors: Factors, border: int) -> bool:
    """Whether the fixed factors rotate as the module does in a text of the length that they belong
    to.

    The first positions must have the same cosines with and without a position beyond the border.
    """
    near = [0, 1, 2]
    far = [*near, border]
    # transformers chooses the set by the largest position of a forward
    expected = _cosines(module, layer_type, far if factors == "long" else near)[:, :3]
    restore = _hold(module, layer_type, factors, border)
    alone = _cosines(module, layer_type, near)
    together = _cosines(module, layer_type, far)[:, :3]
    restore()
    return torch.equal(alone, expected) and torch.equal(together, expected)


def _cosines(
    module: Any, layer_type: str | None, positions: list[int]
) -> Float[Tensor, "one positions channels"]:
    buffer = getattr(module, _buffer_name(layer_type))
    # the module reads device and dtype of its first argument
    like = torch.empty(0, device=buffer.device)
    position_ids = torch.tensor([positions], device=buffer.device)
    options = {} if layer_type is None else {"layer_type": layer_type}
    cosines, _ = module(like, position_ids, **options)
    return cosines


def _buffer_name(layer_type: str | None) -> str:
    """The name of a rotary module's frequencies for a type of layers."""
    return "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
