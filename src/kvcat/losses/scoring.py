"""How well hidden states predict the next tokens, position by position, without holding all logits."""

from dataclasses import dataclass

import torch

from kvcat.errors import InputError
from kvcat.losses.chunked import ChunkedPasses, PassOptions
from kvcat.losses.head import OutputHead
from kvcat.types import Float, Int, Tensor

_CHUNK_ELEMENTS = {"cpu": 2**22}  # a CPU maps larger tensors into memory anew for every chunk
_CHUNK_ELEMENTS_ELSEWHERE = 2**25


@dataclass(frozen=True, eq=False)
class PositionScores:
    """Scores of every position in float32, float64 where the head is.

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
) -> PositionScores:
    """NLL of the targets, and with a teacher its NLL, KL(teacher || student) and top-1 agreement, at every position.

    Nothing is shifted: ``hidden`` at a position is scored against ``targets`` at the same position. Where a position
    has no next token, any id serves as its target; KL and top-1 do not depend on it.

    Args:
        head: the output head of both; ``kvcat.models.output_head(model)`` describes a model's.
        hidden: input of the head, such as ``kvcat.models.hidden_states``.
        targets: token ids.
        teacher_hidden: the teacher's hidden states at the same positions.
        chunk_tokens: positions whose logits exist at a time, at least 1; None takes 2^22 logits on a CPU, 2^25 else.

    Raises:
        InputError: chunk_tokens below 1.
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise InputError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    weight, bias, shape = head.weight, head.bias, targets.shape
    elements = _CHUNK_ELEMENTS.get(weight.device.type, _CHUNK_ELEMENTS_ELSEWHERE)
    step = chunk_tokens or max(1, elements // weight.shape[0])
    first = hidden if teacher_hidden is None else teacher_hidden
    second = None if teacher_hidden is None else hidden.flatten(0, -2)
    with torch.autocast(weight.device.type, enabled=False):
        passes = ChunkedPasses(
            (first.flatten(0, -2), second, weight, bias), (False,) * 4, targets.flatten(), PassOptions.of(head, step)
        )
        values = [part.view(shape) for part in passes.run()]
    if teacher_hidden is None:
        return PositionScores(values[0])
    nll_teacher, nll, kl, top1 = values
    return PositionScores(nll, nll_teacher, kl, top1)
