"""The start-up test that finds out whether a model can be supported."""

from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from kvcat.attention import NAME, Recorder, SlotGate, enable, layer_number
from kvcat.cache import CompactLayer, PrefixLayer, layer_windows
from kvcat.errors import InputError, one_line
from kvcat.models.masked_pass import MaskedPass
from kvcat.models.structure import decoder_layers, examined_head, frozen, hidden_states, logits_from_hidden
from kvcat.policies import RandomPolicy
from kvcat.types import Float, Int, Tensor

_TOKENS = 16
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}


class _CountingGate(SlotGate):
    """A gate that remembers the layers that used it."""

    def __init__(self, keep: Tensor):
        super().__init__(keep)
        self.layers: set[int] = set()

    def keep_for(self, module: nn.Module, *rest: Any, **named: Any) -> Tensor:
        self.layers.add(layer_number(module))
        return super().keep_for(module, *rest, **named)


def self_test(model: PreTrainedModel, *, split: bool = False) -> None:
    """Return if the masked pass and compact caches work on this model; otherwise refuse it by name.

    On 16 random tokens: every layer attends through kvcat's attention; dense rows equal the stock model
    (transformers' eager attention); a random gate changes the masked rows, only where a slot is hidden
    before them, and gets gradients; ``output_head`` can describe its head; tokens behind a
    compact cache of all slots equal the stock model, and a log-bias of the slots changes them (not
    tested with shorter sliding windows). Parameters' gradients are left alone.

    Args:
        model: a causal LM; it is left with kvcat's attention.
        split: test the masked pass with a ``prefix_len`` instead: a suffix run again equals the stock
            model where all slots are kept, and differs where they are not.

    Raises:
        InputError: what fails, and the model's class.
    """
    kind = type(model).__name__
    try:
        with frozen(model):
            enable(model)
            complaint = (_split_complaint if split else _complaint)(model)
    except InputError:
        raise
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{kind} is not supported: {one_line(error)}") from error
    if complaint is not None:
        raise InputError(f"{kind} is not supported: {complaint}")


def _complaint(model: PreTrainedModel) -> str | None:
    """The first thing that does not work."""
    tokens, keep = _example(model)
    batch, num_layers = len(tokens), len(decoder_layers(model))
    gate = _CountingGate(keep)
    logits = _gated_logits(model, tokens, gate)
    with torch.no_grad():
        stock = _stock_logits(model, tokens)
        recorder = Recorder()
        hidden_states(model, input_ids=tokens, use_cache=False, kv_recorder=recorder)
    examined_head(model)
    if gate.layers != set(range(num_layers)):
        return "not every layer sees the gate"
    if not _equal(logits[:batch], stock):
        return "the dense rows differ from the stock model"
    if len(recorder.keys) != num_layers:
        return "not every layer shows its keys"
    windows = [window for window in layer_windows(model.config) if window is not None]
    if min(windows, default=_TOKENS) >= tokens.shape[1]:
        unbiased, biased = (_behind_slots(model, tokens, recorder, spread) for spread in (0.0, 1.0))
        if not _equal(unbiased, stock[:, tokens.shape[1] // 2 :]):
            return "tokens behind a compact cache differ from the stock model"
        if torch.equal(unbiased, biased):
            return "the log-bias of a compact cache does not reach its attention"
    if not _equal(logits[batch:, :2], stock[:, :2]):
        return "hidden slots change earlier tokens"
    moved = (logits[batch:, 2:].float() - stock[:, 2:].float()).norm() / stock.float().norm()
    if not moved.item() > 1e-6:
        return "a gate does not change the masked rows"
    (gradient,) = torch.autograd.grad(logits[batch:].float().square().mean(), keep, allow_unused=True)
    usable = gradient is not None and bool(gradient.isfinite().all()) and bool(gradient.abs().sum() > 0)
    return None if usable else "the gate gets no gradient"


@torch.no_grad()
def _split_complaint(model: PreTrainedModel) -> str | None:
    tokens, _ = _example(model)
    prefix_len = tokens.shape[1] // 2
    stock, found = _stock_logits(model, tokens), []
    for keep_ratio in (1.0, 0.5):
        with MaskedPass(model, {0: RandomPolicy(keep_ratio)}) as masked_pass:
            out = masked_pass.hidden(tokens, torch.Generator().manual_seed(0), prefix_len=prefix_len)
        found.append(logits_from_hidden(model, out.masked_hidden))
    if not _equal(logits_from_hidden(model, out.dense_hidden), stock):
        return "its layers mix up a sequence and its suffix run again"
    if not _equal(found[0], stock[:, prefix_len:]):
        return "a suffix run again differs from the stock model"
    return "hidden slots of the prefix do not change the suffix" if torch.equal(found[0], found[1]) else None


def _example(model: PreTrainedModel) -> tuple[Int[Tensor, "batch tokens"], Float[Tensor, "batch tokens"]]:
    """Random tokens and a gate; the first two tokens attend as in the dense pass, the third is hidden."""
    generator = torch.Generator().manual_seed(0)
    text = model.config.get_text_config(decoder=True)
    length = min(_TOKENS, getattr(text, "max_position_embeddings", None) or _TOKENS)
    tokens = torch.randint(text.vocab_size, (2, length), generator=generator)
    keep = (torch.rand(2, length, generator=generator) < 0.5).float()
    keep[:, :2], keep[:, 2] = 1.0, 0.0
    return tokens.to(model.device), keep.to(model.device).requires_grad_()


def _gated_logits(
    model: PreTrainedModel, tokens: Int[Tensor, "batch tokens"], gate: SlotGate
) -> Float[Tensor, "rows tokens vocab"]:
    def add_gate(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:  # noqa: ARG001
        return args, {**kwargs, "kv_gate": gate}

    handles = [layer.register_forward_pre_hook(add_gate, with_kwargs=True) for layer in decoder_layers(model)]
    try:
        with torch.enable_grad():
            return model(input_ids=torch.cat([tokens, tokens]), use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _behind_slots(
    model: PreTrainedModel, tokens: Int[Tensor, "batch tokens"], seen: Recorder, spread: float
) -> Float[Tensor, "batch suffix vocab"]:
    """Logits of the second half behind a compact cache of the first, log-bias from -spread to spread."""
    half = tokens.shape[1] // 2
    bias = torch.linspace(-spread, spread, half, device=tokens.device)
    layers = []
    for index in range(len(seen.keys)):
        keys, values = seen.keys[index][:, :, :half], seen.values[index][:, :, :half]
        slots = CompactLayer(keys, values, bias.expand(*keys.shape[:2], half))
        layers.append(PrefixLayer(slots, half, read_only=True))
    past = Cache(layers=layers)
    return logits_from_hidden(
        model, hidden_states(model, input_ids=tokens[:, half:], past_key_values=past, use_cache=True)
    )


def _stock_logits(model: PreTrainedModel, tokens: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens vocab"]:
    model.set_attn_implementation("eager")
    try:
        return model(input_ids=tokens, use_cache=False).logits
    finally:
        model.set_attn_implementation(NAME)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether the logits agree as far as the model's dtype rounds."""
    error = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)
    return error.item() < _TOLERANCE.get(b.dtype, 5e-2)
