"""A corpus on a real local Ray cluster: two workers, one of which is killed in the middle."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from corpora import contents, text_of, write_rows

ray = pytest.importorskip("ray", reason="kvcat[ray] is not installed")

from kvcat.corpus import CorpusSettings, Store  # noqa: E402
from kvcat.corpus.ray_engine import compress_on_ray  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two processors on this machine."""
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray's name)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def worker_pids():
    """The processes of this machine that run the actor."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if command.startswith(b"ray::") and b"RayCompressor" in command:
                pids.append(int(folder.name))
    return pids


def test_a_killed_worker_loses_nothing_and_makes_nothing_twice(
    cluster, tiny_folder, compress, tmp_path
):
    rows = [{"id": str(number), "text": text_of(number)} for number in range(60)]
    rows += [{"id": "empty", "text": ""}]
    source = write_rows(tmp_path / "corpus.jsonl", rows)
    compress(source, tmp_path / "local")
    store = tmp_path / "ray"
    killed = []

    def kill():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            pids = worker_pids()
            if len(list(store.rglob("*.safetensors"))) >= 5 and pids:
                os.kill(pids[0], signal.SIGKILL)
                killed.append(pids[0])
                return
            time.sleep(0.02)

    thread = threading.Thread(target=kill)
    thread.start()
    result = compress_on_ray(str(tiny_folder), source, store, CorpusSettings(), workers=2)
    thread.join()
    assert killed
    assert (result.num_made, result.num_documents) == (60, 61)
    assert [row.id for row in result.failures] == ["empty"]
    assert len(Store(store)) == 60
    assert contents(store) == contents(tmp_path / "local")
    again = compress_on_ray(str(tiny_folder), source, store, CorpusSettings(), workers=2)
    assert (again.num_made, again.num_kept) == (0, 60)
