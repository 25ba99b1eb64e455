"""Where things are in an unmodified transformers model: its layers, its hidden states and its output head."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvcat.errors import InputError
from kvcat.losses import OutputHead
from kvcat.types import Float, Tensor

_HEADS: WeakKeyDictionary[PreTrainedModel, OutputHead] = WeakKeyDictionary()
_OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense")
_TOKENS = 8
_LOUD = 100.0
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers, first to last; refuses a model without a list of that many layers."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise InputError(f"{type(model).__name__} is not supported: it has no list of {count} decoder layers")


def output_gains(model: PreTrainedModel, kv_heads: Sequence[int]) -> list[Float[Tensor, " kv_heads"]]:
    """Per layer, how much a KV head's attention output moves the residual stream: mean squared norm of its columns.

    The columns are those of the attention's output projection; 1 where a layer has none of the usual names. The
    layers have ``kv_heads`` KV heads each.
    """
    found = []
    for layer, count in zip(decoder_layers(model), kv_heads, strict=True):
        named = (m for name, m in layer.named_modules() if name.rpartition(".")[2] in _OUTPUT_PROJECTIONS)
        weight = next((m.weight for m in named if isinstance(m, nn.Linear)), None)
        columns = torch.ones(count)
        if weight is not None and weight.shape[1] % count == 0:
            columns = weight.detach().float().square().sum(0)
        found.append(columns.reshape(count, -1).mean(1))
    return found


def positions_of(config: PreTrainedConfig) -> int:
    """Longest sequence of a model; as good as none where its configuration names none."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize


def model_name(model: PreTrainedModel) -> str:
    """The model's Hub name, or the last part of its folder; its class where it was not loaded."""
    name = model.config.name_or_path
    if not name:
        return type(model).__name__
    folder = Path(name).expanduser()
    return folder.resolve().name if folder.is_absolute() or folder.exists() else name


def hidden_states(model: PreTrainedModel, **inputs: object) -> Float[Tensor, "batch tokens hidden"]:
    """The input of the head for every token."""
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


def logits_from_hidden(model: PreTrainedModel, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
    """The model's own logits from ``hidden_states``, in any dtype; refuses what ``output_head`` refuses."""
    return output_head(model).logits(hidden)


def output_head(model: PreTrainedModel) -> OutputHead:
    """The head whose ``logits`` of ``hidden_states(model, ...)`` are the model's own, found at the first call.

    Scale and soft-cap are read from the configuration: ``logit_scale``, ``lm_head_multiplier`` and
    ``output_multiplier`` multiply the logits, ``logits_scaling`` divides them (Granite) or multiplies them (HyperCLOVA
    X), ``final_logit_softcapping`` or ``logits_soft_cap`` caps them. The first of these readings, then of those without
    scale or cap, is taken that gives the model's own logits on 8 random tokens, for hidden states amplified until the
    logits reach 100. So a cap that the configuration does not state, or states and does not use, is noticed.

    Args:
        model: a causal LM with its weights loaded, not yet sharded.

    Raises:
        InputError: no linear head, a head that does not read the output of the model without head, or logits that no
            reading gives; with the model's class.
    """
    if model not in _HEADS:
        _HEADS[model] = _find_head(model)
    return _HEADS[model]


@torch.no_grad()
def _find_head(model: PreTrainedModel) -> OutputHead:
    kind = type(model).__name__
    linear = model.get_output_embeddings()
    if linear is None:
        raise InputError(f"{kind} is not supported: it has no language-model head")
    try:
        heads = [OutputHead(linear, *reading) for reading in _readings(model.config.get_text_config(decoder=True))]
    except InputError as error:
        raise InputError(f"{kind} is not supported: {error}") from error
    vocab = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(vocab, (1, _TOKENS), generator=torch.Generator().manual_seed(0)).to(model.device)
    with frozen(model), torch.autocast(model.device.type, enabled=False):
        hidden = hidden_states(model, input_ids=tokens, use_cache=False)
        seen, loud, logits = _amplified(model, tokens, heads[0])
    if seen.shape != hidden.shape or not same(seen, hidden):
        base = type(model.base_model).__name__
        raise InputError(f"{kind} is not supported: its head does not read the output of {base}")
    for head in heads:
        if same(head.logits(loud), logits):
            return head
    raise InputError(f"{kind} is not supported: its head does more than a matrix, a bias, a scale and a soft-cap")


def _readings(text: PreTrainedConfig) -> Iterator[tuple[float, float | None]]:
    """Scales and soft-caps that the configuration may mean, the likeliest first."""

    def numbers(*names: str) -> list[float]:
        values = (getattr(text, name, None) for name in names)
        return [float(value) for value in values if isinstance(value, int | float) and value]

    scales = numbers("logit_scale", "lm_head_multiplier", "output_multiplier")
    scales += [scale for number in numbers("logits_scaling") for scale in (1 / number, number)]
    yield from product([*scales, 1.0], [*numbers("final_logit_softcapping", "logits_soft_cap"), None])


def _amplified(model: PreTrainedModel, tokens: Tensor, head: OutputHead) -> tuple[Tensor, Tensor, Tensor]:
    """The input of the model's head, the same amplified, and the model's logits of the amplified one."""
    seen: list[Tensor] = []

    def amplify(_linear: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        loudest = OutputHead(head.linear, head.scale).logits(args[0]).abs().amax().clamp_min(1e-12)
        seen.extend([args[0], args[0] * (_LOUD / loudest)])
        return (seen[-1],)

    with head.linear.register_forward_pre_hook(amplify):
        logits = model(input_ids=tokens, use_cache=False).logits
    if len(seen) != 2:
        raise InputError(f"{type(model).__name__} is not supported: it runs its head {len(seen) // 2} times")
    return seen[0], seen[1], logits


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether both may come from the same arithmetic in another order."""
    return relative_error(found, expected) <= _TOLERANCE.get(expected.dtype, 5e-2)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of what is expected."""
    error, size = (found.double() - expected.double()).norm(), expected.double().norm()
    return (error / size.clamp_min(1e-30)).item()
