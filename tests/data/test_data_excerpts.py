"""What a short run reads of much text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcat.data import Document, held_out, local_splits, pack, split_of
from kvcat.data.excerpts import _cap, excerpts
from kvcat.data.split import drop_copies
from tiny import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def document(name, text):
    return Document(name, lambda: text)


def lines(name, count):
    return "".join(f"{name} has a line number {i}\n" for i in range(count))


def corpus(lengths):
    return [document(f"d{i}", lines(f"d{i}", length)) for i, length in enumerate(lengths)]


def test_little_is_read_of_many_documents_from_the_start_of_a_line(tokenizer):
    documents = corpus([400] * 30)
    cut = list(excerpts(documents, tokenizer, 32, 90, 0))
    assert [d.id for d in cut] == [d.id for d in documents]
    table = pack(cut, tokenizer, 32, max_sequences=90)
    assert len(table) == 90
    assert table.num_documents > 25
    assert len({len(d.text) for d in cut}) == 1
    for whole, part in zip(documents, cut, strict=True):
        start = whole.text.index(part.text)
        assert start == 0 or whole.text[start - 1] == "\n"
    assert len({whole.text.index(part.text) for whole, part in zip(documents, cut, strict=True)}) > 15


def test_one_seed_gives_one_choice_and_another_gives_another(tokenizer):
    documents = corpus([400] * 10)
    first, again, other = ([d.text for d in excerpts(documents, tokenizer, 32, 30, seed)] for seed in (0, 0, 1))
    assert first == again != other


def test_where_no_text_is_to_spare_documents_are_whole(tokenizer):
    documents = corpus([3, 50, 10])
    assert [d.text for d in excerpts(documents, tokenizer, 32, 10_000, 0)] == [d.text for d in documents]


def test_an_excerpt_holds_at_least_two_sequences(tokenizer):
    (cut, *_) = excerpts(corpus([400] * 500), tokenizer, 64, 4, 0)
    assert len(tokenizer(cut.text).input_ids) >= 110


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=12), wanted=st.integers(0, 700))
def test_the_cap_is_the_least_that_gives_enough(lengths, wanted):
    cap = _cap(np.array(lengths), wanted)
    given_by = [sum(min(n, c) for n in lengths) for c in range(max(lengths) + 1)]
    enough = [c for c, total in enumerate(given_by) if total >= wanted]
    assert cap == (enough[0] if enough else max(lengths))


def test_a_copy_of_an_earlier_document_is_left_out():
    documents = [
        document("a", lines("a", 10)),
        document("half", lines("a", 10) + lines("b", 9)),
        document("little", lines("a", 3) + lines("c", 20)),
        document("empty", "x\n"),
    ]
    assert [d.id for d in drop_copies(documents)] == ["a", "little"]


def test_training_documents_of_the_installation_hold_no_copies(monkeypatch):
    held = [f"held {i}" for i in range(200) if split_of(f"held {i}") == "validation"][:1]
    names = [f"d{i}" for i in range(40) if split_of(f"d{i}") == "train"][:4]
    found = [document(name, lines("the same", 10)) for name in names] + [document(held[0], lines("held", 10))]
    monkeypatch.setattr(held_out, "open_documents", lambda _: iter(found))
    assert len(local_splits("installed", 1)["train"]) == 1
    assert len(local_splits("texts", 1)["train"]) == 4
