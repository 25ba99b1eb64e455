"""Checks of shape and type annotations where they are asked for, and a tiny model in a folder.

The checks cost a third of the tests' time. CI makes them; KVCAT_CHECK_TYPES=1 makes them here.
"""

import os
from collections import Counter

THREADS = os.environ.get("KVCAT_TEST_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", THREADS)  # of processes that tests start, too

from jaxtyping import install_import_hook  # noqa: E402

if os.environ.get("KVCAT_CHECK_TYPES"):
    install_import_hook("kvcat", "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402

from tiny import byte_tokenizer, write_texts, write_tiny_model  # noqa: E402

torch.set_num_threads(int(THREADS))


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items):
    """Mark the cases that are slow, and begin with the longest tests, so that no worker waits for
    another one at the end.
    """
    num_cases = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        num_cases[test] += 1
        if any(num_cases[test] > mark.args[0] for mark in item.iter_markers("slow_after")):
            item.add_marker("slow")
    items.sort(key=lambda item: item.path.name != "test_readme.py")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A Hugging Face folder: Qwen2, two layers, width 32, 256 positions, byte-level tokenizer with
    a chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level tokenizer of 300 tokens."""
    return byte_tokenizer()


@pytest.fixture(scope="session")
def texts_folder(tmp_path_factory):
    """A folder of 40 short texts."""
    return write_texts(tmp_path_factory.mktemp("data") / "texts")


@pytest.fixture(scope="module")
def cluster():
    """The address of a Ray cluster of two processors on this machine."""
    ray = pytest.importorskip("ray", reason="kvcat[ray] is not installed")
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray's name)
    # "local": a cluster of its own, whatever runs or was left on this machine
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
