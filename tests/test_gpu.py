"""An accelerator computes what the processor does: run with -m gpu."""

import dataclasses

import pytest
import torch

import kvcat
from kvcat.compress import parse_method, seeded_compressor
from kvcat.evals.answers import greedy_answers
from kvcat.training.loop import train
from kvcat.training.objective import Objective
from training.runs import config, records

DEVICE = "cuda"
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def models():
    """kvcat-base on the processor and on the accelerator."""
    return [kvcat.load("kvcat-base", device=device, tokenizer=False)[0] for device in ("cpu", DEVICE)]


def tokens(model, batch, count):
    drawn = torch.randint(model.config.vocab_size, (batch, count), generator=torch.Generator().manual_seed(0))
    return drawn.to(model.device)


@pytest.mark.parametrize("prefix_range", [None, (0.5, 0.5)])
@pytest.mark.parametrize("policy", ["router", "random", "attention", "control"])
def test_loss_and_gradients_are_those_of_the_processor(models, policy, prefix_range):
    settings = config("kvcat-base", "-", "-", policy=policy, prefix_range=prefix_range, seq_len=128)
    found, state = [], None
    for model in models:
        objective = Objective(model, settings).to(model.device)
        objective.load_state_dict(state or objective.state_dict())
        state = {name: value.cpu() for name, value in objective.state_dict().items()}
        objective.zero_grad(set_to_none=True)
        loss, _ = objective(tokens(model, 2, 128), [torch.Generator().manual_seed(i) for i in range(2)], 0)
        loss.backward()
        found.append([loss.detach().cpu(), *(p.grad.cpu() for p in objective.parameters() if p.grad is not None)])
    for own, expected in zip(*found, strict=True):
        assert torch.linalg.vector_norm(own - expected) <= 1e-3 * torch.linalg.vector_norm(expected) + 1e-6


@pytest.mark.parametrize(
    "spec", ["attention-matching", "attention-matching,preset=paper", "gradient,num_steps=5", "h2o", "snapkv", "tova"]
)
def test_caches_lose_as_much_as_on_the_processor_and_answer(models, spec):
    lost = []
    for model in models:
        trace = kvcat.trace(model, tokens(model, 1, 320), 256)
        cache = seeded_compressor(*parse_method(spec), seed=0)(trace, keep_ratio=0.25)
        assert len(greedy_answers(model, cache, [[1, 2, 3]], 4)[0]) == 4
        lost.append(kvcat.compare(trace, cache).kl.cpu())
    assert torch.allclose(*lost, rtol=0.05, atol=1e-4)


def test_a_compiled_bfloat16_run_goes_on_where_it_was_near_the_processors(tiny_folder, texts_folder, tmp_path):
    options = {"dtype": "bfloat16", "compile": True, "policy": "router", "max_steps": 4}
    here = config(tiny_folder, texts_folder, tmp_path / "cpu", **options)
    there = dataclasses.replace(here, output=str(tmp_path / "gpu"), device=DEVICE)
    train(here, progress=False)
    train(dataclasses.replace(there, max_steps=2), progress=False)
    train(there, progress=False)
    losses = [[r["dense_loss"] for r in records(run.output) if r["kind"] == "train"] for run in (here, there)]
    assert len(losses[1]) == 4
    assert torch.allclose(*map(torch.tensor, losses), atol=0.05)
