"""The start-up test that finds out whether a model can be supported."""

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from kvcat.attention import NAME, Recorder, SlotGate, enable, layer_number
from kvcat.cache import CompactLayer, PrefixLayer, layer_windows
from kvcat.errors import InputError
from kvcat.models.head import logits_from_hidden
from kvcat.models.masked_pass import MaskedPass
from kvcat.models.structure import decoder_layers, hidden_states
from kvcat.policies import RandomPolicy
from kvcat.types import Float, Int, Tensor

_TOKENS = 16
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}


class _CountingGate(SlotGate):
    """A gate that remembers which layers asked for it."""

    def __init__(self, keep: Tensor):
        super().__init__(keep)
        object.__setattr__(self, "asked", set())

    def keep_for(self, module: nn.Module, queries: Tensor, keys: Tensor, scale: float, window: int | None) -> Tensor:
        self.asked.add(layer_number(module))  # type: ignore[attr-defined]
        return super().keep_for(module, queries, keys, scale, window)


def self_test(model: PreTrainedModel, *, split: bool = False) -> None:
    """Nothing, if the masked pass works on this model; an error with the model's name otherwise.

    On 16 random tokens: every layer attends through kvcat's attention; dense rows equal the stock model (transformers'
    eager attention); a random gate changes the masked rows, and only where a slot is hidden before them; the gate gets
    gradients; ``logits_from_hidden`` equals the model's own head; tokens behind a compact cache of all slots equal the
    stock model, and a log-bias of its slots changes them (not asked of shorter sliding windows). Parameters' gradients
    are left alone.

    Args:
        model: a causal LM; it is left with kvcat's attention.
        split: test the masked pass with a ``prefix_len`` instead: a suffix run again equals the stock model where all
            slots are kept, and differs where they are not.

    Raises:
        InputError: what fails, and the model's class.
    """
    kind = type(model).__name__
    was_training = model.training
    model.eval()
    try:
        enable(model)
        (_run_split if split else _run)(model, kind)
    except InputError:
        raise
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{kind} is not supported: {_one_line(error)}") from error
    finally:
        model.train(was_training)


