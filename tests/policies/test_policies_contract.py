"""What every policy promises: a new one adds one row to ``ROWS``."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kvcat.policies import (
    POLICIES,
    AttentionMassPolicy,
    RandomPolicy,
    Router,
    SparsificationPolicy,
    build_policies,
    kept_count,
)

BATCH, HEADS, KV_HEADS, TOKENS, HIDDEN, HEAD_DIM = 3, 4, 2, 23, 12, 6


@dataclass(frozen=True)
class Row:
    """One policy under test: made from a seed, keep_ratio where it keeps an exact count, causal or not."""

    make: Callable[[int], SparsificationPolicy]
    keep_ratio: float | None
    causal: bool


def router(seed: int) -> Router:
    made = Router(HIDDEN, 5, noise=3.0, generator=torch.Generator().manual_seed(seed))
    torch.nn.init.constant_(made.alpha, 0.7)
    return made


ROWS = {
    "router": Row(router, keep_ratio=None, causal=True),
    "random": Row(lambda seed: RandomPolicy(0.4), keep_ratio=0.4, causal=False),
    "attention": Row(lambda seed: AttentionMassPolicy(0.4), keep_ratio=0.4, causal=False),
}

each_policy = pytest.mark.parametrize("name", ROWS)


def scores_of(
    policy, *, inputs_seed=0, seed=0, tokens=TOKENS, dtype=torch.float32, changed_after=None, needs_gradient=False
):
    """Scores on random inputs; positions from ``changed_after`` on are replaced by others."""
    inputs = torch.Generator().manual_seed(inputs_seed)

    def draw(heads, width):
        x = torch.randn(BATCH, heads, TOKENS, width, generator=inputs)
        if changed_after is not None:
            x[:, :, changed_after:] = torch.randn(BATCH, heads, TOKENS - changed_after, width, generator=inputs)
        return x[:, :, :tokens].to(dtype).requires_grad_(needs_gradient)

    generator = torch.Generator().manual_seed(seed)
    if policy.reads == "hidden":
        return policy(draw(1, HIDDEN)[:, 0], generator)
    return policy(draw(HEADS, HEAD_DIM), draw(KV_HEADS, HEAD_DIM), scale=HEAD_DIM**-0.5, generator=generator)


@pytest.mark.parametrize("name", POLICIES)
def test_the_registry_builds_the_class_that_the_row_tests(name):
    built = build_policies(name, num_layers=4, hidden_size=HIDDEN, num_groups=2)
    assert [type(policy) for policy in built.values()] == [type(ROWS[name].make(0))] * 2


@each_policy
@pytest.mark.parametrize("tokens", [1, 2, TOKENS])
def test_there_is_one_score_in_zero_to_one_for_every_token(name, tokens):
    scores = scores_of(ROWS[name].make(0), tokens=tokens)
    assert scores.shape == (BATCH, tokens)
    assert scores.min() >= 0
    assert scores.max() <= 1


@each_policy
def test_scores_are_float32_whatever_the_dtype_of_the_model_and_double_stays_double(name):
    for dtype in (torch.bfloat16, torch.float32):
        assert scores_of(ROWS[name].make(0), dtype=dtype).dtype == torch.float32
    assert scores_of(ROWS[name].make(0).double(), dtype=torch.float64).dtype == torch.float64


@each_policy
def test_the_scores_carry_gradient_exactly_if_the_policy_learns(name):
    policy = ROWS[name].make(0)
    assert scores_of(policy, needs_gradient=True).requires_grad == policy.learned


@each_policy
def test_one_seed_gives_one_result_and_the_global_random_state_is_neither_read_nor_moved(name):
    torch.manual_seed(1)
    first = scores_of(ROWS[name].make(5), seed=6)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = scores_of(ROWS[name].make(5), seed=6)
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.causal])
@pytest.mark.parametrize("position", [1, 7, TOKENS - 1])
def test_a_score_does_not_depend_on_later_tokens(name, position):
    policy = ROWS[name].make(0).double()
    whole = scores_of(policy, dtype=torch.float64)
    torch.testing.assert_close(
        scores_of(policy, dtype=torch.float64, changed_after=position)[:, :position], whole[:, :position]
    )
    torch.testing.assert_close(scores_of(policy, dtype=torch.float64, tokens=position), whole[:, :position])


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.keep_ratio is not None])
@pytest.mark.parametrize("tokens", [1, 2, 10, TOKENS])
def test_a_fixed_policy_keeps_an_exact_count_with_position_zero(name, tokens):
    scores = scores_of(ROWS[name].make(0), tokens=tokens)
    assert (scores.sum(1) == kept_count(ROWS[name].keep_ratio, tokens)).all()
    assert (scores[:, 0] == 1).all()
