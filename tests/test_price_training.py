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


def test_with_own_moments_and_no_weight_of_the_mask_the_model_is_the_controls(
    price, tiny_folder, texts_folder, tmp_path
):
    """The other form has the budget's gradient in its sum, whatever the weight."""
    common = {"seq_len": 32, "batch_size": 2, "max_steps": 3, "warmup_steps": 1, "seed": 3}
    common |= {"peak_lr": 1e-2, "min_lr": 1e-3}
    words = ["own-moments", "--model", tiny_folder, "--data", texts_folder, "--num-groups", 1]
    words += ["--output", tmp_path / "apart", "--mask-weight", 0.0]
    for name, value in common.items():
        words += ["--" + name.replace("_", "-"), value]
    apart = price.train(price.parse_arguments([str(word) for word in words]))
    control = kvcat.TrainConfig(
        model=str(tiny_folder), data=str(texts_folder), output=str(tmp_path / "control"),
        policy="control", num_groups=1, **common,
    )  # fmt: skip
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


def test_a_finished_run_is_left_as_it_is_and_other_options_are_rejected_by_name(
    price, tiny_folder, texts_folder, tmp_path
):
    words = ["--model", tiny_folder, "--data", texts_folder, "--num-groups", 1, "--seq-len", 32]
    words += ["--batch-size", 2, "--output", tmp_path / "run"]

    def train(form="own-moments", steps=1, *mask_options):
        line = [form, *words, "--max-steps", steps, *mask_options]
        return price.train(price.parse_arguments([str(word) for word in line]))

    export = train()
    before = (export / "model.safetensors").stat().st_mtime_ns
    assert train() == export
    assert (export / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(kvcat.InputError, match="its form is own-moments"):
        train("projected")
    with pytest.raises(kvcat.InputError, match="its max_steps is 1"):
        train("own-moments", 2)
    with pytest.raises(kvcat.InputError, match=r"its mask_weight is 1\.0, not 0\.3"):
        train("own-moments", 1, "--mask-weight", 0.3)


def test_the_comparison_names_a_missing_run_before_it_trains(tmp_path):
    environment = {**os.environ, "PEERS": str(tmp_path / "none"), "OUT": str(tmp_path / "out")}
    environment["PYTHON"] = "false"  # nothing is trained
    result = subprocess.run(
        ["sh", FOLDER / "compare.sh"], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"no {tmp_path}/none/control-s1/export: run runs/peers/")
    assert not (tmp_path / "out").exists()
