"""Sources, stores and addresses that are rejected, each in one line."""

import pyarrow
import pytest
from corpora import write_rows
from pyarrow import parquet

from kvcat.corpus import Corpus, CorpusSettings, Store, corpus_files, read_corpus
from kvcat.corpus.storage import open_storage
from kvcat.corpus.store import open_writer
from tiny import refusal_with, rejections

KINDS = "text files (.txt, .md, .rst, .py, .tex, .html)"
# store.json of a model that is not there
STORED = {**CorpusSettings().record(), "dtype": "float32", "model": "large", "fingerprint": "2:00"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder, without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def of_kind(folder, name):
    (folder / name).write_text("id,text\na,the cat\n")
    return corpus_files(name)


def documents(folder, *rows, **columns):
    return Corpus.read(corpus_files(str(write_rows(folder / "rows.jsonl", rows)), **columns))


def table(folder, **columns):

    parquet.write_table(pyarrow.table({"body": ["x"]}), folder / "x.parquet")
    return list(read_corpus(corpus_files("x.parquet", **columns)))


def store_inside(here):
    (here / "a.txt").write_text("x")
    return corpus_files(str(here), store=str(here / "store"))


def continued(compress, corpus, folder, **settings):
    """A run with a store that was made with the usual settings."""
    with open_writer(folder / "store", STORED):
        pass
    return compress(corpus, folder / "store", CorpusSettings(**settings))


def thesis(folder):
    (folder / "full").mkdir()
    (folder / "full" / "thesis.tex").write_text("x")
    return folder / "full"


@rejections(
    ("the name of the corpus is empty", lambda: corpus_files("")),
    ("the name of the corpus is empty", lambda: corpus_files(" ")),
    ("no such text file or folder: missing", lambda: corpus_files("missing")),
    ("installed is not a corpus", lambda: corpus_files("installed")),
    ("hub:OWNER/NAME", lambda: corpus_files("hub:")),
    ("HF_HUB_OFFLINE", lambda: corpus_files("hub:owner/name")),
    (KINDS, lambda here: of_kind(here, "rows.csv")),
    (KINDS, lambda here: of_kind(here, "rows.json")),
    (KINDS, lambda here: of_kind(here, "rows.tsv")),
    (KINDS, lambda here: of_kind(here, "report.docx")),
    (KINDS, lambda here: of_kind(here, "rows")),
    ("two documents of the corpus have the id 'a'",
     lambda here: documents(here, {"id": "a", "text": "x"}, {"id": "a", "text": "x"})),
    ("the corpus has no document", lambda: Corpus.read([])),
    ("no column 'text'; its columns: body", lambda here: table(here)),
    ("no column 'name'; its columns: body",
     lambda here: table(here, text_column="body", id_column="name")),
    ("is inside the corpus", store_inside),
    ("was made with method attention-matching, not snapkv",
     lambda compress, corpus, here: continued(compress, corpus, here, method="snapkv")),
    ("was made with keep_ratio 0.2, not 0.3",
     lambda compress, corpus, here: continued(compress, corpus, here, keep_ratio=0.3)),
    ("was made with keep_ratio 0.2, not None",
     lambda compress, corpus, here: continued(compress, corpus, here, num_slots=4)),
    ("was made with chat False, not True",
     lambda compress, corpus, here: continued(compress, corpus, here, chat=True)),
    ("was made with bits 8, not 4",
     lambda compress, corpus, here: continued(compress, corpus, here, bits="4")),
    (
        "was made with",  # another model
        lambda compress, corpus, here: continued(compress, corpus, here),
    ),
    ("has no store.json: it holds thesis.tex",
     lambda compress, corpus, here: compress(corpus, thesis(here))),
    ("has no store.json", lambda here: Store(thesis(here))),
    ("the address of the store is empty", lambda: open_storage("")),
    ("cannot open nothing://x", lambda: open_storage("nothing://x")),
)  # fmt: skip
def test_what_is_no_corpus_or_no_store_is_rejected_in_one_line(message, call, request):
    assert message in refusal_with(request, call)
