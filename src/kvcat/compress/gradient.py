"""Gradient-based compression: slots trained to give the dense model's predictions."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvcat.cache import CompactCache, CompactLayer
from kvcat.compress.common import compact_cache, example_generators, slots_for, take_slots
from kvcat.compress.freezing import frozen
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.models import hidden_states, logits_from_hidden
from kvcat.types import Float, Tensor

SNAPSHOT_STEPS = (0, 1, 2, 5, 10, 20, 50, 100)
_CHUNK_ELEMENTS = 2**25


@dataclass(frozen=True)
class GradientCompression:
    """Keys and values of every slot, trained so that the compact cache predicts as the dense one does.

    Minimises the mean over the supervised positions t of KL(softmax(z*_t) || softmax(z_t)), z* the dense logits and z
    those on the compact cache, by AdamW without weight decay; the model's weights stay fixed. The supervised positions
    are the suffix, or the second copy of a reconstruction sequence. Every example is optimised by itself, its gradient
    clipped by its own norm: a batch gives what its examples give one by one.

    Args:
        num_steps: gradient steps, at least 0.
        lr: learning rate, larger than 0.
        init: "first": the first slots of the prefix; "random": random ones, the same positions in every layer.
        seed: of the random positions.
        freeze_first_slot: the first slot keeps its key and value.
        max_norm: gradient norm per example above which it is clipped, larger than 0.

    Raises:
        InputError: an option out of its range.

    References: KV-CAT, appendix "Gradient-based KV cache compression"; Eyuboglu et al. 2025, arXiv:2506.06266.
    """

    num_steps: int = 100
    lr: float = 1e-2
    init: str = "first"
    seed: int = 0
    freeze_first_slot: bool = False
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.num_steps < 0:
            raise InputError(f"num_steps must not be negative, not {self.num_steps}")
        if self.init not in ("first", "random"):
            raise InputError(f"init must be 'first' or 'random', not {self.init!r}")
        for name in ("lr", "max_norm"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be larger than 0, not {getattr(self, name)}")

    def __call__(
        self, trace: Trace, *, keep_ratio: float | int | None = None, num_slots: int | None = None
    ) -> CompactCache:
        """The compact cache after ``num_steps`` steps.

        Args:
            trace: of the windows to compress.
            keep_ratio: fraction kept, in (0, 1]; 1 returns the dense cache.
            num_slots: number kept, in [1, prefix_len].

        Raises:
            InputError: keep_ratio or num_slots out of range, or a trace without supervising positions.
        """
        ((_, cache),) = self._run(trace, keep_ratio, num_slots, (self.num_steps,))
        return cache

    def snapshots(
        self, trace: Trace, *, keep_ratio: float | int | None = None, num_slots: int | None = None
    ) -> Iterator[tuple[int, CompactCache]]:
        """Steps taken and the compact cache, after 0, 1, 2, 5, 10, 20, 50, 100 steps and the last.

        Args:
            trace: of the windows to compress.
            keep_ratio: fraction kept, in (0, 1]; 1 gives the dense cache every time.
            num_slots: number kept, in [1, prefix_len].

        Raises:
            InputError: keep_ratio or num_slots out of range, or a trace without supervising positions.
        """
        steps = {step for step in SNAPSHOT_STEPS if step < self.num_steps} | {self.num_steps}
        return self._run(trace, keep_ratio, num_slots, tuple(sorted(steps)))

    def _run(
        self, trace: Trace, keep_ratio: float | int | None, num_slots: int | None, wanted: tuple[int, ...]
    ) -> Iterator[tuple[int, CompactCache]]:
        if trace.supervision == "self":
            raise InputError(
                "GradientCompression needs predictions after the prefix, which a trace with supervision='self' lacks: "
                "trace a suffix or a reconstruction sequence, or use AttentionMatching"
            )
        slots = slots_for(trace.prefix_len, keep_ratio, num_slots)
        if slots == trace.prefix_len:
            return ((step, trace.dense_cache()) for step in wanted)
        return self._optimise(trace, self._start(trace, slots), wanted)

    def _start(self, trace: Trace, slots: int) -> list[Tensor]:
        positions = torch.arange(slots).expand(trace.batch_size, -1)
        if self.init == "random":
            generators = example_generators(trace, self.seed)
            positions = torch.stack([torch.randperm(trace.prefix_len, generator=g)[:slots] for g in generators])
            positions = positions.sort(-1).values
        positions = positions.to(trace.input_ids.device)
        parameters = []
        for states in (state for pair in zip(trace.keys, trace.values, strict=True) for state in pair):
            chosen = take_slots(states, positions.unsqueeze(1).expand(-1, states.shape[1], -1))
            parameters.append(chosen.double() if chosen.dtype == torch.float64 else chosen.float())
        return parameters

    def _optimise(
        self, trace: Trace, parameters: list[Tensor], wanted: tuple[int, ...]
    ) -> Iterator[tuple[int, CompactCache]]:
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.0)
        for step in range(wanted[-1] + 1):
            if step in wanted:
                yield step, self._cache(trace, parameters, step)
            if step == wanted[-1]:
                return
            gradients = _gradients(trace, parameters)
            if self.freeze_first_slot:
                for gradient in gradients:
                    gradient[:, :, 0] = 0
            norm = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
            factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0).view(-1, 1, 1, 1)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient * factor
            optimizer.step()

    def _cache(self, trace: Trace, parameters: list[Tensor], step: int) -> CompactCache:
        dtype = trace.keys[0].dtype
        layers = _layers([parameter.detach().to(dtype, copy=True) for parameter in parameters])
        return compact_cache(trace, layers, "gradient", {"steps": step, "lr": self.lr, "init": self.init})


def _layers(parameters: list[Tensor]) -> list[CompactLayer]:
    return [CompactLayer(k, v) for k, v in zip(parameters[::2], parameters[1::2], strict=True)]


@torch.enable_grad()
def _gradients(trace: Trace, parameters: list[Tensor]) -> list[Tensor]:
    """Gradient of the sum over examples of each example's mean KL."""
    cache = CompactCache(_layers(parameters), trace.prefix_len, trace.fingerprint)
    first = trace.supervision_start - trace.prefix_len
    with frozen(trace.model):
        hidden = hidden_states(
            trace.model,
            input_ids=trace.suffix_ids,
            past_key_values=cache.to_transformers(trace.model, read_only=True),
            use_cache=True,
        )
        return list(torch.autograd.grad(hidden, parameters, _hidden_gradient(trace, hidden.detach(), first)))


def _hidden_gradient(
    trace: Trace, hidden: Float[Tensor, "batch suffix hidden"], first: int
) -> Float[Tensor, "batch suffix hidden"]:
    """Gradient with respect to the head's input, made in chunks so that few logits exist at a time."""
    result, length = torch.zeros_like(hidden), hidden.shape[1]
    step = max(1, _CHUNK_ELEMENTS // (len(hidden) * trace.model.config.get_text_config().vocab_size))
    for start in range(first, length, step):
        stop = min(start + step, length)
        teacher = _log_probs(trace.logits_at(start, stop))
        part = hidden[:, start:stop].clone().requires_grad_(True)
        student = _log_probs(logits_from_hidden(trace.model, part))
        kl = (teacher.exp() * (teacher - student)).sum() / (length - first)
        result[:, start:stop] = torch.autograd.grad(kl, part)[0]
    return result


def _log_probs(logits: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.log_softmax(-1)
