"""A prepared folder: complete or absent, and rejected if it is damaged."""

import re
import resource
import shutil
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from kvcat.data import Encoder, open_documents, open_tokens, pack, prepare, split_of, token_files
from kvcat.data.token_files import open_token_folder
from kvcat.errors import InputError
from kvcat.files import json_bytes, read_json
from text_files import of_split, texts, write_corpus, write_lines
from tiny import byte_tokenizer, refusal

COUNTS = {"batch_size": 3, "max_steps": 4, "validation_sequences": 3, "seed": 0}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    return str(folder), write_corpus(folder, "groups")


@pytest.fixture(scope="module")
def good(tmp_path_factory, corpus, tokenizer):
    folder = tmp_path_factory.mktemp("prepared") / "tokens"
    prepare(corpus[0], tokenizer, folder)
    return folder


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(token_files, "BATCH_CHARACTERS", 300)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def interrupted(at, *args, **options):
    """Prepare until progress is reported for the ``at``-th time; returns all reports."""
    calls = []

    def stop(progress):
        calls.append(progress)
        if len(calls) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(*args, on_progress=stop, **options)
    return calls


def test_every_document_is_there_once_in_order_and_held_out_ones_are_apart(
    corpus, good, tokenizer, tmp_path
):
    index = read_json(good / "tokens.json")
    for split in ("train", "validation"):
        assert index["splits"][split]["documents"] == len(of_split(corpus[1], split))
    write_corpus(tmp_path / "texts", "lines", num_files=1, a_file=80)
    prepare(str(tmp_path / "texts"), tokenizer, tmp_path / "tokens")
    tables = open_token_folder(tmp_path / "tokens", Encoder.of(tokenizer), 12)
    for split, table in zip(("train", "validation"), tables, strict=True):
        documents = (d for d in open_documents(str(tmp_path / "texts")) if split_of(d.id) == split)
        assert np.array_equal(table[:], pack(documents, Encoder.of(tokenizer), 12))
        assert table[0].dtype == np.uint16


def test_a_vocabulary_of_more_than_65536_tokens_is_prepared_and_read(tmp_path):
    words = WordLevel({"<unk>": 0, "the": 1, "<eos>": 70_000}, unk_token="<unk>")
    backend = Tokenizer(words)
    backend.pre_tokenizer = Whitespace()
    large = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    write_corpus(tmp_path / "texts", "lines", num_files=1, a_file=80)
    prepare(str(tmp_path / "texts"), large, tmp_path / "tokens")
    train, _ = open_token_folder(tmp_path / "tokens", Encoder.of(large), 12)
    assert train[:].max() == 70_000  # the end of every document


@pytest.mark.parametrize("count", [1, 50, 1999])
def test_reading_ends_at_the_requested_tokens_with_some_to_validate_on_and_one_writer(
    corpus, good, tokenizer, tmp_path, count
):
    def another(_):
        with pytest.raises(InputError, match=r"another process is writing to .*tokens.partial"):
            prepare(corpus[0], tokenizer, folder)

    folder = tmp_path / "tokens"
    index = prepare(corpus[0], tokenizer, folder, max_tokens=count, on_progress=another)
    assert index["splits"]["train"]["tokens"] == count
    assert index["splits"]["validation"]["tokens"] > 0
    assert (good / "train.bin").read_bytes().startswith((folder / "train.bin").read_bytes())
    open_token_folder(folder, Encoder.of(tokenizer), 1)


@given(st.integers(1, 15), st.booleans(), st.sampled_from([0, 5]))
@settings(max_examples=12, deadline=None)
def test_stopped_anywhere_the_same_call_gives_the_same_folder_and_one_of_other_settings_begins_anew(
    corpus, good, tokenizer, tmp_path_factory, at, killed, seed
):
    folder = tmp_path_factory.mktemp("stopped") / "tokens"
    calls = interrupted(at, corpus[0], tokenizer, folder, seed=seed)
    assert not folder.exists()
    if killed:  # tokens that were written after the last record of progress
        with (folder.with_name("tokens.partial") / "train.bin").open("ab") as file:
            file.write(b"more")
    seen = []
    prepare(corpus[0], tokenizer, folder, on_progress=seen.append)
    assert contents(folder) == contents(good)
    assert seed or (len(seen) <= 31 and seen[0] >= calls[-1])


