"""The gate, exact counts, groups of layers and the registry."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcat import InputError
from kvcat.policies import (
    AttentionMassPolicy,
    RandomPolicy,
    Router,
    build_policies,
    check_group_starts,
    default_group_starts,
    gate,
    kept_count,
)


def test_the_gate_keeps_what_exceeds_the_threshold_strictly():
    scores = torch.tensor([[0.9, 0.5, 0.51, 0.49, 0.0, 1.0]])
    assert gate(scores, 0.5).tolist() == [[1, 0, 1, 0, 0, 1]]


def test_the_gate_shows_position_zero_whatever_its_score():
    assert gate(torch.zeros(2, 3))[:, 0].tolist() == [1, 1]


def test_the_gate_passes_gradients_straight_through_except_at_position_zero():
    scores = torch.rand(2, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    (gate(scores, 0.3) * weights).sum().backward()
    expected = weights.clone()
    expected[:, 0] = 0
    assert scores.grad is not None
    assert torch.equal(scores.grad, expected)


@pytest.mark.parametrize("tau", [0.0, 1.0, float("nan")])
def test_a_threshold_outside_zero_to_one_is_refused_with_its_value(tau):
    with pytest.raises(InputError, match=str(tau)):
        gate(torch.ones(1, 2), tau)


@pytest.mark.parametrize(
    ("keep_ratio", "tokens", "count"),
    [(0.5, 10, 5), (0.5, 11, 6), (0.25, 10, 3), (0.24, 10, 2), (0.29, 50, 15), (0.01, 10, 1), (1.0, 7, 7), (0.5, 1, 1)],
)
def test_the_count_rounds_halves_up_and_is_at_least_one(keep_ratio, tokens, count):
    assert kept_count(keep_ratio, tokens) == count


@settings(deadline=None)
@given(st.integers(1, 100).flatmap(lambda layers: st.tuples(st.just(layers), st.integers(1, layers))))
def test_default_groups_are_always_valid_and_differ_in_size_by_at_most_one(layers_and_groups):
    num_layers, num_groups = layers_and_groups
    starts = check_group_starts(default_group_starts(num_layers, num_groups), num_layers)
    sizes = [b - a for a, b in zip(starts, [*starts[1:], num_layers], strict=True)]
    assert len(starts) == num_groups
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_groups", [0, 5])
def test_a_number_of_groups_that_the_layers_cannot_make_is_refused_with_its_value(num_groups):
    with pytest.raises(InputError, match=f"got {num_groups}"):
        default_group_starts(4, num_groups)


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ([], "empty"),
        ([0, 4], "start 4 does not exist.*0..3"),
        ([-1, 2], "start -1 does not exist"),
        ([2, 1], "1 follows 2"),
        ([0, 2, 2], "2 appears twice"),
        ([0, True], "True is not a whole number"),
    ],
)
def test_group_starts_that_make_no_sense_are_refused_with_the_value(starts, said):
    with pytest.raises(InputError, match=said):
        build_policies("router", num_layers=4, hidden_size=8, group_starts=starts)


def test_layers_before_the_first_group_may_stay_dense():
    assert list(build_policies("random", num_layers=24, hidden_size=8, group_starts=(1, 7, 13, 19))) == [1, 7, 13, 19]


def test_an_unknown_policy_is_refused_with_its_name_and_the_known_ones():
    with pytest.raises(InputError, match=r"'rooter'.*attention, random, router"):
        build_policies("rooter", num_layers=4, hidden_size=8)


@pytest.mark.parametrize("policy", [RandomPolicy, AttentionMassPolicy])
@pytest.mark.parametrize("keep_ratio", [0.0, 1.1, float("nan")])
def test_a_keep_ratio_outside_zero_to_one_is_refused_with_its_value(policy, keep_ratio):
    with pytest.raises(InputError, match=str(keep_ratio)):
        policy(keep_ratio)


def test_a_built_policy_takes_the_options():
    routers = build_policies("router", num_layers=8, hidden_size=12, num_groups=2, feature_dim=5, noise=0.1, seed=3)
    assert list(routers) == default_group_starts(8, 2) == [0, 4]
    assert all(isinstance(router, Router) and router.q_proj.weight.shape == (5, 12) for router in routers.values())
    fixed = build_policies("attention", num_layers=8, hidden_size=12, target=0.3)[0]
    assert isinstance(fixed, AttentionMassPolicy)
    assert fixed.keep_ratio == 0.3


def test_groups_start_from_different_weights_and_a_seed_gives_them_again():
    first, again, other = (
        build_policies("router", num_layers=8, hidden_size=12, noise=0.1, seed=seed) for seed in (3, 3, 4)
    )
    weight = [[p.q_proj.weight for p in made.values()] for made in (first, again, other)]
    assert all(torch.equal(a, b) for a, b in zip(weight[0], weight[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weight[0], weight[2], strict=True))
    assert not torch.equal(weight[0][0], weight[0][1])
