"""The training losses after the output head, in chunks of positions.

Nothing is shifted here: hidden states are scored against the target at the same position. The
callers pair the hidden state at t with the token at t + 1.
"""

# pyright: reportIncompatibleMethodOverride=false

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kvcat.errors import InputError
from kvcat.losses.head import OutputHead
from kvcat.losses.logits import Gradients, LogitChunks, PassInputs, positions_per_chunk
from kvcat.memory import DEVICE_ELEMENTS
from kvcat.types import Float, Int, Tensor, at_least_float32


@dataclass(frozen=True, eq=False)
class ChunkedLosses:
    """The weighted objective and its terms: scalars in float32, or in the head's float64.

    Args:
        total: mask_weight * kl + anchor_weight * dense_loss, with gradient.
        dense_loss: NLL of the dense pass, nats; like all below without gradient.
        masked_loss: NLL of the masked pass, nats; None for the control, like all below.
        kl: KL(dense || masked), nats.
        top1: fraction of positions where both passes have the same most likely token.
    """

    total: Float[Tensor, ""]
    dense_loss: Float[Tensor, ""]
    masked_loss: Float[Tensor, ""] | None = None
    kl: Float[Tensor, ""] | None = None
    top1: Float[Tensor, ""] | None = None


def chunked_objective(
    head: OutputHead,
    dense_hidden: Float[Tensor, "*positions hidden"],
    masked_hidden: Float[Tensor, "*positions hidden"] | None,
    targets: Int[Tensor, "*positions"],
    *,
    mask_weight: float = 1.0,
    anchor_weight: float = 1.0,
    chunk_tokens: int | None = None,
    block_tokens: int | None = None,
    compiled: bool = False,
) -> ChunkedLosses:
    """lambda_mask KL(sg dense || masked) + lambda_anchor NLL(dense), means over all positions.

    Equals ``distillation_kl`` and ``next_token_loss`` on the head's logits, in value and in every
    gradient, for the hidden states of positions 1..T-1 and the tokens of positions 2..T. A chunk's
    dense logits are made once. They serve the anchor with gradient and the KL without.

    The gradients with respect to both hidden states, W and b are computed in the forward pass,
    while the chunk's logits exist (``LogitChunks``). The backward pass multiplies them by the
    gradient that arrives; it can be differentiated once only. Scale, soft-cap, softmax and every
    sum over positions are computed in at least float32.

    Memory on top of the inputs: chunk_tokens x vocab logits of both passes, which are overwritten
    by their gradients; a few of their rows in float32; W once in the dtype of the products if that
    is another one, its gradient in float32, and the gradients of the hidden states. Gradients that
    are not needed are not computed.

    Args:
        head: the model's output head. Its W must be a plain tensor: a sharded model unshards it
            around this call, as FSDP2 does inside the forward of the module that has it.
        dense_hidden: output of the model's final norm in the dense pass.
        masked_hidden: the same for the masked pass; None for the control, whose total has no KL.
        targets: the token that each position predicts.
        mask_weight, anchor_weight: lambda_mask and lambda_anchor, >= 0.
        chunk_tokens: positions per chunk, at least 1; None: as many as have 2^28 logits, on a CPU
            1,024 or as many as have 2^26.
        block_tokens: positions of a chunk that are in float32 at once, at least 1; None: as many as
            stay in a CPU's cache.
        compiled: compile the work on a block of positions with torch.compile.

    Raises:
        InputError: no position, chunk_tokens or block_tokens below 1, a sharded W.

    References: KV-CAT, equation "training_objective". Gradients made in the forward: Hsu et al.
        2024 (Liger Kernel), arXiv:2410.10989.
    """
    masked = None if masked_hidden is None else masked_hidden.flatten(0, -2)
    total, means = _apply(
        head,
        dense_hidden.flatten(0, -2),
        masked,
        targets.flatten(),
        _Options(anchor_weight, mask_weight, chunk_tokens, block_tokens, compiled),
    )
    dense_loss, masked_loss, kl, top1 = means.unbind()
    if masked is None:
        return ChunkedLosses(total, dense_loss)
    return ChunkedLosses(total, dense_loss, masked_loss, kl, top1)


def chunked_distillation(
    head: OutputHead,
    teacher_hidden: Float[Tensor, "*positions hidden"],
    hidden: Float[Tensor, "*positions hidden"],
) -> Float[Tensor, ""]:
    """Mean of KL(sg teacher || student) over all positions of one output head, nats.

    As in ``chunked_objective``, the gradients are made in the forward pass.
    """
    teacher = teacher_hidden.detach().flatten(0, -2)
    student = hidden.flatten(0, -2)
    total, _ = _apply(head, teacher, student, None, _Options(anchor_weight=0.0))
    return total