@pytest.mark.parametrize("num_bytes", [None, 5])
def test_tokens_that_are_gone_from_an_unfinished_folder_are_missed(
    corpus, tokenizer, tmp_path, num_bytes
):
    interrupted(10, corpus[0], tokenizer, tmp_path / "tokens")
    file = tmp_path / "tokens.partial" / "train.bin"
    content = file.read_bytes()
    file.unlink() if num_bytes is None else file.write_bytes(content[:num_bytes])
    with pytest.raises(InputError, match=rf"has {num_bytes or 0} of the {len(content)} bytes"):
        prepare(corpus[0], tokenizer, tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()


def test_stopped_at_its_limit_or_before_the_folder_has_its_name_the_same_call_only_finishes(
    corpus, tokenizer, tmp_path, monkeypatch
):
    whole = tmp_path / "whole"
    folder = tmp_path / "tokens"
    calls = []
    prepare(corpus[0], tokenizer, whole, max_tokens=300, on_progress=calls.append)
    interrupted(len(calls), corpus[0], tokenizer, folder, max_tokens=300)
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(corpus[0], tokenizer, folder, max_tokens=300)
    prepare(
        corpus[0],
        tokenizer,
        folder,
        max_tokens=300,
        on_progress=lambda _: pytest.fail("it was read again"),
    )
    assert contents(folder) == contents(whole)


def test_a_source_that_is_gone_or_a_full_disk_costs_nothing_that_was_written(
    corpus, good, tokenizer, tmp_path, monkeypatch
):
    texts = shutil.copytree(corpus[0], tmp_path / "texts")
    interrupted(5, str(texts), tokenizer, tmp_path / "tokens", max_tokens=2000)
    before = contents(tmp_path / "tokens.partial")
    texts.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="texts"):
        prepare(str(texts), tokenizer, tmp_path / "tokens", max_tokens=2000)
    (tmp_path / "elsewhere").rename(texts)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=0))
        with pytest.raises(InputError, match="no disk space"):
            prepare(str(texts), tokenizer, tmp_path / "tokens", max_tokens=2000)
    assert contents(tmp_path / "tokens.partial") == before
    seen = []
    prepare(str(texts), tokenizer, tmp_path / "tokens", max_tokens=2000, on_progress=seen.append)
    assert seen[0] > 0


def test_a_complete_folder_is_left_as_it_is_and_one_of_something_else_is_rejected(
    corpus, good, tokenizer, tmp_path
):
    folder = shutil.copytree(good, tmp_path / "tokens")
    index = prepare(
        corpus[0], tokenizer, folder, on_progress=lambda _: pytest.fail("it was made again")
    )
    assert index == read_json(good / "tokens.json")
    with pytest.raises(InputError, match="max_tokens is 0; it must be at least 1"):
        prepare(corpus[0], tokenizer, tmp_path / "none", max_tokens=0)
    with pytest.raises(InputError, match="holds other tokens: its max_tokens is None, not 5"):
        prepare(corpus[0], tokenizer, folder, max_tokens=5)
    with pytest.raises(InputError, match="its tokenizer is"):
        prepare(corpus[0], byte_tokenizer(280), folder)
    with pytest.raises(InputError, match="is not empty and holds no prepared tokens"):
        prepare(corpus[0], tokenizer, tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="file is a file: name a folder to write"):
        prepare(corpus[0], tokenizer, tmp_path / "file")
    with pytest.raises(InputError, match="holds prepared tokens, not text"):
        open_documents(str(good))


