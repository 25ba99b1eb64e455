"""Gradient-based caches: steps, starts, snapshots, one cache for many suffixes, resume."""

import dataclasses
import math

import pytest
import torch
from structured_heads import positions_of
from transformers import DynamicCache

from kvcat.cache import CompactCache, CompactLayer, cache_argument
from kvcat.compress import (
    SNAPSHOT_STEPS,
    AttentionMatching,
    Eviction,
    GradientCompression,
    Reconstruction,
    compare,
    seeded_compressors,
    trace,
)
from kvcat.compress.methods import gradient
from kvcat.errors import InputError
from tiny import loud_model


def slots_of(cache):
    return [
        tensor
        for layer in cache.layers
        for name, tensor in layer.tensors().items()
        if name != "positions"
    ]


def distance(first, second):
    return max(
        (a - b).abs().max().item() for a, b in zip(slots_of(first), slots_of(second), strict=True)
    )


def naive_loop(model, prefix_len, ids, start, steps, rate):
    """One sequence: full logits, torch's own clipping, the stock cache and loss."""
    dense = model(ids[None]).logits[0, prefix_len:].detach().log_softmax(-1)
    new = len(ids) - prefix_len
    leaves = [x.clone().requires_grad_(True) for layer in start for x in (layer.keys, layer.values)]
    optimizer = torch.optim.AdamW(leaves, weight_decay=0.0)
    at = torch.arange(prefix_len, len(ids))[None]
    mask = torch.cat([torch.ones(new, leaves[0].shape[2]), torch.ones(new, new).tril()], 1).bool()[
        None, None
    ]
    for step in range(steps):
        past = DynamicCache()
        for index in range(len(start)):
            past.update(leaves[2 * index], leaves[2 * index + 1], index)
        logits = model(
            ids[None, prefix_len:], **cache_argument(past), position_ids=at, attention_mask=mask
        ).logits
        optimizer.zero_grad()
        (dense.exp() * (dense - logits[0].log_softmax(-1))).sum(-1).mean().backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.param_groups[0]["lr"] = 0.2 * rate(step)
        optimizer.step()
    tensors = [x.detach() for x in leaves]
    return CompactCache(
        [CompactLayer(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)],
        prefix_len,
        "",
    )


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        ("constant", lambda step: 1.0),
        ("cosine", lambda step: (1 + math.cos(math.pi * step / 6)) / 2),
    ],
)
def test_the_steps_of_every_example_are_those_of_the_naive_loop_clipped_by_its_norm(
    windows, schedule, rate
):
    """Large logits make gradients whose norm passes 1 in some steps only, so that Adam sees where
    it is clipped."""
    model = loud_model(dtype=torch.float64)
    model.lm_head.weight.data.mul_(5)
    traced = trace(model, windows, 48)
    method = GradientCompression(num_steps=6, lr=0.2, schedule=schedule)
    start = dataclasses.replace(method, num_steps=0)(traced, num_slots=5)
    cache = method(traced, num_slots=5)
    assert distance(cache, start) > 5e-3
    for row in range(3):
        naive = naive_loop(model, 48, windows[row], start.select([row]).layers, 6, rate)
        assert distance(cache.select([row]), naive) < 1e-6
    lean = dataclasses.replace(method, activation_checkpointing=True)
    assert distance(lean(traced, num_slots=5), cache) < 1e-12


def test_inference_mode_changes_nothing(model, windows, traced):
    method = GradientCompression(num_steps=3, lr=0.05)
    expected = method(traced, num_slots=6)
    with torch.inference_mode():
        assert distance(method(traced, num_slots=6), expected) == 0
        inside = trace(model, windows, 48)
        assert distance(method(inside, num_slots=6), expected) == 0


