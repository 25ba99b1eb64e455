"""Mistakes that are found before weights are read, and leave nothing behind."""

import json
import os

import pyarrow
import pytest
from pyarrow import parquet

from kvcat.cli.app import run
from kvcat.compress import calibrate
from kvcat.corpus import Store
from kvcat.corpus.storage import LocalStorage
from tiny import loud_model, sentences, write_tiny_model

TEXT = "".join(sentences(2, seed=1))
LONG = "".join(sentences(60, seed=1))
GOOD = {"id": "a", "text": TEXT}


def write_lines(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def corpus(tmp_path):
    """Rows, as a corpus of the working folder."""
    return lambda *rows: write_lines(tmp_path / "corpus.jsonl", *rows)


@pytest.fixture
def no_weights(monkeypatch):
    """Weights that cannot be read."""
    monkeypatch.setattr("kvcat.models.loading._load_model", None)


without_weights = pytest.mark.usefixtures("no_weights")


@pytest.fixture(scope="module")
def no_template(tmp_path_factory):
    """A model whose tokenizer has no chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "plain", chat=False)


@without_weights
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, GOOD], "two documents of the corpus have the id 'a'"),
        ([], "the corpus has no document"),
        ([{"id": "a", "text": " \n"}], "none of the 1 documents of the corpus has a text"),
        ([{"id": "a"}, {"id": "b"}], "the first, 'a': row 0 has no column 'text'; its columns: id"),
        (["no json"], "the first, 'corpus.jsonl#0': row 0 of "),
    ],
)
def test_a_corpus_that_no_model_can_compress(tiny_folder, tmp_path, mistake, corpus, rows, message):
    store = tmp_path / "store"
    assert message in mistake("corpus", tiny_folder, corpus(*rows), "-o", store)
    assert not store.exists()


@without_weights
def test_a_table_without_the_column(tiny_folder, tmp_path, mistake):
    table = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"body": [TEXT]}), table)
    words = ["corpus", tiny_folder, table, "-o", tmp_path / "store"]
    assert "no column 'text'; its columns: body" in mistake(*words)
    table.write_bytes(table.read_bytes()[:-9])
    assert "cannot be read as parquet" in mistake(*words)
    assert not (tmp_path / "store").exists()


@without_weights
@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("attention-matching,preset=best", "preset"),
        ("attention-matching,no_such_option=1", "no_such_option"),
        (
            "attention-matching,budgets=missing.json",
            "a file of `kvcat budgets`, not 'missing.json', which is no file",
        ),
        ("attention-matching,bits=3", "bits"),
        ("kvpress:NoSuchPress", "NoSuchPress"),
    ],
)
def test_wrong_options_of_a_method(tiny_folder, tmp_path, mistake, corpus, method, message):
    pytest.importorskip("kvpress") if method.startswith("kvpress") else None
    store = tmp_path / "store"
    words = ["corpus", tiny_folder, corpus(GOOD), "-o", store, "--method", method]
    assert message in mistake(*words)
    assert not store.exists()


@without_weights
def test_a_chat_template_that_is_missing(no_template, tmp_path, mistake, corpus):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    one = ["compress", no_template, "--text", text]
    for command in (one, ["corpus", no_template, corpus(GOOD)]):
        words = [*command, "-o", tmp_path / "out", "--chat"]
        assert "has no chat template: leave out --chat" in mistake(*words)
    assert not (tmp_path / "out").exists()


@without_weights
def test_a_text_that_is_too_long_for_the_model(tiny_folder, tmp_path, mistake):
    text = tmp_path / "text.txt"
    text.write_text(LONG)
    words = ["compress", tiny_folder, "--text", text, "-o", tmp_path / "out"]
    assert "tokens, and the model 256 positions: shorten the text" in mistake(*words)
    text.write_text("".join(sentences(10, seed=1)))
    assert "tokens of its repetition: supervision self repeats nothing" in mistake(*words)


@without_weights
def test_a_store_that_cannot_be_written(tiny_folder, tmp_path, mistake, corpus):
    words = ["corpus", tiny_folder, corpus(GOOD), "-o"]
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'} is not a folder" in mistake(*words, tmp_path / "file")
    assert f"{tmp_path / 'file'} is not a folder" in mistake(*words, tmp_path / "file" / "store")
    if os.geteuid() != 0:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        assert "no permission" in mistake(*words, closed / "store")


@without_weights
def test_budgets_of_no_usable_document(tiny_folder, tmp_path, mistake, corpus):
    words = ["budgets", tiny_folder, "--corpus", corpus(GOOD), "-o", tmp_path / "budgets.json"]
    assert "no document has 200 tokens" in mistake(*words, "--tokens", 200)
    assert "--tokens: 1024 tokens exceed the model's 256 positions" in mistake(*words)
    assert not (tmp_path / "budgets.json").exists()


def test_a_file_of_budgets_of_another_model_leaves_no_store(
    tiny_folder, tmp_path, tokenizer, mistake, corpus
):
    other = calibrate(loud_model(vocab_size=300), tokenizer, [LONG], num_tokens=24)
    other.save(tmp_path / "budgets.json")
    method = f"attention-matching,budgets={tmp_path / 'budgets.json'}"
    words = ["corpus", tiny_folder, corpus(GOOD), "-o", tmp_path / "store"]
    assert "the budgets belong to" in mistake(*words, "--method", method)
    assert not (tmp_path / "store").exists()


def test_a_store_that_is_damaged_or_in_use(tiny_folder, tmp_path, mistake, corpus, monkeypatch):
    store = tmp_path / "store"
    words = ["corpus", tiny_folder, corpus(GOOD), "-o", store]
    assert run([str(word) for word in words]) == 0
    monkeypatch.setattr("kvcat.models.loading._load_model", None)
    with LocalStorage(store).writer(None):
        assert "another process is writing" in mistake(*words)
    assert Store(store).ids == ("a",)
    (store / "manifest.parquet").write_bytes(b"no table")
    assert "manifest.parquet is damaged" in mistake(*words)
    (store / "store.json").write_text("{")
    assert "store.json is not readable" in mistake(*words)
