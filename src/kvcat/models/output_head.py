"""The output head of an unmodified transformers model."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvcat.errors import InputError
from kvcat.losses import OutputHead
from kvcat.models.exact_copy import exact_copy
from kvcat.models.structure import hidden_states, same
from kvcat.types import Float, Int, Tensor

_HEADS: WeakKeyDictionary[PreTrainedModel, OutputHead] = WeakKeyDictionary()
_PROBE_TOKENS = 8
_LOUD_LOGIT = 100.0


def logits_from_hidden(
    model: PreTrainedModel, hidden: Float[Tensor, "*batch hidden"]
) -> Float[Tensor, "*batch vocab"]:
    """The model's logits for ``hidden_states`` of any dtype; raises as ``output_head`` does."""
    return output_head(model).logits(hidden)


def output_head(model: PreTrainedModel) -> OutputHead:
    """The head that makes the model's logits from ``hidden_states(model, ...)``.

    It is found at the first call. Scale and soft-cap come from the configuration: ``logit_scale``,
    ``lm_head_multiplier`` and ``output_multiplier`` multiply the logits, ``logits_scaling`` divides
    them (Granite) or multiplies them (HyperCLOVA X), ``final_logit_softcapping`` or
    ``logits_soft_cap`` caps them. These interpretations are tried first, then those without scale
    or cap. The result is the first one that reproduces the model's logits on 8 random tokens. The
    hidden states of this test are amplified until the logits reach 100, so that a cap is noticed
    that the configuration does not name, or that it names and the model does not use.

    Args:
        model: a causal LM with its weights loaded, not yet sharded.

    Raises:
        InputError: no linear head, a head that does not read the output of the model without head,
            or logits that no interpretation reproduces; the message names the model's class.
    """
    if model not in _HEADS:
        exact = exact_copy(model).model
        if exact is model:
            _HEADS[model] = _find_head(model)
        else:
            adopt_head(model, exact)
    return _HEADS[model]


def adopt_head(model: PreTrainedModel, copy: PreTrainedModel) -> None:
    """Give a model the scale and the soft-cap that were found on a copy of it."""
    linear: Any = model.get_output_embeddings()
    _HEADS[model] = replace(output_head(copy), linear=linear)


@torch.no_grad()
def _find_head(model: PreTrainedModel) -> OutputHead:
    """The first candidate that gives the logits of an exact copy."""
    kind = type(model).__name__
    text = model.config.get_text_config(decoder=True)
    linear = model.get_output_embeddings()
    if linear is None:
        raise InputError(f"{kind} is not supported: it has no language-model head")
    try:
        heads = [OutputHead(linear, scale, cap) for scale, cap in _readings(text)]
    except InputError as error:
        raise InputError(f"{kind} is not supported: {error}") from error
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(text.vocab_size, (1, _PROBE_TOKENS), generator=generator)
    tokens = tokens.to(model.device)
    with torch.autocast(model.device.type, enabled=False):
        # the head's input differs from it if something runs between the base model and the head
        hidden = hidden_states(model, input_ids=tokens, use_cache=False)
        head_input, loud_input, loud_logits = _amplified(model, tokens, heads[0])
    if head_input.shape != hidden.shape or not same(head_input, hidden):
        base = type(model.base_model).__name__
        raise InputError(f"{kind} is not supported: its head does not read the output of {base}")
    for head in heads:
        if same(head.logits(loud_input), loud_logits):
            return head
    raise InputError(
        f"{kind} is not supported: its head does more than a matrix, a bias, a scale and a soft-cap"
    )


def _readings(text: PreTrainedConfig) -> list[tuple[float, float | None]]:
    """Scales and soft-caps that the configuration may mean, the likeliest first."""
    scales = _numbers(text, ["logit_scale", "lm_head_multiplier", "output_multiplier"])
    for number in _numbers(text, ["logits_scaling"]):
        scales += [1 / number, number]
    caps = _numbers(text, ["final_logit_softcapping", "logits_soft_cap"])
    return list(product([*scales, 1.0], [*caps, None]))


def _numbers(text: PreTrainedConfig, names: Sequence[str]) -> list[float]:
    """The settings with these names that are numbers other than 0."""
    numbers = []
    for name in names:
        value = getattr(text, name, None)
        if isinstance(value, int | float) and value:
            numbers.append(float(value))
    return numbers


def _amplified(
    model: PreTrainedModel, tokens: Int[Tensor, "batch tokens"], head: OutputHead
) -> tuple[Tensor, Tensor, Tensor]:
    """The input of the model's head, the same amplified, and the model's logits for the amplified
    input.
    """
    # a cap of 30 or 50 hardly changes ordinary logits of a few units
    uncapped = OutputHead(head.linear, head.scale)
    inputs: list[Tensor] = []
    loud_inputs: list[Tensor] = []

    def amplify(_linear: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        highest = uncapped.logits(args[0]).abs().amax().clamp_min(1e-12)
        loud = args[0] * (_LOUD_LOGIT / highest)
        inputs.append(args[0])
        loud_inputs.append(loud)
        return (loud,)

    with head.linear.register_forward_pre_hook(amplify):
        logits = model(input_ids=tokens, use_cache=False).logits
    return inputs[0], loud_inputs[0], logits
