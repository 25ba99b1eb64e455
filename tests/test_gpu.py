"""An accelerator computes what the processor does: run with -m gpu, or make test-accelerator."""

import dataclasses
import os

import pytest
import torch

import kvcat
from kvcat.attention import attend
from kvcat.compress import parse_method, seeded_compressor
from kvcat.evals import evaluate
from kvcat.evals.answers import greedy_answers
from kvcat.evals.evaluations.needle import Needle
from kvcat.evals.evaluations.suffix import Suffix
from kvcat.training.loop import train
from kvcat.training.objective import Objective
from naive import normal
from tiny import loud_model
from training_runs import config, records

DEVICE = os.environ.get("KVCAT_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.gpu
if DEVICE == "accel":
    import accelerator  # noqa: F401


@pytest.fixture(scope="module")
def models():
    """kvcat-base on the processor and on the accelerator."""
    return [
        kvcat.load("kvcat-base", device=device, tokenizer=False)[0] for device in ("cpu", DEVICE)
    ]


def tokens(model, batch, count):
    drawn = torch.randint(
        model.config.vocab_size, (batch, count), generator=torch.Generator().manual_seed(0)
    )
    return drawn.to(model.device)


@pytest.mark.parametrize("prefix_range", [None, (0.5, 0.5)])
@pytest.mark.parametrize("policy", ["router", "random", "attention", "control"])
def test_loss_and_gradients_are_those_of_the_processor(models, policy, prefix_range):
    settings = config("kvcat-base", "-", "-", policy=policy, prefix_range=prefix_range, seq_len=128)
    results = []
    state = None
    for model in models:
        objective = Objective(model, settings).to(model.device)
        objective.load_state_dict(state or objective.state_dict())
        state = {name: value.cpu() for name, value in objective.state_dict().items()}
        objective.zero_grad(set_to_none=True)
        loss, _ = objective(
            tokens(model, 2, 128), [torch.Generator().manual_seed(i) for i in range(2)], 0
        )
        loss.backward()
        results.append(
            [
                loss.detach().cpu(),
                *(p.grad.cpu() for p in objective.parameters() if p.grad is not None),
            ]
        )
    for actual, expected in zip(*results, strict=True):
        assert (
            torch.linalg.vector_norm(actual - expected)
            <= 1e-3 * torch.linalg.vector_norm(expected) + 1e-6
        )


@pytest.mark.parametrize(
    "spec",
    [
        "attention-matching",
        "attention-matching,preset=paper",
        "gradient,num_steps=5",
        "h2o",
        "snapkv",
        "tova",
    ],
)
def test_caches_lose_as_much_as_on_the_processor_and_answer(models, spec):
    lost = []
    for model in models:
        trace = kvcat.trace(model, tokens(model, 1, 320), 256)
        cache = seeded_compressor(*parse_method(spec), seed=0)(trace, keep_ratio=0.25)
        assert len(greedy_answers(model, cache, [[1, 2, 3]], 4)[0]) == 4
        lost.append(kvcat.compare(trace, cache).kl.cpu())
    assert torch.allclose(*lost, rtol=0.05, atol=1e-4)


def test_evaluations_give_the_processors_scores(models, tmp_path):
    tokenizer = kvcat.load("kvcat-base")[1]
    options = {"prefix": 64, "suffix": 32, "windows": 2, "per_document": 2}
    halves, again = (
        Suffix.task(tokenizer, supervision=name, **options)
        for name in ("first-half", "reconstruction")
    )
    needles = Needle.task(tokenizer, length=96, per_depth=1)
    for number, task in enumerate((halves, again, needles)):
        scores = []
        for model in models:
            out = tmp_path / f"{number}-{model.device.type}"
            records = evaluate(
                task,
                {"base": (model, tokenizer)},
                ["attention-matching", "snapkv"],
                [0.2],
                out,
                speed=task is halves,  # on the simulated device most of the time
                progress=False,
            )
            scores.append(
                [r.values[name] for r in records for name in ("kl", "nll") if name in r.values]
            )
        assert len(scores[0]) > 0
        assert torch.allclose(*map(torch.tensor, scores), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "router", "router_noise": 0.1},
        {"policy": "attention", "prefix_range": (0.5, 0.5), "detach_prefix": True},
    ],
)
def test_a_run_continues_where_it_was_near_the_processors(
    options, tiny_folder, texts_folder, tmp_path
):
    check_runs(tiny_folder, texts_folder, tmp_path, atol=1e-3, **options)


