"""What kvcat serve rejects, over real HTTP with a tiny model."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from http_requests import KEY, NAME, get, listening, post, send

import kvcat
from kvcat.corpus import CorpusSettings, Store, compress_corpus
from kvcat.corpus.manifest import cache_file
from kvcat.settings import Sampling
from tiny import CHAT, refusal, sentences, write_tiny_model

pytest.importorskip("fastapi", reason="kvcat[serve] is not installed")
pytest.importorskip("uvicorn", reason="kvcat[serve] is not installed")

from kvcat.serving.engine import Engine, Question, RecentDocuments, RequestError, Ticket
from kvcat.serving.server import ServerLimits, make_app

DOCUMENTS = {f"doc/{number}": "".join(sentences(2, seed=number)) for number in range(3)}
TURN = {"role": "user", "content": "the cat"}
MOST_WAITING = 2
LIMITS = ServerLimits(most_bytes=4000, most_tokens=32, most_seconds=0.3)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A tiny model whose answers differ from question to question."""
    folder = tmp_path_factory.mktemp("model")
    return kvcat.load(write_tiny_model(folder, seed=3, initializer_range=0.5))


@pytest.fixture(scope="module")
def served(loaded, tmp_path_factory):
    """The port of a server, its engine, and a store in a chat template."""
    folder = tmp_path_factory.mktemp("server")
    texts = {**DOCUMENTS, "damaged": "the cat", "empty": ""}
    store = make_store(loaded, folder, texts, CorpusSettings(keep_ratio=1.0, bits="16", chat=True))
    damage(folder / "store" / cache_file("damaged"))
    engine = Engine(*loaded, store, cache_bytes=10**6, most_waiting=MOST_WAITING)
    with listening(make_app(engine, NAME, limits=LIMITS, api_key=KEY)) as port:
        yield port, engine, store


def make_store(loaded, folder, texts, settings):
    """A store of texts, or the same store after some of them changed."""
    rows = [json.dumps({"id": id, "text": text}) for id, text in texts.items()]
    (folder / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    compress_corpus(*loaded, folder / "corpus.jsonl", folder / "store", settings)
    return Store(folder / "store")


def damage(file):
    """Change the last byte of a file; the bytes that it had."""
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return content


def test_a_conversation_in_another_template_than_the_documents_is_rejected(served, monkeypatch):
    port, engine, _ = served
    template = CHAT.replace("<assistant>", "<model>")
    monkeypatch.setattr(engine._tokenizer, "chat_template", template)
    status, answer = post(port)
    assert status == 400
    assert "made with another chat template" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"kvcat": "../../etc/passwd"}, 404, "no document '../../etc/passwd'"),
        ({"kvcat": None}, 400, "must name a document"),
        ({"kvcat": "doc/0/../1"}, 404, "no document 'doc/0/../1'"),
        ({"kvcat": "/caches/x.safetensors"}, 404, "no document '/caches/x.safetensors'"),
        ({"kvcat": "doc/0\0"}, 404, "no document 'doc/0\\x00'"),
        ({"kvcat": "empty"}, 404, "has no cache: the document is empty"),
        ({"kvcat": ["doc/0", "doc/9"]}, 404, "no document 'doc/9'"),
        (
            {"kvcat": ["doc/0", "doc/1"]},
            400,
            "cannot be joined: the store was made",
        ),
        ({"cache_salt": "another client's"}, 400, "'cache_salt' is not supported"),
        ({"kvcat": ["doc/0"] * 17}, 400, "names 17 documents; at most 16"),
        ({"kvcat": []}, 400, "must name a document"),
        ({"kvcat": "damaged"}, 500, "document 'damaged': the store/"),
        ({"model": "gpt"}, 404, "no model 'gpt'; there is 'tiny'"),
        ({"model": None}, 400, "the field model is missing"),
        ({"messages": None}, 400, "messages is missing"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "first one the user's"),
        ({"messages": [TURN, {"content": "x"}]}, 400, "message 2 has the role None"),
        ({"temperature": 9999}, 400, "temperature is 9999"),
        ({"temperature": 10**400}, 400, "too large"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "not Unicode text"),
        ({"top_p": 0}, 400, "top_p must be in (0, 1]"),
        ({"max_tokens": 33}, 400, "max_tokens is 33; this server allows 1 to 32"),
        ({"max_tokens": 0}, 400, "max_tokens is 0; this server allows 1 to 32"),
        ({"max_completion_tokens": 0}, 400, "this server allows 1 to 32"),
        ({"max_tokens": True}, 400, "wrong type"),
        ({"stop": [1]}, 400, "stop must be"),
        ({"stop": "a <eos>"}, 400, "holds the control token '<eos>'"),
        ({"n": 2}, 400, "n is not supported with the value 2"),
        ({"n": True}, 400, "n is not supported with the value True"),
        ({"n": "\ud800"}, 400, "n is not supported with the value \ufffd"),
        ({"logprobs": 0}, 400, "logprobs is not supported with the value 0"),
        ({"tools": [{}]}, 400, "tools is not supported"),
        ({"top_k": 3}, 400, "'top_k' is not supported"),
        ({"prompt": "the cat"}, 400, "'prompt' is not supported"),
        (
            {"path": "/v1/completions", "prompt": "the cat"},
            400,
            "'messages' is not supported",
        ),
        ({"body": "{"}, 400, "is not JSON"),
        ({"body": "[]"}, 400, "no JSON object"),
        ({"body": "x" * 4001}, 413, "longer than 4000 bytes"),
        ({"key": "other"}, 401, "API key"),
        ({"key": None}, 401, "API key"),
        ({"key": ""}, 401, "API key"),
        ({"key": KEY + "x"}, 401, "API key"),
        ({"path": "/v1/completions", "key": "other"}, 401, "API key"),
        ({"messages": [{"role": "user", "content": "the cat " * 300}]}, 400, "has more than 256"),
    ],
)
def test_a_wrong_request_gets_a_clear_error_and_the_server_lives_on(
    served, fields, status, message
):
    port, _, store = served
    answer_status, answer = post(port, **fields)
    assert (answer_status, answer["error"]["code"]) == (status, status)
    assert message in answer["error"]["message"]
    assert store.address not in answer["error"]["message"]
    assert post(port)[0] == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics"])
