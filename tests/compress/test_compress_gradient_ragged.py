"""Gradient-based caches whose heads hold other numbers of slots."""

from dataclasses import replace

import pytest
import torch
from test_compress_gradient import distance, slots_of

from kvcat.cache import CompactCache, CompactLayer, RaggedLayer
from kvcat.compress import (
    AttentionMatching,
    Eviction,
    GradientCompression,
    compare,
    make_compressor,
    parse_method,
    trace,
)
from kvcat.compress.optimising import SlotOptimisation
from kvcat.errors import InputError

COUNTS = [[[2, 6], [5, 1], [3, 3]], [[4, 4], [1, 8], [6, 2]]]  # layer, example, head


@pytest.fixture(scope="module")
def double(make_model):
    return make_model(torch.float64)


def ragged_start(traced, log_bias):
    """Random slots of every head, log-bias at random."""
    draw, layers = torch.Generator().manual_seed(3), []
    for keys, values, rows in zip(traced.keys, traced.values, COUNTS, strict=True):
        order = torch.rand(keys.shape[:3], generator=draw).argsort(-1)
        chosen = [[order[b, h, :n] for h, n in enumerate(row)] for b, row in enumerate(rows)]
        parts = [
            [[part[b, h][at] for h, at in enumerate(row)] for b, row in enumerate(chosen)] for part in (keys, values)
        ]  # fmt: skip
        bias = [[torch.randn(len(at), generator=draw).to(keys.dtype) for at in row] for row in chosen]
        layers.append(CompactLayer.ragged(*parts, bias if log_bias else None))
    return CompactCache(layers, traced.prefix_len, traced.fingerprint)


def naive_loop(traced, start, steps, max_norm, lr=1e-2):
    """Leaves without any padding, attended to where they lie; torch's own clipping and optimizer, an example a time."""
    made = []

    def as_layers(leaves):
        kinds = [RaggedLayer if "counts" in layer else CompactLayer for layer in leaves]
        return [kind(**{"log_bias": None, **layer}) for kind, layer in zip(kinds, leaves, strict=True)]

    for row in range(traced.batch_size):
        own = start.select([row])
        leaves = [{n: x.clone() for n, x in layer.tensors().items()} for layer in own.layers]
        free = [x.requires_grad_(True) for layer in leaves for n, x in layer.items() if n != "counts"]
        optimizer = torch.optim.AdamW(free, lr=lr, weight_decay=0.0)
        dense = traced.logits[row].log_softmax(-1)
        for _ in range(steps):
            past = CompactCache(as_layers(leaves), own.num_tokens, own.fingerprint).inputs(
                traced.model, traced.suffix_ids[[row]]
            )
            logits = traced.model(**past).logits[0].log_softmax(-1)
            optimizer.zero_grad()
            (dense.exp() * (dense - logits)).sum(-1).mean().backward()
            torch.nn.utils.clip_grad_norm_(free, max_norm)
            optimizer.step()
        made.append(replace(own, layers=as_layers([{n: x.detach() for n, x in layer.items()} for layer in leaves])))
    return made


@pytest.mark.parametrize("max_norm", [1.0, 1e-3])
@pytest.mark.parametrize("log_bias", [True, False])
def test_steps_are_those_of_the_naive_loop_that_pads_nothing(double, windows, log_bias, max_norm):
    traced = trace(double, windows, 48)
    start = ragged_start(traced, log_bias)
    cache = GradientCompression(num_steps=3, init=start, max_norm=max_norm)(traced, num_slots=4)
    assert [layer.counts.tolist() for layer in cache.layers] == COUNTS
    assert cache.has_log_bias == log_bias
    assert distance(cache, start) > 5e-3
    for row, naive in enumerate(naive_loop(traced, start, 3, max_norm)):
        assert distance(cache.select([row]), naive) < 1e-8


def test_slots_that_a_head_does_not_have_never_move(traced):
    start = ragged_start(traced, log_bias=True)
    run = SlotOptimisation([traced], start.layers, GradientCompression().step_options())
    before = {name: x.clone() for name, x in run.state().items()}
    for _ in range(3):
        run.step()
    after = run.state()
    for layer, rows in enumerate(COUNTS):
        absent = torch.arange(run._parameters[3 * layer].shape[2]) >= torch.tensor(rows).unsqueeze(-1)
        for part in range(3):
            name = f"slots.{3 * layer + part}"
            assert torch.equal(after[name][absent], before[name][absent])
            assert (after[name][~absent] != before[name][~absent]).any()
            assert (after[f"exp_avg_sq.{3 * layer + part}"][absent] == 0).all()
        assert (after[f"slots.{3 * layer + 2}"][absent] == -torch.inf).all()


