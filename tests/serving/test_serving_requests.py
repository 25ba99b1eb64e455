"""A folder of documents: what a request may name, and the prompts that an engine gets."""

import os
from pathlib import Path

import pytest
import torch
from evicted_caches import evicted, ids, make_model

import kvcat
from kvcat.cache import fingerprint
from kvcat.errors import InputError
from kvcat.serving import (
    chat_ids,
    export_prefix,
    open_documents,
    prompt_ids,
    read_prefix,
    request_fields,
)
from tiny import CHAT, byte_tokenizer


@pytest.fixture
def folder(tmp_path):
    model = make_model()
    other = make_model("qwen2")
    cache = evicted(model, ids(1, 30), 7, log_bias=True)
    home = tmp_path / "documents"
    home.mkdir()
    cache.save(home / "report-1.a_b")
    evicted(other, ids(1, 30)).save(home / "foreign")
    cache.save(tmp_path / "outside")
    (home / "link").symlink_to(tmp_path / "outside")
    (home / "damaged").write_bytes((home / "report-1.a_b").read_bytes()[:-1] + b"\7")
    (home / "text").write_text("text")
    (home / "inner").mkdir()
    export_prefix(cache, model, home / "packed", head_dim=12)
    return open_documents(str(home), model.config, lambda _: fingerprint(model)), model


def test_a_request_reaches_no_file_but_a_whole_cache_of_this_model_in_the_folder(folder):
    documents, _ = folder
    assert documents.find("report-1.a_b").counts == ((7, 7),) * 2
    for name, message in {
        "../outside": "no name",
        "/etc/passwd": "no name",
        "..": "no name",
        ".hidden": "no name",
        "": "no name",
        "a/b": "no name",
        "a\0b": "no name",
        "a\n": "no name",
        "a" * 201: "no name",
        "inner": "no document 'inner'",
        "gone": "no document 'gone'",
        "link": "no document 'link'",
        "foreign": "belongs to another model",
        "damaged": "corrupt",
        "text": "not a safetensors file",
        "packed": "not a compact cache",
    }.items():
        with pytest.raises(InputError, match=message) as refused:
            documents.find(name)
        assert str(documents.folder) not in str(refused.value)
    for name in (None, 5, [5], [["report-1.a_b"]], {}):
        with pytest.raises(InputError, match="is no name of a document"):
            documents.find(name)


def test_another_document_under_a_name_has_another_salt(folder):
    documents, model = folder
    path = documents.folder / "report-1.a_b"
    first = documents.find(path.name)
    status = path.stat()
    assert documents.find(path.name) is first
    evicted(model, ids(1, 30, seed=9), 7, log_bias=True).save(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = documents.find(path.name)
    fields = [request_fields(each, path.name, [5, 6], "mine") for each in (first, second)]
    assert fields[0]["prompt"] == fields[1]["prompt"] == [5, 6]
    assert fields[0]["cache_salt"] != fields[1]["cache_salt"]
    with pytest.raises(InputError, match="has changed since it was requested"):
        documents.load(first)


def test_a_file_that_is_replaced_while_it_is_read_has_the_checksum_of_what_was_read(
    folder, monkeypatch
):
    documents, model = folder
    path = documents.folder / "report-1.a_b"
    first = documents.find(path.name)
    later = evicted(model, ids(1, 30, seed=9), 7, log_bias=True)
    read_bytes = Path.read_bytes

    def read_and_replace(file):
        content = read_bytes(file)
        if file == path:
            monkeypatch.setattr(Path, "read_bytes", read_bytes)
            later.save(path)
        return content

    monkeypatch.setattr(Path, "read_bytes", read_and_replace)
    (cache,) = documents.load(first)
    assert not torch.equal(cache.layers[0].keys, later.layers[0].keys)
    with pytest.raises(InputError, match="has changed since it was requested"):
        documents.load(first)


def test_questions_continue_the_turn_that_the_document_opens():
    tokenizer = byte_tokenizer()
    for text in (
        prompt_ids(tokenizer, "the cat", chat=True),
        chat_ids(tokenizer, [user("the cat")], chat=True),
    ):
        assert tokenizer.decode(text) == "\n\nthe cat</user><assistant>"
    assert tokenizer.decode(prompt_ids(tokenizer, "the cat", chat=False)) == "the cat"
    assert prompt_ids(tokenizer, [5, 6], chat=True) == [5, 6]
    conversation = [user("the cat"), {"role": "assistant", "content": "it"}, user("a dog")]
    assert tokenizer.decode(chat_ids(tokenizer, conversation, chat=True)) == (
        "\n\nthe cat</user><user>it</user><user>a dog</user><assistant>"
    )
    for prompt in ("", [], [5, "a"], [True], ["a", "b"], None):
        with pytest.raises(InputError, match="prompt"):
            prompt_ids(tokenizer, prompt, chat=False)
    for messages in (
        None,
        [],
        ["the cat"],
        conversation[1:],
        [{"role": "user", "content": ["the cat"]}],
        [user([{"type": "image_url", "text": "the cat"}])],
    ):
        with pytest.raises(InputError, match="messages must be texts"):
            chat_ids(tokenizer, messages, chat=True)
    for role in ({}, {"role": None}, {"role": 5}):
        with pytest.raises(InputError, match=r"message 2 has the role (None|5), which is no text"):
            chat_ids(tokenizer, [user("the cat"), {"content": "it", **role}], chat=True)
    with pytest.raises(InputError, match="without --chat"):
        chat_ids(tokenizer, conversation, chat=False)
    tokenizer.chat_template = "{{ messages | length }}" + CHAT
    with pytest.raises(InputError, match="something else before the document"):
        chat_ids(tokenizer, conversation, chat=True)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="rejects these messages: roles must alternate"):
        chat_ids(tokenizer, conversation, chat=True)


def test_a_question_in_another_template_than_the_documents_is_rejected(tmp_path):
    tokenizer = byte_tokenizer()
    model = make_model(options={"vocab_size": len(tokenizer), "max_position_embeddings": 256})
    document = kvcat.document_trace(model, tokenizer, "the cat", supervision="self", chat=True)
    cache = kvcat.AttentionMatching()(document, keep_ratio=0.5)
    export_prefix(cache, model, tmp_path / "doc", head_dim=12)
    prefix = read_prefix(tmp_path / "doc")
    assert prefix.chat
    template = {"chat": True, "chat_template": prefix.chat_template}
    asked = prompt_ids(tokenizer, "it", **template)
    assert asked == chat_ids(tokenizer, [user("it")], **template)
    tokenizer.chat_template = CHAT.replace("<assistant>", "<model>")
    for make_ids, question in ((prompt_ids, "it"), (chat_ids, [user("it")])):
        with pytest.raises(InputError, match="made with another chat template than that of"):
            make_ids(tokenizer, question, **template)
    assert prompt_ids(tokenizer, [5, 6], **template) == [5, 6]


def user(text):
    return {"role": "user", "content": text}
