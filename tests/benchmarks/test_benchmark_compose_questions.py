"""The documents that questions are asked about."""

import pytest
from compose_questions import DocumentSet, records_of, report

from tiny import byte_tokenizer, loud_model

LENGTH = 220


def set_of(size, index=0):
    books = [
        " ".join(f"Sentence {number} of book {book}." for number in range(400))
        for book in range(size + 1)
    ]
    return DocumentSet(byte_tokenizer(chat=True), books, size, LENGTH, "test", index)


def test_every_document_has_its_length_and_its_own_fact_alone():
    for index in range(20):
        documents = set_of(4, index)
        opening = len(documents.documents[0]) - LENGTH
        assert opening > 0
        assert [len(ids) for ids in documents.documents[1:]] == [LENGTH] * 3
        texts = [documents.tokenizer.decode(ids) for ids in documents.documents]
        for place, (name, code) in enumerate(documents.facts):
            fact = f"The phone number of {name} is {code}."
            assert [fact in text for text in texts] == [other == place for other in range(4)]


def test_truncated_documents_have_as_many_tokens_as_the_slots():
    documents = set_of(2)
    total = sum(len(ids) for ids in documents.documents)
    # both ends of a document have equally many, so that one may be left over in each
    assert 0 <= round(0.5 * total) - len(documents.truncated(0.5)) <= 2


@pytest.mark.slow
def test_every_condition_is_asked_once_and_an_interrupted_set_goes_on(capsys):
    documents = set_of(2)
    model = loud_model(vocab_size=300, max_position_embeddings=2048)
    records = [{"model": "tiny", **made} for made in records_of(documents, model, [0.2], set())]
    cells = [(record["document"], record["condition"], record["keep"]) for record in records]
    assert len(set(cells)) == len(cells) == 3 + 5
    assert [len(record["answers"]) for record in records] == [2] * 8
    continued = list(records_of(documents, model, [0.2], set(cells[:5])))
    assert [record["answers"] for record in continued] == [
        record["answers"] for record in records[5:]
    ]
    report(records)
    assert "2 questions: 2 about 2 documents" in capsys.readouterr().out
