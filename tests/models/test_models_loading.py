import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from models_zoo import BASE, supported, tiny
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, PreTrainedTokenizerFast, T5Config

from kvcat.attention import attend_twice, enable
from kvcat.errors import InputError
from kvcat.models import capture, decoder_layers, load, logits_from_hidden, model_name, save, self_test
from kvcat.models.structure import hidden_states


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen2"
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    )
    return save(supported("qwen2", dtype=torch.float32), words, folder)


@pytest.fixture
def folder(source, tmp_path):
    return shutil.copytree(source, tmp_path / "copy")


def refusal(*args, **kwargs):
    with pytest.raises(InputError) as caught:
        load(*args, **kwargs)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_loaded_model_is_the_stock_class_ready_to_evaluate(source):
    model, tokenizer = load(source)
    stock = AutoModelForCausalLM.from_pretrained(source)
    assert type(model) is type(stock)
    assert not model.training
    assert model.config._attn_implementation == "kvcat"
    assert tokenizer("b").input_ids == [1]
    assert model_name(model) == "tiny-qwen2"
    ids = torch.arange(3, 15)[None]
    assert torch.allclose(model(input_ids=ids).logits, stock(input_ids=ids).logits, atol=1e-5)
    assert all(p.grad is None for p in model.parameters())


def test_dtype_and_missing_tokenizer_can_be_chosen(source):
    model, tokenizer = load(str(source), dtype="bfloat16", tokenizer=False)
    assert model.dtype == torch.bfloat16
    assert tokenizer is None


def test_a_saved_folder_is_complete_and_does_not_name_kvcats_attention(source, tmp_path):
    model, tokenizer = load(source)
    target = save(model, tokenizer, tmp_path / "deep" / "saved")
    assert "kvcat" not in (target / "config.json").read_text()
    assert [p.name for p in target.parent.iterdir()] == ["saved"]
    again = AutoModelForCausalLM.from_pretrained(target)
    assert again.config._attn_implementation == "sdpa"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
def test_a_saved_folder_loads_in_a_process_without_kvcat(source, tmp_path):
    target = save(*load(source), tmp_path / "saved")
    code = (
        "import sys; from transformers import AutoModelForCausalLM as A, AutoTokenizer as T;"
        f"m = A.from_pretrained({str(target)!r}); T.from_pretrained({str(target)!r});"
        "assert 'kvcat' not in sys.modules; print(m.config._attn_implementation)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "sdpa"


def test_saving_refuses_a_folder_with_something_in_it_and_leaves_it_alone(source, tmp_path):
    (tmp_path / "note").write_text("mine")
    model, tokenizer = load(source)
    with pytest.raises(InputError, match="not empty"):
        save(model, tokenizer, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["note"]
    (tmp_path / "empty").mkdir()
    assert (save(model, tokenizer, tmp_path / "empty") / "config.json").is_file()


def test_a_failed_save_leaves_nothing(source, tmp_path, monkeypatch):
    model, tokenizer = load(source)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer, "save_pretrained", full)
    with pytest.raises(InputError, match="No space left"):
        save(model, tokenizer, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_missing_and_empty_folders_are_told_apart(tmp_path):
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "does not exist" in refusal("./nowhere")
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "file").touch()
    assert "is a file" in refusal(tmp_path / "file")


def test_a_truncated_or_corrupt_weight_file_is_refused(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:4], b"", os.urandom(1000)):
        file.write_bytes(content)
        assert "corrupt or truncated" in refusal(folder)
    file.unlink()
    assert "no weights" in refusal(folder)


