"""Documents from files, folders, the installation and the Hub."""

import json
import random
import time
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcat.data import (
    Document,
    file_documents,
    hub_documents,
    installed_documents,
    open_documents,
    open_shards,
    split_documents,
    split_of,
)
from kvcat.data import held_out as held_out_module
from kvcat.data import shards as shards_module
from kvcat.data.rows import PIECE_CHARACTERS
from kvcat.errors import InputError


def pairs(source):
    return [(d.id, d.text) for d in open_documents(str(source))]


def refusal(source):
    with pytest.raises(InputError) as caught:
        pairs(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_a_short_text_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("hello\n")
    assert pairs(tmp_path / "a.txt") == [("a.txt#0", "hello\n")]


def test_an_empty_text_has_no_document(tmp_path):
    (tmp_path / "a.txt").write_text("")
    assert pairs(tmp_path / "a.txt") == []


@given(st.lists(st.integers(0, 3 * PIECE_CHARACTERS // 2), max_size=5), st.booleans())
@settings(max_examples=20, deadline=None)
def test_the_pieces_of_a_long_text_rejoin_to_the_text(tmp_path_factory, lengths, ends):
    text = "\n".join("x" * length for length in lengths) + "\n" * ends
    file = tmp_path_factory.mktemp("long") / "long.txt"
    file.write_text(text)
    found = list(file_documents(file))
    assert "".join(d.text for d in found) == text
    assert [d.id for d in found] == [f"long.txt#{i}" for i in range(len(found))]
    assert all(0 < len(d.text) <= PIECE_CHARACTERS for d in found)


def test_a_long_text_is_cut_at_line_ends_where_there_are_any(tmp_path):
    line = "words and more words\n"
    (tmp_path / "a.md").write_text(line * 3000)
    pieces = [text for _, text in pairs(tmp_path / "a.md")]
    assert len(pieces) > 2
    assert all(piece.endswith("\n") and len(piece) > PIECE_CHARACTERS - len(line) for piece in pieces[:-1])


def test_jsonl_rows_are_documents_named_by_their_id_or_their_place(tmp_path):
    rows = [{"text": "one", "id": "first"}, {"text": "two"}, {"text": None, "id": "void"}, {"text": "four", "id": 4}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert pairs(tmp_path / "a.jsonl") == [("first", "one"), ("a.jsonl#1", "two"), ("4", "four")]


def test_parquet_rows_are_documents_in_their_order(tmp_path):
    numbers = [str(i) for i in range(600)]
    file = write_parquet(tmp_path / "a.parquet", text=[f"text {i}" for i in numbers], id=numbers)
    assert pairs(file) == [(i, f"text {i}") for i in numbers]


def test_documents_are_read_as_datasets_reads_them(tmp_path):
    import datasets

    texts = ["one\n", "zw\u00f6lf", ""]
    parquet = write_parquet(tmp_path / "a.parquet", text=texts)
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for builder, file in (("parquet", parquet), ("json", jsonl)):
        rows = datasets.load_dataset(builder, data_files=str(file), split="train", streaming=True)
        assert [row["text"] for row in rows] == [text for _, text in pairs(file)]


def test_a_folder_gives_its_readable_files_in_the_order_of_their_names(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "z.txt").write_text("z")
    (tmp_path / "a.jsonl").write_text('{"text": "row"}\n')
    (tmp_path / "c.md").write_text("c")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    assert pairs(tmp_path) == [("a.jsonl#0", "row"), ("b/z.txt#0", "z"), ("c.md#0", "c")]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", b"caf\xe9 au lait", "a.txt is not UTF-8 text: invalid continuation byte at byte 3"),
        ("a.jsonl", b'{"text": "caf\xe9"}', "not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "row 1 of .*, at byte 14, is not JSON"),
        ("a.jsonl", b"[1, 2]\n", "row 0 of .*, is no JSON object"),
        ("a.jsonl", b'{"body": "a", "id": 1}\n', "no column 'text'; its columns: body, id"),
        ("a.jsonl", b'{"text": ["a"]}\n', "holds list, not text"),
        ("a.parquet", b"no parquet", "cannot be read as parquet"),
        ("picture.png", b"\x89PNG", "not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_in_one_line(name, content, told, tmp_path):
    (tmp_path / name).write_bytes(content)
    line = refusal(tmp_path / name)
    assert name in line
    with pytest.raises(InputError, match=told):
        pairs(tmp_path / name)


def test_a_parquet_file_without_the_text_column_names_its_columns(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", body=["a"], id=["1"])
    assert "its columns: body, id" in refusal(file)


def test_a_missing_path_and_a_folder_without_texts_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(InputError, match="no such text file or folder"):
        open_documents(str(tmp_path / "gone"))
    (tmp_path / "picture.png").write_bytes(b"")
    with pytest.raises(InputError, match="no text"):
        open_documents(str(tmp_path))


@pytest.mark.parametrize("name", ["nobody/texts", "nobody/texts/config@validation"])
def test_a_hub_data_set_without_network_is_refused_within_seconds(name, monkeypatch):
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.delenv("ALL_PROXY", raising=False)
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://192.0.2.1")  # swallows packets
    patient = shards_module.hub_obstacle
    monkeypatch.setattr(shards_module, "hub_obstacle", lambda: patient(0.2))
    started = time.monotonic()
    assert "nobody/texts" in refusal(f"hub:{name}")
    assert time.monotonic() - started < 3


def test_the_offline_switch_of_the_hub_is_named(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal("hub:nobody/texts")


@pytest.mark.parametrize("name", ["", "a b", "../x"])
def test_what_is_no_name_of_a_data_set_is_refused(name):
    assert "hub:OWNER/NAME" in refusal(f"hub:{name}")


def fake_hub(monkeypatch, listed, asked=None):
    """The Hub's file lists come from ``listed``, by configuration and revision."""
    import datasets

    def load_dataset_builder(path, config, *, revision):
        if asked is not None:
            asked.append((path, config, revision))
        return SimpleNamespace(config=SimpleNamespace(data_files=listed))

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    monkeypatch.setattr(shards_module, "hub_obstacle", lambda: None)


def test_hub_names_carry_configuration_and_split(monkeypatch, tmp_path):
    file = write_parquet(tmp_path / "a.parquet", text=["one", "two"])
    asked = []
    fake_hub(monkeypatch, {"test": [f"file://{file}"], "train": [f"file://{file}"]}, asked)
    assert [d.text for d in hub_documents("o/n/c@test")] == ["one", "two"]
    list(hub_documents("o/n"))
    assert asked == [("o/n", "c", None), ("o/n", None, None)]
    with pytest.raises(InputError, match="no split 'dev'; its splits: test, train"):
        hub_documents("o/n@dev")


def test_documents_of_the_hub_are_named_after_their_file_and_pinned_to_its_commit(monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    fake_hub(monkeypatch, {"train": [f"hf://datasets/o/n@{commit}/data/{i}.parquet" for i in (1, 0)]})
    shards = open_shards("hub:o/n")
    assert [shard.name for shard in shards.files] == ["data/0.parquet", "data/1.parquet"]
    assert shards.revision == commit
    assert all(shard.remote for shard in shards.files)


def test_a_hub_data_set_of_another_kind_is_refused_by_its_file(monkeypatch):
    fake_hub(monkeypatch, {"train": ["hf://datasets/o/n@main/data/a.tar"]})
    assert "data/a.tar; only parquet, JSON lines and text stream" in refusal("hub:o/n")


def test_a_stream_is_read_no_further_than_the_limit(monkeypatch):
    def endless(_):
        number = 0
        while True:
            yield Document(str(number), str)
            number += 1

    monkeypatch.setattr(held_out_module, "open_documents", endless)
    assert [d.id for d in split_documents("hub:o/n", "all", limit=3)] == ["0", "1", "2"]
    found = split_documents("hub:o/n", "test", limit=4)
    assert len(found) == 4
    assert {split_of(d.id) for d in found} == {"test"}


def test_the_installed_corpus_lists_the_same_names_twice_and_reads(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("kvcat.data.installed.read_source", lambda _: pytest.fail("a listing read a file"))
        found = {d.id: d for d in open_documents("installed")}
    first = list(found)
    assert first == [d.id for d in installed_documents()]
    assert first == sorted(first)
    assert len(first) > 3000
    assert {"stdlib", "torch", "transformers", "numpy"} <= {name.split("/")[0] for name in first}
    assert not any("/tests/" in name or "/test/" in name or "site-packages" in name for name in first)
    assert "def dataclass(" in found["stdlib/dataclasses.py"].text
    for name in random.Random(0).sample(first, 20):
        assert len(found[name].text) >= 100


def test_a_split_without_documents_is_refused_by_name(tmp_path):
    (tmp_path / "a.txt").write_text("alone\n")
    with pytest.raises(InputError, match=r"no document in split '(test|validation|train)' \(of 1\)"):
        [split_documents(str(tmp_path), split) for split in ("train", "validation", "test")]
    assert [d.text for d in split_documents(str(tmp_path), "all")] == ["alone\n"]