def test_snapshots_come_at_their_steps_and_the_loss_falls(traced):
    seen = {}
    losses = {}
    method = GradientCompression(num_steps=12, lr=0.05)
    for step, cache in method.snapshots(traced, num_slots=6):
        seen[step] = compare(traced, cache).kl
    cache = method(traced, num_slots=6, on_step=losses.__setitem__)
    (among_others,) = method.each(traced, [6 / traced.prefix_len])
    assert among_others.record == cache.record
    assert distance(among_others, cache) == 0
    assert losses[6] == pytest.approx(
        seen[5].mean().item(), rel=1e-4
    )  # the loss before the sixth step
    assert list(seen) == [step for step in SNAPSHOT_STEPS if step <= 10] + [12]
    assert (seen[12] < seen[5]).all()
    assert (seen[5] < seen[0]).all()


def test_starts_are_the_caches_of_the_methods_they_name(traced):
    for init, expected in [
        ("first", Eviction("first")),
        ("snapkv,window=4", Eviction("snapkv", window=4)),
        ("attention-matching,preset=paper", AttentionMatching("paper")),
    ]:
        start = GradientCompression(num_steps=0, init=init)(traced, num_slots=6)
        assert distance(start, expected(traced, num_slots=6)) == 0
    drawn = GradientCompression(num_steps=0, init="random")(traced, num_slots=6)
    at = [
        positions_of(layer.keys, keys)
        for layer, keys in zip(drawn.layers, traced.keys, strict=True)
    ]
    assert all(torch.equal(head, at[0][:, 0]) for layer in at for head in layer.unbind(1))
    assert GradientCompression(init="random").draws
    assert not GradientCompression().draws


def test_a_start_that_draws_uses_the_seed_unless_it_names_one(traced):
    two_queries = "attention-matching,num_queries=2,budgets=equal"
    seeds = [
        AttentionMatching(num_queries=2, budgets="equal", seed=seed)(traced, num_slots=6)
        for seed in (0, 3)
    ]
    assert distance(*seeds) > 0
    for init, seed in ((two_queries, 3), (f"{two_queries},seed=3", 0)):
        method = GradientCompression(num_steps=0, init=init, seed=seed)
        assert distance(method(traced, num_slots=6), seeds[1]) == 0
        assert method.draws == (init == two_queries)
    assert [seed for seed, _ in seeded_compressors("gradient", {"init": two_queries}, [3])] == [3]


def test_a_frozen_first_slot_stays(traced):
    method = GradientCompression(num_steps=2, freeze_first_slot=True)
    (_, start), _, (_, end) = method.snapshots(traced, num_slots=6)
    for before, after in zip(start.layers, end.layers, strict=True):
        assert torch.equal(before.values[:, :, 0], after.values[:, :, 0])
        assert not torch.equal(before.values[:, :, 1], after.values[:, :, 1])


def test_unequal_slots_and_their_log_bias_are_trained_and_none_is_added(model, windows):
    traced = trace(model, windows, 48)
    init = "attention-matching,budgets=adaptive"
    start = AttentionMatching(budgets="adaptive")(traced, num_slots=6)
    method = GradientCompression(num_steps=4, lr=0.02, init=init)
    cache = method(traced, num_slots=6)
    assert [layer.counts.tolist() for layer in cache.layers] == [
        layer.counts.tolist() for layer in start.layers
    ]
    assert all(x.isfinite().all() for x in slots_of(cache))
    assert any(
        (a.log_bias != b.log_bias).any() for a, b in zip(cache.layers, start.layers, strict=True)
    )
    assert compare(traced, cache).kl.mean() < compare(traced, start).kl.mean()
    for row in range(3):
        alone = method(trace(model, windows[row : row + 1], 48), num_slots=6)
        assert distance(cache.select([row]), alone) < 1e-3


def test_only_the_second_copy_of_a_reconstruction_supervises(model, windows):
    late, early = (trace(model, Reconstruction(windows[:1], 20, start)) for start in (44, 20))
    assert late.queries[0].shape[2] == 20
    assert (
        distance(
            *(
                GradientCompression(num_steps=2)(one_trace, num_slots=5)
                for one_trace in (late, early)
            )
        )
        > 1e-3
    )


