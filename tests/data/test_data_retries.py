"""A network that fails now and then loses and doubles nothing; one that stays away ends the run with one line."""

import logging
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pyarrow
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcat.data import Shard, Shards, TokenStreams, local_splits, open_shards, retry, rows
from kvcat.data import shards as shards_module
from kvcat.data.rows import read_documents
from kvcat.errors import InputError
from text_files import texts, write_lines, write_table
from tiny import byte_tokenizer


class Network:
    """Which reads fail: those of these numbers, or all from one on."""

    def __init__(self, failing=(), gone_from=None, error=ConnectionResetError):
        self.failing, self.gone_from, self.error, self.reads = set(failing), gone_from, error, 0

    def touch(self):
        self.reads += 1
        if self.reads in self.failing or (self.gone_from is not None and self.reads >= self.gone_from):
            raise self.error("the line\nis dead")


network = Network()


class FlakyFile(AbstractBufferedFile):
    """Fetches ranges, as the Hub's files do."""

    def _fetch_range(self, start, end):
        network.touch()
        return Path(self.path).read_bytes()[start:end]


class FlakySystem(LocalFileSystem):
    protocol = "flaky"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("flaky://")

    def _open(self, path, mode="rb", **options):
        network.touch()
        return FlakyFile(self, path, mode, cache_type=options["cache_type"])


@pytest.fixture(scope="module", autouse=True)
def flaky():
    fsspec.register_implementation("flaky", FlakySystem, clobber=True)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(retry, "WAITS", (0.0,) * 8)
    monkeypatch.setattr(rows, "BUFFER_BYTES", 1 << 12)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote")
    documents = {name: text * 40 for name, text in texts(60).items()}
    write_table(folder / "a.parquet", documents, 4)
    write_lines(folder / "a.jsonl", documents)
    write_lines(folder / "a.jsonl.gz", documents)
    return folder, documents


def remote(files, name):
    return Shard(name, f"flaky://{files[0] / name}", "parquet" if name.endswith("parquet") else "jsonl")


def through(failing=(), **options):
    global network
    network = Network(failing, **options)
    return network


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz"])
@given(st.sets(st.integers(1, 40), max_size=7))
@settings(max_examples=15, deadline=None)
def test_reading_goes_on_exactly_where_it_was(files, name, failing):
    through(failing)
    found = [(document.id, document.text) for _, document in read_documents(remote(files, name))]
    assert found == list(files[1].items())


def test_each_retry_is_told_with_its_reason(files, caplog):
    through([3, 4, 9])
    list(read_documents(remote(files, "a.parquet")))
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 3
    assert all("a.parquet failed (ConnectionResetError: the line is dead); retry" in line for line in told)
    assert "retry 2 of 8" in told[1]


def test_the_waits_grow_and_start_anew_after_a_success(files, monkeypatch):
    waits = []
    monkeypatch.setattr(retry, "WAITS", (1.0, 2.0, 4.0))
    monkeypatch.setattr(retry, "time", SimpleNamespace(sleep=waits.append))
    through([1, 2, 3, 12])
    assert len(list(read_documents(remote(files, "a.parquet")))) == 60
    assert waits == [1.0, 2.0, 4.0, 1.0]


@pytest.mark.parametrize("gone_from", [1, 12])
def test_a_network_that_stays_away_ends_in_one_line(files, gone_from):
    through(gone_from=gone_from)
    with pytest.raises(InputError, match="the network stays away, 8 retries") as caught:
        list(read_documents(remote(files, "a.parquet")))
    assert "\n" not in str(caught.value)
    assert network.reads == gone_from + 8


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_what_waiting_cannot_mend_ends_at_once(files, error):
    through(gone_from=1, error=error)
    with pytest.raises(InputError, match=f"cannot be read as parquet: {error.__name__}"):
        list(read_documents(remote(files, "a.parquet")))
    assert network.reads == 1


@pytest.mark.parametrize(("status", "mended"), [(429, True), (503, True), (403, False), (404, False)])
def test_the_status_of_an_answer_decides(status, mended):
    error = OSError("answer")
    error.response = SimpleNamespace(status_code=status)
    assert retry.passing(error) == mended


def test_the_clients_own_errors_count_as_the_networks():
    httpx = type("ReadTimeout", (Exception,), {"__module__": "httpx._exceptions"})
    assert retry.passing(httpx())
    assert retry.passing(pyarrow.ArrowInvalid())
    assert not retry.passing(KeyError())
    assert not retry.unreadable(pyarrow.ArrowNotImplementedError())


def test_streams_over_a_failing_network_give_the_same_batches(files):
    tokenizer = byte_tokenizer()

    def batches(url):
        shards = Shards("hub:o/n", tuple(Shard(n, url + n, "parquet") for n in ("a.parquet",)), "commit")
        source = TokenStreams(shards, tokenizer, seq_len=32, num_streams=3, seed=0)
        return torch.stack([source.read([0, 1, 2]) for _ in range(30)])

    through([2, 3, 8, 15, 21, 22, 23, 40])
    assert torch.equal(batches(f"flaky://{files[0]}/"), batches(f"{files[0]}/"))


def test_the_list_of_files_is_asked_for_again(monkeypatch):
    import datasets

    answers = [ConnectionError("no"), TimeoutError("late"), {"train": ["hf://datasets/o/n@main/a.parquet"]}]

    def load_dataset_builder(*_, **__):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(config=SimpleNamespace(data_files=answer))

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    monkeypatch.setattr(shards_module, "hub_obstacle", lambda: None)
    assert len(open_shards("hub:o/n").files) == 1
    answers[:] = [ConnectionError("no")] * 9
    with pytest.raises(InputError, match="the file list of o/n: the network stays away"):
        open_shards("hub:o/n")
    answers[:] = [FileNotFoundError("no such data set")]
    with pytest.raises(InputError, match="cannot be opened: FileNotFoundError: no such data set"):
        open_shards("hub:o/n")


def test_too_few_local_documents_are_refused(tmp_path):
    write_table(tmp_path / "a.parquet", texts(1))
    with pytest.raises(InputError, match=r"too few documents \(1\)"):
        local_splits(str(tmp_path), 0)
