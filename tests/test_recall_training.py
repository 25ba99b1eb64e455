"""Text that must be recalled, and training of some weights alone (runs/smollm2)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvcat
from kvcat.compress.documents import INSTRUCTION
from kvcat.data import Encoder, prepare
from kvcat.data.token_files import open_token_folder
from kvcat.models import load_tokenizer
from kvcat.text.encoder import TextEncoder

FOLDER = Path(__file__).parents[1] / "runs" / "smollm2"


def script(name, *arguments):
    """What a script prints, or the end of its error."""
    command = [sys.executable, str(FOLDER / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def recalled(tmp_path_factory, tiny_folder):
    """Documents of 256 tokens that are recalled."""
    folder = tmp_path_factory.mktemp("recall")
    lines = [f"{number} The cat sees a red house by the river.\n" for number in range(1500)]
    (folder / "a.txt").write_text("".join(lines))
    file = folder / "recall.jsonl"
    script("recall.py", folder / "a.txt", "--model", tiny_folder, "--seq-len", 256, "-o", file)
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
    assert "holds another run, which trains" in script("train_only.py", "k_proj", *run)
    run[-1] = tmp_path / "none"
    assert "no weight of the model has magic in its name" in script("train_only.py", "magic", *run)
