"""What each eviction method keeps, against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcat.compress import SCORERS, Eviction, trace
from kvcat.compress.base import received_mass
from kvcat.errors import InputError

NESTED = ("first", "random", "streaming", "keynorm", "tova")


@pytest.fixture(scope="module")
def found(model, windows):
    return trace(model, windows, 48)


@pytest.fixture(scope="module")
def attention(model, windows):
    """transformers' own attention weights of the prefix, (examples, heads, queries, keys) per layer."""
    eager = type(model)._from_config(model.config, attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        return eager(windows[:, :48], output_attentions=True).attentions


def _at(cache, found):
    """Per layer (examples, KV heads, slots): where the cache's keys stand in the prefix."""
    pairs = zip(cache.layers, found.keys, strict=True)
    return [(layer.keys.unsqueeze(3) == keys.unsqueeze(2)).all(-1).float().argmax(-1) for layer, keys in pairs]


def kept(found, name, num_slots, **options):
    return _at(Eviction(name, **options)(found, num_slots=num_slots), found)


@pytest.mark.parametrize(
    ("options", "num_slots", "expected"),
    [
        ({}, 10, [0, 1, 2, 3, 42, 43, 44, 45, 46, 47]),
        ({"num_sinks": 1}, 3, [0, 46, 47]),
        ({"num_sinks": 0}, 2, [46, 47]),
        ({}, 5, [0, 1, 2, 3, 47]),
        ({}, 4, [0, 1, 2, 3]),
        ({}, 2, [0, 1]),
        ({"num_sinks": 99}, 3, [0, 1, 2]),
    ],
)
def test_streaming_keeps_sinks_first_and_recent_positions_in_the_rest(found, options, num_slots, expected):
    for positions in kept(found, "streaming", num_slots, **options):
        assert torch.equal(positions, torch.tensor(expected).expand(3, 2, -1))


def test_streaming_refuses_a_negative_number_of_sinks():
    with pytest.raises(InputError, match="num_sinks must be at least 0, not -1"):
        Eviction("streaming", num_sinks=-1)


@pytest.mark.parametrize("num_slots", [1, 7, 47])
def test_tova_keeps_what_the_last_query_attends_to_alike_in_all_heads_of_a_layer(found, attention, num_slots):
    for weights, positions in zip(attention, kept(found, "tova", num_slots), strict=True):
        for row in range(3):
            mean = sum(weights[row, head, -1] for head in range(4)) / 4
            expected = sorted(sorted(range(48), key=lambda p, mean=mean: -mean[p].item())[:num_slots])
            assert positions[row].tolist() == [expected, expected]


def test_layers_choose_other_positions_under_tova(found):
    first, second = kept(found, "tova", 7)
    assert not torch.equal(first, second)


def naive_snapkv(weights, num_slots, window, kernel_size, pooling):
    """Positions of one KV head from its query heads' weights, (heads, queries, keys), one position at a time."""
    length = weights.shape[-1]
    votes = [sum(w[q, p].item() for w in weights for q in range(length - window, length)) for p in range(length)]
    pooled, half = list(votes), kernel_size // 2
    for p in range(length - window):
        near = [votes[n] if 0 <= n < length - window else None for n in range(p - half, p + half + 1)]
        inside = [vote for vote in near if vote is not None]
        pooled[p] = max(inside) if pooling == "max" else sum(inside) / kernel_size
    always = window if num_slots > window else num_slots // 2
    recent = range(length - always, length)
    others = sorted((p for p in range(length) if p not in recent), key=lambda p: -pooled[p])
    return sorted([*recent, *others[: num_slots - always]])


@pytest.mark.parametrize("pooling", ["max", "average"])
@pytest.mark.parametrize(("window", "num_slots"), [(8, 20), (8, 9), (8, 8), (8, 5), (1, 6)])
def test_snapkv_keeps_what_a_loop_over_positions_keeps(found, attention, pooling, window, num_slots):
    options = {"window": window, "kernel_size": 5, "pooling": pooling}
    for weights, positions in zip(attention, kept(found, "snapkv", num_slots, **options), strict=True):
        for row in range(3):
            for head in range(2):
                own = weights[row, 2 * head : 2 * head + 2]
                assert positions[row, head].tolist() == naive_snapkv(own, num_slots, **options)


@pytest.mark.parametrize("num_slots", [1, 6, 7])
def test_h2o_keeps_a_recent_half_and_the_heaviest_of_the_rest(found, attention, num_slots):
    recent = list(range(48 - num_slots // 2, 48))
    for weights, positions in zip(attention, kept(found, "h2o", num_slots), strict=True):
        for row in range(3):
            for head in range(2):
                mass = weights[row, 2 * head : 2 * head + 2].sum((0, 1))[: 48 - len(recent)]
                heavy = sorted(range(len(mass)), key=lambda p, mass=mass: -mass[p].item())
                assert positions[row, head].tolist() == sorted(heavy[: num_slots - len(recent)]) + recent


@pytest.mark.parametrize("name", SCORERS)
def test_what_follows_the_prefix_changes_no_choice(model, windows, found, name):
    changed = windows.clone()
    changed[:, 48:] = (changed[:, 48:] + 1) % 67
    other = trace(model, changed, 48)
    for left, right in zip(kept(found, name, 10), kept(other, name, 10), strict=True):
        assert torch.equal(left, right)


@settings(max_examples=15, deadline=None)
@given(few=st.integers(1, 46), more=st.integers(1, 46), name=st.sampled_from(NESTED))
def test_a_larger_budget_keeps_all_that_a_smaller_one_does(found, few, more, name):
    few, more = sorted((few, more))
    for small, large in zip(kept(found, name, few), kept(found, name, more), strict=True):
        assert (small.unsqueeze(-1) == large.unsqueeze(-2)).any(-1).all()


@pytest.mark.parametrize("name", SCORERS)
def test_keys_and_values_are_those_of_the_kept_positions(found, name):
    cache = Eviction(name)(found, num_slots=9)
    for layer, positions, values in zip(cache.layers, _at(cache, found), found.values, strict=True):
        assert torch.equal(layer.values, values.gather(2, positions.unsqueeze(-1).expand(-1, -1, -1, 8)))
        assert (positions.diff(dim=-1) > 0).all()
        assert layer.log_bias is None


def test_the_cache_tells_the_options_of_its_scorer(found):
    cache = Eviction("snapkv", window=8, pooling="average")(found, num_slots=9)
    told = {key: cache.metadata[key] for key in ("method", "window", "kernel_size", "pooling", "num_slots")}
    assert told == {"method": "snapkv", "window": "8", "kernel_size": "7", "pooling": "average", "num_slots": "9"}


def test_first_random_and_keynorm_keep_what_their_names_say(traced):
    keys = traced.keys[1]
    assert torch.equal(Eviction("first")(traced, num_slots=5).layers[1].keys, keys[:, :, :5])
    small = keys.norm(dim=-1).topk(5, largest=False).indices.sort(-1).values
    assert torch.equal(kept(traced, "keynorm", 5)[1], small)
    few, many = (kept(traced, "random", n, seed=4)[1] for n in (5, 9))
    assert all(set(f.tolist()) < set(m.tolist()) for f, m in zip(few.flatten(0, 1), many.flatten(0, 1), strict=True))
    other = kept(traced, "random", 5, seed=5)[1]
    assert not torch.equal(few, other)


def test_received_mass_is_the_column_sum_of_the_models_attention(model, windows, traced):
    eager = type(model)._from_config(model.config, attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        attention = eager(windows[:, :48], output_attentions=True).attentions
    for start in (0, 40):
        for index, mass in enumerate(received_mass(traced, start)):
            expected = attention[index][:, :, start:].sum(2).unflatten(1, (2, 2)).sum(2)
            assert torch.allclose(mass, expected, atol=1e-4)


@pytest.mark.parametrize("options", [{"window": 0}, {"kernel_size": 4}, {"pooling": "min"}])
def test_snapkv_refuses_options_it_cannot_take(options):
    with pytest.raises(InputError, match=next(iter(options))):
        Eviction("snapkv", **options)
