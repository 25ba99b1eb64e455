"""A damaged byte in any file that kvcat writes and reads again is noticed, or changes nothing."""

import dataclasses
import json
import random
from contextlib import suppress

import pytest
import torch

import kvcat
from kvcat.compress import CalibratedBudgets
from kvcat.corpus import CorpusSettings, Store, compress_corpus
from kvcat.corpus.manifest import Row
from kvcat.corpus.store import open_writer
from kvcat.data import Encoder, prepare
from kvcat.data.token_files import open_token_folder
from kvcat.errors import InputError
from kvcat.evals.records import Record, ResultsFolder, read_folder
from kvcat.files import check_appended_seal, read_json
from kvcat.serving import widen, write_gguf
from kvcat.training.checkpoint import Checkpoints
from kvcat.training.distributed import World
from text_files import write_corpus
from tiny import byte_tokenizer, loud_model, sentences

NUM_PLACES = 50
CONFIG = {"evaluation": "needle", "dataset": "made up", "num_examples": 2, "methods": []}


def make_tokens(folder):
    write_corpus(folder / "texts", "groups")
    prepare(str(folder / "texts"), byte_tokenizer(), folder / "tokens")


def read_tokens(folder):
    tables = open_token_folder(folder / "tokens", Encoder.of(byte_tokenizer()), 8)
    return [table[:].tolist() for table in tables]


def make_results(folder):
    record = Record(
        "base",
        "2:00",
        "float32",
        "first",
        "{}",
        0.5,
        None,
        None,
        "d",
        "",
        "doc",
        "0",
        {"kl": 0.125},
    )
    cost = dict.fromkeys(
        ("model", "method", "keep_ratio", "step", "examples", "bytes", "dense_bytes"), 1
    )
    with ResultsFolder(folder / "results", CONFIG) as results:
        results.append([record, dataclasses.replace(record, example="1")])
        results.append_cost({**cost, "method": "m", "options": {}, "seconds": 1.5, "peak_mib": 2})
        results.append_event({"command": "kvcat eval needle", "seconds": 12.5})


def read_results(folder):
    return read_folder(folder / "results")


def make_checkpoint(folder):
    saving = checkpoints(folder)
    saving.save(3, {"place": [4, 5]})
    saving.wait()


def checkpoints(folder):
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    return Checkpoints(folder / "run", 1, World(0, 1, torch.device("cpu")), module, optimizer)


def read_checkpoint(folder):
    loading = checkpoints(folder)
    step, states, _ = loading.load_newest()
    return step, states, loading.module.weight.tolist()


def make_store(folder):
    text = "".join(sentences(2))
    (folder / "corpus.jsonl").write_text(json.dumps({"id": "a", "text": text}) + "\n")
    model = loud_model(vocab_size=300, max_position_embeddings=512)
    result = compress_corpus(
        model, byte_tokenizer(), folder / "corpus.jsonl", folder / "store", CorpusSettings()
    )
    assert result.num_made == 1
    settings = {**read_json(folder / "store" / "store.json")}
    del settings["format"]
    row = Row.failed("b", "0", "no text", {"method": "m", "model": "x", "fingerprint": "2:00"})
    with open_writer(folder / "store", settings, (0, 2)) as writer:  # whose log stays
        writer.add([row, row])


def read_store(folder):
    store = Store(folder / "store")
    return store.settings, store.rows, [each.tolist() for each in tensors_of(store["a"])]


def tensors_of(cache):
    return [tensor for layer in cache.layers for tensor in layer.tensors().values()]


def make_budgets(folder):
    calibrated_budgets().save(folder / "budgets.json")


def calibrated_budgets():
    curve = tuple(float(size < 16) for size in (1, 16, 64))
    return CalibratedBudgets(
        model="tiny",
        fingerprint="2:00",
        num_tokens=64,
        num_documents=1,
        sizes=(1, 16, 64),
        errors=((curve, curve),),
    )


def read_budgets(folder):
    return CalibratedBudgets.load(folder / "budgets.json")


def make_wide(folder):
    kvcat.models.save(widen(loud_model()), None, folder / "wide")


def read_wide(folder):
    model, _ = kvcat.load(folder / "wide", tokenizer=False)
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return model.config.to_dict(), model.generation_config.to_dict(), weights


def make_gguf(folder):
    pytest.importorskip("gguf")
    write_gguf(widen(loud_model()), folder / "m.gguf", dtype="float32")


def read_gguf(folder):
    check_appended_seal(folder / "m.gguf")  # as LlamaCpp does
    return "whole"


@pytest.mark.parametrize(
    ("make", "read"),
    [
        pytest.param(make_tokens, read_tokens, marks=pytest.mark.slow),
        (make_results, read_results),
        (make_checkpoint, read_checkpoint),
        (make_store, read_store),
        (make_budgets, read_budgets),
        (make_wide, read_wide),
        (make_gguf, read_gguf),
    ],
)
def test_a_damaged_byte_is_noticed_or_changes_nothing(make, read, tmp_path):
    make(tmp_path)
    right = read(tmp_path)
    files = [path for path in sorted(tmp_path.glob("*/**/*")) if path.is_file()]
    files += [path for path in tmp_path.iterdir() if path.suffix in (".gguf", ".json")]
    generator = random.Random(0)
    for file in files:
        content = file.read_bytes()
        if not content or file.parent.name == "texts":
            continue
        for _ in range(NUM_PLACES):
            place = generator.randrange(len(content))
            file.write_bytes(damaged(content, place, generator))
            with suppress(InputError):
                where = f"byte {place} of {file}: {content[place : place + 1]}"
                assert read(tmp_path) == right, where
            file.write_bytes(content)


def damaged(content, place, generator):
    """The content with another digit in the place of a digit, or another bit in any other byte."""
    changed = bytearray(content)
    if content[place : place + 1].isdigit():
        changed[place] = generator.choice(
            [digit for digit in b"0123456789" if digit != content[place]]
        )
    else:
        changed[place] ^= 1 << generator.randrange(8)
    return bytes(changed)
