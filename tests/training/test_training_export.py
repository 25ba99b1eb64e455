"""What a run leaves behind: an ordinary Hugging Face folder."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from runs import assert_same, config, exported, state
from safetensors.torch import load_file

from kvcat.errors import InputError
from kvcat.models import load
from kvcat.training.export import export_checkpoint
from kvcat.training.loop import train
from kvcat.training.objective import Objective

PLAIN = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("the cat sees a red house", return_tensors="pt").input_ids
with torch.no_grad():
    logits = model(ids).logits[0, -1].double()
print(json.dumps({"kvcat": "kvcat" in sys.modules, "class": type(model).__name__, "dtype": str(model.dtype),
                  "attention": model.config._attn_implementation, "ids": ids.tolist(), "logits": logits.tolist()}))
"""


@pytest.fixture(scope="module")
def finished(tiny_folder, texts_folder, tmp_path_factory):
    run = config(tiny_folder, texts_folder, tmp_path_factory.mktemp("runs") / "router", max_steps=3)
    return train(run, progress=False)


def test_the_export_loads_with_plain_transformers_and_equals_the_trained_weights(finished):
    child = subprocess.run(
        [sys.executable, "-c", PLAIN, str(finished.export)], capture_output=True, text=True, check=True
    )
    told = json.loads(child.stdout)
    assert (told["kvcat"], told["class"], told["dtype"]) == (False, "Qwen2ForCausalLM", "torch.float32")
    assert told["attention"] != "kvcat"

    from transformers import AutoConfig, Qwen2ForCausalLM

    live = Qwen2ForCausalLM(AutoConfig.from_pretrained(finished.export))
    prefix = ".module.model."
    weights = {k.removeprefix(prefix): v for k, v in state(finished.folder).items() if k.startswith(prefix)}
    live.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    with torch.no_grad():
        logits = live.eval()(torch.tensor(told["ids"])).logits[0, -1].double()
    torch.testing.assert_close(torch.tensor(told["logits"], dtype=torch.float64), logits, rtol=0, atol=1e-6)


def test_the_routers_stand_beside_the_export_not_in_it(finished, tiny_folder):
    original = load_file(tiny_folder / "model.safetensors")
    assert exported(finished.folder).keys() == original.keys()
    routers = load_file(finished.folder / "routers.safetensors")
    assert {name.split(".")[1] for name in routers} == {"0", "1"}
    names = {"alpha", "norm.weight", "norm.bias", *(f"{x}_proj.weight" for x in "qkvop")}
    assert {name.split(".", 2)[2] for name in routers} == names
    assert (finished.folder / "routers.safetensors").parent == finished.export.parent


def test_config_and_card_record_nothing_of_ours_but_say_how_the_checkpoint_was_made(finished):
    assert "kvcat" not in (finished.export / "config.json").read_text()
    card = (finished.export / "README.md").read_text()
    assert "library_name: transformers" in card
    for words in ("KV-CAT", "`router` policy", "dense_loss", "steps: 3 of 3, 128 tokens each", "layer 1:", "seed 3"):
        assert words in card
    assert (finished.export / "tokenizer.json").exists()
    assert (finished.export / "generation_config.json").exists()


def test_an_exported_folder_is_a_model_to_train_on(finished, texts_folder, tmp_path):
    again = train(
        config(finished.export, texts_folder, tmp_path / "again", policy="control", max_steps=1), progress=False
    )
    assert exported(again.folder).keys() == exported(finished.folder).keys()


def test_the_control_leaves_no_routers_and_says_that_it_is_one(tiny_folder, texts_folder, tmp_path):
    run = config(tiny_folder, texts_folder, tmp_path / "run", policy="control", max_steps=1, export_dtype="bfloat16")
    result = train(run, progress=False)
    assert not (result.folder / "routers.safetensors").exists()
    assert "the control" in (result.export / "README.md").read_text()
    assert {t.dtype for t in exported(result.folder).values()} == {torch.bfloat16}
    assert '"bfloat16"' in (result.export / "config.json").read_text()


def test_an_export_never_replaces_a_folder_that_is_not_the_runs_own(finished, tiny_folder, tmp_path):
    newest = sorted((finished.folder / "checkpoints").glob("step-*"))[-1]
    foreign = shutil.copytree(tiny_folder, tmp_path / "model")
    before = {f.name: f.read_bytes() for f in foreign.iterdir()}
    with pytest.raises(InputError, match="is not empty"):
        export_checkpoint(newest, foreign)
    assert {f.name: f.read_bytes() for f in foreign.iterdir()} == before
    assert_same(load_file(export_checkpoint(newest, tmp_path / "new") / "model.safetensors"), exported(finished.folder))
    assert (tmp_path / "new-routers.safetensors").exists()


def test_adapters_start_without_effect_and_alone_get_gradients(tiny_folder, tmp_path):
    pytest.importorskip("peft", reason="needs kvcat[lora]")
    model, _ = load(tiny_folder)
    tokens = torch.randint(3, 200, (2, 32), generator=torch.Generator().manual_seed(0))
    before, state_before = model(tokens).logits.detach(), torch.get_rng_state()
    objective = Objective(model, config(tiny_folder, "data", tmp_path / "run", lora_rank=2))
    assert torch.equal(torch.get_rng_state(), state_before)
    torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=1e-6)
    objective(tokens, [torch.Generator().manual_seed(i) for i in range(2)], 0)[0].backward()
    learned = {name for name, p in objective.model.named_parameters() if p.grad is not None}
    assert learned
    assert all("lora_" in name for name in learned)
    assert any(p.grad is not None for p in objective.policy_parameters())


def test_the_export_of_adapters_is_the_plain_model_with_the_adapters_added(tiny_folder, texts_folder, tmp_path):
    pytest.importorskip("peft", reason="needs kvcat[lora]")
    run = config(tiny_folder, texts_folder, tmp_path / "run", lora_rank=2, max_steps=3)
    train(run, progress=False)
    before, after = load_file(tiny_folder / "model.safetensors"), exported(run.output)
    assert before.keys() == after.keys()
    saved = {n.removeprefix(".module.model."): t for n, t in state(run.output).items() if ".module.model." in n}
    changed = 0
    for name in before:
        if name.endswith("_proj.weight"):
            stem = name.removesuffix("weight")
            update = saved[f"{stem}lora_B.default.weight"] @ saved[f"{stem}lora_A.default.weight"]
            torch.testing.assert_close(after[name], before[name] + update, rtol=0, atol=1e-6)
            changed += int(update.abs().max() > 1e-5)
        else:
            assert torch.equal(after[name], before[name])
    assert changed