def test_every_page_but_health_needs_the_key(served, path):
    port, _, _ = served
    assert get(port, path, key="other")[0] == 401
    assert get(port, path)[0] == 200
    assert get(port, "/health", key="other") == (200, '{"status":"ok"}')


def test_a_document_that_loses_its_text_and_has_one_again_is_found_as_it_is(
    loaded, tmp_path, monkeypatch
):
    settings = CorpusSettings(keep_ratio=1.0)
    store = make_store(loaded, tmp_path, DOCUMENTS, settings)
    id = next(iter(DOCUMENTS))
    documents = RecentDocuments(store, 0, loaded[0])
    make_store(loaded, tmp_path, {**DOCUMENTS, id: ""}, settings)
    for _ in range(2):
        with pytest.raises(RequestError, match="has no cache: the document is empty") as caught:
            documents.find([id])
        assert caught.value.status == 404
    monkeypatch.setattr("kvcat.corpus.store._SECONDS_BETWEEN_READS", 0.0)
    make_store(loaded, tmp_path, {**DOCUMENTS, id: "the river"}, settings)
    assert documents.find([id]).num_tokens


def test_a_key_of_any_characters_is_that_which_a_client_sends(served, loaded):
    _, _, store = served
    engine = Engine(*loaded, store, cache_bytes=10**6, most_waiting=MOST_WAITING)
    app = make_app(engine, NAME, limits=LIMITS, api_key="cl\u00e9 \u4e2d")
    with listening(app) as port:
        assert get(port, "/v1/models", key="cl\u00e9 \u4e2d")[0] == 200
        assert get(port, "/v1/models", key="cle \u4e2d")[0] == 401


def exchange(port, *pieces):
    """The status of the response to bytes, whether it closed the connection, and its seconds."""
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = b""
        while True:  # until the server closes the connection
            received = connection.recv(65536)
            if not received:
                break
            answer += received
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content), time.monotonic() - begun


HEAD = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n".encode()


def test_a_request_that_does_not_end_gets_408_and_its_connection_is_closed(served):
    port, _, _ = served
    status, answer, seconds = exchange(port, HEAD + b"Content-Length: 90\r\n\r\n", b'{"model":')
    assert (status, answer["error"]["message"]) == (408, "the request took longer than 0.3 s")
    assert seconds >= 0.3
    assert post(port)[0] == 200


