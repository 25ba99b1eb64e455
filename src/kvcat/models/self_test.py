"""The start-up test that checks whether kvcat works with a model."""

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcat.attention import NAME, check_not_wrapped, enable
from kvcat.cache import (
    CacheRecord,
    CompactCache,
    CompactLayer,
    LayerState,
    cache_argument,
    layer_windows,
    recurrent_layers,
    rope_factors,
    state_layers,
)
from kvcat.errors import InputError, one_line
from kvcat.models.capture import Capture, capture, layer_states
from kvcat.models.exact_copy import StaysDouble, exact_copy, few_layers
from kvcat.models.masked_pass import HiddenOutput, MaskedPass
from kvcat.models.output_head import adopt_head, logits_from_hidden
from kvcat.models.rotation import KeyRotation
from kvcat.models.structure import decoder_layers, output_gains, relative_error, same
from kvcat.policies import SparsificationPolicy
from kvcat.types import Float, Int, Tensor

_MAX_TOKENS = 16
_PASSED: set[tuple[object, ...]] = set()  # _tested_parts of the models that passed


class _FixedScores(SparsificationPolicy):
    """A policy with the same scores for every input.

    The scores are parameters: the gradient of a layer's scores shows whether the layer attends
    through its gate.
    """

    reads = "hidden"

    def __init__(self, scores: Tensor):
        super().__init__()
        self.scores = nn.Parameter(scores.clone())

    def forward(self, hidden: Tensor, generators: object = None) -> Tensor:  # noqa: ARG002
        return self.scores


@dataclass(frozen=True, eq=False)
class _Example:
    """The input of the test, and the expected logits.

    Args:
        tokens: random token ids.
        keep: a random gate: slots 0 and 1 are visible, slot 2 is hidden.
        logits: logits of the stock model.
    """

    tokens: Int[Tensor, "batch tokens"]
    keep: Float[Tensor, "batch tokens"]
    logits: Float[Tensor, "batch tokens vocab"]


def check_supported(model: PreTrainedModel) -> None:
    """``self_test``, unless in this process a model has passed it that has the same configuration,
    classes of modules, dtype and device. The model then has kvcat's attention.

    Raises:
        InputError: a wrapper of a model; otherwise as ``self_test``.
    """
    check_not_wrapped(model)
    if _tested_parts(model) in _PASSED:
        enable(model)
    else:
        self_test(model)


def _tested_parts(model: PreTrainedModel) -> tuple[object, ...]:
    """What of a model the result of ``self_test`` depends on; not the numbers in its weights."""
    classes = frozenset(type(module) for module in model.modules())
    settings = model.config.to_dict()
    settings = {name: value for name, value in settings.items() if not name.startswith("_")}
    return type(model), classes, repr(settings), model.dtype, model.device


