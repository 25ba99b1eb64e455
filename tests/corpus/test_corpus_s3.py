"""A store on a real S3 server (moto's) over HTTP: concurrent writers, and broken connections."""

import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from corpora import text_of, write_rows

pytest.importorskip("s3fs", reason="s3fs is not installed")
pytest.importorskip("moto.server", reason="moto[server] is not installed")

import fsspec
from moto.server import ThreadedMotoServer

from kvcat.corpus import CorpusSettings, Store, check_store
from kvcat.corpus.manifest import cache_file
from kvcat.corpus.storage import open_storage
from tiny import refusal

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Relay:
    """Passes connections on to a server, and can break them."""

    def __init__(self, port):
        self.port = port
        self.num_to_break = 0
        self.num_broken = 0
        self.num_replies_to_break = 0
        self.is_down = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            client, _ = self._listener.accept()
            if self.is_down:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self.port))
            for source, target in ((client, server), (server, client)):
                arguments = (source, target, source is client)
                threading.Thread(target=self._copy, args=arguments, daemon=True).start()

    def _copy(self, source, target, is_request):
        """Copy bytes until one side ends; break the connection in the middle of a file."""
        try:
            while data := source.recv(1 << 14):
                if self.is_down:
                    break
                if is_request and self.num_to_break and data.startswith(b"PUT"):
                    self.num_to_break -= 1
                    self.num_broken += 1
                    target.sendall(data[: len(data) // 2])
                    break
                if not is_request and self.num_replies_to_break and len(data) > 2000:
                    self.num_replies_to_break -= 1
                    self.num_broken += 1
                    target.sendall(data[: len(data) // 2])
                    break
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()


@pytest.fixture(scope="module")
def relay():
    """A server with a bucket, behind a relay."""
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    _, port = server.get_host_and_port()
    yield Relay(port)
    server.stop()


@pytest.fixture
def bucket(relay, monkeypatch):
    """The address of a new bucket."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", relay.address)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    fsspec.filesystem("s3").clear_instance_cache()
    name = f"bucket-{time.time_ns()}"
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}/store"


@pytest.fixture
def many(tmp_path):
    rows = [{"id": f"doc/{number}", "text": text_of(number)} for number in range(12)]
    return write_rows(tmp_path / "many.jsonl", rows)


def bytes_of(address, ids):
    storage = open_storage(address)
    return {id: storage.read(cache_file(id)) for id in ids}


def test_a_store_on_s3_has_the_caches_of_a_local_one_and_continues(
    bucket, many, compress, tmp_path
):
    compress(many, tmp_path / "local")
    compress(many, bucket)
    ids = Store(tmp_path / "local").ids
    store = Store(bucket)
    assert store.ids == ids
    assert bytes_of(bucket, ids) == bytes_of(tmp_path / "local", ids)
    assert store["doc/3"].metadata["id"] == "doc/3"
    assert compress(many, bucket).num_made == 0
    open_storage(bucket).remove(cache_file("doc/3"))
    assert "no cache file s3://" in refusal(Store(bucket).__getitem__, "doc/3")
    assert compress(many, bucket).num_made == 1
    message = refusal(compress, many, bucket, CorpusSettings(keep_ratio=0.5))
    assert "was made with keep_ratio 0.1, not 0.5" in message


def test_processes_that_write_at_the_same_time_lose_no_document(
    bucket, many, compress, tiny_folder, tmp_path
):
    others = write_rows(
        tmp_path / "others.jsonl",
        [{"id": f"other/{number}", "text": text_of(number)} for number in range(6)],
    )
    jobs = [[many, "--shard", "0/2"], [many, "--shard", "1/2"], [others], [others]]
    commands = []
    for source, *options in jobs:
        words = ["corpus", tiny_folder, source, "-o", bucket, *options]
        command = [sys.executable, "-m", "kvcat", *map(str, words)]
        commands.append(subprocess.Popen(command))
    assert [command.wait() for command in commands] == [0, 0, 0, 0]
    assert len(Store(bucket)) == 18
    compress(many, tmp_path / "local")
    ids = Store(tmp_path / "local").ids
    assert bytes_of(bucket, ids) == bytes_of(tmp_path / "local", ids)


def test_uploads_that_break_are_repeated(bucket, many, compress, relay):
    relay.num_broken = 0
    relay.num_to_break = 2
    assert compress(many, bucket).num_made == 12
    assert relay.num_broken == 2
    store = Store(bucket)
    assert all(store[id].metadata["id"] == id for id in store.ids)


def test_a_server_that_is_gone_ends_with_one_line_and_the_run_continues_later(
    bucket, many, compress, relay
):
    compress(many, bucket)
    open_storage(bucket).remove(cache_file("doc/1"))
    relay.is_down = True
    try:
        message = refusal(compress, many, bucket)
        assert message.startswith("cannot ")
        assert bucket in message
    finally:
        relay.is_down = False
    assert compress(many, bucket).num_made == 1


def test_a_download_that_breaks_once_is_repeated(bucket, many, compress, broken_replies):
    compress(many, bucket)
    broken_replies(1)
    assert Store(bucket)["doc/3"].metadata["id"] == "doc/3"


def test_a_download_that_breaks_again_and_again_ends_with_one_line(
    bucket, many, compress, broken_replies
):
    compress(many, bucket)
    store = Store(bucket)
    broken_replies(20)
    message = refusal(store.__getitem__, "doc/3")
    broken_replies(0)
    assert message.startswith("cannot read caches/")
    assert "\n" not in message
    assert store["doc/3"].metadata["id"] == "doc/3"


@pytest.fixture
def broken_replies(relay):
    """Break the next replies that hold a file."""

    def break_some(count):
        relay.num_replies_to_break = count

    relay.num_broken = 0
    yield break_some
    assert relay.num_broken
    relay.num_replies_to_break = 0


def test_a_missing_bucket_and_wrong_credentials_are_rejected_before_the_model_is_loaded(
    bucket, relay
):
    settings = CorpusSettings().record()
    missing = "s3://no-such-bucket/store"
    assert refusal(check_store, missing, settings).startswith(f"cannot write to {missing}: ")
    assert "no store of caches" in refusal(Store, missing)
    check_store(bucket, settings)
    assert open_storage(bucket).occupant() is None
    count_free_requests(relay, 0)  # every further request needs a key that exists
    try:
        message = refusal(check_store, bucket, settings)
        assert message.startswith(f"cannot read store.json in {bucket}: PermissionError")
    finally:
        count_free_requests(relay, 1_000_000)


def count_free_requests(relay, count):
    """Let moto's server accept a number of requests without looking at their keys."""
    address = f"http://127.0.0.1:{relay.port}/moto-api/reset-auth"
    request = urllib.request.Request(address, str(count).encode(), method="POST")
    request.add_header("content-type", "application/octet-stream")
    urllib.request.urlopen(request).close()


def test_a_run_that_is_killed_leaves_whole_objects_and_continues(
    bucket, many, compress, tiny_folder, tmp_path
):
    words = ["corpus", tiny_folder, many, "-o", bucket]
    command = subprocess.Popen([sys.executable, "-m", "kvcat", *map(str, words)])
    storage = open_storage(bucket)
    while command.poll() is None and len(storage.names("caches")) < 4:
        time.sleep(0.05)
    command.kill()
    command.wait()
    compress(many, tmp_path / "local")
    names = storage.names("caches")
    assert 4 <= len(names) < 12
    local = open_storage(tmp_path / "local")
    assert all(storage.read(name) == local.read(name) for name in names)
    assert compress(many, bucket).num_made in (12, 12 - len(names))
    ids = Store(bucket).ids
    assert bytes_of(bucket, ids) == bytes_of(tmp_path / "local", ids)