def chunked_kl(
    teacher_head: OutputHead,
    teacher_hidden: Float[Tensor, "*positions teacher_hidden"],
    head: OutputHead,
    hidden: Float[Tensor, "*positions hidden"],
    *,
    chunk_tokens: int | None = None,
) -> Float[Tensor, ""]:
    """Mean of KL(sg teacher || student) over all positions, nats, of two models with a head each.

    The logits are made chunk by chunk, and once more in the backward pass. ``chunk_tokens`` are the
    positions of a chunk; None: as many as have 2^26 logits, on a CPU at most 1,024.

    References: KV-CAT, footnote on distillation from a frozen base model.
    """

    def sum_of_chunk(teacher: Tensor, student: Tensor) -> Tensor:
        teacher_logits = at_least_float32(teacher_head.logits(teacher).detach())
        student_logits = at_least_float32(head.logits(student))
        return functional.kl_div(
            student_logits.log_softmax(-1),
            teacher_logits.log_softmax(-1),
            reduction="sum",
            log_target=True,
        )

    teachers = teacher_hidden.detach().flatten(0, -2)
    students = hidden.flatten(0, -2)
    # autograd keeps several float32 tensors of a chunk
    chunk = chunk_tokens or positions_per_chunk(head, DEVICE_ELEMENTS)
    sums: list[Any] = [
        # nothing of vocabulary size outlives its chunk; the backward pass makes it again
        checkpoint(sum_of_chunk, teacher, student, use_reentrant=False)
        for teacher, student in zip(teachers.split(chunk), students.split(chunk), strict=True)
    ]
    return torch.stack(sums).sum() / len(students)


@dataclass(frozen=True)
class _Options:
    """As in ``chunked_objective``."""

    anchor_weight: float = 1.0
    mask_weight: float = 1.0
    chunk_tokens: int | None = None
    block_tokens: int | None = None
    compiled: bool = False


def _apply(
    head: OutputHead,
    dense: Float[Tensor, "positions hidden"],
    masked: Float[Tensor, "positions hidden"] | None,
    targets: Int[Tensor, " positions"] | None,
    options: _Options,
) -> tuple[Float[Tensor, ""], Float[Tensor, "4"]]:
    """The total with gradient and the means of the ``PositionValues`` without."""
    if not len(dense):
        raise InputError("no position to score: a sequence of at least 2 tokens is needed")
    if hasattr(head.weight, "placements"):  # a DTensor, without the import of torch.distributed
        raise InputError("the output weight is sharded: the chunked objective needs it whole")
    tensors = [dense, masked, head.weight, head.bias]
    if not torch.is_grad_enabled():  # autograd would report that gradients are needed
        tensors = [None if tensor is None else tensor.detach() for tensor in tensors]
    return _Objective.apply(*tensors, targets, head, options)  # type: ignore[return-value]


class _Objective(torch.autograd.Function):
    """``_apply``; the gradients are made in the forward pass.

    ``apply`` takes dense and masked hidden states, W, b, targets, head and options.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        dense, masked, weight, bias, targets, head, options = arguments
        inputs = PassInputs(dense, masked, weight, bias)
        wide = torch.promote_types(head.compute_dtype(), torch.float32)
        # in 16 bits, a sum over many positions would lose small terms
        gradients = Gradients.zeros(inputs, ctx.needs_input_grad[:4], wide)
        values = LogitChunks(head, inputs, targets, gradients, **vars(options)).run()
        means = torch.stack(values).mean(1)
        dense_loss, _, kl, _ = means.unbind()
        total = options.anchor_weight * dense_loss
        if masked is not None:
            total = total + options.mask_weight * kl
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in vars(inputs).values()]
        # the gradients in place of logits: a chunk's logits are gone when the forward ends
        ctx.save_for_backward(*vars(gradients).values())
        ctx.mark_non_differentiable(means)
        return total, means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad_total = grad_outputs[0]
        scaled: list[Tensor | None] = []
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            # multiplied before the cast: loss scaling keeps float16 gradients from underflow
            scaled.append(None if gradient is None else (gradient * grad_total).to(dtype))
        no_gradient = [None, None, None]  # targets, head, options
        return *scaled, *no_gradient
