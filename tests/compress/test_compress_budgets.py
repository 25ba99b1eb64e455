"""Slots shared out among heads."""

from itertools import product

import pytest
import torch

from kvcat.compress.budgets import allocate, slot_sizes

SIZES = [1, 2, 3, 5, 8]
LARGEST_STEP = 7


def falling_curves(heads, seed):
    draw = torch.Generator().manual_seed(seed)
    scale = 10 ** (4 * torch.rand(1, heads, generator=draw))
    power = 0.3 + 2 * torch.rand(1, heads, generator=draw)
    noise = 1 + torch.rand(len(SIZES), heads, generator=draw)
    return scale * noise * torch.tensor(SIZES).unsqueeze(1) ** -power


def error_of(chosen, errors):
    return sum(errors[SIZES.index(slots), head].item() for head, slots in enumerate(chosen))


def best_error(errors, total):
    choices = (choice for choice in product(SIZES, repeat=errors.shape[1]) if sum(choice) <= total)
    return min(error_of(choice, errors) for choice in choices)


@pytest.mark.parametrize("seed", range(5))
def test_no_choice_with_a_step_less_has_a_smaller_error(seed):
    errors = falling_curves(4, seed)
    for total in range(4, 33):
        chosen = allocate(SIZES, errors, total).tolist()
        assert sum(chosen) <= total
        assert error_of(chosen, errors) <= best_error(errors, max(4, total - LARGEST_STEP)) * (1 + 1e-6)


def test_whole_steps_are_taken_in_the_order_of_their_gain():
    errors = torch.tensor([[9.0, 4.0], [5.0, 2.0], [4.0, 1.5], [2.0, 1.0], [1.0, 0.5]])
    for total, expected in [
        (2, [1, 1]),
        (3, [2, 1]),
        (4, [2, 2]),
        (7, [5, 2]),
        (8, [5, 3]),
        (13, [8, 5]),
        (16, [8, 8]),
    ]:
        assert allocate(SIZES, errors, total).tolist() == expected


def test_a_head_without_error_stays_small_and_a_kink_is_crossed_in_one_step():
    errors = torch.tensor([[0.0, 5.0], [0.0, 5.0], [0.0, 5.0], [0.0, 5.0], [0.0, 0.0]])
    assert allocate(SIZES, errors, 9).tolist() == [1, 8]
    assert allocate(SIZES, errors, 8).tolist() == [1, 1]


def test_sizes_span_an_eighth_to_four_times_the_average_and_stay_within_the_prefix():
    assert slot_sizes(40, 1000) == [5, 10, 20, 30, 40, 60, 80, 120, 160]
    assert slot_sizes(1, 3) == [1, 2, 3]
    assert slot_sizes(700, 768)[-1] == 768


def test_what_no_hull_step_can_use_goes_to_smaller_steps_and_never_below_the_equal_split():
    errors = torch.tensor([[4.0, 4.0], [3.9, 3.9], [3.8, 3.8], [0.0, 0.0]])
    assert allocate([1, 2, 4, 8], errors, 8).tolist() == [4, 4]
    three = torch.cat([errors, errors[:, :1]], dim=1)
    assert sorted(allocate([1, 2, 4, 8], three, 5).tolist()) == [1, 2, 2]
    draw = torch.Generator().manual_seed(0)
    for _ in range(200):
        errors = torch.rand(len(SIZES), 3, generator=draw).sort(0, descending=True).values
        for size in SIZES:
            assert error_of(allocate(SIZES, errors, 3 * size).tolist(), errors) <= error_of([size] * 3, errors) + 1e-6
