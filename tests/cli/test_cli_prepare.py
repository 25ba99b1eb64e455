"""``kvcat prepare`` and ``kvcat export``: what they leave, and one line for each mistake."""

import json

import huggingface_hub.constants
import pytest

from kvcat.cli.app import run
from kvcat.data import prepare
from text_files import write_corpus
from tiny import byte_tokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    write_corpus(folder, "groups")
    return str(folder)


def test_the_command_prepares_and_says_what_is_there(corpus, tmp_path, capsys):
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    argv = ["prepare", corpus, "--model", str(tmp_path / "model"), "-o", str(tmp_path / "tokens")]
    assert run(argv) == 0
    said = capsys.readouterr().out
    index = json.loads((tmp_path / "tokens" / "tokens.json").read_text())
    assert f"{index['splits']['train']['tokens']:,} training tokens of" in said
    prepare(corpus, tokenizer, tmp_path / "same")
    assert (tmp_path / "tokens" / "train.bin").read_bytes() == (tmp_path / "same" / "train.bin").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["prepare", "nowhere", "--tokenizer", "kvcat-base"], "no such text file or folder: nowhere"),
        (["prepare", "{corpus}", "--tokenizer", "{corpus}"], "cannot load the tokenizer of"),
        (["prepare", "{corpus}", "--tokenizer", "nobody/nothing"], "neither a folder nor in the local Hub cache"),
        (["export", "{corpus}", "--step", "3"], "texts holds no checkpoint of step 3; it has none"),
    ],
)
def test_a_mistake_is_one_line(corpus, arguments, told, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    argv = [argument.replace("{corpus}", corpus) for argument in arguments]
    assert run([*argv, "-o", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert not (tmp_path / "out").exists()
