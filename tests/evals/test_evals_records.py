import dataclasses
import errno
import json
import os

import pytest

from kvcat.errors import InputError
from kvcat.evals import Record, ResultsFolder, models_of, read_records

CONFIG = {"evaluation": "suffix", "prefix_len": 8, "seed": 0}


def record(window, keep_ratio=0.1, step=None):
    values = {"kl": 0.1 + 0.2, "nll": 1e-17}
    return Record(
        "base", "abc", "float32", "first", "{}", keep_ratio, step, None, "texts", "", "doc", str(window), values
    )


def test_records_come_back_as_they_were_written_to_the_last_bit(tmp_path):
    written = [record(i) for i in range(3)]
    with ResultsFolder(tmp_path / "out", CONFIG) as folder:
        folder.append(written)
    assert read_records(tmp_path / "out") == written


def test_each_part_of_the_key_makes_another_record():
    changes = {
        "model": "x", "fingerprint": "x", "dtype": "x", "method": "x", "options": '{"a": 1}', "keep_ratio": 0.2,
        "step": 3, "seed": 1, "dataset": "x", "document": "x", "example": "x",
    }  # fmt: skip
    keys = {dataclasses.replace(record(0), **{name: value}).key for name, value in changes.items()}
    assert len(keys | {record(0).key}) == len(changes) + 1


def test_a_record_is_done_after_append_and_is_not_written_twice(tmp_path):
    with ResultsFolder(tmp_path, CONFIG) as folder:
        assert not folder.done(record(0).key)
        folder.append([record(0)])
        folder.append([record(0), record(1)])
        assert folder.done(record(0).key)
    assert read_records(tmp_path) == [record(0), record(1)]


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_torn_by_a_kill_is_dropped_and_the_next_append_is_whole(tmp_path, cut):
    with ResultsFolder(tmp_path, CONFIG) as folder:
        folder.append([record(0), record(1)])
    file = tmp_path / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    assert read_records(tmp_path) == [record(0)]
    with ResultsFolder(tmp_path, CONFIG) as folder:
        assert not folder.done(record(1).key)
        folder.append([record(1)])
    assert read_records(tmp_path) == [record(0), record(1)]


@pytest.mark.parametrize("damage", [b"{broken\n", b"3\n", b"\xff\xfe\n"])
def test_a_damaged_line_in_the_middle_is_refused(tmp_path, damage):
    with ResultsFolder(tmp_path, CONFIG) as folder:
        folder.append([record(0)])
    file = tmp_path / "records.jsonl"
    file.write_bytes(damage + file.read_bytes())
    with pytest.raises(InputError, match="no record"):
        read_records(tmp_path)


def test_another_configuration_is_refused_with_the_field_that_differs(tmp_path):
    with ResultsFolder(tmp_path, CONFIG):
        pass
    with pytest.raises(InputError, match=r"prefix_len is 8 there, 16 here"):
        ResultsFolder(tmp_path, {**CONFIG, "prefix_len": 16})


def test_models_may_be_added_but_a_label_keeps_its_weights(tmp_path):
    with ResultsFolder(tmp_path, CONFIG) as folder:
        folder.check_model("base", "abc", "float32")
        folder.append([record(0)])
    with ResultsFolder(tmp_path, CONFIG) as folder:
        folder.check_model("kvcat", "def", "float32")
        folder.check_model("base", "abc", "float32")
        with pytest.raises(InputError, match=r"'base'.*fingerprint is abc there, other here"):
            folder.check_model("base", "other", "float32")
        with pytest.raises(InputError, match=r"'base'.*dtype is float32 there, bfloat16 here"):
            folder.check_model("base", "abc", "bfloat16")


def test_shards_share_a_folder_and_each_sees_what_the_others_did(tmp_path):
    with (
        ResultsFolder(tmp_path, CONFIG, shard=(0, 2)) as first,
        ResultsFolder(tmp_path, CONFIG, shard=(1, 2)) as second,
    ):
        first.append([record(0)])
        second.append([record(1)])
        with pytest.raises(InputError, match="another process is writing"):
            ResultsFolder(tmp_path, CONFIG, shard=(1, 2))
        with pytest.raises(InputError, match="another process is writing"):
            ResultsFolder(tmp_path, CONFIG)
    with ResultsFolder(tmp_path, CONFIG) as whole:
        assert whole.done(record(0).key)
        assert whole.done(record(1).key)
        with pytest.raises(InputError, match="another process is writing"):
            ResultsFolder(tmp_path, CONFIG, shard=(0, 2))
    assert read_records(tmp_path) == [record(0), record(1)]


def test_a_record_that_two_shards_wrote_counts_once(tmp_path):
    for index in range(2):
        (tmp_path / f"records-{index}-of-2.jsonl").write_text(json.dumps(dataclasses.asdict(record(0))) + "\n")
    assert read_records(tmp_path) == [record(0)]


def test_a_shard_of_another_configuration_is_refused(tmp_path):
    with (
        ResultsFolder(tmp_path, CONFIG, shard=(0, 2)),
        pytest.raises(InputError, match=r"prefix_len is 8 there, 16 here"),
    ):
        ResultsFolder(tmp_path, {**CONFIG, "prefix_len": 16}, shard=(1, 2))


def test_one_label_for_two_models_is_refused():
    with pytest.raises(InputError, match="model 'base' come from two different models"):
        models_of([record(0), dataclasses.replace(record(1), fingerprint="other")])


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("dear")
    with pytest.raises(InputError, match="no results folder"):
        ResultsFolder(tmp_path, CONFIG)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("content", [b"{", b"{}", b"[1]", b"\xff"])
def test_a_config_that_is_not_ours_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=r"damaged|names no evaluation"):
        ResultsFolder(tmp_path, CONFIG)


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    with ResultsFolder(tmp_path, CONFIG) as folder:
        folder.append([record(0)])
        with pytest.raises(InputError, match="another process is writing to"):
            ResultsFolder(tmp_path, CONFIG)
        folder.append([record(1)])
    with ResultsFolder(tmp_path, CONFIG) as folder:
        assert folder.records == [record(0), record(1)]


def test_a_refused_folder_is_free_for_the_next(tmp_path):
    with ResultsFolder(tmp_path, CONFIG):
        pass
    for _ in range(2):
        with pytest.raises(InputError, match="another configuration"):
            ResultsFolder(tmp_path, {**CONFIG, "prefix_len": 16})
    with ResultsFolder(tmp_path, CONFIG):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("dear")
    for place in ("file", "file/results"):
        with pytest.raises(InputError, match=r"is a file|cannot make results folder .*: Not a directory"):
            ResultsFolder(tmp_path / place, CONFIG)


def test_a_full_disk_is_told_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"cannot write to results folder .*: No space left on device"):
        ResultsFolder(tmp_path, CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_the_folder_is_begun_leaves_one_that_can_be_used(tmp_path):
    (tmp_path / "config.partial.7").write_text("{")
    with ResultsFolder(tmp_path, CONFIG) as folder:
        folder.append([record(0)])
    assert read_records(tmp_path) == [record(0)]
