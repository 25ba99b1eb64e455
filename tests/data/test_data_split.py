"""Which documents are held out, and which copies are left out."""

from functools import partial
from itertools import count

import pytest

from kvcat.data import (
    Document,
    hash_order,
    open_documents,
    prepare,
    split_documents,
    split_of,
)
from kvcat.data import split as split_module
from kvcat.data.split import drop_copies, drop_near_duplicates, training_splits
from kvcat.errors import InputError
from text_files import texts, write_lines, write_table
from tiny import byte_tokenizer, refusal, sentences

HELD_OUT = ("validation", "test")


def named(**texts):
    return [Document(name, text) for name, text in texts.items()]


def lines(name, count):
    return "".join(f"{name} has a line number {i}\n" for i in range(count))


def test_five_percent_each_are_held_out_and_the_split_of_known_names_never_changes():
    splits = [split_of(f"document {i}") for i in range(5_000)]
    for held_out in HELD_OUT:
        assert splits.count(held_out) / len(splits) == pytest.approx(0.05, abs=0.01)
    # a changed hash would move held-out documents into the training of published checkpoints
    known = {
        "numpy/_distributor_init.py": "test",
        "numpy/f2py/__init__.py": "validation",
        "1": "train",
        "2": "test",
        "35": "validation",
        "57": "validation",
    }
    assert {name: split_of(name) for name in known} == known


def test_the_order_depends_on_names_and_seed_not_on_the_listing():
    documents = [Document(str(i), "") for i in range(50)]
    order = hash_order(documents, 0)
    assert order == hash_order(documents[::-1], 0) != hash_order(documents, 1)
    assert {d.id for d in order} == {d.id for d in documents}


def test_copies_and_held_out_documents_that_share_long_lines_with_training_are_dropped():
    long = sentences(10, seed=1)
    other = sentences(10, seed=2)
    held_out = named(
        copy="".join(long),
        own="".join(other),
        third="".join(long[:3] + other[3:]),
        most="".join(long[:4] + other[4:]),
        short="x = 1\nreturn x\na line of its own here\n",
        trivial="only\nshort\nlines\n",
        indented="    a shared long line\n",
    )
    training = named(
        a="".join(long[:5]), b="".join(long[5:]), t="x = 1\nreturn x\na shared long line\n"
    )
    assert [d.id for d in drop_near_duplicates(held_out, training)] == ["own", "third", "short"]
    documents = named(
        a=lines("a", 10),
        half=lines("a", 10) + lines("b", 9),
        little=lines("a", 3) + lines("c", 20),
        empty="x\n",
    )
    assert [d.id for d in drop_copies(documents)] == ["a", "little"]


def test_documents_of_the_installation_hold_no_copies_nor_held_out_ones_lines_of_training(
    monkeypatch,
):
    splits = {
        split: next(f"held {i}" for i in range(200) if split_of(f"held {i}") == split)
        for split in HELD_OUT
    }
    *names, last = [f"d{i}" for i in range(40) if split_of(f"d{i}") == "train"][:5]
    documents = [Document(name, lines("the same", 10)) for name in names]
    documents += [Document(name, lines("held", 10)) for name in splits.values()]
    monkeypatch.setattr(split_module, "open_documents", lambda _: iter(documents))
    assert [len(training_splits(source, 1)[0]) for source in ("installed", "texts")] == [1, 4]
    assert [d.id for d in training_splits("installed", 1)[1]] == [splits["validation"]]
    for split, name in splits.items():
        assert [d.id for d in split_documents("installed", split)] == [name]
    documents.append(Document(last, lines("held", 10)))
    assert splits["validation"] not in {d.id for d in training_splits("installed", 1)[1]}
    for split, name in splits.items():
        assert [d.id for d in split_documents("texts", split)] == [name]
        with pytest.raises(InputError, match=f"no document in split '{split}'"):
            split_documents("installed", split)


def test_installed_sources_are_not_streamed_nor_prepared_which_would_keep_copies(tmp_path):
    for read in (open_documents, partial(split_documents, split="validation")):
        message = refusal(read, "stream:installed")
        assert "held-out copies can be left out: give installed" in message
    message = refusal(prepare, "installed", byte_tokenizer(), tmp_path / "tokens")
    assert "held-out copies can be left out: train with" in message
    assert not list(tmp_path.iterdir())


def test_where_no_document_falls_into_validation_one_is_held_out(tmp_path):
    names = [f"doc-{i}" for i in range(40) if split_of(f"doc-{i}") == "train"][:5]
    write_table(tmp_path / "a.parquet", dict.fromkeys(names, "text"))
    train, validation = training_splits(str(tmp_path), 0)
    assert (len(train), len(validation)) == (4, 1)
    assert {d.id for d in train} | {d.id for d in validation} == set(names)
    write_table(tmp_path / "a.parquet", texts(1))
    with pytest.raises(InputError, match=r"too few documents \(1\)"):
        training_splits(str(tmp_path), 0)


def test_the_pieces_of_a_text_among_others_are_in_one_split_and_evaluated_as_one(tmp_path):
    long = "a line of some words\n" * 2000  # three pieces
    names = [f"{number}.txt" for number in range(40)]
    for name in names:
        (tmp_path / name).write_text(name + long)
    train, validation = training_splits(str(tmp_path), 0)
    assert len(train) % 3 == len(validation) % 3 == 0
    trained_on = {document.id.partition("#")[0] for document in train}
    held_out = {document.id.partition("#")[0] for document in validation}
    assert len(trained_on) == len(train) // 3 > 30
    assert len(held_out) == len(validation) // 3 > 0
    assert not trained_on & held_out
    documents = split_documents(str(tmp_path), "all")
    assert {document.id: document.text for document in documents} == {
        f"{name}#0": name + long for name in names
    }
    of_validation = split_documents(str(tmp_path), "validation")
    assert {document.id.partition("#")[0] for document in of_validation} == held_out


def test_a_whole_text_is_held_out_where_none_falls_into_validation(tmp_path):
    names = [f"{i}.txt" for i in range(40) if split_of(f"{i}.txt#0") == "train"][:3]
    for name in names:
        (tmp_path / name).write_text("a line of some words\n" * 2000)
    train, validation = training_splits(str(tmp_path), 0)
    assert (len(train), len(validation)) == (6, 3)
    assert len({document.split_id for document in validation}) == 1
    # the pieces of a text alone are documents
    train, validation = training_splits(str(tmp_path / names[0]), 0)
    assert len(train) + len(validation) == 3
    assert len(validation) > 0


def test_documents_of_one_name_are_not_joined(tmp_path):
    write_lines(tmp_path / "a.jsonl", {"same": "the cat"})
    write_lines(tmp_path / "b.jsonl", {"same": "a dog"})
    texts_read = [document.text for document in split_documents(str(tmp_path), "all")]
    assert texts_read == ["the cat", "a dog"]


def test_a_stream_is_read_no_further_than_the_limit(monkeypatch):
    monkeypatch.setattr(
        split_module, "open_documents", lambda _: (Document(str(number), "") for number in count())
    )
    assert [d.id for d in split_documents("hub:o/n", "all", limit=3)] == ["0", "1", "2"]
    documents = split_documents("hub:o/n", "test", limit=4)
    assert [split_of(d.id) for d in documents] == ["test"] * 4
