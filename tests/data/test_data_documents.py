"""Documents from files, folders, the installation and the Hub."""

import gzip
import json
import struct
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from kvcat.data import documents as documents_module
from kvcat.data import open_documents
from kvcat.data.documents import PIECE_CHARACTERS, SourceFile, open_source, read_documents
from kvcat.data.rows import read_rows
from kvcat.errors import InputError
from tiny import refusal


def pairs(source):
    return [(d.id, d.text) for d in open_documents(str(source))]


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_a_long_text_is_cut_at_line_ends_where_there_are_any_and_its_pieces_rejoin_to_it(tmp_path):
    short = "a" * 5
    line = "words and more words\r\n"
    for text in ("", short, "x" * 40_000, line * 3000 + "x" * 40_000):
        (tmp_path / "long.md").write_bytes(text.encode())
        pieces = pairs(tmp_path / "long.md")
        assert "".join(piece for _, piece in pieces) == text.replace("\r\n", "\n")
        assert [name for name, _ in pieces] == [f"long.md#{i}" for i in range(len(pieces))]
        assert all(0 < len(piece) <= PIECE_CHARACTERS for _, piece in pieces)
        assert len(pieces) == {0: 0, 5: 1, 40_000: 3}.get(len(text), 7)
    assert all(
        piece.endswith("\n") and len(piece) > PIECE_CHARACTERS - len(line)
        for _, piece in pieces[:3]
    )


