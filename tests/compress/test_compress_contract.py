"""What every compressor does: one row of this table per compressor."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcat.compress import COMPRESSORS, compare, make_compressor, replay, slots_for, trace
from kvcat.errors import InputError

ROWS = [
    ("attention-matching", {}),
    ("attention-matching", {"preset": "paper", "num_queries": 20}),
    ("attention-matching", {"selection": "omp", "log_bias": False}),
    ("gradient", {"num_steps": 3}),
    ("gradient", {"num_steps": 2, "init": "random", "freeze_first_slot": True}),
    (
        "gradient",
        {"num_steps": 2, "init": "attention-matching", "schedule": "cosine", "activation_checkpointing": True},
    ),
    ("first", {}),
    ("random", {"seed": 3}),
    ("streaming", {"num_sinks": 2}),
    ("keynorm", {}),
    ("snapkv", {"window": 8}),
    ("h2o", {}),
    ("tova", {}),
]
RAGGED = [
    ("attention-matching", {"budgets": "adaptive"}),
    ("attention-matching", {"budgets": "layers", "own_weight": 0.0}),
    ("gradient", {"num_steps": 2, "init": "attention-matching,budgets=adaptive"}),
]


def table(rows):
    return pytest.mark.parametrize(("name", "options"), rows, ids=[f"{n}-{i}" for i, (n, _) in enumerate(rows)])


every_kind = table([*ROWS[:1], *ROWS[3:5], *ROWS[7:8], *ROWS[-2:-1], *RAGGED])


def tensors(cache):
    return [tensor for layer in cache.layers for tensor in layer.tensors().values()]


def test_every_registered_compressor_has_a_row():
    assert {name for name, _ in ROWS} == set(COMPRESSORS)


@table(ROWS)
def test_a_compressor_keeps_its_number_of_slots_and_tells_how(traced, name, options):
    for wanted, slots in (({"keep_ratio": 0.1}, 5), ({"num_slots": 7}, 7), ({"num_slots": 1}, 1)):
        cache = make_compressor(name, **options)(traced, **wanted)
        assert (cache.num_slots, cache.num_tokens, cache.batch_size) == (slots, 48, 3)
        assert cache.layers[0].keys.shape == cache.layers[1].values.shape == (3, 2, slots, 8)
        assert cache.metadata["method"] == name
        assert cache.metadata["num_slots"] == str(slots)
        assert cache.fingerprint == traced.fingerprint
        assert all(tensor.isfinite().all() for tensor in tensors(cache))
        assert not any(tensor.requires_grad for tensor in tensors(cache))


@table(RAGGED)
def test_unequal_budgets_keep_no_more_slots_than_asked_for_in_any_example(traced, name, options):
    for wanted, slots in (({"keep_ratio": 0.1}, 5), ({"num_slots": 7}, 7), ({"num_slots": 1}, 1)):
        cache = make_compressor(name, **options)(traced, **wanted)
        assert (cache.num_tokens, cache.batch_size, len(cache.layers)) == (48, 3, 2)
        for example in range(3):
            counts = torch.stack([layer.counts[example] for layer in cache.layers])
            assert counts.min() >= 1
            assert 0.85 * 4 * slots <= counts.sum() <= 4 * slots
            assert "layers" not in str(options) or (counts[:, :1] == counts).all()
        assert cache.metadata["method"] == name
        assert cache.metadata["num_slots"] == f"{cache.mean_slots:.6g}"
        assert cache.fingerprint == traced.fingerprint
        assert all(tensor.isfinite().all() for tensor in tensors(cache))
        assert not any(tensor.requires_grad for tensor in tensors(cache))


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_keys_and_values_have_the_dtype_and_the_device_of_the_model(make_model, windows, name, options, dtype):
    cache = make_compressor(name, **options)(trace(make_model(dtype), windows[:1], 48), num_slots=5)
    for layer in cache.layers:
        assert layer.keys.dtype == layer.values.dtype == dtype
        assert layer.log_bias is None or layer.log_bias.dtype in (torch.float32, torch.float64)
        assert layer.keys.device == layer.values.device == torch.device("cpu")


@every_kind
def test_keeping_everything_replays_the_dense_logits(make_model, windows, name, options):
    double = trace(make_model(torch.float64), windows, 48)
    cache = make_compressor(name, **options)(double, keep_ratio=1)
    assert not cache.has_log_bias
    assert torch.allclose(replay(double.model, cache, windows[:, 48:]), double.logits, atol=1e-12)


@every_kind
def test_a_batch_gives_what_its_examples_give_alone(model, windows, traced, name, options):
    together = make_compressor(name, **options)(traced, num_slots=6)
    for row in range(3):
        alone = make_compressor(name, **options)(trace(model, windows[row : row + 1], 48), num_slots=6)
        assert [x.counts.tolist() for x in together.select([row]).layers] == [x.counts.tolist() for x in alone.layers]
        for left, right in zip(tensors(together.select([row])), tensors(alone), strict=True):
            assert torch.allclose(left, right, atol=2e-3, rtol=2e-3)


@every_kind
def test_the_same_call_gives_the_same_cache_and_leaves_the_global_random_state(traced, name, options):
    state = torch.get_rng_state()
    first = make_compressor(name, **options)(traced, num_slots=6)
    again = make_compressor(name, **options)(traced, num_slots=6)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(again), strict=True))


@every_kind
def test_the_model_and_the_trace_are_left_as_they_were(traced, name, options):
    before = [tensor.clone() for tensor in (*traced.keys, *traced.values, *traced.queries, traced.hidden)]
    traced.model.train()
    try:
        make_compressor(name, **options)(traced, num_slots=6)
        assert traced.model.training
        assert all(parameter.requires_grad and parameter.grad is None for parameter in traced.model.parameters())
    finally:
        traced.model.eval()
    after = (*traced.keys, *traced.values, *traced.queries, traced.hidden)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@every_kind
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"keep_ratio": 0.0}, r"keep_ratio must be in \(0, 1\], not 0.0"),
        ({"keep_ratio": 1.01}, r"keep_ratio must be in \(0, 1\], not 1.01"),
        ({"keep_ratio": math.nan}, r"keep_ratio must be in \(0, 1\], not nan"),
        ({"num_slots": 0}, r"num_slots must be in \[1, 48\], not 0"),
        ({"num_slots": 49}, r"num_slots must be in \[1, 48\], not 49"),
        ({}, "either keep_ratio or num_slots"),
        ({"keep_ratio": 0.5, "num_slots": 3}, "either keep_ratio or num_slots"),
    ],
)
def test_budgets_out_of_range_are_refused(traced, name, options, wanted, message):
    with pytest.raises(InputError, match=message):
        make_compressor(name, **options)(traced, **wanted)


@every_kind
def test_a_saved_cache_scores_as_the_one_in_memory(traced, tmp_path, name, options):
    cache = make_compressor(name, **options)(traced, num_slots=6)
    cache.save(tmp_path / "c")
    loaded = type(cache).load(tmp_path / "c", traced.model)
    assert torch.equal(compare(traced, cache).kl, compare(traced, loaded).kl)


def test_unknown_names_and_options_are_refused():
    with pytest.raises(InputError, match=r"no compressor 'zip'; there are attention-matching"):
        make_compressor("zip")
    with pytest.raises(InputError, match=r"attention-matching has no option 'speed'; its options: preset"):
        make_compressor("attention-matching", speed=2)
    with pytest.raises(InputError, match=r"snapkv has no option 'seed'; its options: window, kernel_size, pooling"):
        make_compressor("snapkv", seed=2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("attention-matching", {"log_bias": "no"}, "log_bias is 'no'; it must be true or false"),
        (
            "attention-matching",
            {"num_queries": 1.5},
            "num_queries is 1.5; it must be a whole number or null",
        ),
        ("attention-matching", {"ridge": math.inf}, "ridge is inf"),
        ("attention-matching", {"seed": True}, "seed is True; it must be a whole number"),
        ("gradient", {"num_steps": "x"}, "num_steps is 'x'; it must be a whole number"),
        ("gradient", {"init": None}, "init is None; it must be text"),
        ("gradient", {"lr": math.inf}, "lr is inf"),
        ("snapkv", {"kernel_size": 3.0}, "snapkv: kernel_size is 3.0; it must be a whole number"),
        ("first", {"seed": 1}, "first has no option 'seed'; its options: none"),
    ],
)
def test_values_of_another_type_are_refused_by_name(name, options, message):
    with pytest.raises(InputError, match=message):
        make_compressor(name, **options)


@given(tokens=st.integers(1, 5000), percent=st.integers(1, 100))
def test_slots_are_the_ceiling_of_the_exact_product(tokens, percent):
    assert slots_for(tokens, percent / 100, None) == -(-tokens * percent // 100)
