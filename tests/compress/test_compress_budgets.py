"""Slots shared out among heads."""

from itertools import product

import pytest
import torch

from kvcat.cache import CompactLayer
from kvcat.compress import AttentionMatching
from kvcat.compress.budgets import HeadFit, allocate, share_out, slot_sizes

SIZES = [1, 2, 3, 5, 8]
LARGEST_STEP = 7


def falling_curves(heads, seed):
    draw = torch.Generator().manual_seed(seed)
    scale = 10 ** (4 * torch.rand(1, heads, generator=draw))
    power = 0.3 + 2 * torch.rand(1, heads, generator=draw)
    noise = 1 + torch.rand(len(SIZES), heads, generator=draw)
    return scale * noise * torch.tensor(SIZES).unsqueeze(1) ** -power


def shared_out(errors, total, sizes=SIZES):
    """Slots of every head, where all heads may have the same sizes."""
    costs = torch.tensor(sizes).unsqueeze(1).expand(-1, errors.shape[1])
    return [sizes[index] for index in allocate(costs, errors, total).tolist()]


def error_of(chosen, errors):
    return sum(errors[SIZES.index(slots), head].item() for head, slots in enumerate(chosen))


def best_error(errors, total):
    choices = (choice for choice in product(SIZES, repeat=errors.shape[1]) if sum(choice) <= total)
    return min(error_of(choice, errors) for choice in choices)


@pytest.mark.parametrize("seed", range(5))
def test_no_choice_with_a_step_less_has_a_smaller_error(seed):
    errors = falling_curves(4, seed)
    for total in range(4, 33):
        chosen = shared_out(errors, total)
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
        assert shared_out(errors, total) == expected


def test_a_head_without_error_stays_small_and_a_kink_is_crossed_in_one_step():
    errors = torch.tensor([[0.0, 5.0], [0.0, 5.0], [0.0, 5.0], [0.0, 5.0], [0.0, 0.0]])
    assert shared_out(errors, 9) == [1, 8]
    assert shared_out(errors, 8) == [1, 1]


def test_sizes_span_an_eighth_to_four_times_the_average_and_stay_within_the_prefix():
    assert slot_sizes(40, 1000) == [5, 10, 20, 30, 40, 60, 80, 120, 160]
    assert slot_sizes(1, 3) == [1, 2, 3]
    assert slot_sizes(700, 768)[-1] == 768


def test_what_no_hull_step_can_use_goes_to_smaller_steps_and_never_below_the_equal_split():
    errors = torch.tensor([[4.0, 4.0], [3.9, 3.9], [3.8, 3.8], [0.0, 0.0]])
    assert shared_out(errors, 8, [1, 2, 4, 8]) == [4, 4]
    three = torch.cat([errors, errors[:, :1]], dim=1)
    assert sorted(shared_out(three, 5, [1, 2, 4, 8])) == [1, 2, 2]
    draw = torch.Generator().manual_seed(0)
    for _ in range(200):
        errors = torch.rand(len(SIZES), 3, generator=draw).sort(0, descending=True).values
        for size in SIZES:
            assert error_of(shared_out(errors, 3 * size), errors) <= error_of([size] * 3, errors) + 1e-6


def test_a_head_without_more_slots_to_take_leaves_them_to_the_others():
    costs = torch.tensor([[1, 1], [2, 2], [2, 4], [2, 8]])
    errors = torch.tensor([[9.0, 8.0], [1.0, 6.0], [1.0, 3.0], [1.0, 0.0]])
    for total, expected in [(2, [1, 1]), (3, [2, 1]), (6, [2, 4]), (9, [2, 4]), (10, [2, 8]), (16, [2, 8])]:
        found = allocate(costs, errors, total).tolist()
        assert [int(costs[index, head]) for head, index in enumerate(found)] == expected


def errors_by_layer(trace, importance):
    """Fits whose errors are known: the head's importance over its slots."""

    def fit(size):
        found = {}
        for layer, example, head in ((i, b, h) for i in range(2) for b in range(trace.batch_size) for h in range(2)):
            slots = torch.arange(min(size, int(trace.counts(layer)[example, head])))
            error = importance[layer][head] / len(slots)
            found[layer, example, head] = HeadFit(slots, trace.values[layer][example, head, slots], None, error)
        return found

    return fit


def test_layers_share_slots_out_by_the_errors_of_all_their_heads(traced):
    layers = share_out(traced, 8, errors_by_layer(traced, [[1e4, 0.0], [1.0, 1.1]]), by_layer=True)
    assert [layer.counts.tolist() for layer in layers] == [[[12, 12]] * 3, [[4, 4]] * 3]
    heads = share_out(traced, 8, errors_by_layer(traced, [[1e4, 0.0], [1.0, 1.1]]))
    assert [layer.counts[0].tolist() for layer in heads] == [[24, 1], [2, 4]]


@pytest.mark.parametrize("log_bias", [True, False])
def test_budgets_of_layers_make_ordinary_layers_within_the_total(traced, log_bias):
    cache = AttentionMatching(budgets="layers", log_bias=log_bias)(traced, num_slots=8)
    assert cache.has_log_bias == log_bias
    for example in range(3):
        own = cache.select([example])
        assert all(isinstance(layer, CompactLayer) for layer in own.layers)
        assert own.mean_slots <= 8


@pytest.mark.parametrize(("greedy", "tried"), [(False, 7), (True, 9)])
def test_large_sizes_are_tried_only_where_a_head_takes_all_that_was_tried(traced, greedy, tried):
    asked = []

    def fit(size):
        asked.append(size)
        fits = {}
        for layer, keys in enumerate(traced.keys):
            for example in range(traced.batch_size):
                for head in range(keys.shape[1]):
                    # one head of one example gains from every slot, the others are content with the fewest
                    hungry = greedy and (layer, example, head) == (0, 0, 0)
                    values = keys.new_zeros(size, keys.shape[-1])
                    error = 1000.0 - size if hungry else 1.0
                    fits[layer, example, head] = HeadFit(torch.arange(size), values, None, error)
        return fits

    layers = share_out(traced, 8, fit)
    assert asked == slot_sizes(8, traced.num_slots)[:tried]
    assert layers[0].counts[0].max() == (24 if greedy else 1)  # 3 of the 32 go to the others
    assert layers[0].counts[1].max() == 1
