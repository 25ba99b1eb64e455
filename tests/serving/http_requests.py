"""Requests to a server in this process or another one (a helper of the tests)."""

import http.client
import json
import threading
import time
from contextlib import contextmanager

NAME = "tiny"
KEY = "secret"


@contextmanager
def listening(app):
    """The port of a server with an application, which listens during the block."""
    import uvicorn

    config = uvicorn.Config(app, port=0, log_level="warning", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def post(port, path="/v1/chat/completions", key=KEY, body=None, **fields):
    """Status and JSON of a request; ``body`` replaces its fields."""
    status, _, content = send(port, path, key, body, **fields)
    return status, json.loads(content)


def send(port, path="/v1/chat/completions", key=KEY, body=None, **fields):
    """Status, headers and bytes of the response to a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    request = {
        "model": NAME,
        "kvcat": "doc/0",
        "messages": [{"role": "user", "content": "the cat"}],
        "temperature": 0,
        "max_tokens": 4,
    }
    request.update(fields)
    content = json.dumps(request) if body is None else body
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
    connection.request("POST", path, content, headers)
    response = connection.getresponse()
    result = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return result


def get(port, path, key=KEY):
    """Status and text of a page."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"Authorization": f"Bearer {key}".encode()})
    response = connection.getresponse()
    result = response.status, response.read().decode()
    connection.close()
    return result
