"""The dense model's predictions, and how far a student is from them, a few positions at a time."""

import math
from collections.abc import Iterator

import torch

from kvcat.compress.common import wide
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.models import logits_from_hidden
from kvcat.types import Float, Tensor

_CHUNK_ELEMENTS = {"cpu": 2**22}  # benchmarks/gradient.py: larger tensors are mapped into memory anew every time
_CHUNK_ELEMENTS_ELSEWHERE = 2**25


class Teacher:
    """KL(dense || student) at some suffix positions of a trace, and its gradient.

    The dense predictions are held as hidden states; probabilities exist for one chunk of positions at a time. Only
    where all of them together are small are they computed once and kept.

    Args:
        trace: whose dense forward teaches.
        start: first suffix position, in [0, suffix).
        stop: one past the last, in (start, suffix].
        max_bytes: memory that kept probabilities may take, bytes; 0 keeps none.
    """

    def __init__(self, trace: Trace, start: int, stop: int, *, max_bytes: int = 0):
        self.trace, self.start, self.stop = trace, start, stop
        self._step = positions_at_once(trace)
        row = trace.batch_size * trace.model.config.get_text_config().vocab_size
        size = 8 if trace.hidden.dtype == torch.float64 else 4
        self._keeps = 2 * row * (stop - start) * size <= max_bytes
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def kl(self, hidden: Float[Tensor, "batch suffix hidden"]) -> Float[Tensor, " batch"]:
        """Mean over the positions of KL(dense || student), nats.

        Args:
            hidden: the student's input of the head at all suffix positions.
        """
        total = hidden.new_zeros(len(hidden), dtype=torch.float64)
        for part in self._chunks():
            student = wide(logits_from_hidden(self.trace.model, hidden[:, part])).log_softmax(-1)
            total += _divergence(*self._predictions(part), student)
        return total / (self.stop - self.start)

    @torch.enable_grad()
    def gradient(
        self, hidden: Float[Tensor, "batch suffix hidden"], count: int, *, with_kl: bool = False
    ) -> tuple[Float[Tensor, "batch suffix hidden"], Float[Tensor, " batch"]]:
        """Gradient of the sum over the positions of KL / count with respect to ``hidden``, and KL's mean where wanted.

        Args:
            hidden: the student's input of the head at all suffix positions.
            count: divides the sum.
            with_kl: also work out KL(dense || student), mean over the positions, nats; 0 otherwise.
        """
        result, total = torch.zeros_like(hidden), hidden.new_zeros(len(hidden), dtype=torch.float64)
        for part in self._chunks():
            log_probs, probs = self._predictions(part)
            own = hidden[:, part].detach().clone().requires_grad_(True)
            student = wide(logits_from_hidden(self.trace.model, own)).log_softmax(-1)
            if with_kl:
                total += _divergence(log_probs, probs, student.detach())
            result[:, part] = torch.autograd.grad(student, own, probs * (-1 / count))[0]
        return result, total / (self.stop - self.start)

    def _chunks(self) -> Iterator[slice]:
        for start in range(self.start, self.stop, self._step):
            yield slice(start, min(start + self._step, self.stop))

    def _predictions(self, part: slice) -> tuple[Tensor, Tensor]:
        if part.start in self._kept:
            return self._kept[part.start]
        log_probs = wide(self.trace.logits_at(part.start, part.stop)).log_softmax(-1)
        pair = log_probs, log_probs.exp()
        if self._keeps:
            self._kept[part.start] = pair
        return pair


def _divergence(log_probs: Tensor, probs: Tensor, student: Tensor) -> Float[Tensor, " batch"]:
    return (log_probs - student).mul_(probs).sum(-1).double().sum(-1)


def positions_at_once(trace: Trace) -> int:
    """For how many positions of every example there may be logits at a time.

    Args:
        trace: its batch, vocabulary and device decide.
    """
    row = trace.batch_size * trace.model.config.get_text_config().vocab_size
    return max(1, _CHUNK_ELEMENTS.get(trace.hidden.device.type, _CHUNK_ELEMENTS_ELSEWHERE) // row)


def held_out_start(trace: Trace, fraction: float) -> int:
    """The suffix position from which on the last ceil(fraction * n) of the n supervising positions are held out.

    Args:
        trace: with predictions after its prefix.
        fraction: held out, in [0, 1); 0 gives the end of the suffix.

    Raises:
        InputError: a trace that supervises itself, or no position left to learn from.
    """
    if trace.supervision == "self":
        raise InputError("a trace with supervision='self' has no predictions after its prefix to hold out")
    count = trace.input_ids.shape[1] - trace.supervision_start
    held_out = math.ceil(float(f"{fraction * count:.12g}"))
    if held_out >= count:
        raise InputError(f"held_out={fraction} leaves none of the {count} supervising positions to learn from")
    return trace.input_ids.shape[1] - trace.prefix_len - held_out