def test_too_little_disk_space_is_named_before_reading_and_a_full_disk_keeps_what_is_written(
    corpus, good, tokenizer, tmp_path, monkeypatch
):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # bytes of any file
    try:
        with pytest.raises(InputError, match=r"cannot write to .*tokens.partial: File too large"):
            prepare(corpus[0], tokenizer, tmp_path / "tokens")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    prepare(corpus[0], tokenizer, tmp_path / "tokens")
    assert contents(tmp_path / "tokens") == contents(good)
    monkeypatch.setattr(
        token_files, "read_documents", lambda *_, **__: pytest.fail("text was read")
    )
    with pytest.raises(InputError, match=r"no disk space for .* MB free, .* MB needed"):
        prepare(corpus[0], tokenizer, tmp_path / "other", max_tokens=10**12)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("validation", "has no train document among"),
        ("train", "has no validation document among"),
        (b'{"text": "good"}\n{"text": ', r"a\.jsonl"),
        (b'{"body": "no text"}\n', r"a\.jsonl"),
    ],
)
def test_text_that_lacks_a_split_or_cannot_be_read_is_rejected_and_leaves_nothing(
    tokenizer, tmp_path, content, message
):
    file = tmp_path / "a.jsonl"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        write_lines(file, of_split(texts(40), content))
    with pytest.raises(InputError, match=message):
        prepare(str(file), tokenizer, tmp_path / "tokens")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train.bin", lambda data: data[:-2], r"train.bin is damaged: it has \d+ bytes, not \d+"),
        ("validation.bin", None, "is incomplete: validation.bin is missing"),
        ("tokens.json", lambda data: b"[]", "does not contain a JSON object"),
        (
            "tokens.json",
            lambda data: json_bytes({"format": "kvcat tokens", "version": 2}),
            "has format 2, and this version of kvcat reads 1: prepare",
        ),
        ("validation.crc32", None, "is incomplete: validation.crc32 is missing"),
        ("train.crc32", lambda data: data[:-1], r"train.crc32 is damaged: it has 3 bytes, not 4"),
        (
            "tokens.json",
            lambda data: json_bytes({"format": "kvcat tokens", "version": 1}),
            "lacks 'source'",
        ),
    ],
)
def test_a_damaged_folder_is_rejected_in_one_line(good, tokenizer, tmp_path, name, change, message):
    file = shutil.copytree(good, tmp_path / "damaged") / name
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
    assert re.search(
        message, refusal(open_tokens, str(file.parent), tokenizer, seq_len=8, **COUNTS)
    )


def test_a_prepared_folder_is_mapped_read_only_and_trained_on_at_any_length_with_its_tokenizer(
    good, tokenizer
):
    for seq_len in (5, 8):
        data = open_tokens(str(good), tokenizer, seq_len=seq_len, **COUNTS)
        table, _ = open_token_folder(good, Encoder.of(tokenizer), seq_len)
        assert isinstance(table[:], np.memmap)
        assert not table[:].flags.writeable
        order = np.random.default_rng([0, 0]).permutation(len(table)).tolist()
        assert data.train.read().tolist() == table[np.array(order[:3])].tolist()
        assert len(data.validation) == 3
    for vocabulary, seq_len, message in (
        (280, 8, "of tokenizer .*, not of"),
        (300, 10**5, "fewer than one seq"),
    ):
        with pytest.raises(InputError, match=message):
            open_token_folder(good, Encoder.of(byte_tokenizer(vocabulary)), seq_len)


def test_a_row_with_half_of_an_emoji_is_prepared_and_an_unexpected_error_leaves_nothing(
    tokenizer, tmp_path, monkeypatch
):
    rows = texts(40)
    rows["doc-7"] += " half \ud83d of it"
    write_lines(tmp_path / "a.jsonl", rows)
    index = prepare(str(tmp_path / "a.jsonl"), tokenizer, tmp_path / "tokens")
    assert sum(split["documents"] for split in index["splits"].values()) > 30

    def fail(*_):
        raise TypeError("unexpected")

    monkeypatch.setattr(Encoder, "__call__", fail)
    with pytest.raises(TypeError, match="unexpected"):
        prepare(str(tmp_path / "a.jsonl"), tokenizer, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "tokens"]


def test_a_link_to_a_folder_stays_and_the_folder_is_prepared(corpus, good, tokenizer, tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there")
    prepare(corpus[0], tokenizer, link)
    assert link.is_symlink()
    assert contents(tmp_path / "there") == contents(good)
