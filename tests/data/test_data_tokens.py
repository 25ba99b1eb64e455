"""What is held out, and how tokens become batches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcat.data import (
    Document,
    TokenTable,
    drop_near_duplicates,
    encode_documents,
    hash_order,
    pack,
    split_of,
)
from kvcat.errors import InputError
from tiny import byte_tokenizer, sentences


def named(**texts):
    return [Document(name, lambda text=text: text) for name, text in texts.items()]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def test_the_split_is_a_function_of_the_name_with_five_percent_each_held_out():
    names = [f"document {i}" for i in range(5_000)]
    splits = [split_of(name) for name in names]
    assert splits == [split_of(name) for name in names]
    for held_out in ("test", "validation"):
        assert splits.count(held_out) / len(names) == pytest.approx(0.05, abs=0.01)


@given(st.text(), st.floats(0.01, 0.2), st.floats(0.2, 0.49))
@settings(max_examples=30, deadline=None)
def test_a_test_document_stays_one_when_more_is_held_out(name, small, large):
    if split_of(name, small) == "test":
        assert split_of(name, large) == "test"


def test_the_split_of_known_names_never_changes():
    # a changed hash would move held-out documents into the training of published checkpoints
    known = {
        "stdlib/argparse.py": "test",
        "numpy/linalg/_linalg.py": "test",
        "a": "validation",
        "b": "validation",
        "c": "test",
        "d": "validation",
        "e": "train",
        "f": "test",
    }
    assert {name: split_of(name, 0.25) for name in known} == known


@given(st.lists(st.text(), unique=True), st.integers(0, 3), st.randoms())
@settings(max_examples=30, deadline=None)
def test_the_order_depends_on_names_and_seed_not_on_the_listing(names, seed, random):
    documents = [Document(name, str) for name in names]
    shuffled = random.sample(documents, len(documents))
    order = [d.id for d in hash_order(documents, seed)]
    assert order == [d.id for d in hash_order(shuffled, seed)]
    assert sorted(order) == sorted(names)


def test_another_seed_gives_another_order():
    documents = [Document(str(i), str) for i in range(50)]
    assert [d.id for d in hash_order(documents, 0)] != [d.id for d in hash_order(documents, 1)]


def test_held_out_documents_that_share_their_lines_with_training_are_dropped():
    lines = sentences(10, seed=1)
    other = sentences(10, seed=2)
    held_out = named(
        copy="".join(lines),
        own="".join(other),
        third="".join(lines[:3] + other[3:]),
        most="".join(lines[:4] + other[4:]),
    )
    training = named(a="".join(lines[:5]), b="".join(lines[5:]))
    assert [d.id for d in drop_near_duplicates(held_out, training)] == ["own", "third"]


def test_short_lines_and_indentation_do_not_make_a_duplicate():
    held_out = named(
        a="x = 1\nreturn x\na line of its own here\n", b="only\nshort\nlines\n", c="    a shared long line\n"
    )
    training = named(t="x = 1\nreturn x\na shared long line\n")
    assert [d.id for d in drop_near_duplicates(held_out, training)] == ["a"]


def test_documents_are_packed_with_eos_after_each_and_the_remainder_dropped(tokenizer):
    documents = named(a="the cat", b="a dog sees the river", c="it")
    flat = []
    for document in documents:
        flat += [*tokenizer(document.text)["input_ids"], tokenizer.eos_token_id]
    table = pack(documents, tokenizer, 3)
    count = len(flat) // 3
    assert len(flat) % 3, "the example must leave a remainder"
    assert table.sequences.tolist() == np.array(flat[: 3 * count]).reshape(count, 3).tolist()
    assert (len(table), table.num_tokens, table.num_documents) == (count, 3 * count, 3)


def test_packing_reads_no_further_than_it_needs(tokenizer):
    def endless():
        number = 0
        while True:
            yield from named(**{str(number): "the cat sees a dog and then it was red. " * 5})
            number += 1

    whole = pack((d for d, _ in zip(endless(), range(128), strict=False)), tokenizer, 16)
    table = pack(endless(), tokenizer, 16, max_sequences=7)
    assert len(table) == 7
    assert np.array_equal(table.sequences, whole.sequences[:7])


def test_encoding_adds_no_special_tokens_and_does_not_warn_of_long_texts(tokenizer, caplog):
    tokenizer.model_max_length = 8
    (found,) = encode_documents(named(a="the cat sees a dog. " * 9), tokenizer)
    assert found[0] == "a"
    assert tokenizer.decode(found[1]) == "the cat sees a dog. " * 9
    assert tokenizer.eos_token_id not in found[1]
    assert not caplog.records


def test_a_text_shorter_than_a_sequence_is_refused_with_its_length(tokenizer):
    with pytest.raises(InputError, match=r"the text has 0 tokens, fewer than one sequence of 9"):
        pack([], tokenizer, 9)
    with pytest.raises(InputError, match="fewer than one sequence of 99"):
        pack(named(a="the cat"), tokenizer, 99)


def test_a_tokenizer_without_eos_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="no EOS token"):
        pack(named(a="the cat"), tokenizer, 2)


def table_of(count, width=2):
    return TokenTable(np.arange(count * width, dtype=np.uint16).reshape(count, width), 1)


@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_every_sequence_is_seen_once_an_epoch_whatever_the_batch_size(count, batch_size, seed):
    table = table_of(count)
    steps = -(-3 * count // batch_size)
    seen = np.concatenate([table.batch(step, batch_size, seed)[:, 0].numpy() for step in range(steps)])[: 3 * count]
    for epoch in seen.reshape(3, count):
        assert sorted(epoch // 2) == list(range(count))


@given(st.integers(0, 50), st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_a_batch_is_a_function_of_seed_and_step_alone(step, batch_size, seed):
    table = table_of(11)
    expected = np.concatenate([table.batch(s, 1, seed) for s in range(step * batch_size, (step + 1) * batch_size)])
    assert np.array_equal(table.batch(step, batch_size, seed), expected)


def test_epochs_and_seeds_have_their_own_order():
    table = table_of(40)
    orders = [tuple(table.batch(step, 40, seed)[:, 0].tolist()) for step in (0, 1) for seed in (0, 1)]
    assert len(set(orders)) == 4
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(0, 80, 2))}