@pytest.mark.parametrize("init", ["attention-matching,budgets=adaptive", "attention,budgets=adaptive"])
def test_without_steps_the_cache_is_its_ragged_start(make_model, windows, init):
    traced = trace(make_model(num_hidden_layers=3), windows, 48)
    options = {"log_bias": False, "values": "original"} if init.startswith("attention,") else {}
    expected = AttentionMatching(budgets="adaptive", **options)(traced, num_slots=6)
    assert not expected.is_uniform
    found = GradientCompression(num_steps=0, init=init)(traced, num_slots=6)
    assert distance(found, expected) == 0
    assert found.metadata["init"] == init
    assert found.metadata["num_slots"] == expected.metadata["num_slots"]
    assert distance(GradientCompression(num_steps=0, init=expected)(traced, num_slots=6), expected) == 0


def test_a_ragged_start_learns_and_gives_snapshots_on_the_way(traced):
    method = GradientCompression(num_steps=5, init=ragged_start(traced, log_bias=True))
    caches = dict(method.snapshots(traced, num_slots=4))
    losses = [compare(traced, caches[step]).kl.mean() for step in (0, 1, 2, 5)]
    assert losses == sorted(losses, reverse=True)
    assert distance(caches[5], method(traced, num_slots=4)) == 0


def test_a_frozen_first_slot_is_the_first_of_every_head(traced):
    start = ragged_start(traced, log_bias=False)
    cache = GradientCompression(num_steps=2, init=start, freeze_first_slot=True)(traced, num_slots=4)
    for old, new in zip(start.layers, cache.layers, strict=True):
        for row, head in ((b, h) for b in range(3) for h in range(2)):
            pairs = list(zip(old.head(row, head)[:2], new.head(row, head)[:2], strict=True))
            assert all(torch.equal(a[0], b[0]) for a, b in pairs)
            assert len(pairs[0][0]) == 1 or not torch.equal(pairs[0][0], pairs[0][1])


def test_patience_returns_a_ragged_start_that_every_step_makes_worse(traced):
    start = AttentionMatching(budgets="layers")(traced, num_slots=6)
    cache = GradientCompression(num_steps=9, lr=100.0, patience=1, init=start)(traced, num_slots=6)
    assert distance(cache, start) == 0


def test_half_precision_keeps_its_dtype_and_its_empty_places_out_of_the_cache(make_model, windows):
    traced = trace(make_model(torch.bfloat16), windows, 48)
    start = ragged_start(traced, log_bias=True)
    cache = GradientCompression(num_steps=2, init=start)(traced, num_slots=4)
    assert [layer.counts.tolist() for layer in cache.layers] == COUNTS
    assert all(layer.keys.dtype == layer.values.dtype == torch.bfloat16 for layer in cache.layers)
    assert all(bool(x.isfinite().all()) for x in slots_of(cache))


def test_the_command_line_gives_the_start_its_options_in_brackets(traced):
    name, options = parse_method("gradient,init=[attention-matching,budgets=layers,bounds=[-2.0,2.0]],num_steps=1")
    method = make_compressor(name, **options)
    assert method == GradientCompression(num_steps=1, init="attention-matching,budgets=layers,bounds=[-2.0,2.0]")
    expected = AttentionMatching(budgets="layers", bounds=(-2.0, 2.0))(traced, num_slots=6)
    assert distance(replace(method, num_steps=0)(traced, num_slots=6), expected) == 0
    window = GradientCompression(num_steps=0, init="snapkv,window=4")(traced, num_slots=6)
    assert distance(window, Eviction("snapkv", window=4)(traced, num_slots=6)) == 0


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("attention-matching,speed=2", "init attention-matching has no option 'speed'"),
        ("attention-matching,budgets=some", "budgets must be 'equal', 'adaptive' or 'layers', not 'some'"),
        ("snapkv,window=x", "init snapkv: window is 'x'; it must be a whole number"),
        ("random,seed=2", "init 'random' has no option 'seed': give the gradient method's own"),
        ("last,seed=2", "init must be a compact cache or one of .* not 'last'"),
        ("gradient,num_steps=2", "init must be a compact cache or one of .* not 'gradient'"),
        ("attention-matching,", "'' in method 'attention-matching,' is no option=value"),
    ],
)
def test_starts_with_options_that_do_not_exist_are_refused(init, message):
    with pytest.raises(InputError, match=message):
        GradientCompression(init=init)
