"""Files are complete or absent, logs survive a kill, and a folder has one writer."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvcat.errors import InputError
from kvcat.files import (
    append_jsonl,
    atomic_write,
    claim_folder,
    expanded,
    full_path,
    one_writer,
    read_json,
    read_jsonl,
    read_text,
    write_json,
)


def write_half_a_folder(target):
    with atomic_write(target) as partial:
        partial.mkdir()
        partial.write_text("half")


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind_and_a_folder_is_replaced_whole(
    tmp_path,
):
    target = tmp_path / "a.json"
    write_json(target, {"a": 1})
    with pytest.raises(InputError, match=r"cannot write .*a\.json: Is a dir"):
        write_half_a_folder(target)
    assert read_json(target) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    for name in ("old", "new"):
        with atomic_write(tmp_path / "folder") as partial:
            partial.mkdir()
            (partial / name).write_text(name)
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["new"]


def test_a_file_system_that_removes_nothing_is_named_with_the_file_and_not_with_its_temporary_one(
    tmp_path, monkeypatch
):
    """A read-only file system rejects the removal of what does not exist, too."""

    def unlink(path, **_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(InputError, match=r"^cannot write [^ ]*/a\.json: Read-only file system$"):
        write_json(tmp_path / "a.json", {"a": 1})


def test_a_tilde_is_a_home_folder_and_one_before_the_name_of_no_user_is_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for text, path in (("~/a", "/home/me/a"), ("~", "/home/me"), ("~no user/a", "~no user/a")):
        assert expanded(text) == expanded(Path(text)) == Path(path)
    assert full_path("~no user/a") == Path.cwd() / "~no user" / "a"


def test_numpy_that_finds_no_room_is_explained(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # bytes of a file
    try:
        with (
            pytest.raises(
                InputError, match=r"cannot write .*a\.gguf: the disk is full, or a limit"
            ),
            atomic_write(tmp_path / "a.gguf") as partial,
        ):
            np.ones(10_000).tofile(partial)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_append(tmp_path, cut):
    log = tmp_path / "log.jsonl"
    append_jsonl(log, {"n": 1}, {"n": 2})
    log.write_bytes(log.read_bytes()[:-cut])
    records = read_jsonl(log)
    assert records == [{"n": 1}][: 1 if cut < 40 else 0]
    append_jsonl(log, {"n": 3})
    assert read_jsonl(log) == [*records, {"n": 3}]
    for line in ("{", "3"):
        log.write_text(f"{line}\n")
        with pytest.raises(InputError, match="is damaged"):
            read_jsonl(log)


def test_an_empty_folder_is_claimed_once_and_one_of_something_else_is_rejected(tmp_path):
    (tmp_path / ".partial-x").mkdir()  # left by a kill
    assert claim_folder(tmp_path, "config.json", {"seed": 0}) is None
    assert claim_folder(tmp_path, "config.json", {"seed": 1}) == {"seed": 0}
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    with pytest.raises(InputError, match=r"holds config\.json"):
        claim_folder(tmp_path, "other.json", {})


def test_a_folder_has_one_writer_is_free_after_a_kill_and_goes_where_nothing_was_written(tmp_path):
    hold = "import sys, pathlib, time; from kvcat.files import one_writer\n"
    hold += "with one_writer(pathlib.Path(sys.argv[1])):\n"
    hold += "    print('held', flush=True)\n    time.sleep(60)\n"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match="another process is writing"), one_writer(tmp_path):
            pass
        other.kill()
    (tmp_path / "old").mkdir()
    for name, written in (("empty", False), ("full", True), ("old", False)):
        with one_writer(tmp_path / name):
            if written:
                (tmp_path / name / "file").touch()
        assert (tmp_path / name).exists() == (name != "empty")
    with one_writer(tmp_path):
        pass


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path):
    there = tmp_path / "there"
    here = tmp_path / "here"
    there.mkdir()
    here.mkdir()
    link = here / "a.json"
    link.symlink_to(there / "b.json")  # which does not exist yet
    for content in ({"a": 1}, {"a": 2}):
        write_json(link, content)
        assert link.is_symlink()
        assert read_json(there / "b.json") == content
    relative = here / "folder"
    relative.symlink_to("../there/folder")
    for name in ("old", "new"):
        with atomic_write(relative) as partial:
            partial.mkdir()
            (partial / name).write_text(name)
    assert relative.is_symlink()
    assert [file.name for file in (there / "folder").iterdir()] == ["new"]
    assert sorted(file.name for file in there.iterdir()) == ["b.json", "folder"]
    assert sorted(file.name for file in here.iterdir()) == ["a.json", "folder"]
    circle = here / "circle"
    circle.symlink_to(circle)
    for use in (lambda: write_json(circle, {}), lambda: full_path(circle)):
        with pytest.raises(InputError, match="leads back to itself"):
            use()


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_text(file) == '{"a": 1}'
    assert read_json(file) == {"a": 1}
    file.write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"a.json is not UTF-8 text: .* at byte 3"):
        read_text(file)


def test_a_text_without_end_is_read_to_a_bound(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="/dev/zero is not text: it has a zero byte at 0"):
        read_text(Path("/dev/zero"))
    monkeypatch.setattr("kvcat.files.MOST_TEXT_BYTES", 1 << 20)
    file = tmp_path / "a.txt"
    file.write_bytes(b"a\r\n" * (1 << 16))
    assert read_text(file) == "a\n" * (1 << 16)
    file.write_bytes(b"a" * (1 << 20))
    assert read_text(file) == "a" * (1 << 20)
    file.write_bytes(b"a" * (1 << 20) + b"b")
    with pytest.raises(InputError, match=r"a.txt is longer than 1 MiB: split the text"):
        read_text(file)


def test_a_file_has_the_mode_of_the_umask_whoever_writes_it_and_keeps_a_mode_it_had(tmp_path):
    before = os.umask(0o027)
    try:
        for name in ("file", "folder"):
            with atomic_write(tmp_path / name) as partial:
                if name == "folder":
                    partial.mkdir()
                    partial = partial / "inner"
                save_file({"a": torch.zeros(1)}, partial)  # whose files have mode 600
    finally:
        os.umask(before)
    for file in (tmp_path / "file", tmp_path / "folder" / "inner"):
        assert file.stat().st_mode & 0o777 == 0o640
    (tmp_path / "file").chmod(0o600)
    write_json(tmp_path / "file", {})
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_claimed_folder_holds_no_link_but_may_be_one(tmp_path):
    claim_folder(tmp_path, "config.json", {"seed": 0})
    link = tmp_path / "records.jsonl"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"records\.jsonl is a link, and kvcat follows none in"):
        claim_folder(tmp_path, "config.json", None)
    link.unlink()
    link.symlink_to(tmp_path)
    assert claim_folder(link.rename(tmp_path.parent / "link"), "config.json", None) == {"seed": 0}
    (tmp_path / ".kvcat.lock").symlink_to(tmp_path / "config.json")
    with pytest.raises(InputError, match="is a link"), one_writer(tmp_path):
        pass
    assert read_json(tmp_path / "config.json") == {"seed": 0}