def test_rows_of_a_table_are_documents_named_by_their_id_or_their_place_as_datasets_reads_them(
    tmp_path,
):
    import datasets

    rows = [
        {"text": "one", "id": "first"},
        {"text": "two"},
        {"text": None, "id": "void"},
        {"text": "four", "id": 4},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert pairs(tmp_path / "a.jsonl") == [("first", "one"), ("a.jsonl#1", "two"), ("4", "four")]
    texts = [f"text {i}" for i in range(600)] + ["zw\u00f6lf", ""]
    parquet = write_parquet(tmp_path / "a.parquet", text=texts, id=[str(i) for i in range(602)])
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for builder, file in (("parquet", parquet), ("json", jsonl)):
        rows = datasets.load_dataset(builder, data_files=str(file), split="train", streaming=True)
        # one without a letter would be a document of an end token alone
        with_text = [row["text"] for row in rows if row["text"]]
        assert with_text == [text for _, text in pairs(file)]
    assert [name for name, _ in pairs(parquet)] == [str(i) for i in range(601)]


def test_a_row_whose_id_is_0_has_that_name_and_one_with_an_empty_id_has_none(tmp_path):
    jsonl = tmp_path / "a.jsonl"
    rows = [{"text": "zero", "id": 0}, {"text": "one", "id": 1}, {"text": "two", "id": ""}]
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_parquet(tmp_path / "b.parquet", text=["zero", "one"], id=[0, 1])
    assert pairs(jsonl) == [("0", "zero"), ("1", "one"), ("a.jsonl#2", "two")]
    assert pairs(tmp_path / "b.parquet") == [("0", "zero"), ("1", "one")]


def test_a_folder_gives_its_readable_files_in_the_order_of_their_names(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "z.txt").write_text("z")
    (tmp_path / "a.jsonl").write_text('{"text": "row"}\n')
    (tmp_path / "c.md").write_text("c")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    assert pairs(tmp_path) == [("a.jsonl#0", "row"), ("b/z.txt#0", "z"), ("c.md#0", "c")]


@pytest.mark.slow
def test_the_installed_corpus_holds_the_library_and_packages_without_tests():
    documents = {d.id: d for d in open_documents("installed")}
    names = list(documents)
    assert names == sorted(names)
    assert {"stdlib", "torch", "transformers", "numpy"} <= {name.split("/")[0] for name in names}
    assert not any(
        "/tests/" in name or "/test/" in name or "site-packages" in name for name in names
    )
    assert "def dataclass(" in documents["stdlib/dataclasses.py"].text


def fake_hub(monkeypatch, listed, calls=None):
    """The Hub's file lists come from ``listed``; requests are recorded in ``calls``."""
    import datasets

    def load_dataset_builder(path, config, *, revision):
        if isinstance(listed, Exception):
            raise listed
        if calls is not None:
            calls.append((path, config, revision))
        return SimpleNamespace(config=SimpleNamespace(data_files=listed))

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    monkeypatch.setattr("kvcat.hub.hub_obstacle", lambda: None)


def test_hub_names_carry_configuration_and_split_and_files_their_commit(monkeypatch, tmp_path):
    file = write_parquet(tmp_path / "a.parquet", text=["one", "two"])
    calls = []
    fake_hub(monkeypatch, {"test": [f"file://{file}"], "train": [f"file://{file}"]}, calls)
    assert [d.text for d in open_documents("hub:o/n/c@test")] == ["one", "two"]
    open_documents("hub:o/n")
    assert calls == [("o/n", "c", None), ("o/n", None, None)]
    with pytest.raises(InputError, match="no split 'dev'; its splits: test, train"):
        open_documents("hub:o/n@dev")
    commit = "0123456789abcdef0123456789abcdef01234567"
    fake_hub(
        monkeypatch,
        {"train": [f"hf://datasets/o/n@{commit}/data/{i}" for i in ("1.parquet", "0.json.gz")]},
    )
    source = open_source("hub:o/n")
    assert [(file.name, file.kind) for file in source.files] == [
        ("data/0.json.gz", "jsonl"),
        ("data/1.parquet", "parquet"),
    ]
    assert source.revision == commit


def test_a_hub_data_set_is_no_local_folder_of_its_name(monkeypatch, tmp_path):
    (tmp_path / "o" / "n").mkdir(parents=True)
    (tmp_path / "o" / "n" / "train.jsonl").write_text('{"text": "local"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvcat.hub.hub_obstacle", lambda: None)
    for read in (open_source, lambda name: list(read_rows(name))):
        assert "hub:o/n is also the name of a folder here" in refusal(read, "hub:o/n")


def test_a_hub_data_set_of_another_kind_and_what_clients_of_the_network_raise_end_in_one_line(
    monkeypatch,
):
    fake_hub(monkeypatch, {"train": ["hf://datasets/o/n@main/data/a.tar"]})
    assert "data/a.tar; only parquet, JSON lines and text can be streamed" in refusal(
        pairs, "hub:o/n"
    )
    fake_hub(monkeypatch, FileNotFoundError("no such\ndata set"))
    assert "cannot be opened: FileNotFoundError: no such data set" in refusal(pairs, "hub:o/n")

    def fail(*_, **__):
        raise type("ReadTimeout", (Exception,), {})("the line\nis dead")

    monkeypatch.setattr(documents_module.fsspec, "open", fail)
    with pytest.raises(
        InputError, match=r"a.parquet cannot be read as parquet: ReadTimeout: the line is dead"
    ):
        list(read_documents(SourceFile("a.parquet", "hf://datasets/o/n/a.parquet", "parquet")))


def test_what_is_no_unicode_in_a_row_becomes_a_replacement_and_the_other_rows_are_read(
    tmp_path, caplog
):
    lines = [b'{"text": "one"}', b'{"text": "half \\ud83d of it"}', b'{"text": "caf\xe9"}']
    lines += [b'{"text": "\xed\xa0\xbd", "id": "\\udc80"}', b'{"text": "whole \\ud83d\\ude00"}']
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    rows = pairs(tmp_path / "a.jsonl")
    assert [text for _, text in rows] == [
        "one",
        "half \ufffd of it",
        "caf\ufffd",
        "\ufffd",
        "whole \U0001f600",
    ]
    assert rows[3][0] == "\ufffd"
    (record,) = caplog.records
    assert "row 1 of" in record.getMessage()
    assert "U+FFFD" in record.getMessage()


def test_bytes_that_are_not_utf_8_in_a_parquet_file_become_replacements(tmp_path):
    data = [b"one", b"half \xed\xa0\xbd!", b"caf\xe9", b"four"]
    offsets = [0]
    for text in data:
        offsets.append(offsets[-1] + len(text))
    buffers = [pyarrow.py_buffer(struct.pack("<5i", *offsets)), pyarrow.py_buffer(b"".join(data))]
    column = pyarrow.StringArray.from_buffers(4, *buffers)
    write_parquet(tmp_path / "a.parquet", text=column, id=pyarrow.array([1, 2, 3, 4]))
    expected = [("1", "one"), ("2", "half \ufffd\ufffd\ufffd!"), ("3", "caf\ufffd"), ("4", "four")]
    assert pairs(tmp_path / "a.parquet") == expected


def test_a_binary_column_of_utf_8_text_is_read_without_a_warning(tmp_path, caplog):
    column = pyarrow.array([b"one", "caf\u00e9".encode()], pyarrow.binary())
    write_parquet(tmp_path / "a.parquet", text=column, id=pyarrow.array([1, 2]))
    assert pairs(tmp_path / "a.parquet") == [("1", "one"), ("2", "caf\u00e9")]
    assert not caplog.records


def test_a_byte_order_mark_at_the_start_of_a_text_is_no_part_of_it(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfthe cat\n")
    assert pairs(tmp_path / "a.txt") == [("a.txt#0", "the cat\n")]


def test_a_byte_order_mark_at_the_start_of_a_rows_text_is_no_part_of_it(tmp_path):
    rows = [{"text": "\ufeffThe cat.", "id": "a"}, {"text": "The\ufeff cat.", "id": "b"}]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    documents = list(open_documents(str(tmp_path / "t.jsonl")))
    assert [document.text for document in documents] == ["The cat.", "The\ufeff cat."]


@pytest.mark.parametrize("name", ["a.ndjson", "a.ndjson.gz", "a.jsonlines", "A.JSONL", "a.JSON.gz"])
def test_json_lines_of_every_suffix_are_rows_named_or_in_a_folder(tmp_path, name):
    content = b'{"text": "one"}\n{"text": "two"}\n'
    packed = gzip.compress(content) if name.endswith(".gz") else content
    (tmp_path / name).write_bytes(packed)
    rows = [(f"{name}#0", "one"), (f"{name}#1", "two")]
    assert pairs(tmp_path / name) == rows
    if "json." not in name.lower():  # .json holds rows only if it is named itself
        assert pairs(tmp_path) == rows


def test_zst_files_need_a_decompressor_that_notices_a_cut_file(tmp_path, monkeypatch):
    """fsspec takes the package zstandard, which does not, if it has no other."""
    (tmp_path / "a.txt.zst").write_bytes(b"anything")

    def zstandard_file(infile, mode="rb"):
        return infile

    for made in ({}, {"zstd": zstandard_file}):
        monkeypatch.setattr(documents_module.fsspec.compression, "compr", made)
        assert "pip install -U backports.zstd" in refusal(pairs, tmp_path / "a.txt.zst")


def test_a_parquet_file_with_two_columns_of_one_name_is_rejected(tmp_path):
    columns = [pyarrow.array([text]) for text in ("first", "second", "third")]
    for names in (["text", "text", "id"], ["id", "text", "id"], ["a", "b", "a"]):
        table = pyarrow.Table.from_arrays(columns, names)
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        twice = max(names, key=names.count)
        assert f"has 2 columns named '{twice}'" in refusal(pairs, tmp_path / "a.parquet")
    table = pyarrow.Table.from_arrays(columns, ["a", "text", "a"])  # none of those that are read
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert pairs(tmp_path / "a.parquet") == [("a.parquet#0", "second")]


@pytest.mark.parametrize("size", [1, 4, 5, 11, 12])
def test_any_byte_of_a_local_file_changes_the_revision_of_its_source(tmp_path, monkeypatch, size):
    monkeypatch.setattr(documents_module, "HASHED_BYTES", 4)
    monkeypatch.setattr(documents_module, "HASHED_PIECES", 3)
    path = tmp_path / "a.txt"

    def revision(content):
        path.write_bytes(bytes(content))
        return open_source(str(tmp_path)).revision

    content = [65] * size
    edited = [[*content[:place], 66, *content[place + 1 :]] for place in range(size)]
    assert len({revision(each) for each in [content, *edited]}) == size + 1
    assert revision(content) == revision(content)
    in_larger = revision([65] * 99)
    assert revision([65] * 98 + [66]) != in_larger  # the last piece ends with the file
