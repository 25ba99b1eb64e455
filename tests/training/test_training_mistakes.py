"""A person's mistake is one line, told before anything is written."""

import dataclasses
import json
import shutil
import time
from collections import namedtuple

import pytest
from runs import config

from kvcat.errors import InputError
from kvcat.training import TrainConfig, train
from kvcat.training.setup import claim_folder
from tiny import write_texts


def refusal(run):
    with pytest.raises(InputError) as caught:
        train(run, progress=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def out(tmp_path):
    """An output folder that must not be there afterwards."""
    yield tmp_path / "run"
    assert not (tmp_path / "run").exists()


def test_a_missing_model_folder(texts_folder, out):
    assert "./nowhere" in refusal(config("./nowhere", texts_folder, out))


def test_a_corrupt_model_folder(tiny_folder, texts_folder, tmp_path, out):
    broken = shutil.copytree(tiny_folder, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    assert "model.safetensors is corrupt" in refusal(config(broken, texts_folder, out))


def test_a_hub_model_without_network(texts_folder, out, monkeypatch):
    monkeypatch.setattr("kvcat.network._reachable", lambda *_: False)
    assert "cannot be reached" in refusal(config("nobody/no-such-model", texts_folder, out))


def test_a_hub_data_set_without_network(tiny_folder, out, monkeypatch):
    monkeypatch.setattr("kvcat.network._reachable", lambda *_: False)
    started = time.monotonic()
    assert "nobody/texts" in refusal(config(tiny_folder, "hub:nobody/texts", out))
    assert time.monotonic() - started < 3


def test_a_missing_text(tiny_folder, tmp_path, out):
    assert "gone.txt" in refusal(config(tiny_folder, tmp_path / "gone.txt", out))


def test_text_shorter_than_a_sequence(tiny_folder, tmp_path, out):
    texts = write_texts(tmp_path / "short", documents=2, length=1)
    told = refusal(config(tiny_folder, texts, out))
    assert "fewer than one sequence of 32" in told
    assert str(texts) in told


def test_a_single_document_cannot_be_split(tiny_folder, tmp_path, out):
    texts = write_texts(tmp_path / "one", documents=1, length=90)
    assert "too few documents (1)" in refusal(config(tiny_folder, texts / "00.txt", out))


def test_two_documents_are_enough(tiny_folder, tmp_path):
    texts = write_texts(tmp_path / "two", documents=2, length=60)
    assert train(config(tiny_folder, texts, tmp_path / "run", max_steps=1), progress=False).validation["step"] == 1


def test_a_sequence_longer_than_the_models_positions(tiny_folder, texts_folder, out):
    assert "seq_len 257 exceeds the model's 256 positions" in refusal(
        config(tiny_folder, texts_folder, out, seq_len=257)
    )


@pytest.mark.parametrize("starts", [(0, 2), (-1,), (1, 0), (0, 0), ()])
def test_routers_at_layers_that_do_not_exist(starts, tiny_folder, texts_folder, out):
    assert "group start" in refusal(config(tiny_folder, texts_folder, out, group_starts=starts))


def test_more_groups_than_layers(tiny_folder, texts_folder, out):
    assert "1..2" in refusal(config(tiny_folder, texts_folder, out, num_groups=3))


def test_too_little_disk_space(tiny_folder, texts_folder, out, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 10_000))
    assert "no disk space" in refusal(config(tiny_folder, texts_folder, out))


def test_a_folder_that_holds_something_else(tiny_folder, texts_folder, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty" in refusal(config(tiny_folder, texts_folder, tmp_path))
    assert [f.name for f in tmp_path.iterdir()] == ["notes.txt"]


def test_a_model_folder_is_no_run_of_ours(tiny_folder, texts_folder, tmp_path):
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    before = sorted(f.name for f in model.iterdir())
    assert "holds no run of ours" in refusal(config(tiny_folder, texts_folder, model))
    assert sorted(f.name for f in model.iterdir()) == before


def test_the_folder_of_another_run_keeps_its_run(tiny_folder, texts_folder, tmp_path):
    run = config(tiny_folder, texts_folder, tmp_path / "run", policy="control", max_steps=1)
    train(run, progress=False)
    before = {f: f.read_bytes() for f in (tmp_path / "run").rglob("*") if f.is_file()}
    told = refusal(dataclasses.replace(run, peak_lr=0.5))
    assert "its peak_lr is 0.01, not 0.5" in told
    assert {f: f.read_bytes() for f in (tmp_path / "run").rglob("*") if f.is_file()} == before


def test_a_file_in_place_of_the_folder(tiny_folder, texts_folder, tmp_path):
    (tmp_path / "run").write_text("")
    assert str(tmp_path / "run") in refusal(config(tiny_folder, texts_folder, tmp_path / "run"))
    assert str(tmp_path / "run") in refusal(config(tiny_folder, texts_folder, tmp_path / "run" / "below"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_keep", 0.0), ("target_keep", 1.0), ("target_keep", float("nan")), ("tau", 1.0), ("max_steps", 0),
        ("seq_len", 1), ("batch_size", 0), ("micro_batch_size", 3), ("micro_batch_size", 0), ("micro_batch_size", -2),
        ("peak_lr", 0.0), ("peak_lr", float("inf")), ("min_lr", 1.0), ("min_lr", -1.0), ("warmup_steps", -1),
        ("mask_weight", -1.0), ("mask_weight", float("nan")), ("router_noise", -0.1), ("max_grad_norm", 0.0),
        ("seed", -1), ("seed", 2**63), ("policy", "best"), ("coupling", "loose"), ("dtype", "int8"),
        ("betas", (0.9, 1.0)), ("keep_checkpoints", 0), ("router_lr_multiplier", 0.0), ("learning_rate", 0.1),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named(name, value):
    with pytest.raises(InputError, match=name) as caught:
        config("model", "data", "out", **{name: value})
    assert "\n" not in str(caught.value)


def test_a_configuration_reads_back_what_it_saved(tmp_path):
    run = config("model", "data", "out", group_starts=(0, 3), micro_batch_size=2)
    run.save(tmp_path / "config.json")
    assert TrainConfig.load(tmp_path / "config.json") == run
    assert [f.name for f in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"model": "m"}), json.dumps({"hidden_size": 3})])
def test_what_is_no_configuration_is_refused(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError):
        TrainConfig.load(tmp_path / "config.json")


def test_a_second_process_does_not_write_into_a_run(tiny_folder, texts_folder, tmp_path):
    run = config(tiny_folder, texts_folder, tmp_path / "run", policy="control", max_steps=1)
    with claim_folder(tmp_path / "run", run):
        assert "another process is writing" in refusal(run)
    train(run, progress=False)


def test_what_a_kill_while_the_folder_was_claimed_leaves_is_a_fresh_folder(tiny_folder, texts_folder, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.partial").write_text("{")
    run = config(tiny_folder, texts_folder, tmp_path / "run", policy="control", max_steps=1)
    assert train(run, progress=False).validation["step"] == 1
    assert not (tmp_path / "run" / "config.partial").exists()
