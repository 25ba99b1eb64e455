"""Sources of a corpus: whole files, rows with ids, and rows that are no documents."""

import json
import os

import pyarrow
import pytest
from corpora import write_rows
from pyarrow import parquet

from kvcat.corpus import corpus_files, left_out, read_corpus
from kvcat.files import read_text


def documents(source, **columns):
    return list(read_corpus(corpus_files(str(source), **columns)))


def test_a_text_file_is_one_document_however_long_it_is(tmp_path):
    (tmp_path / "inner").mkdir()
    text = "A line.\n" * 10_000
    (tmp_path / "inner" / "long.txt").write_text(text)
    (tmp_path / "short.md").write_text("\ufeffHello")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    read = {document.id: document.text for document in documents(tmp_path)}
    assert read == {"inner/long.txt": text, "short.md": "Hello"}


def test_a_row_is_named_by_its_id_column_or_by_its_place(tmp_path):
    rows = [{"id": "a", "text": "x"}, {"text": "y"}, {"id": 7, "text": "z"}]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    assert [(one.id, one.text) for one in documents(file)] == [
        ("a", "x"),
        ("rows.jsonl#1", "y"),
        ("7", "z"),
    ]
    table = pyarrow.table({"name": ["p", "q"], "body": ["one", "two"]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    columns = {"id_column": "name", "text_column": "body"}
    read = documents(tmp_path / "rows.parquet", **columns)
    assert [(one.id, one.text) for one in read] == [("p", "one"), ("q", "two")]


def test_a_row_or_file_without_a_text_is_a_document_with_a_problem(tmp_path):
    rows = ['{"id": "cut', {"id": "list", "text": ["x"]}, {"id": "none", "text": None}]
    rows += [{"id": "no column"}, "[1]", {"id": "good", "text": "x"}]
    read = documents(write_rows(tmp_path / "rows.jsonl", rows))
    problems = {one.id: one.problem for one in read}
    assert "not JSON" in problems["rows.jsonl#0"]
    assert "holds list" in problems["list"]
    assert "holds nothing" in problems["none"]
    assert "no column 'text'" in problems["no column"]
    assert "not a JSON object" in problems["rows.jsonl#4"]
    assert problems["good"] is None
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "zero.txt").write_bytes(b"a\0b")
    by_file = {one.id: one.problem for one in documents(folder)}
    assert "not UTF-8" in by_file["latin.txt"]
    assert "zero byte" in by_file["zero.txt"]


def test_a_row_without_the_id_column_is_named_by_its_place(tmp_path):
    columns = {"text_column": "body", "id_column": "name"}
    rows = [{"name": "a", "body": "x"}, {"title": "b", "body": "x"}]
    file = write_rows(tmp_path / "typing-error.jsonl", rows)
    problems = {one.id: one.problem for one in documents(file, **columns)}
    assert problems["a"] is None
    assert "no column 'name'" in problems["typing-error.jsonl#1"]


def test_columns_of_bytes_are_read_as_utf_8(tmp_path):
    columns = {"id": [b"a", b"b\xff", b"c"], "text": [b"caf\xc3\xa9", b"the cat", b"caf\xe9"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    read = [(one.id, one.text, one.problem) for one in documents(tmp_path / "x.parquet")]
    problem = "column 'text' holds bytes that are not UTF-8, not text"
    assert read[0] == ("a", "caf\u00e9", None)
    assert read[1] == ("x.parquet#1", "the cat", None)
    assert read[2] == ("c", "", problem)


def test_json_lines_that_are_not_unicode_are_no_documents(tmp_path):
    lines = [b'{"id": "a", "text": "caf\xe9"}', b'{"id": "b", "text": "\\ud83d!"}']
    lines += [b'{"id": "c", "text": "\\ud83d\\ude00"}', '{"id": "d", "text": "\u00e9"}'.encode()]
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines))
    read = [(one.id, one.text, one.problem) for one in documents(tmp_path / "x.jsonl")]
    assert read == [
        ("a", "", "row 0 is not UTF-8 text"),
        ("b", "", "column 'text' holds half a character"),
        ("c", "\U0001f600", None),
        ("d", "\u00e9", None),
    ]


def test_files_of_other_kinds_are_named(tmp_path):
    (tmp_path / ".git").mkdir()
    for name in ["a.txt", "b.pdf", "C.TXT", ".hidden", ".hidden.txt", ".git/a.txt"]:
        (tmp_path / name).touch()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    files = corpus_files(str(tmp_path))
    assert [file.name for file in files] == ["C.TXT", "a.txt"]
    assert [path.name for path in left_out(str(tmp_path), files)] == ["b.pdf", "gone.txt"]


def test_a_file_whose_name_is_not_utf_8_is_a_document(tmp_path):
    try:
        (tmp_path / os.fsdecode(b"bad\xff.txt")).write_text("x")
    except OSError:
        pytest.skip("this file system has names in UTF-8 alone")
    assert [(one.id, one.text) for one in documents(tmp_path)] == [("bad\ufffd.txt", "x")]


def test_a_single_text_file_is_a_corpus_of_one_document(tmp_path):
    (tmp_path / "minutes.txt").write_text("the cat")
    (only,) = documents(tmp_path / "minutes.txt")
    assert (only.id, only.text) == ("minutes.txt", "the cat")


def test_lines_that_another_system_wrote_are_read_as_its_rows(tmp_path):
    row = {"id": "a", "text": "caf\u00e9"}
    content = json.dumps(row, ensure_ascii=False)
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{content}\r\n\r\n".encode())
    (only,) = documents(tmp_path / "rows.jsonl")
    assert (only.id, only.text, only.problem) == ("a", "caf\u00e9", None)
    (tmp_path / "wide.jsonl").write_bytes(f"{content}\n".encode("utf-16"))
    assert all("not JSON" in one.problem for one in documents(tmp_path / "wide.jsonl"))


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
def test_a_text_file_with_other_line_ends_is_the_text_that_compress_text_reads(tmp_path, end):
    (tmp_path / "a.txt").write_bytes(end.join([b"the cat", b"", b"sees it", b""]))
    (only,) = documents(tmp_path)
    assert only.text == read_text(tmp_path / "a.txt") == "the cat\n\nsees it\n"


def test_a_row_without_an_end_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr("kvcat.data.documents.MOST_TEXT_BYTES", 64)
    file = tmp_path / "rows.jsonl"
    texts = ["short", "long " * 100, "also short"]
    file.write_text("".join(json.dumps({"id": text[:4], "text": text}) + "\n" for text in texts))
    documents = list(read_corpus(corpus_files(str(file))))
    assert [document.text for document in documents] == ["short", "", "also short"]
    assert documents[1].problem == f"row 1 of {file} is longer than 0 MiB"


def test_json_files_of_a_folder_are_texts(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1}\n')
    (tmp_path / "b.txt").write_text("text")
    documents = list(read_corpus(corpus_files(str(tmp_path))))
    assert [(document.id, document.text) for document in documents] == [
        ("a.json", '{"a": 1}\n'),
        ("b.txt", "text"),
    ]
