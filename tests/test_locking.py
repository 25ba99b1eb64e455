"""A folder has one writer at a time."""

import errno
import multiprocessing
import os
import signal

import pytest

from kvcat import locking
from kvcat.errors import InputError
from kvcat.locking import FolderLock


def hold(folder, ready):
    with FolderLock(folder):
        ready.set()
        signal.pause()


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready), daemon=True)
    process.start()
    assert ready.wait(60)
    yield process
    process.kill()
    process.join()


def test_a_folder_that_another_process_holds_is_refused_in_one_line(tmp_path, holder):
    with pytest.raises(InputError, match=r"^another process is writing to .*choose another folder$"):
        FolderLock(tmp_path)


def test_a_killed_process_leaves_the_folder_free_and_as_it_was(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with FolderLock(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_folder_is_free_again_after_the_block_and_after_release(tmp_path):
    with FolderLock(tmp_path), pytest.raises(InputError, match="another process"):
        FolderLock(tmp_path)
    lock = FolderLock(tmp_path)
    lock.release()
    lock.release()
    FolderLock(tmp_path).release()


def test_a_lock_that_is_not_enabled_holds_nothing_and_asks_nobody(tmp_path):
    with FolderLock(tmp_path), FolderLock(tmp_path, enabled=False), FolderLock(tmp_path / "gone", enabled=False):
        pass


def test_a_lock_that_nobody_refers_to_any_more_is_released(tmp_path):
    FolderLock(tmp_path)
    FolderLock(tmp_path).release()


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"cannot open .*gone: No such file"):
        FolderLock(tmp_path / "gone")


def test_without_locks_on_the_platform_a_warning_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "fcntl", None)
    with pytest.warns(RuntimeWarning, match="this platform has no file locks"), FolderLock(tmp_path):
        pass


def test_without_locks_on_the_file_system_a_warning_says_so(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(locking.fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning, match="its file system has no file locks"):
        FolderLock(tmp_path).release()
