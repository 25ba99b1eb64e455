"""Scores of single positions after the output head."""

from dataclasses import dataclass

import torch

from kvcat.losses.head import OutputHead
from kvcat.losses.logits import LogitChunks, PassInputs, PositionValues
from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class PositionScores:
    """Scores of every position in float32, or in float64 if the head has that type.

    Args:
        nll: -log probability of the target, nats.
        nll_teacher: the same under the teacher; None without one, like all below.
        kl: KL(teacher || student), nats.
        top1: 1 where both have the same most likely token, else 0.
    """

    nll: Float[Tensor, "*positions"]
    nll_teacher: Float[Tensor, "*positions"] | None = None
    kl: Float[Tensor, "*positions"] | None = None
    top1: Float[Tensor, "*positions"] | None = None


@torch.no_grad()
def score_positions(
    head: OutputHead,
    hidden: Float[Tensor, "*positions hidden"],
    targets: Int[Tensor, "*positions"],
    teacher_hidden: Float[Tensor, "*positions hidden"] | None = None,
    *,
    chunk_tokens: int | None = None,
    block_tokens: int | None = None,
) -> PositionScores:
    """NLL of the targets at every position; with a teacher, also the teacher's NLL, KL and top-1
    agreement.

    Nothing is shifted: ``hidden``, the input of the head, is scored against ``targets`` at the same
    position. If a position has no next token, any id serves as its target; KL and top-1 do not
    depend on it. ``chunk_tokens`` and ``block_tokens`` are as in ``chunked_objective``.
    """
    student = hidden.flatten(0, -2)
    flat_targets = targets.flatten()

    def run(inputs: PassInputs) -> PositionValues:
        return LogitChunks(
            head, inputs, flat_targets, chunk_tokens=chunk_tokens, block_tokens=block_tokens
        ).run()

    if teacher_hidden is None:
        inputs = PassInputs(dense=student, masked=None, weight=head.weight, bias=head.bias)
        values = run(inputs)
        return PositionScores(values.dense_nll.view(targets.shape))
    teacher = teacher_hidden.flatten(0, -2)
    inputs = PassInputs(dense=teacher, masked=student, weight=head.weight, bias=head.bias)
    values = run(inputs)
    return PositionScores(
        nll=values.masked_nll.view(targets.shape),
        nll_teacher=values.dense_nll.view(targets.shape),
        kl=values.kl.view(targets.shape),
        top1=values.top1.view(targets.shape),
    )
