"""Tests of what a compact cache records about itself."""

import json
from dataclasses import fields, replace

import torch

from kvcat.cache import CacheRecord, document_digests

FULL = CacheRecord(
    method="by hand",
    options={"seed": "0", "ridge": "None"},
    model="tiny",
    architecture="LlamaForCausalLM",
    supervision="self",
    chat=False,
    chat_template="ab12",
    document=("0f", "1e"),
    first_ids=((5, 6, 7), (8, 9, 10)),
    first_slots=((1, 5), (0, 3)),
    rope="short",
    room=0,
    protected=((0, 24), (40, 48)),
    protected_later=((60, 61),),
    documents=(50, 20),
    seam_tokens=0,
    appended=3,
    refit="suffix",
    held_out_kl=0.125,
    id="a/1",
    text_checksum="c0",
)


def test_json_has_what_is_known_and_gives_the_same_record():
    unknown = CacheRecord()
    assert all(getattr(FULL, each.name) != getattr(unknown, each.name) for each in fields(FULL))
    assert CacheRecord.from_json(FULL.to_json(), "c") == FULL
    assert unknown.to_json() == "{}"
    entries = json.loads(FULL.to_json())
    assert entries["protected"] == [[0, 24], [40, 48]]
    assert (entries["chat"], entries["room"], entries["held_out_kl"]) == (False, 0, 0.125)


def test_people_read_words_in_place_of_lists_and_no_first_tokens():
    assert FULL.texts() == {
        "method": "by hand",
        "seed": "0",
        "ridge": "None",
        "model": "tiny",
        "architecture": "LlamaForCausalLM",
        "supervision": "self",
        "chat": "no",
        "chat_template": "ab12",
        "document": "0f;1e",
        "rope": "short",
        "room": "0",
        "protected": "0:24,40:48",
        "protected_later": "60:61",
        "documents": "50 20",
        "seam_tokens": "0",
        "appended": "3",
        "refit": "suffix",
        "held_out_kl": "0.125",
        "id": "a/1",
        "text_checksum": "c0",
    }


def test_chosen_examples_have_their_own_tokens_and_share_the_rest():
    chosen = FULL.of_examples([1, 1])
    assert chosen.first_ids == ((8, 9, 10), (8, 9, 10))
    assert chosen.first_slots == ((0, 3), (0, 3))
    assert chosen.document == ("1e", "1e")
    others = {"first_ids": (), "first_slots": (), "document": ()}
    assert replace(chosen, **others) == replace(FULL, **others)


def test_a_longer_text_has_further_first_ids_only_if_the_prefix_has_all_of_its_own():
    longer = FULL.longer(3, ((1, 2), (3, 4)))
    assert longer.first_ids == ((5, 6, 7, 1, 2), (8, 9, 10, 3, 4))
    assert (longer.document, longer.first_slots, longer.held_out_kl) == ((), (), None)
    assert FULL.longer(4, ((1,), (2,))).first_ids == FULL.first_ids
    sixteen = tuple(range(16))
    assert CacheRecord(first_ids=((5,),)).longer(1, (sixteen,)).first_ids == ((5, *range(15)),)


def test_rows_of_tokens_are_compared_with_the_document_that_they_continue():
    tokens = torch.tensor([[1, 2], [3, 4]])
    record = CacheRecord(document=document_digests(tokens))
    assert record.same_documents(tokens) == [True, True]
    assert record.same_documents(tokens[[0, 0, 0, 1]]) == [True, True, False, True]
    assert CacheRecord().same_documents(tokens) is None
