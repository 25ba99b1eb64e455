"""What a step computes: the control and every objective written naively, accumulation, seeds,
records."""

import dataclasses
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcat.data import open_tokens
from kvcat.files import read_jsonl
from kvcat.losses import distillation_kl, next_token_loss
from kvcat.models import MaskedPass, load, logits_from_hidden
from kvcat.policies import RandomPolicy
from kvcat.recipes import small
from kvcat.training import run as run_module
from kvcat.training.loop import train
from kvcat.training.objective import Objective, loss_notes
from kvcat.training.optimizer import make_optimizer
from tiny import loud_model
from training_runs import POLICIES, assert_close, assert_same, config, exported, records

PREFIX = 20
FIELDS = ("dense_loss", "masked_loss", "kl", "budget", "grad_norm")


def some_tokens(batch=2):
    return torch.randint(3, 200, (batch, 32), generator=torch.Generator().manual_seed(0))


def generators(count=2):
    return [torch.Generator().manual_seed(i) for i in range(count)]


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, marks=[] if policy == "router" else pytest.mark.slow)
        for policy in POLICIES
    ],
)
def test_the_loss_curve_is_the_one_on_record(policy, tiny_folder, texts_folder, tmp_path):
    """A missing curve is written; a commit that removes one must say why."""
    run = tmp_path / "run"
    file = Path(__file__).parent / "golden" / f"{policy}.txt"
    train(
        config(tiny_folder, texts_folder, run, policy=policy, max_steps=12, peak_lr=3e-3),
        progress=False,
    )
    steps = [r for r in records(run) if r["kind"] == "train"]
    names = [name for name in FIELDS if name in steps[0]]
    if not file.exists():
        lines = [" ".join(f"{record[name]:.6f}" for name in names) for record in steps]
        file.write_text("\n".join([" ".join(names), *lines]) + "\n")
        pytest.fail(f"{file} was written anew")
    head, *lines = file.read_text().splitlines()
    assert head.split() == names
    for record, line in zip(steps, lines, strict=True):
        expected = [float(word) for word in line.split()]
        assert [record[name] for name in names] == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("policy", ["router", pytest.param("random", marks=pytest.mark.slow)])
def test_four_micro_batches_of_one_equal_one_of_four_up_to_rounding(policy, monkeypatch, new_run):
    def plain(model, routers, config):  # AdamW divides by gradients that are nothing but rounding
        return torch.optim.SGD([{"params": [*model.parameters(), *routers], "lr_multiplier": 1.0}])

    monkeypatch.setattr(run_module, "make_optimizer", plain)
    options = {"policy": policy, "max_steps": 3, "peak_lr": 1.0}
    whole, split = (new_run(str(size), micro_batch_size=size, **options) for size in (4, 1))
    for run in (whole, split):
        train(run, progress=False)
    assert_close(whole.output, split.output, weights=1e-6)


def test_routers_are_clipped_apart_from_the_model(monkeypatch, new_run):
    norms = []
    make_optimizer = run_module.make_optimizer

    def watched(model, routers, config):
        made = make_optimizer(model, routers, config)
        groups = routers, list(model.parameters())
        made.register_step_pre_hook(
            lambda *_: norms.append(
                [sum(p.grad.square().sum().item() for p in group) ** 0.5 for group in groups]
            )
        )
        return made

    monkeypatch.setattr(run_module, "make_optimizer", watched)
    train(new_run(max_steps=1, max_grad_norm=1e-3), progress=False)
    assert norms == [pytest.approx([1e-3, 1e-3], rel=1e-2)]


