"""Training whose two losses do not share one step of the optimizer (runs/price)."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
import torch

import kvcat
from kvcat.files import read_jsonl

FOLDER = Path(__file__).parents[1] / "runs" / "price"


@pytest.fixture(scope="module")
def price():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("price_training", FOLDER / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_only_what_points_against_the_anchor_is_left_out(price):
    anchor = [torch.tensor([2.0, 0.0]), torch.tensor([[0.0]])]
    along = [torch.tensor([1.0, 3.0]), torch.tensor([[5.0]])]
    against = [torch.tensor([-1.0, 3.0]), torch.tensor([[5.0]])]
    added = price.projected_sum(anchor, along)
    assert [gradient.tolist() for gradient in added] == [[3.0, 3.0], [[5.0]]]
    projected = price.projected_sum(anchor, against)
    assert [gradient.tolist() for gradient in projected] == [[2.0, 3.0], [[5.0]]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", ["router", "random"])
def test_with_own_moments_and_no_weight_of_the_mask_the_model_is_the_controls(
    price, tiny_folder, texts_folder, tmp_path, dtype, policy
):
    """The other form has the budget's gradient in its sum, whatever the weight."""
    common = {
        "model": str(tiny_folder), "data": str(texts_folder), "num_groups": 1, "seq_len": 32,
        "batch_size": 2, "max_steps": 3, "warmup_steps": 1, "seed": 3, "peak_lr": 1e-2,
        "min_lr": 1e-3, "dtype": dtype,
    }  # fmt: skip
    masked = kvcat.TrainConfig(
        **common, policy=policy, mask_weight=0.0, output=str(tmp_path / "apart")
    )
    apart = price.train("own-moments", masked)
    control = kvcat.TrainConfig(**common, policy="control", output=str(tmp_path / "control"))
    plain = kvcat.train(control, progress=False).export
    first, *models = (kvcat.load(folder)[0] for folder in (tiny_folder, apart, plain))
    for start, one, other in zip(*(m.parameters() for m in (first, *models)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        assert not torch.equal(start, other)
    checksums = []
    for run in ("apart", "control"):
        records = read_jsonl(tmp_path / run / "metrics.jsonl")
        checksums.append([each["tokens_crc32"] for each in records if each["kind"] == "train"])
    assert checksums[0] == checksums[1]


def test_the_first_step_of_own_moments_adds_the_controls_and_the_distillations(
    price, tiny_folder, texts_folder, tmp_path
):
    """Adam's first step of a weight is the learning rate times the sign of its gradient."""
    config = kvcat.TrainConfig(
        model=str(tiny_folder), data=str(texts_folder), num_groups=1, seq_len=32, batch_size=2,
        max_steps=1, warmup_steps=0, peak_lr=1e-3, min_lr=1e-3, weight_decay=0.0, policy="random",
        mask_weight=0.25, output=str(tmp_path / "run"),
    )  # fmt: skip
    export = price.train("own-moments", config)
    start, trained = (kvcat.load(folder)[0] for folder in (tiny_folder, export))
    changes = [b - a for a, b in zip(start.parameters(), trained.parameters(), strict=True)]
    moved = torch.cat([change.flatten() for change in changes]).abs() / 1e-3
    # both gradients are far from 0 in most weights: together 1.25 rates, against each other .75
    together = (moved - 1.25).abs() < 0.01
    against = (moved - 0.75).abs() < 0.01
    assert (together | against).float().mean() > 0.8
    assert 0.05 < against.float().mean() < together.float().mean()


def test_a_finished_run_is_left_as_it_is_and_other_options_are_rejected_by_name(
    price, tiny_folder, texts_folder, tmp_path
):
    def train(form="own-moments", **changes):
        values = {"num_groups": 1, "seq_len": 32, "batch_size": 2, "max_steps": 1} | changes
        config = kvcat.TrainConfig(
            model=str(tiny_folder), data=str(texts_folder), output=str(tmp_path / "run"), **values
        )
        return price.train(form, config)

    export = train()
    before = (export / "model.safetensors").stat().st_mtime_ns
    assert train() == export
    assert (export / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(kvcat.InputError, match="its form is own-moments"):
        train("projected")
    with pytest.raises(kvcat.InputError, match="its max_steps is 1"):
        train(max_steps=2)
    with pytest.raises(kvcat.InputError, match=r"its mask_weight is 1\.0, not 0\.3"):
        train(mask_weight=0.3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["own-moments", "nano"], "no recipe 'nano'"),
        (["own-moments", "small", "--policy", "control"], "own-moments needs a masked pass"),
        (["own-moments", "small", "--teacher", "frozen"], "needs a masked pass that the model"),
        (["own-moments", "small", "--micro-batch-size", "2"], "one micro-batch a step, not of 2"),
        (["own-moments", "small", "--dry-run"], "--dry-run is an option of kvcat train alone"),
        (["projected", "small", "--dtype", "bfloat16"], "projected needs --dtype float32"),
    ],
)
def test_what_a_form_does_not_have_is_rejected_before_the_run(
    price, monkeypatch, tmp_path, words, message
):
    options = ["--model", "kvcat-base", "--output", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", ["train.py", *words, *options])
    with pytest.raises(kvcat.InputError, match=message):
        price.main()
    assert not (tmp_path / "run").exists()


def test_the_comparison_names_a_missing_run_before_it_trains(tmp_path):
    environment = {**os.environ, "PEERS": str(tmp_path / "none"), "OUT": str(tmp_path / "out")}
    environment["PYTHON"] = "false"  # nothing is trained
    result = subprocess.run(
        ["sh", FOLDER / "compare.sh"], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"no {tmp_path}/none/control-s1/export: run runs/peers/")
    assert not (tmp_path / "out").exists()
