"""Text that must be recalled, and forms of training (runs/smollm2)."""

import importlib
import json
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import kvcat
from kvcat.compress.documents import INSTRUCTION
from kvcat.data import Encoder, prepare
from kvcat.data.token_files import open_token_folder
from kvcat.files import read_jsonl
from kvcat.models import load_tokenizer
from kvcat.text.encoder import TextEncoder

FOLDER = Path(__file__).parents[1] / "runs" / "smollm2"


def script(name, *arguments):
    """What a script prints, or the end of its error."""
    command = [sys.executable, str(FOLDER / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else done.stderr.splitlines()[-1]


def recall(*arguments):
    """Run recall.py in this process, which has loaded the packages."""
    with patch.object(sys, "argv", ["recall.py", *map(str, arguments)]):
        runpy.run_path(str(FOLDER / "recall.py"))["main"]()


@pytest.fixture(scope="module")
def recalled(tmp_path_factory, tiny_folder):
    """Documents of 256 tokens that are recalled."""
    folder = tmp_path_factory.mktemp("recall")
    lines = [f"{number} The cat sees a red house by the river.\n" for number in range(1500)]
    (folder / "a.txt").write_text("".join(lines))
    file = folder / "recall.jsonl"
    recall(folder / "a.txt", "--model", tiny_folder, "--seq-len", 256, "-o", file)
    return file


def test_every_sequence_is_a_passage_the_instruction_and_the_same_tokens_again(
    recalled, tiny_folder, tmp_path
):
    tokenizer = load_tokenizer(str(tiny_folder))
    prepare(str(recalled), tokenizer, tmp_path / "tokens", bos="never")
    data = open_token_folder(tmp_path / "tokens", Encoder.of(tokenizer, "never"), 256)
    middle = TextEncoder(tokenizer).behind(INSTRUCTION)
    first = 128 - len(middle)
    assert len(data.train) > 20
    for sequence in data.train[:].tolist():
        assert sequence[first:128] == middle
        assert sequence[:first] == sequence[128 : 128 + first]
        assert sequence.index(tokenizer.eos_token_id) == 255
    for line in recalled.read_text().splitlines():
        assert json.loads(line)["text"].count(INSTRUCTION) == 1


def test_the_control_has_the_text_of_the_same_places_without_a_repetition(
    recalled, tiny_folder, tmp_path
):
    options = ["--model", tiny_folder, "--seq-len", 256, "--plain", "-o", tmp_path / "plain.jsonl"]
    recall(recalled.with_name("a.txt"), *options)
    encode = TextEncoder(load_tokenizer(str(tiny_folder)))
    plain, twice = (
        [json.loads(line)["text"] for line in file.read_text().splitlines()]
        for file in (tmp_path / "plain.jsonl", recalled)
    )
    assert len(plain) == len(twice)
    for text, repeated in zip(plain, twice, strict=True):
        assert text.startswith(repeated.partition(INSTRUCTION)[0])
        assert INSTRUCTION not in text
        assert len(encode(text)) == 255


@pytest.mark.slow
def test_only_the_weights_with_the_words_in_their_names_are_trained(
    recalled, tiny_folder, tmp_path
):
    options = ["--model", tiny_folder, "--data", recalled, "--seq-len", 32, "--batch-size", 2]
    options += ["--max-steps", 2, "--warmup-steps", 1, "--num-groups", 1, "--policy", "random"]
    run = ["small", *options, "--output", tmp_path / "out"]
    export = script("train_only.py", "k_proj,v_proj", *run).strip()
    before, after = (dict(kvcat.load(name)[0].named_parameters()) for name in (tiny_folder, export))
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if "k_proj" in name or "v_proj" in name}
    assert "holds another run, of the form only k_proj,v_proj" in script(
        "train_only.py", "k_proj", *run
    )
    run[-1] = tmp_path / "none"
    assert "no weight of the model has magic in its name" in script("train_only.py", "magic", *run)


@pytest.mark.slow
def test_layers_differ_by_what_is_hidden_alone(recalled, tiny_folder, tmp_path):
    options = ["--model", tiny_folder, "--data", recalled, "--seq-len", 32, "--batch-size", 2]
    options += ["--max-steps", 2, "--warmup-steps", 1, "--num-groups", 1, "--policy", "attention"]
    options += ["--prefix-range", 0.5, 0.5, "--mask-weight", 0, "--target-keep"]

    def losses(name, keep, weight):
        run = ["small", *options, keep, "--output", tmp_path / name]
        script("align.py", weight, *run)
        records = read_jsonl(tmp_path / name / "metrics.jsonl")
        return [record["align"] for record in records if record["kind"] == "train"], run

    seen, run = losses("seen", 0.999, 1)  # of 16 slots all
    assert seen == pytest.approx([0.0, 0.0], abs=1e-9)
    assert min(losses("hidden", 0.1, 1)[0]) > 1e-6
    assert "holds another run, of the form align 1" in script("align.py", 2, *run)


def test_the_loss_of_a_layer_is_the_relative_square_of_what_hidden_slots_change(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    loss = importlib.import_module("align").layer_loss
    text = torch.tensor([[[9.0, 9.0], [3.0, 4.0], [0.0, 5.0]]], requires_grad=True)
    again = torch.tensor([[[3.0, 2.0], [1.0, 5.0]]], requires_grad=True)  # the last two, changed
    result = loss(torch.cat([text, again], dim=1), prefix_len=1)
    assert result.item() == pytest.approx((4 + 1) / (25 + 25))
    result.backward()
    assert not text.grad.any()
    assert torch.allclose(again.grad, 2 * torch.tensor([[[0.0, -2.0], [1.0, 0.0]]]) / 50)
