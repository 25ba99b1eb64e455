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


def masked_attention(q, k, v, m, reach, scale, bias=None, sinks=None):
    """o_i = sum_j w_ij e^{s_ij} v_j / (e^sink + sum_j w_ij e^{s_ij}) over the reachable j, w_ij =
    m_j; a blind query sees itself. Without sinks e^sink is 0.

    The derivative by m is the one at the dense attention, with respect to m alone.
    """
    repeats = q.shape[1] // k.shape[1]
    bias = torch.zeros_like(k[..., 0]) if bias is None else bias
    k, v, bias = (x.repeat_interleave(repeats, 1) for x in (k, v, bias.unsqueeze(2)))

    def weighted_mean(weight, q, k, v, bias, sink_mass):
        mass = weight * ((q @ k.mT) * scale + bias).exp()
        return mass @ v / (mass.sum(-1, keepdim=True) + sink_mass)

    sink_mass = torch.zeros(()) if sinks is None else sinks.exp()[:, None, None]

    hard = reach * m.detach()
    hard = torch.where(
        hard.detach().sum(-1, keepdim=True) > 0, hard, torch.eye(q.shape[2], dtype=q.dtype)
    )
    out = weighted_mean(hard, q, k, v, bias, sink_mass)
    fixed = [x.detach() for x in (q, k, v, bias, sink_mass)]
    soft = weighted_mean(reach * (1 + m - m.detach()), *fixed)
    return out + soft - soft.detach()


def attention_mass(q, k, scale, window=None, sinks=None):
    """Causal attention that each slot receives from all queries and heads."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    mass = (q @ k.mT * scale).exp() * allowed(q.shape[2], window)
    sink_mass = 0.0 if sinks is None else sinks.exp()[:, None, None]
    return (mass / (mass.sum(-1, keepdim=True) + sink_mass)).sum((1, 2))


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
