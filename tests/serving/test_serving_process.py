"""``kvcat serve`` as a process of its own: a store over HTTP, kills, and its end."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from http_requests import get, post

import kvcat
from kvcat.corpus import CorpusSettings, Store, compress_corpus
from kvcat.corpus.manifest import cache_file
from tiny import write_texts

pytest.importorskip("fastapi", reason="kvcat[serve] is not installed")
pytest.importorskip("uvicorn", reason="kvcat[serve] is not installed")
pytestmark = pytest.mark.slow
KEY = "a key from the environment"
MODEL = "kvcat-base"


@pytest.fixture(scope="module")
def loaded():
    return kvcat.load(MODEL)


@pytest.fixture(scope="module")
def folder(loaded, tmp_path_factory):
    """A store of three documents for the model that kvcat contains."""
    folder = tmp_path_factory.mktemp("process")
    write_texts(folder / "texts", documents=3, length=6)
    settings = CorpusSettings(keep_ratio=0.25, supervision="self")
    compress_corpus(*loaded, folder / "texts", folder / "store", settings)
    return folder / "store"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def serving(store, port, max_tokens=20):
    """The process of a server that answers; it is killed at the end of the block."""
    words = ["serve", MODEL, "--store", str(store), "--port", str(port)]
    words += ["--max-tokens", str(max_tokens)]
    environment = {**os.environ, "KVCAT_API_KEY": KEY}
    command = [sys.executable, "-m", "kvcat", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stderr.readline().startswith("serving 3 documents as model 'kvcat-base'")
            wait_until_healthy(port)
            yield server
        finally:
            server.kill()


def wait_until_healthy(port):
    for _ in range(600):
        try:
            if get(port, "/health", key="")[0] == 200:
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"no server on port {port}")


def ask(port, id, key=KEY, **fields):
    """Status, and the answer's text or the error."""
    fields = {"kvcat": id, "prompt": "the cat", "max_tokens": 8, "messages": None, **fields}
    status, answer = post(port, "/v1/completions", key=key, model=MODEL, **fields)
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]


def stock_answer(loaded, store, id):
    """The answer of transformers' greedy generation behind the document's cache."""
    model, tokenizer = loaded
    cache = Store(store)[id]
    ids = kvcat.question_ids(tokenizer, "the cat", cache=cache)
    out = model.generate(**cache.inputs(model, ids), max_new_tokens=8, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_killed_server_answers_the_same_when_it_is_started_again_and_ends_when_asked(
    loaded, folder
):
    port = free_port()
    ids = ["00.txt", "01.txt", "02.txt"]
    expected = [(200, stock_answer(loaded, folder, id)) for id in ids]
    with serving(folder, port) as server:
        assert [ask(port, id) for id in ids] == expected
        taken = [sys.executable, "-m", "kvcat", "serve", MODEL, "--store", folder, "--port"]
        second = subprocess.run([*taken, str(port)], capture_output=True, text=True, check=False)
        assert second.returncode == 2
        assert second.stderr.count("\n") == 1
        assert "is in use" in second.stderr
        server.send_signal(signal.SIGKILL)
        assert server.wait(30) == -signal.SIGKILL
    with serving(folder, port) as server:
        assert [ask(port, id) for id in reversed(ids)] == expected[::-1]
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) in (0, -signal.SIGTERM)
        assert server.stderr.read() == ""


def metric(port, name):
    """A counter or gauge of the server."""
    lines = get(port, "/metrics", key=KEY)[1].splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"kvcat_{name} ")))


def begin(port, id, **fields):
    """A connection on which a long answer was asked for."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    request = {"model": MODEL, "kvcat": id, "prompt": "the cat", "temperature": 1, **fields}
    headers = {"Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", json.dumps(request), headers)
    return connection


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # closed with bytes that were not read yet
        return True


def test_clients_that_leave_cost_nothing_and_those_that_are_answered_at_the_end_get_503(folder):
    port = free_port()
    with serving(folder, port, max_tokens=5000) as server:
        for is_streamed in (True, False):
            connection = begin(port, "00.txt", max_tokens=5000, seed=3, stream=is_streamed)
            waiting = begin(port, "01.txt", max_tokens=5000, stream=is_streamed)
            time.sleep(1)
            assert metric(port, "waiting_requests") == 1
            waiting.close()
            connection.close()
            assert ask(port, "02.txt")[0] == 200
            assert metric(port, "waiting_requests") == 0
        assert metric(port, "answer_tokens_total") < 5000
        # a client that does not finish its headers loses its connection
        half = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(70)]
        for each in half:
            each.sendall(b"GET /health HTTP/1.1\r\n")
        begun = time.monotonic()
        assert is_closed(half[0])
        assert time.monotonic() - begun < 5
        half[-1].sendall(b"X: y\r\n")  # further bytes give no further time
        assert is_closed(half[-1])
        assert time.monotonic() - begun < 20
        for each in half:
            each.close()
        # requests that are answered, wait or stream when the server is asked to end
        asked = [begin(port, f"0{number % 3}.txt", max_tokens=5000) for number in range(6)]
        streamed = begin(port, "00.txt", max_tokens=5000, stream=True)
        time.sleep(1)
        server.send_signal(signal.SIGTERM)
        with ThreadPoolExecutor() as pool:
            responses = list(pool.map(http.client.HTTPConnection.getresponse, asked))
        ends = [(response.status, json.loads(response.read())) for response in responses]
        message = "the server is shutting down"
        assert [(status, end["error"]["message"]) for status, end in ends] == [(503, message)] * 6
        assert message in streamed.getresponse().read().decode()
        for each in (*asked, streamed):
            each.close()
        assert server.wait(30) in (0, -signal.SIGTERM)
        assert server.stderr.read() == ""


def test_a_served_store_rejects_what_is_wrong_and_serves_what_is_made_meanwhile(loaded, folder):
    port = free_port()
    with serving(folder, port):
        assert ask(port, "00.txt", key="other")[0] == 401
        assert ask(port, "../store.json") == (404, "no document '../store.json'")
        assert ask(port, "00.txt", max_tokens=21)[0] == 400
        file = folder / cache_file("01.txt")
        whole = file.read_bytes()
        file.write_bytes(whole[:100])
        status, message = ask(port, "01.txt")
        assert status == 500
        assert str(folder) not in message
        file.write_bytes(whole)
        assert ask(port, "01.txt") == (200, stock_answer(loaded, folder, "01.txt"))
        compress_more(loaded, folder)
        status, message = ask_until(port, "03.txt", 200)
        assert message == stock_answer(loaded, folder, "03.txt")


def compress_more(loaded, store):
    """Add a document to the store, as another process does while a server reads it."""
    settings = CorpusSettings(keep_ratio=0.25, supervision="self")
    texts = store.parent / "texts"
    (texts / "03.txt").write_text("the old dog finds the river and a red stone. " * 8)
    compress_corpus(*loaded, texts, store, settings)


def ask_until(port, id, status):
    """The answer as soon as it has a status; a server reads the manifest every few seconds."""
    for _ in range(40):
        answer = ask(port, id)
        if answer[0] == status:
            return answer
        time.sleep(0.5)
    return answer