def _run(model: PreTrainedModel, kind: str) -> None:
    tokens, keep = _example(model)
    tolerance = _TOLERANCE.get(next(model.parameters()).dtype, 5e-2)
    batch = tokens.shape[0]
    counting = _CountingGate(keep)
    logits = _gated_logits(model, tokens, counting)
    _demand(counting.asked == set(range(len(decoder_layers(model)))), kind, "not every layer sees the gate")  # type: ignore[attr-defined]
    with torch.no_grad():
        stock = _stock_logits(model, tokens)
        recorder = Recorder()
        hidden = hidden_states(model, input_ids=tokens, use_cache=False, kv_recorder=recorder)
        own_head = logits_from_hidden(model, hidden)
        windows = [window for window in layer_windows(model.config) if window is not None]
        spreads = (0.0, 1.0) if min(windows, default=_TOKENS) >= tokens.shape[1] else ()
        behind = [_behind_slots(model, tokens, recorder, spread) for spread in spreads]
    _demand(_distance(logits[:batch], stock) < tolerance, kind, "the dense rows differ from the stock model")
    _demand(_distance(own_head, stock) < tolerance, kind, "its head does more than a matrix, a scale and a soft-cap")
    _demand(len(recorder.keys) == len(decoder_layers(model)), kind, "not every layer shows its keys")
    if behind:
        told = "tokens behind a compact cache differ from the stock model"
        _demand(_distance(behind[0], stock[:, tokens.shape[1] // 2 :]) < tolerance, kind, told)
        told = "the log-bias of a compact cache does not reach its attention"
        _demand(not torch.equal(behind[0], behind[1]), kind, told)
    before, after = logits[batch:, :2], logits[batch:, 2:]
    _demand(_distance(before, stock[:, :2]) < tolerance, kind, "hidden slots change earlier tokens")
    moved = (after.float() - stock[:, 2:].float()).norm() / stock.float().norm()
    _demand(moved.item() > 1e-6, kind, "a gate does not change the masked rows")
    (gradient,) = torch.autograd.grad(logits[batch:].float().square().mean(), keep, allow_unused=True)
    usable = gradient is not None and bool(gradient.isfinite().all()) and bool(gradient.abs().sum() > 0)
    _demand(usable, kind, "the gate gets no gradient")


@torch.no_grad()
def _run_split(model: PreTrainedModel, kind: str) -> None:
    tokens, _ = _example(model)
    tolerance = _TOLERANCE.get(next(model.parameters()).dtype, 5e-2)
    prefix_len = tokens.shape[1] // 2
    stock = _stock_logits(model, tokens)
    found = []
    for keep_ratio in (1.0, 0.5):
        with MaskedPass(model, {0: RandomPolicy(keep_ratio)}) as masked_pass:
            out = masked_pass.hidden(tokens, torch.Generator().manual_seed(0), prefix_len=prefix_len)
        found.append(logits_from_hidden(model, out.masked_hidden))
    dense = logits_from_hidden(model, out.dense_hidden)
    _demand(_distance(dense, stock) < tolerance, kind, "its layers mix up a sequence and its suffix run again")
    suffix = stock[:, prefix_len:]
    _demand(_distance(found[0], suffix) < tolerance, kind, "a suffix run again differs from the stock model")
    _demand(not torch.equal(found[0], found[1]), kind, "hidden slots of the prefix do not change the suffix")


def _example(model: PreTrainedModel) -> tuple[Int[Tensor, "batch tokens"], Float[Tensor, "batch tokens"]]:
    generator = torch.Generator().manual_seed(0)
    text = model.config.get_text_config(decoder=True)
    length = min(_TOKENS, getattr(text, "max_position_embeddings", None) or _TOKENS)
    tokens = torch.randint(text.vocab_size, (2, length), generator=generator)
    keep = (torch.rand(2, length, generator=generator) < 0.5).float()
    # the first two tokens attend as in the dense pass; the third is hidden, so that the gate surely does something
    keep[:, :2], keep[:, 2] = 1.0, 0.0
    return tokens.to(model.device), keep.to(model.device).requires_grad_()


def _gated_logits(
    model: PreTrainedModel, tokens: Int[Tensor, "batch tokens"], gate: SlotGate
) -> Float[Tensor, "rows tokens vocab"]:
    def hand_over(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:  # noqa: ARG001
        return args, {**kwargs, "kv_gate": gate}

    handles = [layer.register_forward_pre_hook(hand_over, with_kwargs=True) for layer in decoder_layers(model)]
    try:
        with torch.enable_grad():
            return model(input_ids=torch.cat([tokens, tokens]), use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()


def _behind_slots(
    model: PreTrainedModel, tokens: Int[Tensor, "batch tokens"], seen: Recorder, spread: float
) -> Float[Tensor, "batch suffix vocab"]:
    """Logits of the second half behind a compact cache of the first half's slots, log-bias from -spread to spread."""
    half = tokens.shape[1] // 2
    bias = torch.linspace(-spread, spread, half, device=tokens.device)
    layers = []
    for index in range(len(seen.keys)):
        keys, values = seen.keys[index][:, :, :half], seen.values[index][:, :, :half]
        slots = CompactLayer(keys, values, bias.expand(*keys.shape[:2], half))
        layers.append(PrefixLayer(slots, half, read_only=True))
    past = Cache(layers=layers)
    hidden = hidden_states(model, input_ids=tokens[:, half:], past_key_values=past, use_cache=True)
    return logits_from_hidden(model, hidden)


def _stock_logits(model: PreTrainedModel, tokens: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens vocab"]:
    model.set_attn_implementation("eager")
    try:
        return model(input_ids=tokens, use_cache=False).logits
    finally:
        model.set_attn_implementation(NAME)


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def _demand(condition: bool, kind: str, complaint: str) -> None:
    if not condition:
        raise InputError(f"{kind} is not supported: {complaint}")


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
