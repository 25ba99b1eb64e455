"""The start-up test that finds out whether a model can be supported."""

from contextlib import suppress

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcat.attention import NAME, enable
from kvcat.cache import CompactCache, CompactLayer, cache_argument, layer_windows, rope_factors
from kvcat.errors import InputError, one_line
from kvcat.models.capture import Capture, capture
from kvcat.models.masked_pass import HiddenOutput, MaskedPass
from kvcat.models.rotation import KeyRotation
from kvcat.models.structure import (
    decoder_layers,
    frozen,
    logits_from_hidden,
    output_gains,
    relative_error,
    same,
)
from kvcat.policies import SparsificationPolicy
from kvcat.types import Float, Int, Tensor

_TOKENS = 16


class _Given(SparsificationPolicy):
    """Scores that are given; the gradient of each layer's own shows whether the layer attends through its gate."""

    reads = "hidden"

    def __init__(self, scores: Tensor):
        super().__init__()
        self.scores = nn.Parameter(scores.clone())

    def forward(self, hidden: Tensor, generator: object = None) -> Tensor:  # noqa: ARG002
        return self.scores


def self_test(model: PreTrainedModel, *, split: bool = False) -> None:
    """Return if the masked pass and compact caches work on this model; otherwise refuse it by name.

    On 16 random tokens: dense rows equal the stock model (transformers' eager attention); a random
    gate in every layer changes the masked rows, only where a slot is hidden before them, and gets
    gradients; ``output_head`` can describe the head; tokens behind a compact cache of all slots
    equal the stock model, also as generation calls it, and a log-bias of the slots changes them
    (not tested with shorter sliding windows); keys turn to other positions, or it is known that
    they do not. The model is left with kvcat's attention.

    Args:
        model: a causal LM.
        split: test the masked pass with a ``prefix_len`` instead: a suffix run again equals the stock model where all
            slots are kept, and differs where they are not.
    """
    kind = type(model).__name__
    try:
        with frozen(model):
            enable(model)
            complaint = (_split_complaint if split else _complaint)(model)
    except InputError:
        raise
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        text = model.config.get_text_config(decoder=True)
        is_latent = getattr(text, "kv_lora_rank", None) is not None
        reason = "its cache holds latent attention, not keys and values" if is_latent else one_line(error)
        raise InputError(f"{kind} is not supported: {reason}") from error
    if complaint is not None:
        raise InputError(f"{kind} is not supported: {complaint}")


@torch.enable_grad()
def _complaint(model: PreTrainedModel) -> str | None:
    """The first thing that does not work."""
    windows = [window for window in layer_windows(model.config) if window is not None]
    tokens, keep, stock = _example(model)
    policies, out = _passes(model, tokens, keep)
    dense, masked = (logits_from_hidden(model, hidden) for hidden in (out.dense_hidden, out.masked_hidden))
    if not same(dense, stock):
        return "the dense rows differ from the stock model"
    seen, half = capture(model, tokens), tokens.shape[1] // 2
    if min(windows, default=_TOKENS) >= tokens.shape[1]:
        unbiased, biased = (_behind_slots(model, tokens, seen, spread) for spread in (0.0, 1.0))
        if not same(unbiased, stock[:, half:]):
            return "tokens behind a compact cache differ from the stock model"
        if torch.equal(unbiased, biased):
            return "the log-bias of a compact cache does not reach its attention"
        if not same(_generated(model, tokens, seen), stock[:, half:]):
            return "generation behind a compact cache differs from the stock model"
    output_gains(model, [keys.shape[1] for keys in seen.keys])
    with suppress(InputError):  # methods do without turned keys
        KeyRotation(model, half)
    if not same(masked[:, :2], stock[:, :2]):
        return "hidden slots change earlier tokens"
    if not relative_error(masked[:, 2:], stock[:, 2:]) > 1e-6:
        return "a gate does not change the masked rows"
    scores = [policy.scores for policy in policies]
    gradients = torch.autograd.grad(masked.float().square().mean(), scores, allow_unused=True)
    for layer, gradient in enumerate(gradients):
        if gradient is None or not gradient.isfinite().all() or not gradient.abs().sum() > 0:
            return f"the gate of layer {layer} gets no gradient"
    return None


