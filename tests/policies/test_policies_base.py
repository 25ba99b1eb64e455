"""The gate, groups of layers, the registry, and the policies that keep an exact count."""

import math

import pytest
import torch

from kvcat import InputError
from kvcat.policies import (
    POLICIES,
    AttentionMassPolicy,
    RandomPolicy,
    Router,
    build_policies,
    check_group_starts,
    gate,
    kept_count,
)


def test_the_gate_keeps_position_zero_and_what_exceeds_the_threshold_with_straight_gradients():
    scores = torch.tensor(
        [[0.9, 0.5, 0.51, 0.49, 0.0, 1.0], [0.0, 1.0, 0.5, 0.0, 0.0, 0.0]], requires_grad=True
    )
    kept = gate(scores, 0.5)
    weights = torch.arange(12.0).reshape(2, 6) - 4
    assert kept.tolist() == [[1, 0, 1, 0, 0, 1], [1, 1, 0, 0, 0, 0]]
    (kept * weights).sum().backward()
    assert (scores.grad[:, 0] == 0).all()
    assert torch.equal(scores.grad[:, 1:], weights[:, 1:])


@pytest.mark.parametrize(
    ("keep_ratio", "tokens", "count"),
    [
        (0.5, 10, 5),
        (0.5, 11, 6),
        (0.25, 10, 3),
        (0.24, 10, 2),
        (0.29, 50, 15),
        (0.01, 10, 1),
        (1.0, 7, 7),
        (0.5, 1, 1),
    ],
)
def test_the_count_rounds_halves_up_and_is_at_least_one(keep_ratio, tokens, count):
    assert kept_count(keep_ratio, tokens) == count


@pytest.mark.parametrize(("layers", "groups"), [(1, 1), (24, 4), (30, 7), (100, 99)])
def test_default_groups_are_valid_and_differ_in_size_by_at_most_one(layers, groups):
    starts = check_group_starts(layers, None, groups)
    assert check_group_starts(layers, starts) == starts
    sizes = [b - a for a, b in zip(starts, [*starts[1:], layers], strict=True)]
    assert (len(starts), starts[0]) == (groups, 0)
    assert max(sizes) - min(sizes) <= 1
    assert check_group_starts(24) == [0, 6, 12, 18]


def build(policy="router", **options):
    return build_policies(policy, **{"num_layers": 4, "hidden_size": 8, **options})


@pytest.mark.parametrize(
    ("call", "options", "said"),
    [
        (build, {"group_starts": []}, "empty"),
        (build, {"group_starts": [0, 4]}, "start 4 does not exist.*0..3"),
        (build, {"group_starts": [2, 1]}, "1 follows 2"),
        (build, {"group_starts": [0, 2, 2]}, "2 follows 2"),
        (build, {"group_starts": [0, True]}, "start True does not"),
        (build, {"num_groups": 0}, "not 0"),
        (build, {"num_groups": 5}, "not 5"),
        (build, {"policy": "rooter"}, "'rooter'.*attention, random, router"),
        (RandomPolicy, {"keep_ratio": 0.0}, "0.0"),
        (AttentionMassPolicy, {"keep_ratio": math.nan}, "nan"),
        (lambda: RandomPolicy(0.5)(torch.zeros(2, 6, 2)), {}, r"torch\.Generator"),
        (Router, {"hidden_size": 0}, "hidden_size is 0"),
        (Router, {"hidden_size": 4, "feature_dim": 0}, "feature_dim is 0"),
        (Router, {"hidden_size": 4, "noise": -0.1}, "-0.1"),
        (Router, {"hidden_size": 4, "noise": math.nan}, "nan"),
    ],
)
def test_what_makes_no_sense_is_rejected_with_the_value(call, options, said):
    with pytest.raises(InputError, match=said):
        call(**options)


def test_built_policies_use_the_options_and_start_from_different_weights_fixed_by_the_seed():
    options = {"num_layers": 8, "hidden_size": 12, "num_groups": 2, "feature_dim": 5, "noise": 0.1}
    first, again, other = (build(**options, seed=seed) for seed in (3, 3, 4))
    assert list(first) == [0, 4]
    weight = [[p.q_proj.weight for p in made.values()] for made in (first, again, other)]
    assert all(w.shape == (5, 12) for w in weight[0])
    assert all(torch.equal(a, b) for a, b in zip(weight[0], weight[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weight[0], weight[2], strict=True))
    assert not torch.equal(weight[0][0], weight[0][1])
    assert build("attention", target=0.3)[0].keep_ratio == 0.3


def test_a_policys_options_come_from_its_spec_and_are_checked_by_name_and_type(monkeypatch):
    def make(*, target: float, every: int = 2, **_: object) -> RandomPolicy:
        policy = RandomPolicy(target)
        policy.every = every
        return policy

    monkeypatch.setitem(POLICIES, "strided", make)
    assert build("strided,every=3", target=0.4)[0].every == 3
    assert build("strided", target=0.4)[0].every == 2
    with pytest.raises(
        InputError,
        match=r"policy strided has no option 'evry' \(did you mean every\?\); its options: every",
    ):
        build("strided,evry=3")
    with pytest.raises(InputError, match="every is 'often'; it must be a whole number"):
        build("strided,every=often")
    with pytest.raises(InputError, match="policy random has no option 'every'; its options: none"):
        build("random,every=3")


def test_the_slots_that_everyone_looks_at_are_kept_and_equal_masses_go_to_the_lower_position():
    keys = torch.zeros(1, 1, 12, 2)
    queries = torch.ones(1, 4, 12, 2)
    assert AttentionMassPolicy(0.5)(queries, keys, scale=1.0, window=1).tolist() == [
        [1.0] * 6 + [0.0] * 6
    ]
    keys[0, 0, [3, 6], 0] = 10.0
    assert AttentionMassPolicy(0.25)(queries, keys, scale=1.0).nonzero()[:, 1].tolist() == [0, 3, 6]


def test_random_masks_are_uniform_over_all_positions_but_the_first_and_over_pairs():
    draws = 20_000
    tokens = 9
    scores = RandomPolicy(0.5)(
        torch.zeros(draws, tokens, 1), [torch.Generator().manual_seed(0)] * draws
    )[:, 1:]
    kept = 4
    others = tokens - 1
    single = kept / others
    pair = kept * (kept - 1) / (others * (others - 1))
    together = scores.T @ scores / draws
    error = together - torch.full_like(together, pair).fill_diagonal_(single)
    assert error.abs().max() < 4.5 * (single * (1 - single) / draws) ** 0.5
