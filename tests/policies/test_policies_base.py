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

NAN = float("nan")


def test_the_gate_keeps_what_exceeds_the_threshold_strictly_and_position_zero_always():
    scores = torch.tensor([[0.9, 0.5, 0.51, 0.49, 0.0, 1.0], [0.0, 1.0, 0.5, 0.0, 0.0, 0.0]])
    assert gate(scores, 0.5).tolist() == [[1, 0, 1, 0, 0, 1], [1, 1, 0, 0, 0, 0]]


def test_the_gate_passes_gradients_straight_through_except_at_position_zero():
    scores = torch.rand(2, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    (gate(scores, 0.3) * weights).sum().backward()
    expected = weights.clone()
    expected[:, 0] = 0
    assert scores.grad is not None
    assert torch.equal(scores.grad, expected)


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


def build(policy="router", **options):
    return build_policies(policy, num_layers=4, hidden_size=8, **options)


@pytest.mark.parametrize(
    ("call", "options", "said"),
    [
        (build, {"group_starts": []}, "empty"),
        (build, {"group_starts": [0, 4]}, "start 4 does not exist.*0..3"),
        (build, {"group_starts": [2, 1]}, "1 follows 2"),
        (build, {"group_starts": [0, 2, 2]}, "2 follows 2"),
        (build, {"group_starts": [0, True]}, "True is not a whole number"),
        (build, {"num_groups": 0}, "got 0"),
        (build, {"num_groups": 5}, "got 5"),
        (build, {"policy": "rooter"}, "'rooter'.*attention, random, router"),
        (AttentionMassPolicy, {"keep_ratio": 0.5, "query_chunk": 0}, "got 0"),
        *(
            (policy, {"keep_ratio": x}, str(x))
            for policy in (RandomPolicy, AttentionMassPolicy)
            for x in (0.0, 1.1, NAN)
        ),
        *((gate, {"scores": torch.ones(1, 2), "tau": tau}, str(tau)) for tau in (0.0, 1.0, NAN)),
        (Router, {"hidden_size": 0}, "at least 1"),
        (Router, {"hidden_size": 4, "feature_dim": 0}, "at least 1"),
        *((Router, {"hidden_size": 4, "noise": x}, str(x)) for x in (-0.1, NAN)),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_value(call, options, said):
    with pytest.raises(InputError, match=said):
        call(**options)


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
