"""Adapters are trained alone and merged at export."""

import pytest
import torch
from runs import assert_same, config, exported, records, state

from kvcat.models import load
from kvcat.training import train
from kvcat.training.objective import Objective

pytest.importorskip("peft", reason="needs kvcat[lora]")


def test_adapters_start_without_effect_and_alone_get_gradients(tiny_folder, texts_folder, tmp_path):
    run = config(tiny_folder, texts_folder, tmp_path / "run", lora_rank=2)
    model, _ = load(tiny_folder)
    tokens = torch.randint(3, 200, (2, 32), generator=torch.Generator().manual_seed(0))
    before = model(tokens).logits.detach()
    state_before = torch.get_rng_state()
    objective = Objective(model, run)
    assert torch.equal(torch.get_rng_state(), state_before)
    torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=1e-6)
    total, _ = objective(tokens, [torch.Generator().manual_seed(i) for i in range(2)], range(2), 0)
    total.backward()
    learned = {name for name, p in objective.model.named_parameters() if p.grad is not None}
    assert learned
    assert all("lora_" in name for name in learned)
    assert any(p.grad is not None for p in objective.policy_parameters())


def test_the_export_is_the_plain_model_with_the_adapters_added(tiny_folder, texts_folder, tmp_path):
    run = config(tiny_folder, texts_folder, tmp_path / "run", lora_rank=2, max_steps=3)
    train(run, progress=False)
    before, after = exported_names(tiny_folder), exported(run.output)
    assert before.keys() == after.keys()
    saved = {
        name.removeprefix(".module.model."): t for name, t in state(run.output).items() if ".module.model." in name
    }
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
    last = records(run.output)[-1]
    assert last["kind"] == "validation"


def test_a_run_with_adapters_resumes_bit_for_bit(tiny_folder, texts_folder, tmp_path, monkeypatch):
    from test_training_resume import interrupt_after

    from kvcat.training import Stopped

    whole, broken = (
        config(tiny_folder, texts_folder, tmp_path / name, lora_rank=2, policy="random", max_steps=4) for name in "ab"
    )
    train(whole, progress=False)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(Stopped):
            train(broken, progress=False)
    train(broken, progress=False)
    assert_same(exported(whole.output), exported(broken.output))


def exported_names(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
