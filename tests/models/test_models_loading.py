"""Folders that load and save, folders that are rejected by name, and models that the self-test
rejects."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from models_zoo import supported
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kvcat import hub
from kvcat.attention import attend_twice
from kvcat.errors import InputError
from kvcat.models import decoder_layers, load, model_name, save, self_test
from tiny import refusal


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen2"
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    return save(
        supported("qwen2", dtype=torch.float32),
        PreTrainedTokenizerFast(tokenizer_object=words),
        folder,
    )


@pytest.fixture
def folder(source, tmp_path):
    """A folder whose files a test changes, as people do: without the list of their hashes."""
    return shutil.copytree(source, tmp_path / "copy", ignore=shutil.ignore_patterns("SHA256SUMS"))


def test_a_loaded_model_is_the_stock_class_and_a_saved_folder_names_nothing_of_ours(
    source, tmp_path
):
    model, tokenizer = load(source)
    stock = AutoModelForCausalLM.from_pretrained(source)
    assert (type(model), model.training) == (type(stock), False)
    assert model.config._attn_implementation == "kvcat"
    assert tokenizer("b").input_ids == [1]
    assert model_name(model) == "tiny-qwen2"
    ids = torch.arange(3, 15)[None]
    assert torch.allclose(model(input_ids=ids).logits, stock(input_ids=ids).logits, atol=1e-5)
    half, none = load(str(source), dtype="bfloat16", tokenizer=False)
    assert (half.dtype, none) == (torch.bfloat16, None)
    target = save(model, tokenizer, tmp_path / "deep" / "saved")
    assert "kvcat" not in (target / "config.json").read_text()
    assert [p.name for p in target.parent.iterdir()] == ["saved"]
    again = AutoModelForCausalLM.from_pretrained(target)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_a_rejected_or_failed_save_leaves_the_folder_as_it_was(source, tmp_path, monkeypatch):
    model, tokenizer = load(source)
    (tmp_path / "note").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        save(model, tokenizer, tmp_path)
    (tmp_path / "empty").mkdir()
    assert (save(model, tokenizer, tmp_path / "empty") / "config.json").is_file()

    monkeypatch.setattr(tokenizer, "save_pretrained", lambda *_: (tmp_path / "none").read_bytes())
    with pytest.raises(InputError, match=r"cannot write .*No such file"):
        save(model, tokenizer, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "note"]


def test_a_hub_name_without_network_fails_within_seconds(monkeypatch, tmp_path):
    # an address that swallows packets: the worst kind of no network
    for name, value in (
        ("ENDPOINT", "https://192.0.2.1"),
        ("HF_HUB_CACHE", str(tmp_path)),
        ("HF_HUB_OFFLINE", False),
    ):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("kvcat.hub.PATIENCE", 0.3)
    for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    started = time.monotonic()
    assert "cannot be reached" in refusal(load, "Qwen/no-such-model")
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    "lacking", ["tokenizer.json", "model-00002-of-00002.safetensors", "index", None]
)
def test_a_cached_model_that_lacks_files_is_fetched_again_where_there_is_a_way(
    lacking, tmp_path, monkeypatch
):
    index = {
        "weight_map": {
            "x": "model-00001-of-00002.safetensors",
            "y": "model-00002-of-00002.safetensors",
        }
    }
    for name in ("config.json", "tokenizer.json", *index["weight_map"].values()):
        if name != lacking:
            (tmp_path / name).write_text("{}")
    if lacking != "index":
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: "fetched")
    for obstacle, folder in (
        ("no way", tmp_path),
        (None, Path("fetched") if lacking else tmp_path),
    ):
        monkeypatch.setattr(hub, "hub_obstacle", lambda obstacle=obstacle: obstacle)
        assert hub.local_folder("some/model") == folder


@pytest.mark.parametrize(
    ("obstacle", "tokenizer"), [(None, False), (None, True), ("no way", False)]
)
def test_a_tokenizer_is_fetched_without_weights_where_it_is_not_cached(
    obstacle, tokenizer, tmp_path, monkeypatch
):
    for name in ("config.json", "tokenizer.json")[: 1 + tokenizer]:
        (tmp_path / name).write_text("{}")
    fetched = []
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    monkeypatch.setattr(
        hub, "snapshot_download", lambda *_, **options: fetched.append(options) or tmp_path
    )
    monkeypatch.setattr(hub, "hub_obstacle", lambda: obstacle)
    assert hub.local_folder("some/model", weights=False) == tmp_path
    assert len(fetched) == (obstacle is None and not tokenizer)
    assert all(
        "*.json" in x["allow_patterns"] and not {*x["allow_patterns"]} & {*hub._WEIGHTS}
        for x in fetched
    )


def test_the_self_test_notices_gates_log_bias_and_suffixes_that_attention_ignores(monkeypatch):
    model = supported("llama", dtype=torch.float32).train()
    random_state = torch.get_rng_state()
    self_test(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    attention = decoder_layers(model)[1].self_attn

    class WithoutGate(type(attention)):
        def forward(self, *args, kv_gate=None, **kwargs):
            return super().forward(*args, **kwargs)

    class WithoutGradient(type(attention)):
        def forward(self, *args, kv_gate=None, **kwargs):
            if kv_gate is not None:
                kv_gate.keep = kv_gate.keep.detach()
            return super().forward(*args, kv_gate=kv_gate, **kwargs)

    attention.__class__ = WithoutGate
    with pytest.raises(InputError, match="not all of its layers attend"):
        self_test(model)
    attention.__class__ = WithoutGradient
    with pytest.raises(InputError, match="gate of one of its layers gets no gradient"):
        self_test(model)

    def blind(q, k, v, keep, prefix_len, **options):
        return attend_twice(q, k, v, torch.ones_like(keep), prefix_len, **options)

    for name, broken, split, message in (
        (
            "carried_by",
            lambda keys: None,
            False,
            "Qwen2ForCausalLM is not supported: the log-bias .* does not reach",
        ),
        ("attend_twice", blind, True, "hidden slots of the prefix do not change the suffix"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"kvcat.attention.interface.{name}", broken)
            with pytest.raises(InputError, match=message):
                self_test(supported("qwen2", dtype=torch.float32), split=split)