@torch.no_grad()
def _split_complaint(model: PreTrainedModel) -> str | None:
    tokens, keep, stock = _example(model)
    prefix = tokens.shape[1] // 2
    whole, part = (_passes(model, tokens, x[:, :prefix], prefix)[1] for x in (torch.ones_like(keep), keep))
    again, masked = (logits_from_hidden(model, out.masked_hidden) for out in (whole, part))
    if not same(logits_from_hidden(model, part.dense_hidden), stock):
        return "its layers mix up a sequence and its suffix run again"
    if not same(again, stock[:, prefix:]):
        return "a suffix run again differs from the stock model"
    return "hidden slots of the prefix do not change the suffix" if torch.equal(again, masked) else None


def _example(
    model: PreTrainedModel,
) -> tuple[Int[Tensor, "batch tokens"], Float[Tensor, "batch tokens"], Float[Tensor, "batch tokens vocab"]]:
    """Random tokens, a gate (the first two tokens attend as in the dense pass, the third is hidden), stock logits."""
    generator = torch.Generator().manual_seed(0)
    text = model.config.get_text_config(decoder=True)
    length = min(_TOKENS, getattr(text, "max_position_embeddings", None) or _TOKENS)
    tokens = torch.randint(text.vocab_size, (2, length), generator=generator).to(model.device)
    keep = (torch.rand(2, length, generator=generator) < 0.5).float()
    keep[:, :2], keep[:, 2] = 1.0, 0.0
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return tokens, keep.to(model.device), model(input_ids=tokens, use_cache=False).logits
    finally:
        model.set_attn_implementation(NAME)


def _passes(
    model: PreTrainedModel, tokens: Tensor, keep: Tensor, prefix_len: int | None = None
) -> tuple[list[_Given], HiddenOutput]:
    """Both passes under a gate in every layer, with gradient to the gates."""
    policies = [_Given(keep) for _ in decoder_layers(model)]
    with MaskedPass(model, dict(enumerate(policies))) as masked_pass:  # type: ignore[arg-type]
        return policies, masked_pass.hidden(tokens, prefix_len=prefix_len)


def _behind_slots(
    model: PreTrainedModel, tokens: Int[Tensor, "batch tokens"], seen: Capture, spread: float
) -> Float[Tensor, "batch suffix vocab"]:
    """Logits of the second half behind a compact cache of the first, log-bias from -spread to spread."""
    half = tokens.shape[1] // 2
    past = _first_half(model, seen, half, spread).to_transformers(model)
    return logits_from_hidden(model, capture(model, tokens[:, half:], past=past).hidden)


@torch.no_grad()
def _generated(
    model: PreTrainedModel, tokens: Int[Tensor, "batch tokens"], seen: Capture
) -> Float[Tensor, "batch suffix vocab"]:
    """Logits of the second half behind the first, from the model as generation calls it."""
    half = tokens.shape[1] // 2
    past = _first_half(model, seen, half, 0.0).to_transformers(model)
    mask = torch.ones_like(tokens)
    options = {"attention_mask": mask, "use_cache": True, **cache_argument(past)}
    return model(input_ids=tokens[:, half:], **options).logits


def _first_half(model: PreTrainedModel, seen: Capture, half: int, spread: float) -> CompactCache:
    """A compact cache of the first half, log-bias from -spread to spread."""
    bias = torch.linspace(-spread, spread, half, device=seen.keys[0].device)
    layers = [
        CompactLayer(keys[:, :, :half], values[:, :, :half], bias.expand(*keys.shape[:2], half))
        for keys, values in zip(seen.keys, seen.values, strict=True)
    ]
    factors = rope_factors(model.config, 2 * half)
    return CompactCache(layers, half, "", {} if factors is None else {"rope": factors})
