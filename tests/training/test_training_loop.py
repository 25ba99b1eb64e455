"""What a step computes: schedule, accumulation, seeds, the control written naively."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import POLICIES, assert_same, config, exported, records
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcat.data import file_documents, hash_order, pack, split_of
from kvcat.data.excerpts import excerpts
from kvcat.errors import InputError
from kvcat.losses import distillation_kl
from kvcat.models import load
from kvcat.training import loop as loop_module
from kvcat.training import train
from kvcat.training.objective import Objective
from kvcat.training.optim import learning_rate

ASSETS = Path(__file__).parents[3] / "shared" / "assets"


def test_the_learning_rate_warms_up_to_the_peak_and_ends_on_the_floor():
    run = config("m", "d", "o", max_steps=12, warmup_steps=3, peak_lr=0.9, min_lr=0.1)
    rates = [learning_rate(step, run) for step in range(12)]
    assert rates[:4] == pytest.approx([0.3, 0.6, 0.9, 0.9])
    assert rates[7] == pytest.approx(0.5)  # the middle of the cosine from step 3 to step 11
    assert rates[11] == pytest.approx(0.1)
    assert rates[3:] == sorted(rates[3:], reverse=True)


@pytest.mark.parametrize(("warmup", "rates"), [(0, [0.9, 0.1]), (1, [0.9, 0.9]), (2, [0.45, 0.9]), (4, [0.225, 0.45])])
def test_the_schedule_of_very_short_runs_stays_between_zero_and_peak(warmup, rates):
    run = config("m", "d", "o", max_steps=2, warmup_steps=warmup, peak_lr=0.9, min_lr=0.1)
    assert [learning_rate(step, run) for step in range(2)] == pytest.approx(rates)


@pytest.mark.parametrize("policy", POLICIES)
def test_four_micro_batches_of_one_equal_one_of_four_up_to_rounding(
    policy, tiny_folder, texts_folder, tmp_path, monkeypatch
):
    def plain(objective, config):  # AdamW divides by gradients that are all rounding
        return torch.optim.SGD([{"params": list(objective.parameters()), "lr_multiplier": 1.0}])

    monkeypatch.setattr(loop_module, "make_optimizer", plain)
    whole, split = (
        config(
            tiny_folder,
            texts_folder,
            tmp_path / str(size),
            policy=policy,
            micro_batch_size=size,
            max_steps=3,
            peak_lr=1.0,
        )
        for size in (4, 1)
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


@pytest.mark.parametrize("policy", POLICIES)
def test_one_seed_gives_one_result_and_another_seed_another(policy, tiny_folder, texts_folder, tmp_path):
    runs = [
        config(tiny_folder, texts_folder, tmp_path / str(i), policy=policy, seed=seed, max_steps=2)
        for i, seed in enumerate((3, 3, 4))
    ]
    for run in runs:
        train(run, progress=False)
    first, same, other = (exported(run.output) for run in runs)
    assert_same(first, same)
    assert records(runs[0].output) == records(runs[1].output)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_the_global_random_state_neither_matters_nor_changes(tiny_folder, texts_folder, tmp_path):
    runs = [config(tiny_folder, texts_folder, tmp_path / str(i), policy="router", max_steps=2) for i in range(2)]
    for seed, run in enumerate(runs):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (the global state is what this test is about)
        before = torch.get_rng_state()
        train(run, progress=False)
        assert torch.equal(torch.get_rng_state(), before)
    assert_same(exported(runs[0].output), exported(runs[1].output))


def test_the_control_is_plain_next_token_training(tiny_folder, texts_folder, tmp_path):
    run = config(tiny_folder, texts_folder, tmp_path / "run", policy="control", max_steps=4)
    train(run, progress=False)

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    documents = [d for d in file_documents(texts_folder) if split_of(d.id) == "train"]
    read = excerpts(hash_order(documents, run.seed), tokenizer, run.seq_len, 16, run.seed)
    table = pack(read, tokenizer, run.seq_len, max_sequences=16)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": run.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=run.betas,
    )
    losses = []
    for step, rate in enumerate([5e-3, 1e-2, 1e-2, 1e-3]):
        tokens = table.batch(step, run.batch_size, run.seed)
        logits = model(tokens).logits
        loss = -logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    logged = [r["dense_loss"] for r in records(run.output) if r["kind"] == "train"]
    assert logged == pytest.approx(losses, abs=1e-5)
    trained = exported(run.output)
    for name, parameter in model.named_parameters():
        # as a whole: Adam magnifies the rounding of single gradients that are nearly zero
        moved = (parameter.detach() - start[name]).norm()
        assert (trained[name] - parameter.detach()).norm() < 5e-4 * moved, name


def test_at_the_start_the_masked_pass_is_the_dense_pass_and_the_budget_is_one_over_the_target(
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


def test_validation_weighs_every_held_out_sequence_alike(tiny_folder, texts_folder, tmp_path):
    run = config(
        tiny_folder, texts_folder, tmp_path / "run", policy="control", max_steps=1, validation_sequences=3, batch_size=2
    )
    train(run, progress=False)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    documents = [d for d in file_documents(texts_folder) if split_of(d.id) == "validation"]
    table = pack(hash_order(documents, 0), AutoTokenizer.from_pretrained(tiny_folder), run.seq_len, max_sequences=3)
    tokens = torch.from_numpy(table.sequences.astype("int64"))
    with torch.no_grad():
        expected = functional.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert len(tokens) == 3
    assert records(run.output)[0]["dense_loss"] == pytest.approx(expected.item(), abs=1e-5)


def test_a_run_that_diverges_stops_with_one_line_and_no_checkpoint_of_bad_weights(tiny_folder, texts_folder, tmp_path):
    run = config(
        tiny_folder, texts_folder, tmp_path / "run", policy="control", peak_lr=1e36, warmup_steps=0, checkpoint_every=1
    )
    with pytest.raises(InputError, match=r"diverged: the gradient of the model in step \d+ is not finite"):
        train(run, progress=False)
    saved = list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(saved) <= 1
    assert not (tmp_path / "run" / "export").exists()


def test_bfloat16_compute_keeps_float32_weights(tiny_folder, texts_folder, tmp_path):
    run = config(tiny_folder, texts_folder, tmp_path / "run", dtype="bfloat16", max_steps=2)
    train(run, progress=False)
    assert {t.dtype for t in exported(run.output).values()} == {torch.float32}
    assert all(np.isfinite(r["dense_loss"]) for r in records(run.output))


def learns(model, data, output, **options):
    """Mean kept fraction of each router over the last 50 of 300 steps of the small recipe."""
    from kvcat.recipes import small

    run = small(model=str(model), data=str(data), output=str(output), max_steps=300, **options)
    train(run, progress=False)
    kept = [r["kept"] for r in records(run.output) if r["kind"] == "train"][-50:]
    return {layer: float(np.mean([k[layer] for k in kept])) for layer in kept[0]}


@pytest.mark.slow
def test_with_the_recipes_settings_the_routers_reach_their_target(tiny_folder, texts_folder, tmp_path):
    kept = learns(
        tiny_folder, texts_folder, tmp_path / "run", seq_len=64, batch_size=4, num_groups=2, validation_every=300
    )
    assert all(abs(value - 0.5) <= 0.05 for value in kept.values()), kept


@pytest.mark.slow
@pytest.mark.skipif(not ASSETS.is_dir(), reason=f"no {ASSETS}")
def test_on_a_pretrained_model_the_routers_reach_their_target_too(tmp_path):
    kept = learns(
        ASSETS / "models" / "stories260K", ASSETS / "corpora" / "books-validation.parquet", tmp_path / "run",
        validation_every=300,
    )  # fmt: skip
    assert all(abs(value - 0.5) <= 0.05 for value in kept.values()), kept


def test_a_frozen_teacher_teaches_both_passes_and_stays_as_it_was(tiny_folder, texts_folder, tmp_path):
    run = config(tiny_folder, texts_folder, tmp_path / "run", teacher="frozen", router_noise=0.0)
    model, _ = load(tiny_folder)
    objective = Objective(model, run)
    tokens = torch.randint(3, 200, (2, 32), generator=torch.Generator().manual_seed(0))
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    total, record = objective(tokens, generators, range(2), 0)
    assert total.item() == pytest.approx(run.budget_weight * 2.0, abs=1e-6)
    assert record["kl"].item() == pytest.approx(0.0, abs=1e-6)
    assert not any(name.startswith("_teacher") for name, _ in objective.named_parameters())
    with torch.no_grad():
        base = model(tokens).logits
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        moved = distillation_kl(base, model(tokens).logits)
    total, record = objective(tokens, generators, range(2), 0)
    assert record["kl"].item() == pytest.approx(0.0, abs=1e-6)  # the routers still keep everything
    assert total.item() == pytest.approx((2 * moved + run.budget_weight * 2.0).item(), rel=1e-5)
