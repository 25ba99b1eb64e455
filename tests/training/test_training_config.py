"""The configuration: types, ranges, schedules, and files of it."""

import dataclasses
import json
import math
import re

import pytest

from kvcat.errors import InputError
from kvcat.files import read_json
from kvcat.models import load
from kvcat.training import loop, plan
from kvcat.training.config import TrainConfig
from kvcat.training.plan import flops_per_token, memory_concern
from kvcat.training.schedule import learning_rate, schedule_notes
from tiny import refusal
from training_runs import config


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_steps", 3.5, "a whole number"),
        ("max_steps", True, "a whole number"),
        ("max_steps", "3", "a whole"),
        ("betas", 0.9, "a list of 2"),
        ("betas", [0.9], "2 values, each a finite number"),
        ("peak_lr", "1e-4", "a finite number"),
        ("teacher", "none", "one of self, frozen"),
        ("compile", "no", "true or false"),
        ("model", 5, "text"),
        ("group_starts", [0, 1.5], "each a whole number or null"),
        ("policy", 1, "text"),
        ("seed", None, "a whole number"),
        ("micro_batch_size", "all", "a whole number or null"),
        ("target_keep", 0.0, ""),
        ("target_keep", math.nan, ""),
        ("tau", 1.0, ""),
        ("max_steps", 0, ""),
        ("seq_len", 1, ""),
        ("micro_batch_size", 3, ""),
        ("micro_batch_size", 0, ""),
        ("peak_lr", 0.0, ""),
        ("peak_lr", math.inf, ""),
        ("min_lr", 1.0, ""),
        ("warmup_steps", -1, ""),
        ("mask_weight", math.nan, ""),
        ("router_noise", -0.1, ""),
        ("seed", 2**63, ""),
        ("policy", "best", ""),
        ("betas", (0.9, 1.0), ""),
        ("learning_rate", 0.1, ""),
        ("prefix_range", (0.9, 0.2), ""),
        ("prefix_range", (0.0, 0.5), ""),
        ("detach_prefix", True, ""),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_named_in_one_line(name, value, expected):
    message = refusal(
        TrainConfig.from_dict, {**dataclasses.asdict(config("model", "data", "out")), name: value}
    )
    assert re.search(f"{name} is .*; it must be .*{expected}" if expected else name, message)


def test_a_configuration_reads_back_what_was_saved(tmp_path):
    run = config(
        "model", "data", "out", peak_lr=1, betas=[0, 0.5], group_starts=[0, 3], micro_batch_size=2
    )
    assert (run.peak_lr, run.betas, run.group_starts) == (1.0, (0.0, 0.5), (0, 3))
    assert isinstance(run.peak_lr, float)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dataclasses.asdict(run)))
    assert TrainConfig.from_dict(read_json(file)) == run
    for content in ("", "[]", "{}", '{"model": "m"}', '{"hidden_size": 3}', '{"model": 5}'):
        file.write_text(content)
        with pytest.raises(InputError):
            TrainConfig.from_dict(read_json(file))
    with pytest.raises(InputError, match="no masked pass to teach"):
        config("model", "data", "out", policy="control", teacher="frozen")
    with pytest.raises(InputError, match="num_groups is 8, but group_starts names 2 layers"):
        config("model", "data", "out", group_starts=[0, 3], num_groups=8)


def test_a_warm_up_that_does_not_end_within_the_run_is_named():
    assert schedule_notes(scheduled(max_steps=4, warmup_steps=3)) == []
    (note,) = schedule_notes(scheduled(max_steps=4, warmup_steps=4))
    assert "never reaches its peak" in note
    assert "the warm-up has 4 steps, the run 4" in note


def test_the_learning_rate_warms_up_to_the_peak_and_ends_on_the_floor():
    rates = [learning_rate(step, scheduled(max_steps=12, warmup_steps=3)) for step in range(12)]
    assert rates[:4] == pytest.approx([0.3, 0.6, 0.9, 0.9])
    assert rates[7] == pytest.approx(0.5)  # the middle of the cosine from step 3 to step 11
    assert rates[11] == pytest.approx(0.1)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    for warmup, expected in ((0, [0.9, 0.1]), (1, [0.9, 0.1]), (4, [0.225, 0.45])):
        short = scheduled(max_steps=2, warmup_steps=warmup)
        assert [learning_rate(step, short) for step in range(2)] == pytest.approx(expected)


def scheduled(**options):
    return config("m", "d", "o", peak_lr=0.9, min_lr=0.1, **options)


def test_the_split_is_drawn_anew_each_step_from_the_seed_alone():
    run = config("model", "data", "out", prefix_range=(0.25, 0.9), seq_len=1024)
    lengths = [run.prefix_len_at(step) for step in range(400)]
    assert lengths == [run.prefix_len_at(step) for step in range(400)]
    assert lengths != [dataclasses.replace(run, seed=4).prefix_len_at(step) for step in range(400)]
    assert set(lengths) == {64 * i for i in range(4, 15)}
    assert run.masked_share == pytest.approx(1 - 0.575)
    assert config("m", "d", "o", prefix_range=(1.0, 1.0), seq_len=64).prefix_len_at(0) == 62
    assert config("m", "d", "o", prefix_range=(0.001, 0.01), seq_len=64).prefix_len_at(0) == 1


def test_a_plan_counts_operations_by_the_formula(texts_folder):
    run = config("kvcat-base", texts_folder, "o", prefix_range=(0.5, 0.9), max_steps=10)
    shown = plan.plan(run)["operations"]
    # N = 708,960 with the embedding, which is tied; L = 6, d = 96; 1.3 passes
    per_token = 1.3 * 6 * (708_960 + run.seq_len * 6 * 96)
    total = 10 * run.tokens_per_step * per_token
    assert shown == (
        f"{total:.3g} in floating point, {per_token:.3g} a token: "
        "6 (N + T L d) in each of 1.3 passes"
    )


def test_a_frozen_teacher_is_a_sixth_more_work():
    model, _ = load("kvcat-base", tokenizer=False)
    self_taught, frozen = (
        flops_per_token(model, config("m", "d", "o", teacher=teacher))
        for teacher in ("self", "frozen")
    )
    assert frozen == pytest.approx(self_taught * 7 / 6)


@pytest.fixture
def model_of_1500_million(tmp_path):
    """A folder with the configuration of Qwen2.5-1.5B and no weights."""
    shape = {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


@pytest.mark.parametrize(
    ("gpu_gib", "remedy"),
    [
        (90, None),
        (79, "--micro-batch-size 4 needs about 51"),
        (40, "--micro-batch-size 1 needs about 32"),
        (20, "more processes"),
    ],
)
def test_a_run_that_may_not_fit_the_device_says_so_with_what_would_help(
    gpu_gib, remedy, model_of_1500_million, monkeypatch
):
    monkeypatch.setattr(plan, "_memory_of_device", lambda device: gpu_gib)
    run = config(
        model_of_1500_million,
        "d",
        "o",
        seq_len=1024,
        batch_size=128,
        micro_batch_size=8,
        dtype="bfloat16",
    )
    concern = memory_concern(run)
    if remedy is None:
        assert concern is None
        return
    line = f"this run may need about 77 GiB, and cpu has {gpu_gib}; {remedy}"
    assert concern.startswith(line)


def test_the_warning_comes_before_the_run_begins(new_run, monkeypatch, caplog):
    monkeypatch.setattr(plan, "_memory_of_device", lambda device: 1e-3)
    monkeypatch.setattr(loop, "join_world", lambda *_args, **_options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.train(new_run())
    assert "more processes" in caplog.text
