"""The loss that brings the kept fraction to its target."""

import torch

from kvcat.errors import InputError
from kvcat.types import Float, Tensor


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

    Returns:
        A scalar in float32, float64 where ``prob`` is.

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
