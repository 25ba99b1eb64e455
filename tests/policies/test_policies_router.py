"""The router and its linear attention."""

import pytest
import torch

from kvcat.losses import budget_loss
from kvcat.policies import Router
from naive import normal, router_scores


def moved_router(hidden):
    router = Router(hidden, 5, noise=1.0, generator=torch.Generator().manual_seed(1)).double()
    torch.nn.init.constant_(router.alpha, 0.7)
    for parameter, seed in ((router.norm.weight, 2), (router.norm.bias, 3)):
        parameter.data += 0.3 * normal(hidden, seed=seed)
    return router


def test_the_router_in_chunks_equals_the_formula_in_outputs_and_all_gradients():
    router = moved_router(7)
    hidden = normal(2, 140, 7).requires_grad_()  # three chunks
    upstream = normal(2, 140, seed=4)
    inputs = [hidden, *router.parameters()]
    outputs = [router(hidden), router_scores(router, hidden)]
    gradients = [torch.autograd.grad(output, inputs, upstream) for output in outputs]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=1e-13)
    assert all(gradient.abs().max() > 1e-6 for gradient in gradients[1])
    for fast, slow in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.bfloat16, 1e-3), (torch.float32, 1e3), (torch.float64, 1.0)]
)
def test_at_the_start_every_probability_is_exactly_one_and_a_vanishing_hidden_state_is_always_kept(
    dtype, scale
):
    wide = torch.promote_types(dtype, torch.float32)
    assert (Router(33).to(wide)((normal(2, 200, 33) * scale).to(dtype)) == 1).all()
    hidden = torch.zeros(1, 3, 8, dtype=dtype, requires_grad=True)
    probabilities = moved_router(8).to(wide)(hidden)
    probabilities.sum().backward()
    assert (probabilities == 1).all()
    assert hidden.grad.isfinite().all()


def test_the_start_is_minus_the_identity_a_critical_point_that_noise_leaves():
    router = Router(16).double()
    noisy = Router(16, noise=0.05).double()
    assert torch.equal(router.p_proj.weight, -torch.eye(16, dtype=torch.float64))
    assert router.alpha.item() == 0
    for made in (router, noisy):
        made(normal(2, 50, 16)).sum().backward()
    assert all(p.grad.abs().max() < 1e-14 for p in router.parameters())
    assert all(p.grad.abs().max() > 1e-2 for p in (noisy.p_proj.weight, noisy.alpha))


def test_neither_a_bfloat16_autocast_nor_bfloat16_weights_reach_the_arithmetic_of_the_router():
    router = moved_router(16).float()
    hidden = normal(2, 30, 16).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = router(hidden)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, router(hidden.float()))
    cast = router.bfloat16()(hidden)
    assert cast.dtype == torch.float32
    assert torch.equal(cast, router.float()(hidden))


def test_the_budget_alone_moves_the_router_to_its_target():
    router = Router(32, 8, noise=0.02)
    optimizer = torch.optim.AdamW(router.parameters(), lr=3e-3, weight_decay=0.0)
    embedding = normal(100, 32, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    kept = []
    for _ in range(120):
        prob = router(embedding[torch.randint(100, (2, 64), generator=generator)])
        keep = (prob > 0.5).float()
        optimizer.zero_grad()
        budget_loss(keep, prob, 0.5).backward()
        optimizer.step()
        kept.append(keep.mean().item())
    assert kept[0] == 1.0
    assert sum(kept[-40:]) / 40 == pytest.approx(0.5, abs=0.05)
