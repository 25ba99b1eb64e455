"""The terms of the training objective, written plainly; tests compare the chunked forms with them.

All are scalars in float32, or in float64 if their input has that type.
"""

import torch
from torch.nn import functional

from kvcat.errors import InputError, check_in
from kvcat.types import Float, Int, Tensor, at_least_float32


def next_token_loss(
    logits: Float[Tensor, "batch tokens vocab"], tokens: Int[Tensor, "batch tokens"]
) -> Float[Tensor, ""]:
    """Mean of -log p(x_t | x_<t) over positions t = 2..T of all sequences, nats.

    It is log(vocab) for uniform logits. The logits at t predict token t + 1. The last logits are
    not used.

    Raises:
        InputError: sequences of fewer than two tokens.

    References: KV-CAT, L_anchor in equation "training_objective".
    """
    _check_length(tokens.shape[1])
    predictions = at_least_float32(logits[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(predictions, tokens[:, 1:].flatten())


def distillation_kl(
    teacher_logits: Float[Tensor, "batch tokens vocab"],
    student_logits: Float[Tensor, "batch tokens vocab"],
) -> Float[Tensor, ""]:
    """Mean of KL(sg teacher || student) over the predictions of positions t = 2..T, nats.

    KL = sum_v p_v (log p_v - log s_v), zero if the two distributions agree. The teacher carries no
    gradient. The logits at t predict token t + 1. The last logits are not used.

    Raises:
        InputError: sequences of fewer than two positions.

    References: KV-CAT, L_mask in equation "training_objective".
    """
    _check_length(teacher_logits.shape[1])
    log_p = at_least_float32(teacher_logits[:, :-1].detach()).log_softmax(-1)
    log_s = at_least_float32(student_logits[:, :-1]).log_softmax(-1)
    return functional.kl_div(log_s, log_p, reduction="none", log_target=True).sum(-1).mean()


def budget_loss(
    keep: Float[Tensor, "batch tokens"], prob: Float[Tensor, "batch tokens"], target: float
) -> Float[Tensor, ""]:
    """Mean over sequences of F G / rho + (1 - F)(1 - G) / (1 - rho).

    F is the mean of ``keep`` and G the mean of ``prob``.

    It is 1 at F = G = rho and 1 / rho at F = G = 1. Only ``prob`` gets a gradient. It is
    dB/dG = (F - rho) / (rho (1 - rho)), which lowers the probabilities if more than the target is
    kept. With rho = 1 / N this is H-Net's ratio loss.

    Args:
        keep: the router's own mask m, before position 0 is forced, 0 or 1; it carries no gradient.
        prob: keep probabilities p, in [0, 1].
        target: kept fraction rho, in (0, 1).

    Raises:
        InputError: target outside (0, 1).

    References: KV-CAT, appendix "Training objective"; Hwang et al. 2025 (H-Net), arXiv:2507.07955.
    """
    check_in("(0, 1)", target=target)
    wide = torch.promote_types(prob.dtype, torch.float32)
    # F is a count of hard decisions: only G, the mean probability, learns
    F = keep.detach().to(wide).mean(1)
    G = prob.to(wide).mean(1)
    return (F * G / target + (1 - F) * (1 - G) / (1 - target)).mean()


def _check_length(num_tokens: int) -> None:
    """Reject a sequence that is too short for a prediction."""
    if num_tokens < 2:
        raise InputError(
            f"a sequence of {num_tokens} tokens predicts nothing: at least 2 are needed"
        )