def test_a_long_request_in_pieces_without_a_length_gets_413_before_its_end(served):
    port, _, _ = served
    piece = b"800\r\n" + b"x" * 0x800 + b"\r\n"
    status, answer, _ = exchange(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", piece, piece)
    assert (status, answer["error"]["message"]) == (413, "the request is longer than 4000 bytes")


def test_the_request_after_those_that_may_wait_gets_429_and_the_others_their_answers(served):
    port, engine, _ = served
    expected = [post(port, kvcat=id)[1]["choices"] for id in DOCUMENTS]
    is_free = threading.Event()

    def hold(_):
        is_free.wait(30)

    engine.submit(Ticket(Question(("doc/0",), "the cat", False, Sampling()), hold))
    wait_until(lambda: engine.num_waiting == 0)  # the model is busy with it
    with ThreadPoolExecutor(MOST_WAITING) as pool:
        answers = [pool.submit(post, port, kvcat=id) for id in list(DOCUMENTS)[:MOST_WAITING]]
        wait_until(lambda: engine.num_waiting == MOST_WAITING)
        status, headers, content = send(port)
        is_free.set()
        for answer, choices in zip(answers, expected, strict=False):
            assert answer.result()[0] == 200
            assert answer.result()[1]["choices"] == choices
    assert (status, headers["retry-after"]) == (429, "1")
    message = json.loads(content)["error"]["message"]
    assert message == "2 requests wait already, the most that may: try again later"


def wait_until(is_true):
    """Wait for at most 20 seconds."""
    for _ in range(2000):
        if is_true():
            return
        time.sleep(0.01)
    pytest.fail("it did not become true")


def test_a_cache_that_is_damaged_while_it_is_served_fails_alone_until_it_is_whole_again(
    loaded, tmp_path
):
    store = make_store(
        loaded, tmp_path, DOCUMENTS, CorpusSettings(keep_ratio=1.0, bits="16", chat=True)
    )
    engine = Engine(*loaded, store, cache_bytes=0, most_waiting=9)  # every request reads the file
    file = tmp_path / "store" / cache_file("doc/1")
    with listening(make_app(engine, NAME)) as port:
        before = post(port, kvcat="doc/1")
        whole = damage(file)
        status, answer = post(port, kvcat="doc/1")
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert "document 'doc/1': the store/caches/" in answer["error"]["message"]
        assert str(tmp_path) not in answer["error"]["message"]
        assert post(port, kvcat="doc/0")[0] == 200
        file.unlink()
        assert post(port, kvcat="doc/1")[0] == 500
        file.write_bytes(whole)
        after = post(port, kvcat="doc/1")
    assert before[0] == after[0] == 200
    assert before[1]["choices"] == after[1]["choices"]


def test_a_document_that_changes_while_it_is_served_is_never_answered_from_the_other_text(
    loaded, tmp_path
):
    settings = CorpusSettings(keep_ratio=1.0, bits="16")
    store = make_store(loaded, tmp_path, {"a": "the cat sees the old dog", "b": "it"}, settings)
    documents = RecentDocuments(store, 0, loaded[0])
    before = documents.find(["a"])
    make_store(loaded, tmp_path, {"a": "a stone", "b": "it"}, settings)
    with pytest.raises(RequestError, match="'a' has just changed: ask again") as caught:
        documents.find(["a"])
    assert caught.value.status == 503
    assert documents.find(["a"]).num_tokens < before.num_tokens


def test_a_closed_engine_takes_no_question(loaded, served):
    _, _, store = served
    engine = Engine(*loaded, store, cache_bytes=10**6, most_waiting=1)
    engine.close()
    ticket = Ticket(Question(("doc/0",), "the cat", False, Sampling()), lambda _: None)
    with pytest.raises(RequestError, match="shutting down") as caught:
        engine.submit(ticket)
    assert caught.value.status == 503


def test_a_store_of_another_model_is_rejected(served, tiny_folder):
    _, _, store = served
    other = kvcat.load(tiny_folder)
    message = refusal(Engine, *other, store, cache_bytes=1, most_waiting=1)
    assert "belongs to another model" in message