def self_test(model: PreTrainedModel, *, split: bool = False) -> None:
    """Raises ``InputError`` if the masked pass or compact caches do not work with this model.

    On 16 random tokens, with one layer of each kind in float64, where a wrong attention and
    rounding cannot be confused (``exact_copy``):

    - the dense rows equal the stock model (transformers' eager attention);
    - a random gate in every layer changes the masked rows, but only where a slot is hidden before
      them, and gets gradients;
    - ``output_head`` can describe the head;
    - tokens after a compact cache of all slots equal the stock model, also as generation calls it,
      and a log-bias of the slots changes them (not tested if all layers have shorter windows);
      a model with recurrent states has no masked pass, and only this is tested;
    - keys can be rotated to other positions, or it is known that they cannot.

    Then all this runs once more with the model's dtype, on its device, without a comparison of
    numbers. The model then has kvcat's attention.

    Args:
        model: a causal LM, not sharded.
        split: test the masked pass with a ``prefix_len`` instead: a suffix that runs again equals
            the stock model where all slots are kept, and differs where they are not.

    Raises:
        InputError: something does not work; the message names the model's class.
    """
    class_name = type(model).__name__
    try:
        enable(model)
        layer_windows(model.config)  # rejects layers of kinds that are not known
        exact = exact_copy(model).model
        enable(exact)
        with StaysDouble():
            complaint = _split_complaint(exact) if split else _complaint(exact)
        if complaint is None:
            adopt_head(model, exact)
            shallow = few_layers(model)
            adopt_head(shallow, exact)
            enable(shallow)
            _run(shallow, split=split)
    except InputError:
        raise
    except (
        AttributeError,
        IndexError,
        KeyError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        text = model.config.get_text_config(decoder=True)
        is_latent = getattr(text, "kv_lora_rank", None) is not None
        reason = one_line(error)
        if is_latent:
            reason = "its cache holds latent attention, not keys and values"
        raise InputError(f"{class_name} is not supported: {reason}") from error
    if complaint is not None:
        raise InputError(f"{class_name} is not supported: {complaint}")
    if not split:
        _PASSED.add(_tested_parts(model))


@torch.enable_grad()
def _complaint(model: PreTrainedModel) -> str | None:
    """The first thing that does not work."""
    example = _make_example(model)
    recurrent = recurrent_layers(model.config)
    attending = [layer for layer in range(len(decoder_layers(model))) if layer not in recurrent]
    passes = None
    if not recurrent:  # with recurrent states there is no masked pass
        passes = _run_both_passes(model, example.tokens, example.keep)
        if not same(logits_from_hidden(model, passes[1].dense_hidden), example.logits):
            return "the dense rows differ from the stock model"
    captured = capture(model, example.tokens, layers=attending)
    if not same(logits_from_hidden(model, captured.hidden), example.logits):
        return "its hidden states differ from the stock model"
    complaint = _cache_complaint(model, example)
    if complaint is not None:
        return complaint
    output_gains(model, [keys.shape[1] for keys in captured.keys], attending)
    if passes is None:
        return None
    policies, output = passes
    with suppress(InputError):  # compression methods work without turned keys
        KeyRotation(model, example.tokens.shape[1] // 2)
    masked = logits_from_hidden(model, output.masked_hidden)
    return _gate_complaint(masked, example, policies)


def _cache_complaint(model: PreTrainedModel, example: _Example) -> str | None:
    """The first thing that does not work after a compact cache of the first half."""
    caches = _caches(model, example.tokens)
    if caches is None:
        return None
    plain, biased = caches  # the plain one has a log-bias of 0
    expected = example.logits[:, plain.num_tokens :]
    unbiased = _behind_slots(model, example.tokens, plain)
    if not same(unbiased, expected):
        return "tokens after a compact cache differ from the stock model"
    if torch.equal(unbiased, _behind_slots(model, example.tokens, biased)):
        return "the log-bias of a compact cache does not reach its attention"
    if not same(_generated(model, example.tokens, plain), expected):
        return "generation after a compact cache differs from the stock model"
    return None


def _gate_complaint(
    masked: Float[Tensor, "batch tokens vocab"], example: _Example, policies: list[_FixedScores]
) -> str | None:
    """The first missing or unwanted effect of a gate."""
    if not same(masked[:, :2], example.logits[:, :2]):
        return "hidden slots change earlier tokens"
    if not relative_error(masked[:, 2:], example.logits[:, 2:]) > 1e-6:
        return "a gate does not change the masked rows"
    scores = [policy.scores for policy in policies]
    gradients = torch.autograd.grad(masked.square().mean(), scores, allow_unused=True)
    for gradient in gradients:
        if gradient is None or not gradient.isfinite().all() or not gradient.abs().sum() > 0:
            return "the gate of one of its layers gets no gradient"
    return None


@torch.no_grad()
def _split_complaint(model: PreTrainedModel) -> str | None:
    """The first thing that does not work where only a suffix runs in the masked pass."""
    example = _make_example(model)
    prefix_len = example.tokens.shape[1] // 2
    prefix_keep = example.keep[:, :prefix_len]
    all_visible = torch.ones_like(prefix_keep)
    _, output_all = _run_both_passes(model, example.tokens, all_visible, prefix_len)
    _, output_kept = _run_both_passes(model, example.tokens, prefix_keep, prefix_len)
    dense = logits_from_hidden(model, output_kept.dense_hidden)
    suffix_all = logits_from_hidden(model, output_all.masked_hidden)
    suffix_kept = logits_from_hidden(model, output_kept.masked_hidden)
    if not same(dense, example.logits):
        return "its layers mix up a sequence and its suffix run again"
    if not same(suffix_all, example.logits[:, prefix_len:]):
        return "a suffix run again differs from the stock model"
    if torch.equal(suffix_all, suffix_kept):
        return "hidden slots of the prefix do not change the suffix"
    return None


@torch.no_grad()
def _run(model: PreTrainedModel, *, split: bool) -> None:
    """Run what is tested, for errors that only the model's dtype or device raises."""
    example = _make_example(model)
    num_tokens = example.tokens.shape[1]
    prefix_len = num_tokens // 2 if split else None
    if not recurrent_layers(model.config):
        _run_both_passes(model, example.tokens, example.keep[:, :prefix_len], prefix_len)
    caches = None if split else _caches(model, example.tokens)
    if caches is not None:
        plain, biased = caches
        _behind_slots(model, example.tokens, biased)
        _generated(model, example.tokens, plain)


def _make_example(model: PreTrainedModel) -> _Example:
    """Random tokens, a random gate and the stock model's logits."""
    text = model.config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None) or _MAX_TOKENS
    length = min(_MAX_TOKENS, longest)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(text.vocab_size, (2, length), generator=generator).to(model.device)
    keep = (torch.rand(2, length, generator=generator) < 0.5).float()
    # the first two tokens see no hidden slot, all later ones at least one
    keep[:, :2] = 1.0
    keep[:, 2] = 0.0
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        model.set_attn_implementation(NAME)
    return _Example(tokens, keep.to(model.device), logits)


def _run_both_passes(
    model: PreTrainedModel,
    tokens: Int[Tensor, "batch tokens"],
    keep: Float[Tensor, "batch slots"],
    prefix_len: int | None = None,
) -> tuple[list[_FixedScores], HiddenOutput]:
    """The policies and the output of both passes with a gate in every layer, with gradient."""
    policies = [_FixedScores(keep) for _ in decoder_layers(model)]
    by_layer = dict(enumerate(policies))
    with MaskedPass(model, by_layer) as masked_pass:  # type: ignore[arg-type]
        return policies, masked_pass.hidden(tokens, prefix_len=prefix_len)


def _behind_slots(
    model: PreTrainedModel, tokens: Int[Tensor, "batch tokens"], cache: CompactCache
) -> Float[Tensor, "batch suffix vocab"]:
    """Logits of the tokens after a compact cache of the first ones."""
    past = cache.to_transformers(model)
    new_tokens = tokens[:, cache.num_tokens :]
    captured = capture(model, new_tokens, past=past, layers=cache.layer_numbers)
    return logits_from_hidden(model, captured.hidden)


@torch.no_grad()
def _generated(
    model: PreTrainedModel, tokens: Int[Tensor, "batch tokens"], cache: CompactCache
) -> Float[Tensor, "batch suffix vocab"]:
    """Logits of the tokens after the cache's, from the model as generation calls it.

    The last token runs alone, as models with recurrent states compute it in another way.
    """
    past = cache.to_transformers(model)
    last = tokens.shape[1] - 1
    logits = []
    for start, stop in [(cache.num_tokens, last), (last, last + 1)]:
        options = {"attention_mask": torch.ones_like(tokens[:, :stop]), "use_cache": True}
        options.update(cache_argument(past))
        logits.append(model(input_ids=tokens[:, start:stop], **options).logits)
    return torch.cat(logits, dim=1)


def _caches(
    model: PreTrainedModel, tokens: Int[Tensor, "batch tokens"]
) -> tuple[CompactCache, CompactCache] | None:
    """Compact caches of all slots of the first half, without and with a log-bias.

    None if all layers have windows or states that such a cache holds whole.
    """
    half = tokens.shape[1] // 2
    whole = state_layers(model.config, tokens.shape[1])
    compacted = [layer for layer in range(len(decoder_layers(model))) if layer not in whole]
    if not compacted:
        return None
    captured = capture(model, tokens[:, :half], layers=compacted)
    states = layer_states(model, tokens[:, :half], whole)
    return _cache_of(model, captured, states, 0.0), _cache_of(model, captured, states, 1.0)


def _cache_of(
    model: PreTrainedModel, captured: Capture, states: dict[int, LayerState], spread: float
) -> CompactCache:
    """A compact cache of all captured slots, with a log-bias from -spread to spread."""
    num_tokens = captured.keys[0].shape[2]
    bias = torch.linspace(-spread, spread, num_tokens, device=captured.keys[0].device)
    layers = []
    for keys, values in zip(captured.keys, captured.values, strict=True):
        log_bias = bias.expand(*keys.shape[:2], num_tokens)
        layers.append(CompactLayer(keys, values, log_bias))
    factors = rope_factors(model.config, 2 * num_tokens)
    return CompactCache(layers, num_tokens, "", CacheRecord(rope=factors), states)
