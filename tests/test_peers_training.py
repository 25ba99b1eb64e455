"""Methods that train for small caches, on the tokens of a KV-CAT run (runs/peers)."""

import importlib
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import kvcat
from kvcat.errors import InputError
from kvcat.files import read_jsonl
from tiny import loud_model

FOLDER = Path(__file__).parents[1] / "runs" / "peers"
WINDOW = 3
NEVER = -1e4


@pytest.fixture
def peers(monkeypatch):
    """The modules ``gated_attention`` and ``train`` of the folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("gated_attention", "train")
    yield Namespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name)


def token_ids(batch=2, length=12):
    return torch.randint(0, 67, (batch, length), generator=torch.Generator().manual_seed(0))


def test_open_gates_leave_the_model_as_it_is(peers):
    ids = token_ids()
    dense = loud_model(dtype=torch.float64)(ids).logits
    model = loud_model(dtype=torch.float64)
    predictors = peers.gated_attention.GatePredictors(model, window=WINDOW, bias=0.0, scale=1.0)
    torch.testing.assert_close(model(ids).logits, dense, rtol=1e-9, atol=1e-9)
    predictors.use(torch.zeros_like)
    torch.testing.assert_close(model(ids, use_cache=False).logits, dense, rtol=1e-9, atol=1e-9)


def test_open_gates_leave_layers_with_a_sliding_window_as_they_are(peers):
    ids = token_ids()
    whole = loud_model("mistral", sliding_window=None)(ids, use_cache=False).logits
    model = loud_model("mistral", sliding_window=4)
    dense = model(ids, use_cache=False).logits
    assert not torch.allclose(whole, dense, atol=0.1)
    predictors = peers.gated_attention.GatePredictors(model, window=WINDOW, bias=0.0, scale=1.0)
    predictors.use(torch.zeros_like)
    torch.testing.assert_close(model(ids, use_cache=False).logits, dense, rtol=1e-3, atol=1e-3)


def test_a_model_whose_attention_has_sinks_or_a_softcap_is_rejected(peers):
    for option in ("softcap", "s_aux"):
        with pytest.raises(InputError, match=f"not supported: it has {option}"):
            peers.gated_attention.gated_attention(
                torch.nn.Module(), *[torch.ones(1, 1, 1, 1)] * 3, None, **{option: torch.ones(1)}
            )


def test_a_closed_slot_is_hidden_from_the_window_on_as_by_transformers_own_mask(peers):
    """The oracle is eager attention with a mask over queries and slots."""
    ids = token_ids()
    closed = torch.tensor([1, 4, 5])
    model = loud_model(dtype=torch.float64)
    model.set_attn_implementation("eager")
    position = torch.arange(ids.shape[1])
    distance = position[:, None] - position[None, :]
    is_hidden = (distance >= WINDOW) & torch.isin(position, closed)[None, :]
    mask = torch.zeros(distance.shape, dtype=torch.float64)
    mask = mask.masked_fill(is_hidden | (distance < 0), torch.finfo(torch.float64).min)
    expected = model(ids, attention_mask=mask[None, None].expand(2, 1, -1, -1)).logits
    assert not torch.allclose(expected, model(ids).logits, atol=1e-3)

    def log_gate(logits):
        return torch.zeros_like(logits).index_fill(1, closed, NEVER)

    gated = loud_model(dtype=torch.float64)
    peers.gated_attention.GatePredictors(gated, window=WINDOW, bias=0.0, scale=1.0).use(log_gate)
    actual = gated(ids, use_cache=False).logits  # eager attention has its softmax in float32
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_gates_of_kv_heads_serve_their_query_heads_and_get_the_exact_gradient(peers):
    """One query is attended by hand: softmax of scores plus log-gates."""
    draw = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    query, key, value = normal(1, 4, 6, 8), normal(1, 2, 6, 8), normal(1, 2, 6, 8)
    log_gate = -normal(1, 6, 2).abs()
    log_gate.requires_grad_()
    module = torch.nn.Module()
    module.peer_gate = (log_gate, WINDOW)
    out, _ = peers.gated_attention.gated_attention(module, query, key, value, None)
    assert out.shape == (1, 6, 4, 8)
    last = 5
    for head in range(4):
        kv_head = head // 2
        scores = key[0, kv_head] @ query[0, head, last] / 8**0.5
        is_old = last - torch.arange(6) >= WINDOW
        scores = scores + torch.where(is_old, log_gate[0, :, kv_head], 0.0)
        by_hand = scores.softmax(0) @ value[0, kv_head]
        torch.testing.assert_close(out[0, last, head], by_hand)

    def total(gate):
        module.peer_gate = (gate, WINDOW)
        return peers.gated_attention.gated_attention(module, query, key, value, None)[0].sum()

    assert torch.autograd.gradcheck(total, log_gate)


def test_dms_pulls_only_while_fewer_slots_are_hidden_than_the_target(peers):
    model = loud_model()
    teacher = loud_model()
    predictors = peers.gated_attention.GatePredictors(model, window=WINDOW, bias=0.0, scale=1.0)
    ids = token_ids()
    method = peers.train.DMS(model, teacher, predictors, target=0.75, weight=2.0)
    records = {}
    for progress in (0.0, 0.25, 1.0):
        generator = torch.Generator().manual_seed(0)
        loss, record = method.loss(ids, progress, generator)
        target = 0.75 * min(1, 2 * progress)
        assert record["target"] == target
        pull = 2.0 * max(0.0, target - record["hidden"])
        assert loss.item() == pytest.approx(record["kl"] + pull, rel=1e-5)
        records[progress] = record
    assert records[0.0]["hidden"] == pytest.approx(0.5, abs=0.1)  # logits of 0
    assert records[0.0]["kl"] > 0.01
    with torch.no_grad():
        log_teacher = teacher(ids).logits[:, :-1].log_softmax(-1)
        log_student = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    kl = functional.kl_div(log_student, log_teacher, reduction="none", log_target=True)
    assert kl.sum(-1).mean() >= 0  # the gated model's own logits, with other draws of the noise


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dms", "sp-kv"])
def test_a_run_reads_the_controls_tokens_continues_and_leaves_an_ordinary_checkpoint(
    peers, method, tiny_folder, texts_folder, tmp_path, monkeypatch
):
    common = {
        "checkpoint_every": 1,
        "seq_len": 32,
        "batch_size": 2,
        "max_steps": 4,
        "warmup_steps": 1,
        "seed": 3,
    }

    def options(folder):
        words = [method, "--model", tiny_folder, "--data", texts_folder, "--output", folder]
        for name, value in common.items():
            words += ["--" + name.replace("_", "-"), value]
        return peers.train.parse_arguments([str(word) for word in words])

    whole = peers.train.train(options(tmp_path / "whole"))
    records = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    control = kvcat.TrainConfig(
        model=str(tiny_folder), data=str(texts_folder), output=str(tmp_path / "control"),
        policy="control", num_groups=1, **common,
    )  # fmt: skip
    kvcat.train(control, progress=False)
    trained = read_jsonl(tmp_path / "control" / "metrics.jsonl")
    checksums = [record["tokens_crc32"] for record in trained if record["kind"] == "train"]
    assert [record["tokens_crc32"] for record in records] == checksums

    append = peers.train.append_jsonl

    def kill_at_the_third_step(path, *lines):
        if lines[0]["step"] == 3:
            raise KeyboardInterrupt
        append(path, *lines)

    with monkeypatch.context() as patched:
        patched.setattr(peers.train, "append_jsonl", kill_at_the_third_step)
        with pytest.raises(KeyboardInterrupt):
            peers.train.train(options(tmp_path / "killed"))
    again = peers.train.train(options(tmp_path / "killed"))
    assert read_jsonl(tmp_path / "killed" / "metrics.jsonl") == records
    models = [kvcat.load(folder)[0] for folder in (whole, again)]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(kvcat.InputError, match="other options"):
        peers.train.train(Namespace(**{**vars(options(tmp_path / "whole")), "seed": 4}))
