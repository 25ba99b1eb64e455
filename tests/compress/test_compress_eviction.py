"""What each eviction method keeps, against its definition."""

import pytest
import torch
from structured_heads import eager_attention, positions_of

from kvcat.compress import SCORERS, Eviction, trace


@pytest.fixture(scope="module")
def prefix_trace(model, windows):
    return trace(model, windows, 48)


@pytest.fixture(scope="module")
def attention(model, windows):
    """transformers' own attention weights of the prefix, (examples, heads, queries, keys) per
    layer."""
    return eager_attention(model, windows[:, :48])


def kept(prefix_trace, name, num_slots, **options):
    """Positions in the prefix of the cache's keys, per layer: (examples, KV heads, slots)."""
    cache = Eviction(name, **options)(prefix_trace, num_slots=num_slots)
    return [
        positions_of(layer.keys, keys)
        for layer, keys in zip(cache.layers, prefix_trace.keys, strict=True)
    ]


@pytest.mark.parametrize(
    ("options", "num_slots", "expected"),
    [
        ({}, 10, [0, 1, 2, 3, 42, 43, 44, 45, 46, 47]),
        ({"num_sinks": 1}, 3, [0, 46, 47]),
        ({"num_sinks": 0}, 2, [46, 47]),
        ({}, 5, [0, 1, 2, 3, 47]),
        ({}, 4, [0, 1, 2, 3]),
        ({}, 2, [0, 1]),
    ],
)
def test_streaming_keeps_sinks_first_and_recent_positions_in_the_rest(
    prefix_trace, options, num_slots, expected
):
    for positions in kept(prefix_trace, "streaming", num_slots, **options):
        assert torch.equal(positions, torch.tensor(expected).expand(3, 2, -1))


@pytest.mark.parametrize("num_slots", [1, 7, 47])
def test_tova_keeps_what_the_last_query_attends_to_alike_in_all_heads_of_a_layer(
    prefix_trace, attention, num_slots
):
    layers = kept(prefix_trace, "tova", num_slots)
    for weights, positions in zip(attention, layers, strict=True):
        expected = weights[:, :, -1].mean(1).topk(num_slots).indices.sort(-1).values
        assert torch.equal(positions, expected.unsqueeze(1).expand(-1, 2, -1))
    assert num_slots != 7 or not torch.equal(*layers)


def naive_snapkv(weights, num_slots, window, kernel_size, pooling):
    """Positions that one KV head keeps, from its query heads' weights (heads, queries, keys), one
    position at a time."""
    length = weights.shape[-1]
    votes = [
        sum(w[q, p].item() for w in weights for q in range(length - window, length))
        for p in range(length)
    ]
    pooled = list(votes)
    half = kernel_size // 2
    for p in range(length - window):
        inside = [votes[n] for n in range(p - half, p + half + 1) if 0 <= n < length - window]
        pooled[p] = max(inside) if pooling == "max" else sum(inside) / kernel_size
    always = window if num_slots > window else num_slots // 2
    recent = range(length - always, length)
    others = sorted((p for p in range(length) if p not in recent), key=lambda p: -pooled[p])
    return sorted([*recent, *others[: num_slots - always]])


@pytest.mark.parametrize("pooling", ["max", "average"])
@pytest.mark.parametrize(("window", "num_slots"), [(8, 20), (8, 8), (8, 5), (1, 6)])
def test_snapkv_keeps_what_a_loop_over_positions_keeps(
    prefix_trace, attention, pooling, window, num_slots
):
    options = {"window": window, "kernel_size": 5, "pooling": pooling}
    for weights, positions in zip(
        attention, kept(prefix_trace, "snapkv", num_slots, **options), strict=True
    ):
        for row, head in ((0, 0), (1, 1), (2, 0)):
            head_weights = weights[row, 2 * head : 2 * head + 2]
            assert positions[row, head].tolist() == naive_snapkv(head_weights, num_slots, **options)


@pytest.mark.parametrize("num_slots", [1, 6, 7])
def test_h2o_keeps_a_recent_half_and_the_heaviest_of_the_rest(prefix_trace, attention, num_slots):
    recent = list(range(48 - num_slots // 2, 48))
    for weights, positions in zip(attention, kept(prefix_trace, "h2o", num_slots), strict=True):
        mass = weights.unflatten(1, (2, 2)).sum((2, 3))[..., : 48 - len(recent)]
        heavy = mass.topk(num_slots - len(recent)).indices.sort(-1).values
        assert torch.equal(
            positions, torch.cat([heavy, torch.tensor(recent).long().expand(3, 2, -1)], -1)
        )


@pytest.mark.parametrize("name", SCORERS)
def test_slots_are_those_of_the_kept_positions_and_what_follows_the_prefix_changes_none(
    model, windows, prefix_trace, name
):
    changed = windows.clone()
    changed[:, 48:] = (changed[:, 48:] + 1) % 67
    positions = kept(prefix_trace, name, 9)
    assert all(
        torch.equal(*pair)
        for pair in zip(positions, kept(trace(model, changed, 48), name, 9), strict=True)
    )
    for layer, at, values in zip(
        Eviction(name)(prefix_trace, num_slots=9).layers,
        positions,
        prefix_trace.values,
        strict=True,
    ):
        assert torch.equal(layer.values, values.gather(2, at.unsqueeze(-1).expand(-1, -1, -1, 8)))
        assert torch.equal(layer.positions, at)
        assert (at.diff(dim=-1) > 0).all()
        assert layer.log_bias is None


def test_first_random_and_keynorm_follow_their_names_and_a_cache_records_its_scorers_options(
    traced,
):
    keys = traced.keys[1]
    assert torch.equal(Eviction("first")(traced, num_slots=5).layers[1].keys, keys[:, :, :5])
    small = keys.norm(dim=-1).topk(5, largest=False).indices.sort(-1).values
    assert torch.equal(kept(traced, "keynorm", 5)[1], small)
    one, other = (kept(traced, "random", 5, seed=seed) for seed in (4, 5))
    assert not torch.equal(one[1], other[1])
    assert not torch.equal(*one)
    cache = Eviction("snapkv", window=8, pooling="average")(traced, num_slots=9)
    expected_options = {
        "method": "snapkv",
        "window": "8",
        "kernel_size": "7",
        "pooling": "average",
        "num_slots": "9",
    }
    assert expected_options.items() <= cache.metadata.items()