def test_missing_shards_and_bad_indexes_are_refused(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model-00002-of-00002.safetensors"}}))
    assert "model-00002-of-00002.safetensors is missing" in refusal(folder)
    index.write_text("{}")
    assert "weight_map" in refusal(folder)


def test_weights_that_are_missing_or_of_another_shape_are_refused(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors", {"format": "pt"})
    assert name in refusal(folder)
    save_file({**tensors, name: torch.zeros(3, 3)}, folder / "model.safetensors", {"format": "pt"})
    assert name in refusal(folder)


def test_weights_of_more_layers_than_the_config_has_are_refused(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    layers = config["num_hidden_layers"]
    config |= {"num_hidden_layers": layers - 1, "layer_types": config.get("layer_types", [])[: layers - 1] or None}
    path.write_text(json.dumps(config))
    assert f"more layers than config.json's {layers - 1}, for example model.layers.{layers - 1}." in refusal(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(folder, value):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "not finite numbers, for example model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_bad_json_is_refused(folder):
    for file in ("tokenizer.json", "config.json"):
        (folder / file).write_text('{"model_type": ')
        assert "config.json" in refusal(folder) if file == "config.json" else "tokenizer" in refusal(folder)
    (folder / "config.json").write_text("[1]")
    assert "not a JSON object" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no-such-model", "architectures": ["NoSuchLM"]}, "NoSuchLM"),
        ({"model_type": "no-such-model", "auto_map": {"AutoModelForCausalLM": "x.Y"}}, "never run"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": "wide"}, "cannot load"),
    ],
)
def test_a_config_that_names_no_usable_model_is_refused(folder, change, message):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert message in refusal(folder)


def test_an_encoder_decoder_is_refused(tmp_path):
    T5Config(d_model=8, num_layers=1, num_heads=2, architectures=["T5ForConditionalGeneration"]).save_pretrained(
        tmp_path
    )
    assert "T5ForConditionalGeneration" in refusal(tmp_path)


def test_a_folder_without_tokenizer_says_so(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer=False" in refusal(folder)
    assert load(folder, tokenizer=False)[1] is None


def test_unknown_dtype_and_absent_device_are_refused_before_anything_is_read(tmp_path):
    assert "'float8'" in refusal(tmp_path / "nowhere", dtype="float8")
    assert "'abacus'" in refusal(tmp_path / "nowhere", device="abacus")
    if not torch.cuda.is_available():
        assert "'cuda'" in refusal(tmp_path / "nowhere", device="cuda")


def test_a_hub_name_without_network_fails_within_seconds(monkeypatch, tmp_path):
    import huggingface_hub.constants

    # an address that swallows packets: the worst kind of no network
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://192.0.2.1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("kvcat.hub._PATIENCE", 0.3)
    for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    started = time.monotonic()
    assert "cannot be reached" in refusal("Qwen/no-such-model")
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("stablelm", {}, "StableLm.*gate"),
        ("falcon", {}, "FalconForCausalLM.*interface"),
        ("bloom", {}, "BloomForCausalLM.*interface"),
        ("gemma2", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}, "Gemma2ForCausalLM.*50"),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, "GptOss.*s_aux"),
        ("mamba", {}, "MambaForCausalLM"),
    ],
)
def test_what_cannot_be_supported_is_refused_by_name(kind, options, message):
    with pytest.raises(InputError, match=message):
        self_test(tiny(kind, dtype=torch.float32, **options))


def test_an_encoder_is_refused_by_name():
    names = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
    with pytest.raises(InputError, match=r"Bert.*not causal"):
        self_test(BertLMHeadModel(BertConfig(**names)))


def test_the_self_test_notices_a_model_that_ignores_the_gate():
    model = supported("llama", dtype=torch.float32)
    layer = decoder_layers(model)[1]
    forward = layer.self_attn.forward
    layer.self_attn.forward = lambda *args, kv_gate=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(InputError, match="not every layer sees the gate"):
        self_test(model)


def test_the_self_test_notices_keys_that_lose_their_log_bias(monkeypatch):
    monkeypatch.setattr("kvcat.attention.interface.carried_by", lambda keys: None)
    with pytest.raises(InputError, match=r"Qwen2ForCausalLM is not supported: the log-bias .* does not reach"):
        self_test(supported("qwen2", dtype=torch.float32))


def test_the_self_test_notices_suffixes_that_see_every_slot(monkeypatch):
    def blind(q, k, v, keep, prefix_len, **options):
        return attend_twice(q, k, v, torch.ones_like(keep), prefix_len, **options)

    monkeypatch.setattr("kvcat.attention.interface.attend_twice", blind)
    with pytest.raises(InputError, match="hidden slots of the prefix do not change the suffix"):
        self_test(supported("qwen2", dtype=torch.float32), split=True)


def test_the_self_test_leaves_mode_and_gradients_alone():
    model = supported("llama", dtype=torch.float32).train()
    self_test(model)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not any(layer._forward_pre_hooks for layer in decoder_layers(model))


@pytest.mark.parametrize("kind", ["llama", "gemma", "qwen3", "granite", "mistral"])
def test_captured_tensors_make_the_models_own_attention_again(kind):
    model = supported(kind)
    ids = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    whole, part = capture(model, ids), capture(model, ids, query_start=4)
    stock = model(input_ids=ids, use_cache=True)
    for layer, (keys, values) in enumerate(zip(whole.keys, whole.values, strict=True)):
        assert torch.equal(keys, stock.past_key_values.layers[layer].keys) or kind == "mistral"
        assert torch.equal(part.keys[layer], keys)
        assert torch.equal(part.queries[layer], whole.queries[layer][:, :, 4:])
        assert values.shape == keys.shape
        assert whole.scales[layer] == decoder_layers(model)[layer].self_attn.scaling
    assert torch.allclose(logits_from_hidden(model, whole.hidden), stock.logits, atol=1e-6)
    assert not whole.hidden.requires_grad
    with pytest.raises(InputError, match="11"):
        capture(model, ids, query_start=11)


def test_enabling_twice_changes_nothing_and_hidden_states_are_the_input_of_the_head():
    model = supported("llama")
    ids = torch.arange(3, 12)[None]
    before = model(input_ids=ids).logits
    enable(model)
    enable(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert torch.equal(model.lm_head(hidden_states(model, input_ids=ids)), before)
    assert "kvcat" not in json.dumps(model.config.to_dict())
