"""Options beyond the paper: any-budget training, a masked pass on a share of the sequences, monitors."""

import dataclasses
import importlib.util

import pytest
import torch
from runs import config, records

from kvcat.errors import InputError
from kvcat.losses import distillation_kl, next_token_loss
from kvcat.models import MaskedPass, load
from kvcat.policies import RandomPolicy, gate, gate_share, kept_count
from kvcat.training import train
from kvcat.training.objective import Objective


def test_the_share_is_exact_the_best_are_kept_and_the_gradient_is_the_gates():
    scores = torch.rand(3, 21, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for ratio in (0.05, 0.3, 0.5, 1.0):
        mask = gate_share(scores, ratio)
        assert (mask.sum(1) == kept_count(ratio, 21)).all()
        assert (mask[:, 0] == 1).all()
        for row, kept in zip(scores, mask, strict=True):
            best = row[1:].topk(kept_count(ratio, 21) - 1).indices + 1
            assert set(kept.nonzero().flatten().tolist()) == {0, *best.tolist()}
    weights = torch.randn(3, 21, generator=torch.Generator().manual_seed(1))
    ours, gates = (torch.autograd.grad((m * weights).sum(), scores)[0] for m in (gate_share(scores, 0.3), gate(scores)))
    assert torch.equal(ours, gates)


def test_among_equal_scores_no_part_of_the_text_is_preferred():
    kept = gate_share(torch.ones(1, 256), 0.5)[0]
    for part in kept.split(32):
        assert 14 <= part.sum() <= 18


@pytest.mark.parametrize("policy", ["router", "random", "attention"])
def test_with_a_keep_range_every_step_keeps_its_own_share(policy, tiny_folder, texts_folder, tmp_path):
    run = config(tiny_folder, texts_folder, tmp_path / "run", policy=policy, keep_range=(0.2, 0.9), max_steps=5)
    train(run, progress=False)
    kept = [tuple(r["kept"].values()) for r in records(run.output) if r["kind"] == "train"]
    assert len(set(kept)) == 5
    assert all(0.2 <= value <= 0.9 and len(set(values)) == 1 for values in kept for value in values)
    if policy != "router":
        first = next(r for r in records(run.output) if r["kind"] == "validation")
        assert set(first["kept"].values()) == {0.5}


def test_a_range_of_one_share_is_the_fixed_count(tiny_folder, texts_folder, tmp_path):
    fixed = config(tiny_folder, texts_folder, tmp_path / "a", policy="random", max_steps=3)
    ranged = dataclasses.replace(fixed, keep_range=(0.5, 0.5), output=str(tmp_path / "b"))
    for run in (fixed, ranged):
        train(run, progress=False)
    assert records(fixed.output) == records(ranged.output)


def test_a_share_of_the_sequences_gives_the_kl_of_these_and_the_anchor_of_all(tiny_folder, texts_folder, tmp_path):
    run = config(
        tiny_folder, texts_folder, tmp_path / "run", policy="random", masked_fraction=0.5, mask_weight=0.7, num_groups=1
    )
    model, _ = load(tiny_folder)
    objective = Objective(model, run)
    tokens = torch.randint(3, 200, (4, 32), generator=torch.Generator().manual_seed(0))
    total, record = objective(tokens, [torch.Generator().manual_seed(i) for i in range(4)], range(4), 0)
    masked = [1, 3]
    with torch.no_grad(), MaskedPass(model, {0: RandomPolicy(0.5)}) as passes:
        out = passes(tokens[masked], [torch.Generator().manual_seed(i) for i in masked])
        kl = distillation_kl(out.dense_logits, out.masked_logits)
        anchor = next_token_loss(model(tokens).logits, tokens)
    assert record["kl"].item() == pytest.approx(kl.item(), rel=1e-5)
    assert record["dense_loss"].item() == pytest.approx(anchor.item(), rel=1e-5)
    assert total.item() == pytest.approx((0.7 * kl + anchor).item(), rel=1e-5)


@pytest.mark.parametrize("policy", ["router", "attention"])
def test_a_share_of_the_sequences_trains_whatever_the_micro_batches(policy, tiny_folder, texts_folder, tmp_path):
    runs = [
        config(
            tiny_folder, texts_folder, tmp_path / str(size), policy=policy, masked_fraction=0.5, micro_batch_size=size,
            max_steps=2, peak_lr=1e-3,
        )
        for size in (4, 2)
    ]  # fmt: skip
    for run in runs:
        train(run, progress=False)
    for one, other in zip(*(records(run.output) for run in runs), strict=True):
        assert one["kl"] == pytest.approx(other["kl"], rel=1e-3, abs=1e-5)
        assert one["dense_loss"] == pytest.approx(other["dense_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"masked_fraction": 0.0}, "masked_fraction is 0.0"),
        ({"masked_fraction": 0.3}, "masked_fraction 0.3 of the 4 sequences"),
        ({"keep_range": (0.9, 0.2)}, "keep_range is 0.9, 0.2"),
        ({"keep_range": (0.0, 0.2)}, "keep_range is 0.0, 0.2"),
        ({"teacher": "frozen", "policy": "control"}, "no masked pass to teach"),
    ],
)
def test_values_out_of_range_are_named(options, told):
    with pytest.raises(InputError, match=told):
        config("model", "data", "out", **options)


def test_a_missing_monitor_is_told_with_its_installation(tiny_folder, texts_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"pip install 'kvcat\[wandb\]'"):
        train(config(tiny_folder, texts_folder, tmp_path / "run", monitor="wandb"), progress=False)
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_every_number_of_every_record(tiny_folder, texts_folder, tmp_path):
    pytest.importorskip("tensorboard", reason="needs kvcat[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = config(tiny_folder, texts_folder, tmp_path / "run", monitor="tensorboard", max_steps=3)
    train(run, progress=False)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    losses = [r["dense_loss"] for r in records(run.output) if r["kind"] == "train"]
    assert [e.value for e in events.Scalars("train/dense_loss")] == pytest.approx(losses)
    assert [e.step for e in events.Scalars("train/kept/0")] == [1, 2, 3]
    assert [e.step for e in events.Scalars("validation/kl")] == [0, 3]
