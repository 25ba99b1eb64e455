"""The optimisation behind gradient-based caches: slots as parameters, one step at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvcat.cache import CompactCache, CompactLayer, Layer
from kvcat.compress.common import wide
from kvcat.compress.freezing import frozen
from kvcat.compress.recomputing import recomputing
from kvcat.compress.teacher import Teacher, held_out_start
from kvcat.compress.tracing import Trace
from kvcat.models import hidden_states
from kvcat.types import Bool, Float, Tensor


@dataclass(frozen=True)
class StepOptions:
    """How a step is made.

    Args:
        rate: learning rate of the step of a number, from 0.
        max_norm: gradient norm per cache above which it is clipped.
        freeze_first_slot: the first slot stays as it is.
        patience: steps without a new low after which a cache goes back to its best slots and stays there; None: never.
        held_out: fraction of the supervising positions, the last ones, that judge and do not teach.
        recompute: activations are made anew in the backward pass.
        teacher_bytes: memory that kept teacher probabilities may take, bytes.
    """

    rate: Callable[[int], float]
    max_norm: float
    freeze_first_slot: bool
    patience: int | None
    held_out: float
    recompute: bool
    teacher_bytes: int


class SlotOptimisation:
    """AdamW on the slots of compact caches, towards the dense model's predictions.

    As many caches as the starting layers have examples: one per row of a trace, each with its own gradient norm, or a
    single one that all rows of all traces share. Heads with fewer slots than the fullest of their layer are filled up
    with slots of log-bias -inf, whose gradient is exactly 0: they never move, weigh nothing in the norm, and are gone
    from the result. A cache that starts with all slots of its prefix stays as it is.

    Args:
        traces: of one model; a single one unless the cache is shared.
        start: slots to start from, in at least float32; a log-bias is trained as well.
        options: how a step is made.

    Raises:
        InputError: too few supervising positions for ``held_out``.
    """

    def __init__(self, traces: list[Trace], start: Sequence[Layer], options: StepOptions):
        self.num_steps, self._options, self._traces = 0, options, traces
        padded = [layer.padded() for layer in start]
        trained = [("keys", "values") if x.log_bias is None else ("keys", "values", "log_bias") for x in start]
        self._trained = [
            {name: wide(layer.tensors()[name]).clone().requires_grad_(True) for name in names}
            for layer, names in zip(padded, trained, strict=True)
        ]
        self._parameters = [x for own in self._trained for x in own.values()]
        # what only hides the slots that heads do not have
        self._fixed = [None if "log_bias" in names else x.log_bias for x, names in zip(padded, trained, strict=True)]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=options.rate(0), weight_decay=0.0)
        full = [(x.counts == traces[0].counts(i)[: x.batch_size]).all(1) for i, x in enumerate(start)]
        self._whole = torch.stack(full).all(0).to(traces[0].hidden.device)
        ends = [(t, t.supervision_start - t.prefix_len, t.suffix_ids.shape[1]) for t in traces]
        splits = [held_out_start(trace, options.held_out) for trace in traces]
        share = options.teacher_bytes // (len(traces) * (2 if options.held_out else 1))
        self._teachers = [Teacher(t, a, b, max_bytes=share) for (t, a, _), b in zip(ends, splits, strict=True)]
        self._judges = [
            Teacher(t, b, c, max_bytes=share) for (t, _, c), b in zip(ends, splits, strict=True) if options.held_out
        ]
        count = len(self._parameters[0])
        self._lowest = torch.full((count,), torch.inf, dtype=torch.float64)
        self._waited = torch.zeros(count, dtype=torch.int64)
        self._best = [] if options.patience is None else [x.detach().clone() for x in self._parameters]

    @property
    def stopped(self) -> Bool[Tensor, " caches"]:
        """Caches that have waited for a new low as long as ``patience``."""
        if self._options.patience is None:
            return torch.zeros_like(self._waited, dtype=torch.bool)
        return self._waited >= self._options.patience

    def step(self, *, with_kl: bool = False) -> Float[Tensor, " caches"]:
        """Takes one step; KL before it at the judging positions where wanted, nats per token, otherwise 0.

        Args:
            with_kl: work out the KL; with ``patience`` that is done anyway.
        """
        patient = self._options.patience is not None
        gradients, kl = self._gradients(with_kl or patient)
        if patient:
            self._judge(kl)
        for gradient in gradients:
            gradient[self._whole] = 0
            if self._options.freeze_first_slot:
                gradient[:, :, 0] = 0
        norm = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
        factor = (self._options.max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient * factor.view(-1, *[1] * (gradient.ndim - 1))
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.rate(self.num_steps)
        self._optimizer.step()
        if patient:
            self._go_back(self.stopped)
        self.num_steps += 1
        return kl

    def layers(self, dtype: torch.dtype) -> list[Layer]:
        """The slots as they are, copied, keys and values in the given dtype."""
        found = []
        for own, fixed in zip(self._trained, self._fixed, strict=True):
            layer = CompactLayer(**{name: x.detach().clone() for name, x in own.items()}).to(dtype=dtype)
            found.append(layer.without_absent() if fixed is None else layer.taken(fixed > -torch.inf))
        return found

    def state(self) -> dict[str, Tensor]:
        """Everything that the next steps depend on, by name."""
        tensors = {"num_steps": torch.tensor(self.num_steps), "lowest": self._lowest, "waited": self._waited}
        for index, parameter in enumerate(self._parameters):
            tensors[f"slots.{index}"] = parameter.detach()
            tensors |= {f"{name}.{index}": x for name, x in self._optimizer.state[parameter].items()}
        return tensors | {f"best.{index}": x for index, x in enumerate(self._best)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Goes on from what ``state`` gave.

        Args:
            tensors: of an optimisation of equal options and shapes.
        """
        self.num_steps = int(tensors["num_steps"])
        self._lowest, self._waited = tensors["lowest"], tensors["waited"]
        for index, parameter in enumerate(self._parameters):
            parameter.data.copy_(tensors[f"slots.{index}"])
            for name in ("step", "exp_avg", "exp_avg_sq"):
                moment = tensors[f"{name}.{index}"]
                self._optimizer.state[parameter][name] = moment if name == "step" else moment.to(parameter.device)
        for index, best in enumerate(self._best):
            best.copy_(tensors[f"best.{index}"])

    def _gradients(self, with_kl: bool) -> tuple[list[Tensor], Float[Tensor, " caches"]]:
        """Gradient of the sum over caches of each cache's mean KL, and that mean at the judging positions."""
        shared = len(self._parameters[0]) == 1
        counts = [len(t.input_ids) * (s.stop - s.start) for t, s in zip(self._traces, self._teachers, strict=True)]
        whole = sum(counts) if shared else self._teachers[0].stop - self._teachers[0].start
        total, divergences, weights = None, [], []
        for index, teacher in enumerate(self._teachers):
            hidden = self._replay(self._traces[index])
            upstream, kl = teacher.gradient(hidden.detach(), whole, with_kl=with_kl and not self._judges)
            judge = teacher
            if self._judges and with_kl:
                judge = self._judges[index]
                kl = judge.kl(hidden.detach())
            with frozen(teacher.trace.model):
                found = torch.autograd.grad(hidden, self._parameters, upstream)
            total = list(found) if total is None else [a + b for a, b in zip(total, found, strict=True)]
            divergences.append(kl.cpu())
            weights.append(torch.full((len(kl),), float(judge.stop - judge.start), dtype=torch.float64))
        assert total is not None
        kl, weight = torch.cat(divergences), torch.cat(weights)
        return total, (kl @ weight / weight.sum()).unsqueeze(0) if shared else kl

    @torch.enable_grad()
    def _replay(self, trace: Trace) -> Float[Tensor, "batch suffix hidden"]:
        layers = [
            CompactLayer(own["keys"], own["values"], own.get("log_bias", fixed))
            for own, fixed in zip(self._trained, self._fixed, strict=True)
        ]
        cache = CompactCache(layers, trace.prefix_len, trace.fingerprint)
        with frozen(trace.model), recomputing(trace.model, self._options.recompute):
            past = cache.to_transformers(trace.model, read_only=True)
            return hidden_states(trace.model, input_ids=trace.suffix_ids, past_key_values=past, use_cache=True)

    @torch.no_grad()
    def _judge(self, kl: Float[Tensor, " caches"]) -> None:
        better = (kl < self._lowest) & ~self.stopped
        self._lowest = torch.where(better, kl, self._lowest)
        self._waited = torch.where(better, 0, self._waited + 1)
        rows = better.nonzero().flatten()
        for best, parameter in zip(self._best, self._parameters, strict=True):
            best[rows] = parameter[rows]

    @torch.no_grad()
    def _go_back(self, caches: Bool[Tensor, " caches"]) -> None:
        rows = caches.nonzero().flatten()
        for best, parameter in zip(self._best, self._parameters, strict=True):
            parameter[rows] = best[rows]
