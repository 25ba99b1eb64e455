"""A tiny model, a corpus of rows for it, and stores."""

import pytest
from corpora import text_of, write_rows

import kvcat
from kvcat.corpus import compress_corpus


@pytest.fixture(scope="session")
def loaded(tiny_folder):
    """The tiny model with its tokenizer."""
    return kvcat.load(tiny_folder)


@pytest.fixture
def corpus(tmp_path):
    """Six documents; two of them have equally many tokens, and so have two others."""
    rows = [{"id": f"doc-{number}", "text": text_of(number)} for number in range(4)]
    rows += [{"id": f"copy-{number}", "text": text_of(number)} for number in range(2)]
    return write_rows(tmp_path / "corpus.jsonl", rows)


@pytest.fixture
def compress(loaded):
    """Compress a corpus with the tiny model."""

    def run(source, store, settings=None, **options):
        return compress_corpus(*loaded, source, store, settings, **options)

    return run
