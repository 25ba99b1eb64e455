import itertools
import math

import pytest
import torch

from kvcat.errors import InputError
from kvcat.recipes.histogram import HistogramConfig, make_network
from kvcat.recipes.histogram_measure import SearchOptions, count_prefixes, measure_histogram, worst_error
from kvcat.recipes.histogram_search import search_caches
from kvcat.theory.compression import prefix_cache
from kvcat.theory.definitions import AttentionHead, Block, FeedForward, Transformer, sequences
from kvcat.theory.histogram import incompressible_histogram
from kvcat.theory.histogram_optimum import joint_optimum

TINY = HistogramConfig(longest=6, width=8, key_width=4, hidden_width=16)


def untrained(**changes):
    return make_network(HistogramConfig(**{**vars(TINY), **changes})).requires_grad_(False).transformer()


def constant_query_model(num_positions):
    """One block whose queries are the same for every token: a key can carry any log-weight exactly."""
    draw = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    embedding = normal(3, 1, 4).expand(3, num_positions, 4).clone()
    embedding[..., 0] = 1.0
    w_q = torch.zeros(4, 2, dtype=torch.float64)
    w_q[0] = torch.tensor([0.3, -0.2])
    head = AttentionHead(w_q, normal(4, 2), normal(4, 4))
    ffn = FeedForward(normal(4, 9), normal(9), normal(9, 3), normal(3))
    return Transformer(embedding, (Block((head,), normal(4, 4), ffn),), causal=True)


@pytest.mark.parametrize("uniform", [True, False])
def test_the_error_that_a_search_reports_is_that_of_its_cache(uniform):
    model, prefixes = untrained(uniform=uniform), count_prefixes(3, 4, limit=5)
    found = search_caches(model, prefixes, 2, num_steps=15, num_restarts=3)
    for error, cache, prefix in zip(found.errors, found.caches, prefixes, strict=True):
        assert [keys.shape[0] for heads in cache for keys, _ in heads] == [2, 2]
        assert worst_error(model, cache, prefix) == pytest.approx(float(error), rel=1e-9)


def test_more_steps_find_better_caches_and_no_step_forgets_the_best():
    model, prefixes = untrained(), count_prefixes(3, 4, limit=5)
    start, later = (search_caches(model, prefixes, 1, num_steps=steps).errors for steps in (0, 60))
    assert (later <= start).all()
    assert (later < 0.8 * start).all()
    astray = search_caches(model, prefixes, 1, num_steps=3, step_size=1e3)
    assert (astray.errors <= start).all()
    assert worst_error(model, astray.caches[0], prefixes[0]) == pytest.approx(float(astray.errors[0]), rel=1e-9)


def test_more_restarts_are_never_worse():
    model, prefixes = untrained(), count_prefixes(3, 4, limit=5)
    one, three = (search_caches(model, prefixes, 2, num_steps=10, num_restarts=count).errors for count in (1, 3))
    assert (three <= one + 1e-12).all()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_search_ends_just_above_the_exact_optimum_and_never_below(num_slots):
    model = incompressible_histogram(3, 6, num_blocks=4).with_causal_mask()
    prefixes = count_prefixes(3, 4, limit=4)
    found = search_caches(model, prefixes, num_slots, num_steps=120, num_restarts=2).errors
    for prefix, error in zip(prefixes, found.tolist(), strict=True):
        optimum = joint_optimum(torch.bincount(prefix, minlength=3), 2, num_slots).error
        assert optimum * (1 - 1e-9) <= error <= 1.02 * optimum


def test_one_slot_whose_key_carries_log_n_stands_for_n_equal_slots():
    model, prefix = constant_query_model(7), torch.full((1, 4), 2)
    without, with_log = (search_caches(model, prefix, 1, num_steps=0, num_restarts=count).errors for count in (1, 2))
    assert float(with_log) < 1e-12 < 1e-3 < float(without)
    ((keys, _),) = search_caches(model, prefix, 1, num_steps=0, num_restarts=2).caches[0][0]
    head = model.blocks[0].heads[0]
    query = model.embedding[0, 0] @ head.w_q / math.sqrt(2)
    own = prefix_cache(model, prefix[0])[0][0][0][0]
    assert float(query @ (keys[0] - own)) == pytest.approx(math.log(4), abs=1e-12)


