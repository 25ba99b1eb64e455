import dataclasses
import json

import numpy as np
import pytest

from kvcat.errors import InputError
from kvcat.evals import Record, ResultsFolder, read_records

CONFIG = {"evaluation": "suffix", "dataset": "t", "num_examples": 2, "methods": [], "prefix_len": 8}


def record(window, keep_ratio=0.1, step=None):
    values = {"kl": 0.1 + 0.2, "nll": 1e-17}
    return Record(
        "base",
        "abc",
        "float32",
        "first",
        "{}",
        keep_ratio,
        step,
        None,
        "texts",
        "",
        "doc",
        str(window),
        values,
    )


def test_each_part_of_the_key_makes_another_record():
    changes = {
        "model": "x",
        "fingerprint": "x",
        "dtype": "x",
        "method": "x",
        "options": '{"a": 1}',
        "keep_ratio": 0.2,
        "step": 3,
        "seed": 1,
        "dataset": "x",
        "document": "x",
        "example": "x",
    }
    keys = {dataclasses.replace(record(0), **{name: value}).key for name, value in changes.items()}
    assert len(keys | {record(0).key}) == len(changes) + 1


def test_numbers_of_numpy_are_written_like_pythons(tmp_path):
    made = dataclasses.replace(record(0), values={"kl": np.float32(0.5), "nll": np.int64(2)})
    with ResultsFolder(tmp_path, CONFIG) as folder:
        folder.append([made])
    assert read_records(tmp_path) == [made]
    assert made.values == {"kl": 0.5, "nll": 2.0}


@pytest.mark.parametrize("cut", [1, 60])
def test_records_are_written_once_and_a_line_torn_by_a_kill_is_written_again(tmp_path, cut):
    with ResultsFolder(tmp_path, CONFIG) as folder:
        assert not folder.done(record(0).key)
        folder.append([record(0)])
        folder.append([record(0), record(1)])
        assert folder.done(record(0).key)
    file = tmp_path / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    assert read_records(tmp_path) == [record(0)]
    with ResultsFolder(tmp_path, CONFIG) as folder:
        assert not folder.done(record(1).key)
        folder.append([record(1)])
    assert read_records(tmp_path) == [record(0), record(1)]


def line(**changes):
    return json.dumps({**dataclasses.asdict(record(0)), **changes})


def test_another_configuration_or_other_weights_of_a_label_are_rejected_and_the_folder_freed(
    tmp_path,
):
    with ResultsFolder(tmp_path, CONFIG) as folder:
        folder.append([record(0)])
        folder.check_models({"base": {"fingerprint": "abc", "dtype": "float32"}})
        with pytest.raises(InputError, match=r"another model 'base', .*float32.*, not .*bfloat16"):
            folder.check_models({"base": {"fingerprint": "abc", "dtype": "bfloat16"}})
    for shard in ((0, 1), (1, 2), (1, 2)):
        with pytest.raises(
            InputError, match=r"another configuration: prefix_len is 8 there, 16 here"
        ):
            ResultsFolder(tmp_path, {**CONFIG, "prefix_len": 16}, shard=shard)
    with ResultsFolder(tmp_path, CONFIG):
        pass


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
    (tmp_path / "records-2-of-3.jsonl").write_text(line() + "\n")  # two shards wrote it
    assert read_records(tmp_path) == [record(0), record(1)]
