"""Documents to tokens, to sequences of one length, and to excerpts."""

import dataclasses
import random
from itertools import chain, count, islice

import numpy as np
import pytest

from kvcat.data import Document, Encoder, pack
from kvcat.data.packing import excerpts
from kvcat.errors import InputError
from tiny import byte_tokenizer, without_type_checks


def corpus(lengths):
    texts = [
        "".join(f"d{i} has a line number {j}\n" for j in range(length))
        for i, length in enumerate(lengths)
    ]
    return [Document(f"d{i}", text) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def encoder():
    return Encoder.of(byte_tokenizer())


def test_the_encoder_gives_the_tokenizers_ids_at_any_length_and_distinguishes_tokenizers(
    encoder, caplog
):
    tokenizer = byte_tokenizer()
    draw = random.Random(0)
    tokenizer.model_max_length = 8
    copied = Encoder.of(tokenizer)
    texts = [
        "",
        "the cat",
        "<eos> inside",
        "".join(chr(draw.randint(32, 0x2FFF)) for _ in range(500)),
    ]
    for text, ids in zip(texts, copied(texts), strict=True):
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        expected = tokenizer(text, **options)["input_ids"]
        assert ids.tolist() == [*expected, tokenizer.eos_token_id]
    assert not caplog.records
    assert encoder.fingerprint == copied.fingerprint != Encoder.of(byte_tokenizer(280)).fingerprint
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="no EOS token"):
        Encoder.of(tokenizer)


def test_documents_are_packed_with_eos_after_each_reading_no_further_than_needed(encoder):
    documents = [
        Document("a", "the cat"),
        Document("b", "a dog sees the river"),
        Document("c", "it"),
    ]
    flat = np.concatenate(encoder([d.text for d in documents]))
    assert len(flat) % 3, "the example must leave a remainder"
    table = pack(documents, encoder, 3)
    assert table.tolist() == flat[: len(flat) // 3 * 3].reshape(-1, 3).tolist()
    assert table.dtype == np.uint16
    endless = (
        Document(str(number), "the cat sees a dog and then it was red. " * 5) for number in count()
    )
    documents = list(islice(endless, 128))
    table = pack(chain(documents, endless), encoder, 16, max_sequences=7)
    assert np.array_equal(table, pack(documents, encoder, 16)[:7])
    for documents_read, message in (
        ([], "the text has 0 tokens, fewer than one sequence of 99"),
        (corpus([1]), "of 99"),
    ):
        with pytest.raises(InputError, match=message):
            pack(documents_read, encoder, 99)


def test_a_short_run_reads_an_excerpt_of_every_document_from_the_start_of_a_line(encoder):
    documents = corpus([400] * 30)
    cut = list(excerpts(documents, encoder, 32, 90, 0))
    assert [d.id for d in cut] == [d.id for d in documents]
    table = pack(cut, encoder, 32, max_sequences=90)
    assert len(table) == 90
    assert (table == encoder.eos).sum() > 25
    assert len({len(d.text) for d in cut}) == 1
    starts = [whole.text.index(excerpt.text) for whole, excerpt in zip(documents, cut, strict=True)]
    assert all(
        start == 0 or whole.text[start - 1] == "\n"
        for start, whole in zip(starts, documents, strict=True)
    )
    assert len(set(starts)) > 15


def test_excerpts_follow_the_seed_hold_two_sequences_and_are_whole_where_no_text_is_to_spare(
    encoder,
):
    first, again, other = (
        [d.text for d in excerpts(corpus([400] * 10), encoder, 32, 30, s)] for s in (0, 0, 1)
    )
    assert first == again != other
    (cut, *_) = excerpts(corpus([400] * 500), encoder, 64, 4, 0)
    assert len(encoder([cut.text])[0]) >= 110
    documents = corpus([3, 50, 10])
    assert [d.text for d in excerpts(documents, encoder, 32, 10_000, 0)] == [
        d.text for d in documents
    ]


@without_type_checks()
def test_a_very_long_text_is_encoded_in_pieces_and_has_the_same_tokens(encoder, monkeypatch):
    texts = ["the cat\n" * 40, "a", "x" * 100]
    whole = encoder(texts)
    sizes = []
    encode = encoder.backend.encode_batch_fast
    monkeypatch.setattr("kvcat.data.packing._PIECE_CHARACTERS", 20)

    class Backend:
        """The tokenizer, which notes the lengths of what it encodes."""

        encode_special_tokens = False

        def encode_batch_fast(self, pieces, **options):
            sizes.extend(map(len, pieces))
            return encode(pieces, **options)

        def __getattr__(self, name):
            return getattr(encoder.backend, name)

    in_pieces = dataclasses.replace(encoder, backend=Backend())(texts)
    assert [ids.tolist() for ids in in_pieces[:2]] == [ids.tolist() for ids in whole[:2]]
    assert max(sizes) == 20  # of the line that is longer
    assert sum(sizes) == sum(map(len, texts))