def test_one_seed_gives_one_result_whatever_the_global_random_state(new_run):
    runs = [
        new_run(str(i), policy="random", seed=seed, max_steps=2) for i, seed in enumerate((3, 3, 4))
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


def test_a_model_with_experts_is_said_to_train_without_a_balancing_term():
    experts = loud_model("gpt_oss", head_dim=8, num_local_experts=2, router_aux_loss_coef=0.25)
    (note,) = loss_notes(experts)
    assert "keeps the model's experts equally busy (router_aux_loss_coef 0.25 is not used)" in note
    assert loss_notes(loud_model()) == []


def test_weight_decay_reaches_no_bias_of_the_experts(tmp_path):
    experts = loud_model("gpt_oss", head_dim=8, num_local_experts=2, num_experts_per_tok=2)
    biases = [p for name, p in experts.named_parameters() if name.endswith("bias")]
    assert any(bias.ndim == 2 for bias in biases)
    decayed, kept = make_optimizer(experts, [], config("m", "d", tmp_path)).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.01, 0.0)
    assert {id(bias) for bias in biases} <= {id(p) for p in kept["params"]}
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(list(experts.parameters()))


def test_the_control_is_plain_next_token_training(tiny_folder, texts_folder, new_run):
    run = new_run(policy="control", max_steps=4, validation_sequences=3)
    train(run, progress=False)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    options = {
        name: getattr(run, name)
        for name in ("seq_len", "batch_size", "max_steps", "validation_sequences", "seed")
    }
    data = open_tokens(str(texts_folder), AutoTokenizer.from_pretrained(tiny_folder), **options)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def loss_on(tokens):
        return -model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()

    before = loss_on(data.validation).item()
    groups = [
        {
            "params": [p for p in model.parameters() if (p.ndim > 1) == matrices],
            "weight_decay": decay,
        }
        for matrices, decay in ((True, run.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, betas=run.betas)
    losses = []
    for rate in [5e-3, 1e-2, 1e-2, 1e-3]:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = loss_on(data.train.read())
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


@pytest.mark.slow
def test_runs_record_the_same_checksum_where_they_see_the_same_tokens(
    texts_folder, tiny_folder, new_run
):
    control = new_run("control", policy="control", max_steps=2)
    options = {
        name: getattr(control, name) for name in ("seq_len", "batch_size", "validation_sequences")
    }
    runs = (
        control,
        new_run("router", max_steps=2, micro_batch_size=1),
        new_run("other", policy="control", max_steps=2, seed=1),
    )
    sums = []
    for run in runs:
        train(run, progress=False)
        sums.append([r["tokens_crc32"] for r in records(run.output) if r["kind"] == "train"])
    data = open_tokens(
        str(texts_folder),
        AutoTokenizer.from_pretrained(tiny_folder),
        **options,
        max_steps=2,
        seed=control.seed,
    )
    expected = [
        sum(zlib.crc32(row.tobytes()) for row in data.train.read().numpy()) for _ in range(2)
    ]
    assert sums[:2] == [expected, expected]
    assert not set(sums[2]) & set(expected)


def test_a_fixed_policy_keeps_its_exact_count_and_pays_no_budget(tmp_path, new_run):
    base = new_run("a", policy="random", target_keep=0.25, max_steps=2)
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
        tiny_folder,
        "data",
        tmp_path / "run",
        policy="random",
        mask_weight=0.7,
        anchor_weight=1.3,
        num_groups=1,
        prefix_range=prefix_range,
        teacher=teacher,
        tau=0.3,
    )
    prefix_len = PREFIX if prefix_range else 0
    assert run.prefix_len_at(0) == run.prefix_len_at(None) == (prefix_len or None)
    model, _ = load(tiny_folder)
    objective = Objective(model, run)
    tokens = some_tokens()
    assert objective.masked_pass.tau == 0.3
    assert not any("teacher" in name for name, _ in objective.named_parameters())
    with torch.no_grad():
        base = model(tokens).logits
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
    total, record = objective(tokens, generators(), 0)
    with torch.no_grad(), MaskedPass(model, {0: RandomPolicy(0.5)}) as passes:
        out = passes.hidden(tokens, generators(), prefix_len=prefix_len or None)
        dense = model(tokens).logits
        masked = logits_from_hidden(model, out.masked_hidden)
    teach = dense if teacher == "self" else base
    anchor = next_token_loss(dense, tokens) if teacher == "self" else distillation_kl(base, dense)
    expected = 0.7 * distillation_kl(teach[:, prefix_len:], masked) + 1.3 * anchor
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert record["kl"].item() == pytest.approx(
        distillation_kl(dense[:, prefix_len:], masked).item(), rel=1e-5
    )
    assert record["dense_loss"].item() == pytest.approx(
        next_token_loss(dense, tokens).item(), rel=1e-5
    )
    losses_of_suffix = {"masked_loss": masked}
    if prefix_len:
        losses_of_suffix["dense_suffix_loss"] = dense[:, prefix_len:]
    for name, logits in losses_of_suffix.items():
        expected_loss = next_token_loss(logits, tokens[:, prefix_len:]).item()
        assert record[name].item() == pytest.approx(expected_loss, rel=1e-5)
    assert ("dense_suffix_loss" in record) == bool(prefix_len)


def test_the_routers_target_falls_and_is_the_last_one_in_validation(tiny_folder, tmp_path):
    options = {"router_noise": 0.0, "target_keep": 0.4, "target_warmup_steps": 2}
    objective = Objective(
        load(tiny_folder)[0], config(tiny_folder, "data", tmp_path / "run", **options)
    )
    budgets = [
        objective(some_tokens(), generators(), step)[1]["budget"].item()
        for step in (0, 1, 2, 3, None)
    ]
    assert budgets == pytest.approx(
        [1 / target for target in (0.8, 0.6, 0.4, 0.4, 0.4)]
    )  # all is kept


def test_a_frozen_teacher_computes_in_the_type_of_the_run_with_exact_positions(
    tiny_folder, tmp_path
):
    run = config(tiny_folder, "data", tmp_path / "run", teacher="frozen", dtype="bfloat16")
    (teacher,) = Objective(load(tiny_folder)[0], run)._teachers
    assert {parameter.dtype for parameter in teacher.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in teacher.buffers()} == {torch.float32}


@pytest.mark.slow
def test_a_record_and_a_line_without_a_terminal_show_rates_norms_speed_and_the_remaining_time(
    tmp_path, capsys, new_run
):
    run = new_run(max_steps=3, dtype="bfloat16", teacher="frozen")
    train(run)
    for record in (
        r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"
    ):
        assert record["router_lr"] == pytest.approx(10 * record["lr"])
        norms = record["router_grad_norms"]
        assert norms.keys() == {"0", "1"}
        assert record["router_grad_norm"] == pytest.approx(
            sum(n**2 for n in norms.values()) ** 0.5, rel=1e-5
        )
        assert min(record["grad_norm"], record["tokens_per_s"], record["dense_loss"]) > 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert len(lines) == 3
    assert all(
        "dense " in line and " tokens/s" in line and line.endswith(" left") for line in lines
    )
    assert "  kept 1.00  " in lines[0]  # both groups keep everything: reported once
    assert {t.dtype for t in exported(run.output).values()} == {
        torch.float32
    }  # the weights of bfloat16 compute


@pytest.mark.slow
def test_tensorboard_gets_every_number_of_every_record(tmp_path, new_run):
    pytest.importorskip("tensorboard", reason="needs kvcat[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = new_run(monitor="tensorboard", max_steps=3)
    train(run, progress=False)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    losses = [r["dense_loss"] for r in records(run.output) if r["kind"] == "train"]
    assert [e.value for e in events.Scalars("train/dense_loss")] == pytest.approx(losses)
    assert [e.step for e in events.Scalars("train/kept/0")] == [1, 2, 3]
    assert [e.step for e in events.Scalars("validation/kl")] == [0, 3]


@pytest.mark.slow
def test_with_the_recipes_settings_the_routers_reach_their_target(
    tiny_folder, texts_folder, tmp_path
):
    """The mean kept fraction of each router over the last 50 of 300 steps of the small recipe."""
    places = {"model": str(tiny_folder), "data": str(texts_folder), "output": str(tmp_path / "run")}
    options = {
        "seq_len": 64,
        "batch_size": 4,
        "num_groups": 2,
        "max_steps": 300,
        "validation_every": 300,
    }
    train(small(**places, **options), progress=False)
    kept = [list(r["kept"].values()) for r in records(tmp_path / "run") if r["kind"] == "train"][
        -50:
    ]
    assert np.mean(kept, axis=0) == pytest.approx([0.5] * len(kept[0]), abs=0.05)