def test_a_network_gets_no_credit_for_small_queries():
    """The same attention with queries a millionth the size and keys a million times as large: the same search."""
    model, prefixes = untrained(), count_prefixes(3, 4, limit=4)
    scaled = []
    for block in model.blocks:
        (head,) = block.heads
        scaled.append(
            Block((AttentionHead(head.w_q / 2**20, head.w_k * 2**20, head.w_v),), block.w_o, block.feed_forward)
        )
    other = Transformer(model.embedding, tuple(scaled), causal=True)
    first, second = (search_caches(m, prefixes, 1, num_steps=30).errors for m in (model, other))
    assert torch.allclose(first, second, rtol=1e-3)


@pytest.mark.parametrize("num_slots", [0, 5])
def test_a_search_refuses_slots_out_of_range(num_slots):
    with pytest.raises(ValueError, match=f"{num_slots} slots for prefixes of 4"):
        search_caches(untrained(), count_prefixes(3, 4), num_slots)


def test_a_search_refuses_a_model_without_the_causal_mask():
    with pytest.raises(ValueError, match="a causal transformer with one head"):
        search_caches(untrained().with_causal_mask(False), count_prefixes(3, 4), 1)


def test_prefixes_are_one_for_every_count_vector():
    prefixes = count_prefixes(3, 4)
    counts = {tuple(torch.bincount(row, minlength=3).tolist()) for row in prefixes}
    assert counts == {c for c in itertools.product(range(5), repeat=3) if sum(c) == 4}
    assert len(prefixes) == len(counts) == 15
    assert not torch.equal(prefixes, prefixes.sort(1).values)
    assert torch.equal(prefixes, count_prefixes(3, 4))
    assert not torch.equal(prefixes, count_prefixes(3, 4, seed=1))


def test_a_limited_set_of_prefixes_holds_the_constant_ones_and_different_others():
    prefixes = count_prefixes(3, 4, limit=7)
    assert prefixes[:3].tolist() == [[a] * 4 for a in range(3)]
    assert len({tuple(row) for row in prefixes.sort(1).values.tolist()}) == 7
    with pytest.raises(InputError, match="at least 3"):
        count_prefixes(3, 4, limit=2)


def test_the_worst_error_is_over_suffixes_of_every_length():
    model, prefix = untrained(), torch.tensor([0, 1, 2, 2])
    cache = search_caches(model, prefix[None], 1, num_steps=0, num_restarts=1).caches[0]
    errors = [
        float((model(torch.cat([prefix, b])) - _behind(model, cache, 4, b)).norm())
        for k in (1, 2)
        for b in sequences(3, k)
    ]
    assert worst_error(model, cache, prefix) == pytest.approx(max(errors), abs=1e-12)


def _behind(model, cache, start, suffix):
    """The suffix token by token behind the cache, in plain loops."""
    x = model.embedding[suffix, torch.arange(start, start + len(suffix))]
    for block, ((keys, values),) in zip(model.blocks, cache, strict=True):
        (head,) = block.heads
        rows = []
        for t in range(len(suffix)):
            all_keys = torch.cat([keys, x[: t + 1] @ head.w_k])
            all_values = torch.cat([values, x[: t + 1] @ head.w_v])
            weights = ((x[t] @ head.w_q) @ all_keys.T / math.sqrt(head.d_k)).softmax(0)
            rows.append(block.feed_forward(weights @ all_values @ block.w_o + x[t]))
        x = torch.stack(rows)
    return x[-1]


def test_a_measurement_has_a_row_for_every_number_of_slots_and_ends_at_zero():
    told = []
    rows = measure_histogram(
        untrained(), prefix_len=3, num_prefixes=4, search=SearchOptions(num_steps=5), done=told.append
    )
    assert [row.num_slots for row in rows] == [1, 2, 3]
    assert all(0 <= row.mean_error <= row.max_error for row in rows)
    assert rows[-1].max_error < 1e-12 < rows[0].mean_error
    assert told == ["1 of 3 slots", "2 of 3 slots", "3 of 3 slots"]
    assert rows[0].as_row("m", 7)["worst_prefix"].replace(" ", "").isdigit()


def test_a_measurement_refuses_what_cannot_be():
    with pytest.raises(InputError, match="prefixes must have 1 to 5 symbols, got 6"):
        measure_histogram(untrained(), prefix_len=6)
    with pytest.raises(InputError, match="slots must lie in 1 to 3"):
        measure_histogram(untrained(), prefix_len=3, slots=[4])
