"""A person's mistake is one line, before anything is written."""

import dataclasses
import importlib.util
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from runs import config

from kvcat.errors import InputError
from kvcat.files import one_writer
from kvcat.models import load
from kvcat.training.loop import train
from kvcat.training.objective import Objective
from tiny import write_texts


def refusal(run):
    with pytest.raises(InputError) as caught:
        train(run, progress=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def out(tmp_path):
    """An output folder that must not exist afterwards."""
    yield tmp_path / "run"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "./nowhere"}, "./nowhere"),
        ({"data": "gone.txt"}, "gone.txt"),
        ({"seq_len": 257}, "seq_len 257 exceeds the model's 256 positions"),
        ({"group_starts": (0, 2)}, "group start 2"),
        ({"group_starts": ()}, "group start"),
        ({"num_groups": 3}, "1..2"),
        ({"device": "foo"}, "device is 'foo'"),
        ({"device": "cuda:99"}, "device is 'cuda:99'"),
    ],
)
def test_what_a_run_cannot_have_is_named(options, message, tiny_folder, texts_folder, out):
    assert message in refusal(dataclasses.replace(config(tiny_folder, texts_folder, out), **options))


def test_a_corrupt_model_folder_is_named(tiny_folder, texts_folder, tmp_path, out):
    broken = shutil.copytree(tiny_folder, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    assert "model.safetensors is corrupt" in refusal(config(broken, texts_folder, out))


def test_the_hub_without_network_is_one_line(tiny_folder, texts_folder, out, monkeypatch):
    monkeypatch.setattr("kvcat.network._reachable", lambda *_: False)
    assert "nor in the local Hub cache" in refusal(config("nobody/no-such-model", texts_folder, out))
    assert "nobody/texts" in refusal(config(tiny_folder, "hub:nobody/texts", out))


@pytest.mark.parametrize(
    ("documents", "length", "message"), [(2, 1, "fewer than one sequence of 32"), (1, 90, "too few documents (1)")]
)
def test_text_that_is_too_short_is_named(documents, length, message, tiny_folder, tmp_path, out):
    texts = write_texts(tmp_path / "short", documents=documents, length=length)
    told = refusal(config(tiny_folder, texts, out))
    assert message in told
    assert str(texts) in told


@pytest.mark.parametrize(("option", "package"), [({"monitor": "wandb"}, "wandb"), ({"lora_rank": 2}, "lora")])
def test_a_missing_package_is_told_with_its_installation(option, package, tiny_folder, texts_folder, out, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert f"pip install 'kvcat[{package}]'" in refusal(config(tiny_folder, texts_folder, out, **option))


def free_space(monkeypatch, free):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("kvcat.training.run_folder.shutil.disk_usage", lambda _: usage(10**9, 10**9, free))


def test_the_disk_must_hold_what_is_still_to_be_written_with_the_routers(
    tiny_folder, texts_folder, tmp_path, monkeypatch
):
    run = config(tiny_folder, texts_folder, tmp_path / "run", max_steps=6, checkpoint_every=2, keep_checkpoints=2)
    parameters = sum(p.numel() for p in Objective(load(tiny_folder)[0], run).parameters())
    weights = 4 * parameters  # the export; a checkpoint holds these and two moments of each
    free_space(monkeypatch, 3 * 3 * weights + weights - 1)
    assert "no disk space" in refusal(run)
    assert not (tmp_path / "run").exists()
    free_space(monkeypatch, 3 * 3 * weights + weights)
    with monkeypatch.context() as patch:
        patch.setattr(
            "kvcat.training.loop.Trainer._after_step", lambda self, _: (_ for _ in ()).throw(InterruptedError)
        )
        with pytest.raises(InterruptedError):
            train(run, progress=False)
    for step in (2, 4):
        (tmp_path / "run" / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    free_space(monkeypatch, 3 * weights + weights - 1)
    assert "no disk space" in refusal(run)
    free_space(monkeypatch, 3 * weights + weights)
    assert "is missing" in refusal(run)  # there is room; the two checkpoints are empty folders


def test_a_folder_that_holds_something_else_is_left_alone(tiny_folder, texts_folder, tmp_path):
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    for output in (model, tmp_path / "notes"):
        assert "is not empty and holds no run of ours" in refusal(config(tiny_folder, texts_folder, output))
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        assert str(output) in refusal(config(tiny_folder, texts_folder, output))
    assert sorted(tmp_path.rglob("*")) == before


def test_the_folder_of_another_run_keeps_its_run(tiny_folder, texts_folder, tmp_path):
    run = config(tiny_folder, texts_folder, tmp_path / "run", policy="control", max_steps=2)
    train(run, progress=False)
    before = contents(tmp_path / "run")
    assert "its peak_lr is 0.01, not 0.5" in refusal(dataclasses.replace(run, peak_lr=0.5))
    assert "its max_steps is 2, not 1" in refusal(dataclasses.replace(run, max_steps=1))
    assert contents(tmp_path / "run") == before


def contents(folder):
    return {f: f.read_bytes() for f in Path(folder).rglob("*") if f.is_file()}


def test_a_second_process_does_not_write_into_a_run(tiny_folder, texts_folder, tmp_path):
    run = config(tiny_folder, texts_folder, tmp_path / "run", policy="control", max_steps=1)
    with one_writer(tmp_path / "run"):
        assert "another process is writing" in refusal(run)
    (tmp_path / "run" / ".partial-config.json").write_text("{")  # by a kill while the folder was claimed
    assert train(run, progress=False).validation["step"] == 1


def test_a_run_that_diverges_stops_with_one_line_and_no_checkpoint_of_bad_weights(tiny_folder, texts_folder, tmp_path):
    run = config(
        tiny_folder, texts_folder, tmp_path / "run", policy="control", peak_lr=1e36, warmup_steps=0, checkpoint_every=1
    )
    assert "diverged: the gradient of the model in step" in refusal(run)
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) <= 1
    assert not (tmp_path / "run" / "export").exists()
