"""Attention, masks and the router by their formulas, with whole matrices (a helper of the
tests)."""

import torch
from torch.nn import functional


def normal(*shape, seed=0, dtype=torch.float64):
    """Standard normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_gradients(function, tensors):
    """A function's result, and the gradients of a weighted sum of it by all tensors."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [
        out.detach(),
        *torch.autograd.grad((out * normal(*out.shape, seed=1).to(out.dtype)).sum(), leaves),
    ]


def allowed(tokens, window=None):
    """Which key j a query i may see by causality and the sliding window, 0 or 1."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return ((distance >= 0) & (distance < (window or tokens))).double()


def masked_attention(q, k, v, m, reach, scale, bias=None):
    """o_i = sum_j w_ij e^{s_ij} v_j / sum_j w_ij e^{s_ij} over the reachable j, w_ij = m_j; a blind
    query sees itself.

    The derivative by m is the one at the dense attention, with respect to m alone.
    """
    repeats = q.shape[1] // k.shape[1]
    bias = torch.zeros_like(k[..., 0]) if bias is None else bias
    k, v, bias = (x.repeat_interleave(repeats, 1) for x in (k, v, bias.unsqueeze(2)))

    def weighted_mean(weight, q, k, v, bias):
        mass = weight * ((q @ k.mT) * scale + bias).exp()
        return mass @ v / mass.sum(-1, keepdim=True)

    hard = reach * m.detach()
    hard = torch.where(
        hard.detach().sum(-1, keepdim=True) > 0, hard, torch.eye(q.shape[2], dtype=q.dtype)
    )
    out = weighted_mean(hard, q, k, v, bias)
    soft = weighted_mean(reach * (1 + m - m.detach()), *(x.detach() for x in (q, k, v, bias)))
    return out + soft - soft.detach()


def attention_mass(q, k, scale, window=None):
    """Causal attention that each slot receives from all queries and heads."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q @ k.mT * scale).masked_fill(allowed(q.shape[2], window) == 0, -torch.inf)
    return scores.softmax(-1).sum((1, 2))


def router_scores(router, h):
    """The keep probabilities of the paper's appendix in quadratic form."""
    x = functional.layer_norm(h, h.shape[-1:], router.norm.weight, router.norm.bias)
    q, k = (functional.elu(x @ p.weight.T) + 1 for p in (router.q_proj, router.k_proj))
    weights = (q @ k.mT).tril()
    a = (
        (weights / (weights.sum(-1, keepdim=True) + 1e-6))
        @ (x @ router.v_proj.weight.T)
        @ router.o_proj.weight.T
    )
    return (
        1 - functional.cosine_similarity(h @ router.p_proj.weight.T, h + router.alpha * a, dim=-1)
    ) / 2
