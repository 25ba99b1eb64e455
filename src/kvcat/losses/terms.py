"""The terms of the training objective, written plainly: the oracles of the chunked objective, and the budget.

All are scalars in float32, float64 where their input is.
"""

import torch
from torch.nn import functional

from kvcat.errors import InputError
from kvcat.types import Float, Int, Tensor, at_least_float32


def next_token_loss(
    logits: Float[Tensor, "batch tokens vocab"], tokens: Int[Tensor, "batch tokens"]
) -> Float[Tensor, ""]:
    """Mean of -log p(x_t | x_<t) over positions t = 2..T of all sequences, nats; log(vocab) for uniform logits.

    The logits at t predict token t + 1, the last are not used. Refuses sequences of fewer than two tokens.

    References: KV-CAT, L_anchor in equation "training_objective".
    """
    check_length(tokens.shape[1])
    return functional.cross_entropy(at_least_float32(logits[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def distillation_kl(
    teacher_logits: Float[Tensor, "batch tokens vocab"], student_logits: Float[Tensor, "batch tokens vocab"]
) -> Float[Tensor, ""]:
    """Mean of KL(sg teacher || student) over the predictions of positions t = 2..T of all sequences, nats.

    KL = sum_v p_v (log p_v - log s_v), zero where the two distributions agree; the teacher carries no gradient.

    The logits are of all positions; the last predict nothing and are not used. Refuses fewer than two positions.

    References: KV-CAT, L_mask in equation "training_objective".
    """
    check_length(teacher_logits.shape[1])
    teacher = at_least_float32(teacher_logits[:, :-1].detach()).log_softmax(-1)
    student = at_least_float32(student_logits[:, :-1]).log_softmax(-1)
    return functional.kl_div(student, teacher, reduction="none", log_target=True).sum(-1).mean()


def budget_loss(
    keep: Float[Tensor, "batch tokens"], prob: Float[Tensor, "batch tokens"], target: float
) -> Float[Tensor, ""]:
    """Mean over sequences of F G / rho + (1 - F)(1 - G) / (1 - rho), F the mean of ``keep``, G the mean of ``prob``.

    1 at F = G = rho, 1 / rho at F = G = 1. The gradient reaches ``prob`` only: dB/dG = (F - rho) / (rho (1 - rho))
    lowers the probabilities where more than the target is kept. With rho = 1 / N it is H-Net's ratio loss.

    Args:
        keep: the router's own mask m, before position 0 is forced, 0 or 1; it carries no gradient.
        prob: keep probabilities p, in [0, 1].
        target: kept fraction rho, in (0, 1).

    Raises:
        InputError: target outside (0, 1).

    References: KV-CAT, appendix "Training objective"; Hwang et al. 2025 (H-Net), arXiv:2507.07955.
    """
    if not 0 < target < 1:
        raise InputError(f"target keep ratio must lie in (0, 1), got {target}")
    dtype = torch.promote_types(prob.dtype, torch.float32)
    F = keep.detach().to(dtype).mean(1)
    G = prob.to(dtype).mean(1)
    return (F * G / target + (1 - F) * (1 - G) / (1 - target)).mean()


def check_length(num_tokens: int) -> None:
    """Refuse a sequence that holds no prediction."""
    if num_tokens < 2:
        raise InputError(f"a sequence of {num_tokens} tokens predicts nothing: at least 2 are needed")