class KilledError(Exception):
    pass


def killed_at(last):
    def on_step(step, kl):
        if step == last:
            raise KilledError

    return on_step


@pytest.mark.parametrize("last", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"init": "random", "schedule": "cosine", "freeze_first_slot": True}),
        (torch.float32, {"init": "attention-matching,budgets=adaptive"}),
        (torch.bfloat16, {"lr": 1e-4}),
    ],
    ids=["schedule", "ragged", "half precision"],
)
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(
    windows, tmp_path, monkeypatch, dtype, options, last
):
    monkeypatch.setattr(gradient, "SAVE_EVERY", 2)
    traced = trace(loud_model(dtype=dtype), windows, 48)
    method = GradientCompression(num_steps=5, **options)
    path = tmp_path / "state"
    whole = method(traced, num_slots=5)
    with pytest.raises(KilledError):
        method(traced, num_slots=5, resume=path, on_step=killed_at(last))
    steps = []
    lean = dataclasses.replace(method, activation_checkpointing=last == 4)
    resumed = lean(traced, num_slots=5, resume=path, on_step=lambda step, kl: steps.append(step))
    assert distance(resumed, whole) == 0
    assert steps[0] == last // 2 * 2 + 1
    assert distance(method(traced, num_slots=5, resume=path), whole) == 0


def test_states_of_another_run_damaged_and_foreign_ones_are_rejected(
    model, windows, traced, tmp_path
):
    path = tmp_path / "state"
    method = GradientCompression(num_steps=1)
    cache = method(traced, num_slots=5, resume=path)
    before = path.read_bytes()
    flipped = trace(model, windows.flip(0), 48)
    for other_trace, change, slots, message in [
        (traced, {"lr": 0.5}, 5, "its lr is 0.01, here it is 0.5"),
        (traced, {"init": "random"}, 5, "its init is first, here it is random"),
        (traced, {}, 6, "its num_slots is 5, here it is 6"),
        (flipped, {}, 5, r"its tokens is .*, here it is"),
        (
            trace(model, windows, 48, past=method(trace(model, windows, 24), num_slots=9)),
            {},
            5,
            r"its tokens is",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            dataclasses.replace(method, **change)(other_trace, num_slots=slots, resume=path)
    assert path.read_bytes() == before
    path.write_bytes(path.read_bytes()[:-9])
    cache.save(tmp_path / "cache")
    for resume, message in [
        (path, "truncated"),
        (tmp_path / "cache", "is a compact cache of kvcat, not the state of a gradient-based run"),
        (tmp_path, "no cache file"),
    ]:
        with pytest.raises(InputError, match=message):
            method(traced, num_slots=5, resume=resume, on_step=killed_at(1))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "phi3",
            {
                "pad_token_id": 0,
                "original_max_position_embeddings": 50,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0, 1.5, 2.0, 2.5],
                    "long_factor": [2.0, 5.0, 8.0, 11.0],
                    "original_max_position_embeddings": 50,
                },
            },
            "its rope is short, here it is long",
        ),
        (
            "gemma3_text",
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 50,
                "head_dim": 8,
                "query_pre_attn_scalar": 8,
            },
            "its layers is None, here it is 1",
        ),
    ],
)
def test_the_state_of_other_rotary_factors_or_layers_is_rejected(kind, options, message, tmp_path):
    """Both depend on the room for later text."""
    model = loud_model(kind, std=0.2, **options)
    ids = torch.randint(3, 67, (1, 40), generator=torch.Generator().manual_seed(0))
    method = GradientCompression(num_steps=1)
    path = tmp_path / "state"
    method(trace(model, ids, 30, room=10), num_slots=5, resume=path)
    with pytest.raises(InputError, match=message):
        method(trace(model, ids, 30, room=40), num_slots=5, resume=path)
