"""Masked attention by its formula, with whole matrices (a module of the tests, not a test)."""

import torch


def allowed(tokens, window=None):
    """Which key j a query i may see by causality and the sliding window, 0 or 1."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return ((distance >= 0) & (distance < (window or tokens))).double()


def masked_attention(q, k, v, m, reach, scale, coupling, bias=None):
    """o_i = sum_j w_ij e^{s_ij} v_j / sum_j w_ij e^{s_ij} over the reachable j, w_ij = m_j; a blind query sees itself.

    The derivative by m is that of this formula (exact), or the one at the dense attention, with respect to m alone
    (surrogate).
    """
    repeats = q.shape[1] // k.shape[1]
    bias = torch.zeros_like(k[..., 0]) if bias is None else bias
    k, v, bias = (x.repeat_interleave(repeats, 1) for x in (k, v, bias.unsqueeze(2)))

    def weighted_mean(weight, q, k, v, bias):
        mass = weight * ((q @ k.mT) * scale + bias).exp()
        return mass @ v / mass.sum(-1, keepdim=True)

    hard = reach * (m if coupling == "exact" else m.detach())
    hard = torch.where(hard.detach().sum(-1, keepdim=True) > 0, hard, torch.eye(q.shape[2], dtype=q.dtype))
    out = weighted_mean(hard, q, k, v, bias)
    if coupling == "exact":
        return out
    soft = weighted_mean(reach * (1 + m - m.detach()), *(x.detach() for x in (q, k, v, bias)))
    return out + soft - soft.detach()
