"""Files and sources of text that are rejected, each in one line."""

import re

import pyarrow
import pyarrow.parquet
import pytest

from kvcat.data import Encoder, open_documents, open_tokens
from kvcat.data.documents import open_source
from kvcat.data.streams import TextStreams, TokenLoader
from text_files import of_split, texts, write_table
from tiny import refusal_with, rejections

FEW = {"seq_len": 8, "batch_size": 2, "max_steps": 1, "validation_sequences": 2, "seed": 0}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("kvcat.hub.hub_obstacle", lambda: "HF_HUB_OFFLINE is set")


def read(source):
    return list(open_documents(str(source)))


def file_of(name, content):
    """A call that reads a file of these bytes."""

    def call(tmp_path):
        (tmp_path / name).write_bytes(content)
        return read(tmp_path / name)

    return call


def table_without_text(tmp_path):
    columns = pyarrow.table({"body": ["a"], "id": ["1"]})
    pyarrow.parquet.write_table(columns, tmp_path / "a.parquet")
    return read(tmp_path / "a.parquet")


def folder_without_text(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"")
    return read(tmp_path)


def without_validation(tmp_path, tokenizer):
    write_table(tmp_path / "a.parquet", of_split(texts(3), "train"))
    return open_tokens(f"stream:{tmp_path}", tokenizer, **FEW)


def without_training(tmp_path, tokenizer):
    write_table(tmp_path / "a.parquet", of_split(texts(200), "test"))
    source = open_source(f"stream:{tmp_path}")
    return TokenLoader(TextStreams(source, Encoder.of(tokenizer), 16, 2, 0)).read()


@rejections(
    ("a.txt cannot be read as text: .* byte 0xe9 in position 3", file_of("a.txt", b"caf\xe9")),
    ("a.txt is not text: it has a zero byte at 1", file_of("a.txt", "wide".encode("utf-16-le"))),
    ("row 1 of .*a.jsonl.* is not JSON", file_of("a.jsonl", b'{"text": "a"}\n{"text": \n')),
    ("row 0 of .*a.jsonl.* is not a JSON object", file_of("a.jsonl", b"[1, 2]\n")),
    ("a.jsonl.*no column 'text'; its columns: body, id",
     file_of("a.jsonl", b'{"body": "a", "id": 1}\n')),
    ("a.jsonl.*holds list, not text", file_of("a.jsonl", b'{"text": ["a"]}\n')),
    ("row 0 of .*a.json .*is not a JSON object", file_of("a.json", b'[{"text": "a"}]\n')),
    ("row 0 of .*a.json .*is not JSON", file_of("a.json", b'{\n "text": "a"\n}\n')),
    ("a.jsonl.gz cannot be read as jsonl", file_of("a.jsonl.gz", b"no gzip")),
    ("a.parquet cannot be read as parquet", file_of("a.parquet", b"no parquet")),
    ("a.parquet.*its columns: body, id", table_without_text),
    ("no such text file or folder", lambda tmp_path: open_documents(str(tmp_path / "gone"))),
    ("no text", folder_without_text),
    ("nobody/texts' is on the Hub, and HF_HUB_OFFLINE is set",
     lambda: read("hub:nobody/texts/c@dev")),
    ("hub:OWNER/NAME", lambda: read("hub:")),
    ("hub:OWNER/NAME", lambda: read("hub:a b")),
    ("hub:OWNER/NAME", lambda: read("hub:../x")),
    (r"validation documents of stream:.*has 0 tokens", without_validation),
    ("has too few train documents for 2 streams", without_training),
)  # fmt: skip
def test_what_holds_no_text_is_rejected_in_one_line(message, call, request):
    assert re.search(message, refusal_with(request, call))
