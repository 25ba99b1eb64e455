"""A corpus on a real local Ray cluster: two workers, one of which is killed in the middle."""

from pathlib import Path

import pytest
from corpora import contents, text_of, write_rows

ray = pytest.importorskip("ray", reason="kvcat[ray] is not installed")

from kvcat.corpus import CorpusSettings, Store  # noqa: E402
from kvcat.corpus.ray_engine import compress_on_ray  # noqa: E402
from kvcat.ray_cluster import connect  # noqa: E402
from ray_commands import kill_a_worker, start  # noqa: E402
from tiny import refusal  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_a_killed_worker_loses_nothing_and_makes_nothing_twice(
    cluster, tiny_folder, compress, tmp_path
):
    rows = [{"id": str(number), "text": text_of(number)} for number in range(60)]
    rows += [{"id": "empty", "text": ""}]
    source = write_rows(tmp_path / "corpus.jsonl", rows)
    compress(source, tmp_path / "local")
    store = tmp_path / "ray"
    arguments = ["corpus", tiny_folder, source, "-o", store, "--workers", 2]
    command = start(cluster, *arguments)
    kill_a_worker(b"RayCompressor", lambda: len(list(store.rglob("*.safetensors"))) >= 5, command)
    output, errors = command.communicate()
    assert command.returncode == 0, errors
    assert "RayCompressor" not in errors  # Ray's log is in its files
    assert "RayCompressor" in driver_log()
    assert "60 caches made and 0 kept of 61 documents, 1 without a cache" in output
    assert "no cache of 'empty'" in errors
    assert len(Store(store)) == 60
    assert contents(store) == contents(tmp_path / "local")
    again = compress_on_ray(str(tiny_folder), source, store, CorpusSettings(), workers=2)
    assert (again.num_made, again.num_kept) == (0, 60)


def test_a_mistake_that_only_a_worker_sees_is_one_line(cluster, tiny_folder, corpus, tmp_path):
    store = tmp_path / "store"
    compress_on_ray(str(tiny_folder), corpus, store, CorpusSettings(), workers=1)
    file = next(store.rglob("*.safetensors"))
    file.unlink()
    file.mkdir()
    (file / "in the way").touch()
    message = refusal(compress_on_ray, str(tiny_folder), corpus, store, CorpusSettings())
    assert message.startswith(f"cannot write {file}")
    assert "\n" not in message


def driver_log():
    """What Ray Data wrote to its log file."""
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    return (session / "logs" / "ray-data" / "ray-data.log").read_text()


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense", "host:port"])
def test_an_address_without_a_cluster_is_rejected_at_once(address):
    if ray.is_initialized():
        ray.shutdown()
    assert f"no Ray cluster at {address}" in refusal(connect, address)
