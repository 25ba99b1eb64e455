"""What a step computes: the control and every objective written naively, accumulation, seeds, records."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import POLICIES, assert_same, config, exported, records
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcat.cache import CompactCache, CompactLayer, fingerprint
from kvcat.compress import replay, trace
from kvcat.data import open_tokens
from kvcat.files import read_jsonl
from kvcat.losses import distillation_kl, next_token_loss
from kvcat.models import MaskedPass, load, logits_from_hidden
from kvcat.policies import RandomPolicy
from kvcat.training import loop as loop_module
from kvcat.training.loop import train
from kvcat.training.objective import Objective

ASSETS = Path(__file__).parents[3] / "shared" / "assets"
PREFIX = 20


def some_tokens(batch=2):
    return torch.randint(3, 200, (batch, 32), generator=torch.Generator().manual_seed(0))


def generators(count=2):
    return [torch.Generator().manual_seed(i) for i in range(count)]


@pytest.mark.parametrize("policy", POLICIES)
def test_four_micro_batches_of_one_equal_one_of_four_up_to_rounding(
    policy, tiny_folder, texts_folder, tmp_path, monkeypatch
):
    def plain(objective, config):  # AdamW divides by gradients that are all rounding
        return torch.optim.SGD([{"params": list(objective.parameters()), "lr_multiplier": 1.0}])

    monkeypatch.setattr(loop_module, "make_optimizer", plain)
    options = {"policy": policy, "max_steps": 3, "peak_lr": 1.0}
    whole, split = (
        config(tiny_folder, texts_folder, tmp_path / str(size), micro_batch_size=size, **options) for size in (4, 1)
    )
    train(whole, progress=False)
    train(split, progress=False)
    a, b = exported(whole.output), exported(split.output)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-6)
    for one, four in zip(records(whole.output), records(split.output), strict=True):
        assert one.keys() == four.keys()
        assert one["dense_loss"] == pytest.approx(four["dense_loss"], abs=1e-4)
        assert one.get("kl", 0.0) == pytest.approx(four.get("kl", 0.0), abs=1e-4)


@pytest.mark.parametrize("policy", ["router", "random"])
def test_one_seed_gives_one_result_whatever_the_global_random_state(policy, tiny_folder, texts_folder, tmp_path):
    runs = [
        config(tiny_folder, texts_folder, tmp_path / str(i), policy=policy, seed=seed, max_steps=2)
        for i, seed in enumerate((3, 3, 4))
    ]
    for state, run in enumerate(runs):
        torch.manual_seed(state)
        np.random.seed(state)  # noqa: NPY002 (the global state is what this test is about)
        before = torch.get_rng_state()
        train(run, progress=False)
        assert torch.equal(torch.get_rng_state(), before)
    first, same, other = (exported(run.output) for run in runs)
    assert_same(first, same)
    assert records(runs[0].output) == records(runs[1].output)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_the_control_is_plain_next_token_training(tiny_folder, texts_folder, tmp_path):
    run = config(tiny_folder, texts_folder, tmp_path / "run", policy="control", max_steps=4, validation_sequences=3)
    train(run, progress=False)

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    data = open_tokens(
        str(texts_folder), AutoTokenizer.from_pretrained(tiny_folder), seq_len=run.seq_len, batch_size=run.batch_size,
        max_steps=4, validation_sequences=3, seed=run.seed,
    )  # fmt: skip
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    held_out = data.validation.take([0, 1, 2])
    with torch.no_grad():
        logits = model(held_out).logits[:, :-1].flatten(0, 1)
        before = functional.cross_entropy(logits, held_out[:, 1:].flatten()).item()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": run.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=run.betas,
    )
    losses = []
    for rate in [5e-3, 1e-2, 1e-2, 1e-3]:
        tokens = data.train.read(range(run.batch_size))
        loss = -model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    logged = [r["dense_loss"] for r in records(run.output) if r["kind"] == "train"]
    assert logged == pytest.approx(losses, abs=1e-5)
    assert records(run.output)[0]["dense_loss"] == pytest.approx(before, abs=1e-5)
    trained = exported(run.output)
    for name, parameter in model.named_parameters():
        # as a whole: Adam magnifies the rounding of single gradients that are nearly zero
        moved = (parameter.detach() - start[name]).norm()
        assert (trained[name] - parameter.detach()).norm() < 5e-4 * moved, name


def test_without_noise_the_masked_pass_starts_as_the_dense_pass_with_a_budget_of_one_over_the_target(
    tiny_folder, texts_folder, tmp_path
):
    run = config(tiny_folder, texts_folder, tmp_path / "run", router_noise=0.0, max_steps=1, target_keep=0.25)
    train(run, progress=False)
    start = records(run.output)[0]
    assert (start["kind"], start["step"]) == ("validation", 0)
    assert start["kl"] == pytest.approx(0.0, abs=1e-6)
    assert start["masked_loss"] == pytest.approx(start["dense_loss"], abs=1e-6)
    assert start["budget"] == pytest.approx(4.0)
    assert start["kept"] == {"0": 1.0, "1": 1.0}
    assert start["top1"] == 1.0


@pytest.mark.parametrize("policy", ["random", "attention"])
def test_the_fixed_policies_keep_their_exact_count_and_pay_no_budget(policy, tiny_folder, texts_folder, tmp_path):
    base = config(tiny_folder, texts_folder, tmp_path / "a", policy=policy, target_keep=0.25, max_steps=2)
    other = dataclasses.replace(base, output=str(tmp_path / "b"), budget_weight=9.0)
    for run in (base, other):
        train(run, progress=False)
    assert {value for r in records(base.output) for value in r["kept"].values()} == {0.25}
    assert_same(exported(base.output), exported(other.output))


@pytest.mark.parametrize("teacher", ["self", "frozen"])
@pytest.mark.parametrize("prefix_range", [None, (0.6, 0.6)])
def test_the_objective_is_the_kl_of_the_masked_tokens_and_the_anchor_of_all(
    teacher, prefix_range, tiny_folder, tmp_path
):
    run = config(
        tiny_folder, "data", tmp_path / "run", policy="random", mask_weight=0.7, num_groups=1,
        prefix_range=prefix_range, teacher=teacher,
    )  # fmt: skip
    prefix_len = PREFIX if prefix_range else 0
    assert run.prefix_len_at(0) == run.prefix_len_at(None) == (prefix_len or None)
    model, _ = load(tiny_folder)
    objective, tokens = Objective(model, run), some_tokens()
    assert not any("teacher" in name for name, _ in objective.named_parameters())
    with torch.no_grad():
        base = model(tokens).logits
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    total, record = objective(tokens, generators(), 0)
    with torch.no_grad(), MaskedPass(model, {0: RandomPolicy(0.5)}) as passes:
        out = passes.hidden(tokens, generators(), prefix_len=prefix_len or None)
        dense, masked = model(tokens).logits, logits_from_hidden(model, out.masked_hidden)
    teach = dense if teacher == "self" else base
    anchor = next_token_loss(dense, tokens) if teacher == "self" else distillation_kl(base, dense)
    expected = 0.7 * distillation_kl(teach[:, prefix_len:], masked) + anchor
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert record["kl"].item() == pytest.approx(distillation_kl(dense[:, prefix_len:], masked).item(), rel=1e-5)
    assert record["dense_loss"].item() == pytest.approx(next_token_loss(dense, tokens).item(), rel=1e-5)


def test_a_suffix_sees_what_it_would_see_on_a_compact_cache_of_the_kept_slots(tiny_folder):
    model, _ = load(tiny_folder)
    tokens = some_tokens()
    with torch.no_grad(), MaskedPass(model, {0: RandomPolicy(0.4)}) as passes:
        out = passes.hidden(tokens, torch.Generator().manual_seed(1), prefix_len=PREFIX)
    traced = trace(model, tokens, prefix_len=PREFIX)
    slots = out.keep[0].nonzero()[:, 1].view(2, 1, -1, 1)
    layers = [
        CompactLayer(*(x.gather(2, slots.expand(-1, x.shape[1], -1, x.shape[3])) for x in layer))
        for layer in zip(traced.keys, traced.values, strict=True)
    ]
    cache = CompactCache(layers, PREFIX, fingerprint(model))
    assert cache.num_slots == 8
    answered = replay(model, cache, tokens[:, PREFIX:])
    torch.testing.assert_close(logits_from_hidden(model, out.masked_hidden), answered, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"policy": "random"}, {"policy": "attention", "prefix_range": (0.25, 0.9)}])
def test_recomputed_activations_change_nothing(options, tiny_folder, texts_folder, tmp_path):
    plain = config(tiny_folder, texts_folder, tmp_path / "plain", max_steps=3, **options)
    again = dataclasses.replace(plain, output=str(tmp_path / "again"), activation_checkpointing=True)
    train(plain, progress=False)
    train(again, progress=False)
    assert_same(exported(plain.output), exported(again.output))
    assert records(plain.output) == records(again.output)


def test_bfloat16_compute_keeps_float32_weights(tiny_folder, texts_folder, tmp_path):
    run = config(tiny_folder, texts_folder, tmp_path / "run", dtype="bfloat16", max_steps=2)
    train(run, progress=False)
    assert {t.dtype for t in exported(run.output).values()} == {torch.float32}
    assert all(np.isfinite(r["dense_loss"]) for r in records(run.output))


def test_a_record_has_the_rates_and_gradient_norms_of_the_model_and_of_each_router(tiny_folder, texts_folder, tmp_path):
    run = config(tiny_folder, texts_folder, tmp_path / "run", max_steps=2)
    train(run, progress=False)
    for record in (r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"):
        assert record["router_lr"] == pytest.approx(10 * record["lr"])
        norms = record["router_grad_norms"]
        assert norms.keys() == {"0", "1"}
        assert min(norms.values()) > 0
        assert record["router_grad_norm"] == pytest.approx(sum(n**2 for n in norms.values()) ** 0.5, rel=1e-5)
        assert record["grad_norm"] > 0
        assert record["tokens_per_s"] > 0


def test_without_a_terminal_lines_tell_losses_speed_and_the_time_left(tiny_folder, texts_folder, tmp_path, capsys):
    train(config(tiny_folder, texts_folder, tmp_path / "run", policy="control", max_steps=3))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert len(lines) == 3
    assert all("dense " in line and " tokens/s" in line and line.endswith(" left") for line in lines)


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


def learns(model, data, output, **options):
    """Mean kept fraction of each router over the last 50 of 300 steps of the small recipe."""
    from kvcat.recipes import small

    run = small(model=str(model), data=str(data), output=str(output), max_steps=300, validation_every=300, **options)
    train(run, progress=False)
    kept = [r["kept"] for r in records(run.output) if r["kind"] == "train"][-50:]
    return {layer: float(np.mean([k[layer] for k in kept])) for layer in kept[0]}


@pytest.mark.slow
def test_with_the_recipes_settings_the_routers_reach_their_target(tiny_folder, texts_folder, tmp_path):
    kept = learns(tiny_folder, texts_folder, tmp_path / "run", seq_len=64, batch_size=4, num_groups=2)
    assert all(abs(value - 0.5) <= 0.05 for value in kept.values()), kept


@pytest.mark.slow
@pytest.mark.skipif(not ASSETS.is_dir(), reason=f"no {ASSETS}")
def test_on_a_pretrained_model_the_routers_reach_their_target_too(tmp_path):
    kept = learns(ASSETS / "models" / "stories260K", ASSETS / "corpora" / "books-validation.parquet", tmp_path / "run")
    assert all(abs(value - 0.5) <= 0.05 for value in kept.values()), kept
