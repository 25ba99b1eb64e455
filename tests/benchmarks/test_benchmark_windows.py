"""Windows of several kinds of text, the same for every model."""

from argparse import ArgumentParser
from itertools import pairwise

import pandas as pd
import pytest
from windows import HALVES, Source, add_options, choose, encoder, half_of, long_texts, stored

from kvcat.errors import InputError
from kvcat.files import append_jsonl
from tiny import refusal, sentences
from tokenizers_zoo import byte_level


def by_word(text):
    return [hash(word) % 1000 for word in text.split()]


def by_letter(text):
    return list(text.encode())


@pytest.fixture
def folder(tmp_path):
    """Text files of several suffixes, a table of each kind, and a file that is no text."""
    notes = tmp_path / "notes"
    notes.mkdir()
    for index in range(12):
        (notes / f"minutes-{index}.log").write_text("".join(sentences(60, seed=index)))
    (notes / "code.js").write_text("const x = 1;\n" * 300)
    (notes / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    rows = ["".join(sentences(60, seed=50 + index)) for index in range(3)]
    append_jsonl(notes / "chat.jsonl", *({"text": row} for row in rows))
    pd.DataFrame({"text": rows[:2]}).to_parquet(notes / "table.parquet")
    return notes


def chosen(folder, **options):
    sources = [Source("notes", str(folder))]
    return choose(sources, [by_word], **{"length": 40, "num_windows": 30, **options})


def test_every_text_file_and_every_row_of_a_table_is_a_document(folder):
    names = [name for name, _ in Source("notes", str(folder)).documents(100)]
    assert len(names) == len(set(names)) == 12 + 1 + 3 + 2
    assert sum(name.startswith("chat.jsonl:") for name in names) == 3
    assert not any("picture" in name for name in names)


def test_a_source_reads_kind_path_and_split():
    assert Source.parse("js=folder/a") == Source("js", "folder/a", "all")
    assert Source.parse("code=installed:test") == Source("code", "installed", "test")
    assert Source.parse("web=hub:name/config") == Source("web", "hub:name/config", "all")
    for wrong in ("installed", "=folder", "js="):
        assert "is no source" in refusal(Source.parse, wrong)


def test_the_same_seed_chooses_the_same_windows_and_another_seed_others(folder):
    assert chosen(folder) == chosen(folder)
    assert chosen(folder, seed=1) != chosen(folder)


def test_validation_and_test_share_no_document_whatever_the_seed(folder):
    halves = [
        {window.document for window in chosen(folder, half=half, seed=seed)}
        for seed, half in enumerate(HALVES[1:])
    ]
    assert not halves[0] & halves[1]
    whole = {window.document for window in chosen(folder)}
    assert halves[0] | halves[1] == whole
    assert all(half_of(name) == "validation" for name in halves[0])


def test_windows_of_a_document_do_not_overlap_and_are_its_text(folder):
    texts = {f"notes:{name}": text for name, text in Source("notes", str(folder)).documents(100)}
    windows = chosen(folder, per_document=2)
    spans = {}
    for window in windows:
        end = window.start + len(window.text)
        assert texts[window.document][window.start : end] == window.text
        spans.setdefault(window.document, []).append((window.start, end))
    assert max(map(len, spans.values())) == 2
    for starts in spans.values():
        ordered = sorted(starts)
        assert all(one[1] <= other[0] for one, other in pairwise(ordered))


def test_kinds_take_turns_and_so_do_documents(folder):
    sources = [Source("a", str(folder)), Source("b", str(folder))]
    windows = choose(sources, [by_word], length=40, num_windows=4, per_document=2)
    assert [window.kind for window in windows] == ["a", "b"] * 4
    of_a = [window.document for window in windows if window.kind == "a"]
    assert len(set(of_a)) == 4


def test_a_window_has_its_tokens_on_every_model_and_says_so_where_it_has_not(folder):
    sources = [Source("notes", str(folder))]
    options = {"length": 40, "num_windows": 5}
    windows = choose(sources, [by_word, by_letter], **options)
    for window in windows:
        for encode in (by_word, by_letter):
            assert len(window.tokens(encode, 40)) == 40

    def few(text):
        return by_word(text)[:30]

    assert "30 of 40 tokens" in refusal(windows[0].tokens, few, 40)
    assert "none of 18 documents of notes (all) has 40 tokens" in refusal(
        choose, sources, [few], **options
    )


def test_a_kind_is_named_once(folder):
    sources = [Source("a", str(folder))] * 2
    assert "named once" in refusal(choose, sources, [by_word], length=40, num_windows=1)


def test_a_folder_keeps_its_windows_and_rejects_other_options(folder, tmp_path):
    parser = ArgumentParser()
    add_options(parser)
    command = ["--data", f"notes={folder}", "--prefix", "30", "--windows", "3"]
    out = tmp_path / "out"
    first = stored(out, parser.parse_args(command), 10, [by_word])
    for file in folder.iterdir():
        file.write_text("other text " * 400)
    assert stored(out, parser.parse_args(command), 10, [by_word]) == first
    with pytest.raises(InputError, match="other windows"):
        stored(out, parser.parse_args([*command, "--seed", "1"]), 10, [by_word])


def test_a_window_begins_as_the_tokenizer_begins_a_text_and_spells_no_control_token(folder):
    tokenizer = byte_level(before=["<s>"], after=["</s>"])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert encoder(tokenizer)("a </s> b") == [bos, *encoder(byte_level())("a </s> b")]
    assert eos not in encoder(tokenizer)("a </s> b")
    window = chosen(folder)[0]
    tokens = window.tokens(encoder(tokenizer), 40)
    assert tokens == [bos, *tokenizer.encode(window.text, add_special_tokens=False)[:39]]


def test_a_table_without_enough_long_texts_is_rejected(tmp_path):
    path = tmp_path / "books.parquet"
    pd.DataFrame({"id": ["b", "a", "c"], "text": ["b" * 9, "a" * 9, "c"]}).to_parquet(path)
    assert long_texts(path, 8, 2) == ["a" * 9, "b" * 9]
    assert refusal(long_texts, path, 8, 3).endswith(
        "has 2 texts of more than 8 characters; 3 are needed"
    )
    pd.DataFrame({"text": ["a"]}).to_parquet(path)
    (tmp_path / "rows.jsonl").write_text("{}")
    for file in (path, tmp_path / "rows.jsonl", tmp_path / "none.parquet"):
        assert "is no Parquet table with the columns id and text" in refusal(long_texts, file, 8, 1)
