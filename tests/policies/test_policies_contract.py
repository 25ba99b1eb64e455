"""What every policy guarantees, with a row of ``ROWS`` for each."""

import pytest
import torch

from kvcat.policies import (
    POLICIES,
    AttentionMassPolicy,
    RandomPolicy,
    Router,
    build_policies,
    kept_count,
)

BATCH = 3
HEADS = 4
KV_HEADS = 2
TOKENS = 23
HIDDEN = 12
HEAD_DIM = 6


def router(seed):
    made = Router(HIDDEN, 5, noise=3.0, generator=torch.Generator().manual_seed(seed))
    torch.nn.init.constant_(made.alpha, 0.7)
    return made


ROWS = {
    "router": router,
    "random": lambda _: RandomPolicy(0.4),
    "attention": lambda _: AttentionMassPolicy(0.4),
}
# policies whose scores do not depend on later tokens
CAUSAL = ("router",)
# policies that keep an exact number of tokens
EXACT = ("random", "attention")

each_policy = pytest.mark.parametrize("name", ROWS)


def scores_of(
    policy,
    *,
    seed=0,
    tokens=TOKENS,
    dtype=torch.float32,
    changed_after=TOKENS,
    needs_gradient=False,
):
    """Scores on random inputs; positions from ``changed_after`` on are replaced by others."""
    inputs = torch.Generator().manual_seed(0)

    def draw(heads, width):
        x, others = torch.randn(2, BATCH, heads, TOKENS, width, generator=inputs)
        x[:, :, changed_after:] = others[:, :, changed_after:]
        return x[:, :, :tokens].to(dtype).requires_grad_(needs_gradient)

    generators = [torch.Generator().manual_seed(seed + number) for number in range(BATCH)]
    if policy.reads == "hidden":
        return policy(draw(1, HIDDEN)[:, 0], generators)
    return policy(
        draw(HEADS, HEAD_DIM),
        draw(KV_HEADS, HEAD_DIM),
        scale=HEAD_DIM**-0.5,
        generators=generators,
    )


@pytest.mark.parametrize("name", POLICIES)
def test_the_registry_builds_the_class_that_the_row_tests(name):
    built = build_policies(name, num_layers=4, hidden_size=HIDDEN, num_groups=2)
    assert [type(policy) for policy in built.values()] == [type(ROWS[name](0))] * 2


@each_policy
@pytest.mark.parametrize("tokens", [1, 2, TOKENS])
def test_every_token_has_a_float32_score_in_zero_to_one_and_a_fixed_policy_keeps_its_count(
    name, tokens
):
    scores = scores_of(ROWS[name](0), tokens=tokens)
    assert scores.shape == (BATCH, tokens)
    assert ((scores >= 0) & (scores <= 1)).all()
    if name in EXACT:
        assert (scores.sum(1) == kept_count(0.4, tokens)).all()
        assert (scores[:, 0] == 1).all()
    for dtype in (torch.bfloat16, torch.float32):
        assert scores_of(ROWS[name](0), dtype=dtype).dtype == torch.float32
    assert scores_of(ROWS[name](0).double(), dtype=torch.float64).dtype == torch.float64


@each_policy
def test_one_seed_gives_one_result_and_the_global_random_state_is_neither_read_nor_moved(name):
    torch.manual_seed(1)
    first = scores_of(ROWS[name](5), seed=6)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(first, scores_of(ROWS[name](5), seed=6))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("position", [1, 7, TOKENS - 1])
def test_a_score_does_not_depend_on_later_tokens(name, position):
    policy = ROWS[name](0).double()
    whole = scores_of(policy, dtype=torch.float64)[:, :position]
    changed = scores_of(policy, dtype=torch.float64, changed_after=position)
    assert not torch.allclose(
        changed[:, position], scores_of(policy, dtype=torch.float64)[:, position]
    )
    torch.testing.assert_close(changed[:, :position], whole)
    torch.testing.assert_close(scores_of(policy, dtype=torch.float64, tokens=position), whole)