@pytest.mark.skipif(DEVICE == "accel", reason="it has no compiler and no shards")
def test_a_compiled_bfloat16_run_continues_where_it_was_near_the_processors(
    tiny_folder, texts_folder, tmp_path
):
    check_runs(
        tiny_folder,
        texts_folder,
        tmp_path,
        atol=0.05,
        dtype="bfloat16",
        compile=True,
        policy="router",
    )


def check_runs(model, texts, folder, *, atol, **options):
    """Two steps and two more on the device have the losses of the processor."""
    losses = []
    for device in ("cpu", DEVICE):
        run = config(model, texts, folder / device, max_steps=4, device=device, **options)
        for max_steps in (2, 4):
            train(dataclasses.replace(run, max_steps=max_steps), progress=False)
        losses.append([r["dense_loss"] for r in records(run.output) if r["kind"] == "train"])
    assert len(losses[1]) == 4
    assert torch.allclose(*map(torch.tensor, losses), atol=atol)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("window", [None, 50])
def test_the_masks_gradient_is_that_of_the_processor_in_double_precision(window, dtype):
    if (DEVICE, dtype) == ("accel", "autocast"):
        pytest.skip("it has no autocast")
    half = torch.float32 if dtype == "float32" else torch.bfloat16
    shapes = [(2, 9, 128, 64), (2, 3, 200, 64), (2, 3, 200, 64), (2, 9, 128, 64)]
    q, k, v, grad_out = (normal(*shape, seed=i).to(half) for i, shape in enumerate(shapes))
    if dtype == "autocast":  # which leaves rotated queries and keys in float32
        q = q.float()
        k = k.float()
    keep = (normal(2, 200, seed=4) > 0.0).float()
    gradients = []
    for device in ("cpu", DEVICE):
        states = [q, k, v, keep, grad_out]
        if device == "cpu":
            states = [x.double() for x in states]
        *qkv, leaf, weights = (x.to(device) for x in states)
        leaf.requires_grad_()
        with torch.autocast(
            DEVICE, torch.bfloat16, enabled=dtype == "autocast" and device != "cpu"
        ):
            out = attend(*qkv, leaf, window=window)
        (gradient,) = torch.autograd.grad(out, leaf, weights.to(out.dtype))
        gradients.append(gradient.cpu().double())
    expected, actual = gradients
    error = (actual - expected).norm() / expected.norm()
    assert error < (1e-4 if dtype == "float32" else 0.02)


FAMILIES = {
    "gpt_oss": {
        "num_hidden_layers": 2,
        "sliding_window": 8,
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    "jamba": {
        "num_hidden_layers": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 4,
        "expert_layer_offset": 3,
        "mamba_d_state": 8,
    },
}


@pytest.mark.parametrize("method", ["attention-matching", "snapkv"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sinks_and_continued_states_are_those_of_the_processor(family, method):
    results = []
    for device in ("cpu", DEVICE):
        model = loud_model(family, std=0.2, pad_token_id=0, **FAMILIES[family]).to(device)
        model.config._experts_implementation = "eager"
        ids = tokens(model, 2, 40)
        trace = kvcat.trace(model, ids, 30)
        cache = kvcat.compress.make_compressor(method)(trace, num_slots=8)
        logits = [trace.logits, kvcat.replay(model, cache, ids[:, 30:])]
        results.append([each.cpu() for each in logits])
    torch.testing.assert_close(*results, rtol=0, atol=1e-2)
