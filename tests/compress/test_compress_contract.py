"""What every compressor guarantees, with a row of ``ROWS`` for each, and methods as text."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structured_heads import tensors

from kvcat.compress import (
    COMPRESSORS,
    Prefix,
    compare,
    make_compressor,
    parse_method,
    replay,
    seeded_compressors,
    slots_for,
    trace,
)
from kvcat.errors import InputError
from tiny import loud_model

ROWS = [
    ("attention-matching", {"budgets": "equal"}),
    ("attention-matching", {"preset": "paper", "num_queries": 20}),
    ("attention-matching", {"log_bias": False, "budgets": "equal"}),
    ("refined", {"budgets": "equal", "num_steps": 2}),
    ("gradient", {"num_steps": 3}),
    ("gradient", {"num_steps": 2, "init": "random", "activation_checkpointing": True}),
    ("first", {}),
    ("random", {"seed": 3}),
    ("streaming", {"num_sinks": 2}),
    ("keynorm", {}),
    ("snapkv", {"window": 8}),
    ("h2o", {}),
    ("tova", {}),
]
RAGGED = [
    ("attention-matching", {}),
    ("attention-matching", {"budgets": "adaptive", "own_weight": 0.0}),
    ("refined", {"num_steps": 2}),
    ("gradient", {"num_steps": 2, "init": "attention-matching,budgets=adaptive"}),
]


def table(rows):
    return pytest.mark.parametrize(
        ("name", "options"), rows, ids=[f"{n}-{i}" for i, (n, _) in enumerate(rows)]
    )


some_kinds = table([ROWS[1], ROWS[5], ROWS[7], *RAGGED[:1], *RAGGED[2:]])


def test_every_registered_compressor_has_a_row_and_a_name_on_the_command_line():
    assert {name for name, _ in ROWS} == set(COMPRESSORS)


@table([*ROWS, *RAGGED])
def test_a_compressor_keeps_its_number_of_slots_and_records_its_method(traced, name, options):
    for wanted, slots in (({"keep_ratio": 0.1}, 5), ({"num_slots": 7}, 7), ({"num_slots": 1}, 1)):
        cache = make_compressor(name, **options)(traced, **wanted)
        assert (cache.num_tokens, cache.batch_size, len(cache.layers)) == (48, 3, 2)
        assert cache.num_slots == slots
        for example in range(3):
            counts = torch.stack([layer.counts[example] for layer in cache.layers])
            if (name, options) in RAGGED:
                assert counts.min() >= 1
                assert counts.sum() == 4 * slots
            else:
                assert counts.tolist() == [[slots, slots]] * 2
        assert cache.metadata["method"] == name
        assert cache.metadata["num_slots"] == str(cache.num_slots)
        assert cache.metadata["mean_slots"] == f"{cache.mean_slots:.6g}"
        assert cache.fingerprint == traced.fingerprint
        held = [x for layer in tensors(cache) for x in layer.values()]
        assert all(x.isfinite().all() and not x.requires_grad for x in held)


@some_kinds
def test_a_cache_has_the_models_dtype_and_all_slots_replay_the_dense_logits(windows, name, options):
    method = make_compressor(name, **options)
    for dtype in (torch.bfloat16, torch.float64):
        double_trace = trace(loud_model(dtype=dtype), windows[:2], 48)
        for layer in method(double_trace, num_slots=5).layers:
            assert layer.keys.dtype == layer.values.dtype == dtype
            assert layer.log_bias is None or layer.log_bias.dtype in (torch.float32, torch.float64)
    whole = method(double_trace, keep_ratio=1)
    assert not whole.has_log_bias
    assert torch.allclose(
        replay(double_trace.model, whole, windows[:2, 48:]), double_trace.logits, atol=1e-12
    )


@some_kinds
def test_a_batch_gives_what_its_examples_give_alone(model, windows, traced, name, options):
    together = make_compressor(name, **options)(traced, num_slots=6)
    for row in range(3):
        alone = make_compressor(name, **options)(
            trace(model, windows[row : row + 1], 48), num_slots=6
        )
        torch.testing.assert_close(
            tensors(together.select([row])), tensors(alone), atol=2e-3, rtol=2e-3
        )


@some_kinds
def test_a_call_repeats_and_leaves_model_trace_and_random_state_and_is_the_same_from_disk(
    traced, tmp_path, name, options
):
    held = (*traced.keys, *traced.values, *traced.queries, traced.hidden)
    before = [tensor.clone() for tensor in held]
    state = torch.get_rng_state()
    traced.model.train()
    try:
        first, again = (make_compressor(name, **options)(traced, num_slots=6) for _ in range(2))
        assert traced.model.training
        assert all(
            parameter.requires_grad and parameter.grad is None
            for parameter in traced.model.parameters()
        )
    finally:
        traced.model.eval()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True))
    torch.testing.assert_close(tensors(first), tensors(again), rtol=0, atol=0)
    first.save(tmp_path / "c")
    loaded = type(first).load(tmp_path / "c", traced.model)
    assert torch.equal(compare(traced, first).kl, compare(traced, loaded).kl)


def test_a_method_that_draws_gets_each_seed_and_others_run_once(traced):
    prefix = Prefix.of(traced)
    for name, options in (
        ("random", {}),
        ("gradient", {"init": "random"}),
        ("attention-matching", {"num_queries": 2}),
    ):
        seeded = seeded_compressors(name, options, [0, 3])
        assert [seed for seed, _ in seeded] == [0, 3]
        assert [method.facts(prefix)["seed"] for _, method in seeded] == [0, 3]
    for name, options in (("snapkv", {}), ("random", {"seed": 2}), ("attention-matching", {})):
        ((seed, method),) = seeded_compressors(name, options, [0, 3])
        assert seed is None
        assert method == make_compressor(name, **options)


@given(tokens=st.integers(1, 5000), percent=st.integers(1, 100))
def test_slots_are_the_ceiling_of_the_exact_product(tokens, percent):
    assert slots_for(tokens, percent / 100, None) == -(-tokens * percent // 100)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            "gradient,num_steps=20,init=random,lr=1e-3",
            ("gradient", {"num_steps": 20, "init": "random", "lr": 1e-3}),
        ),
        (
            "keynorm,a=[0.9,1],b=None,c=null,d=true",
            ("keynorm", {"a": (0.9, 1), "b": None, "c": None, "d": True}),
        ),
        ("gradient,init=[first,x=1],lr=1", ("gradient", {"init": "first,x=1", "lr": 1})),
        ("gradient,lr=.1,a=-2.,b=.5e-3", ("gradient", {"lr": 0.1, "a": -2.0, "b": 5e-4})),
        ("kvpress:SnapKVPress,window_size=8", ("kvpress:SnapKVPress", {"window_size": 8})),
        ("", "names no method"),
        ("num_steps=2", "names no method"),
        ("gradient,num_steps", "method 'gradient,num_steps' is not of the form option=value"),
        ("gradient,num_steps=", "is not of the form option=value"),
        ("gradient,lr=1,lr=2", "option lr is given twice"),
    ],
)
def test_a_method_is_a_name_and_options_as_text(spec, expected):
    if isinstance(expected, tuple):
        assert parse_method(spec) == expected
        return
    with pytest.raises(InputError, match=expected):
        parse_method(spec)
