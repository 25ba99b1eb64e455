"""A run's export is an ordinary Hugging Face folder."""

import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from kvcat.errors import InputError
from kvcat.training.export import export_checkpoint
from kvcat.training.loop import train
from training_runs import assert_same, config, exported, state

PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model(tokenizer("the cat sees a red house", return_tensors="pt").input_ids)
used = model.config._attn_implementation
print("kvcat" in sys.modules, used == "kvcat", type(model).__name__, model.dtype)
"""


@pytest.fixture(scope="module")
def finished(tiny_folder, texts_folder, tmp_path_factory):
    run = config(tiny_folder, texts_folder, tmp_path_factory.mktemp("runs") / "router", max_steps=3)
    return train(run, progress=False)


@pytest.mark.slow
def test_the_export_runs_in_plain_transformers_and_holds_the_trained_weights(finished):
    command = [sys.executable, "-c", PLAIN, str(finished.export)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "False", "Qwen2ForCausalLM", "torch.float32"]
    weights = exported(finished.folder)
    trained = state(finished.folder)
    assert_same(weights, {name: trained[f".module.model.{name}"] for name in weights})


def test_an_export_is_a_model_with_its_card_next_to_the_routers(finished, tiny_folder):
    assert exported(finished.folder).keys() == load_file(tiny_folder / "model.safetensors").keys()
    names = {"alpha", "norm.weight", "norm.bias", *(f"{x}_proj.weight" for x in "qkvop")}
    routers = load_file(finished.export.parent / "routers.safetensors")
    assert {tuple(name.split(".", 2)[1:]) for name in routers} == {
        (group, name) for group in "01" for name in names
    }
    trained = state(finished.folder)
    assert_same(routers, {name: trained[f".module.masked_pass.{name}"] for name in routers})
    assert "kvcat" not in (finished.export / "config.json").read_text()
    card = (finished.export / "README.md").read_text()
    for words in (
        "library_name: transformers",
        "KV-CAT",
        "`router` policy",
        "dense_loss",
        "layer 1:",
        "seed 3",
    ):
        assert words in card
    assert "steps: 3 of 3, 128 tokens each" in card
    units = dict(re.findall(r"^- (\w+): \d+\.\d{4} ?(.*)$", card, re.MULTILINE))
    assert units == {
        "dense_loss": "nats per token",
        "masked_loss": "nats per token",
        "kl": "nats per token",
        "top1": "of the tokens",
        "budget": "",
    }
    assert all(
        (finished.export / name).exists() for name in ("tokenizer.json", "generation_config.json")
    )


def test_an_export_trains_on_and_the_control_leaves_no_routers_and_says_that_it_is_one(
    finished, texts_folder, tmp_path
):
    options = {"policy": "control", "max_steps": 1, "export_dtype": "bfloat16"}
    result = train(
        config(finished.export, texts_folder, tmp_path / "run", **options), progress=False
    )
    assert exported(result.folder).keys() == exported(finished.folder).keys()
    assert not (result.folder / "routers.safetensors").exists()
    assert "the control" in (result.export / "README.md").read_text()
    assert {t.dtype for t in exported(result.folder).values()} == {torch.bfloat16}
    assert '"bfloat16"' in (result.export / "config.json").read_text()


def test_an_export_never_replaces_a_folder_of_something_else(finished, tiny_folder, tmp_path):
    earlier, newest = sorted((finished.folder / "checkpoints").glob("step-*"))
    foreign = shutil.copytree(tiny_folder, tmp_path / "model")
    before = {f.name: f.read_bytes() for f in foreign.iterdir()}
    with pytest.raises(InputError, match="is not empty"):
        export_checkpoint(newest, foreign)
    assert {f.name: f.read_bytes() for f in foreign.iterdir()} == before
    assert_same(
        load_file(export_checkpoint(newest, tmp_path / "new") / "model.safetensors"),
        exported(finished.folder),
    )
    assert (tmp_path / "new-routers.safetensors").exists()
    card = (export_checkpoint(earlier, tmp_path / "earlier") / "README.md").read_text()
    assert all(line in card for line in ("steps: 2 of 3", "Validation after step 0"))
