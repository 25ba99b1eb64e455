"""A user's mistake gives one line, before anything is written."""

import dataclasses
import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcat.errors import InputError
from kvcat.files import LOCK_FILE, one_writer
from kvcat.models import load, load_tokenizer
from kvcat.training.loop import train
from kvcat.training.objective import Objective
from tiny import refusal, write_texts
from training_runs import contents


def refused(run):
    return refusal(train, run, progress=False)


MISTAKES = {
    "./nowhere": {"model": "./nowhere"},
    "gone.txt": {"data": "gone.txt"},
    "nor in the local Hub cache": {"model": "nobody/no-such-model"},
    "broken: SafetensorError": {"model": "broken"},
    "fewer than one sequence of 32": {"data": "2 of 1"},
    "too few documents (1)": {"data": "1 of 90"},
    "seq_len: 257 tokens exceed the model's 256 positions": {"seq_len": 257},
    "group start 2": {"group_starts": (0, 2)},
    "device is 'cuda:99'": {"device": "cuda:99"},
    "[tensorboard]'": {"monitor": "tensorboard"},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_a_run_cannot_have_is_named(message, tiny_folder, tmp_path, monkeypatch, new_run):
    options = dict(MISTAKES[message])
    monkeypatch.setattr("kvcat.hub.constants.HF_HUB_OFFLINE", True)
    if message == "gone.txt":
        monkeypatch.setattr(
            "kvcat.training.run.load", lambda *_, **__: pytest.fail("the model was loaded first")
        )
    if "tensorboard" in message:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    if options.get("model") == "broken":
        options["model"] = str(shutil.copytree(tiny_folder, tmp_path / "broken"))
        weights = tmp_path / "broken" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:2000])
    if " of " in options.get("data", ""):
        documents, length = map(int, options["data"].split(" of "))
        options["data"] = str(write_texts(tmp_path / "short", documents=documents, length=length))
    refusal_line = refused(dataclasses.replace(new_run(), **options))
    assert message in refusal_line
    assert options.get("data", "") in refusal_line
    assert not (tmp_path / "run").exists()


def test_the_disk_must_hold_what_will_be_written_with_the_routers(
    tiny_folder, tmp_path, monkeypatch, new_run
):
    run = new_run(max_steps=6, checkpoint_every=2, keep_checkpoints=2)
    weights = 4 * sum(
        p.numel() for p in Objective(load(tiny_folder)[0], run).parameters()
    )  # of the export

    def stop(_):
        raise InputError("done")

    for steps, num_new in (
        ((), 3),
        ((2, 4), 1),
        ((6,), 0),
    ):  # checkpoints, each of weights and two moments
        for step in steps:
            (tmp_path / "run" / "checkpoints" / f"step-{step}").mkdir(parents=True)
        for short, message in ((1, "no disk space"), (0, "is missing" if steps else "done")):
            usage = SimpleNamespace(free=(3 * num_new + 1) * weights - short)
            monkeypatch.setattr(
                "kvcat.training.run_folder.shutil.disk_usage", lambda _, usage=usage: usage
            )
            monkeypatch.setattr("kvcat.training.loop.Trainer.train", stop)
            assert message in refused(run)


def test_a_folder_of_something_else_or_that_cannot_be_written_is_left_alone(
    tiny_folder, tmp_path, new_run
):
    shutil.copytree(tiny_folder, tmp_path / "model")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    for output, message in (
        ("model", "is not empty and holds no run of ours"),
        ("notes", "is not empty and has no config.json"),
        ("file", "file is a file: name a folder to write"),
        ("file/below", "file/below"),
        ("/proc/runs/router", "cannot make folder /proc"),
    ):
        assert message in refused(new_run(output))
    assert sorted(path for path in tmp_path.rglob("*") if path.name != LOCK_FILE) == before


def test_the_folder_of_another_run_keeps_its_run(new_run):
    run = new_run(policy="control", max_steps=2)
    train(run, progress=False)
    before = contents(run.output)
    for name, value in {
        "seed": 9,
        "target_keep": 0.4,
        "batch_size": 2,
        "dtype": "bfloat16",
        "max_steps": 1,
    }.items():
        refusal_line = refused(dataclasses.replace(run, **{name: value}))
        assert (
            f"holds another run: its {name} is {getattr(run, name)!r}, not {value!r}"
            in refusal_line
        )
    assert contents(run.output) == before


def test_a_run_that_died_before_its_first_checkpoint_begins_again_with_other_settings(
    new_run, monkeypatch
):
    run = new_run(policy="control", max_steps=2, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr("kvcat.training.loop.Trainer._train_step", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(run, progress=False)
    corrected = dataclasses.replace(run, seed=2, batch_size=2, max_steps=1)
    train(corrected, progress=False)
    again = dataclasses.replace(corrected, output=f"{run.output}-alone")
    train(again, progress=False)
    weights = [Path(output, "export", "model.safetensors") for output in (run.output, again.output)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    # without its checkpoints, a run that was exported is still a run
    shutil.rmtree(Path(run.output, "checkpoints"))
    assert "holds another run: its " in refused(run)


def test_a_second_process_does_not_write_into_a_run(tmp_path, new_run):
    run = new_run(policy="control", max_steps=1)
    with one_writer(tmp_path / "run"):
        assert "another process is writing" in refused(run)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".partial-config.json").write_text(
        "{"
    )  # by a kill while the folder was claimed
    assert train(run, progress=False).validation["step"] == 1


def test_processes_without_an_address_fail_at_once_with_a_message(monkeypatch, new_run):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "the 2 processes do not find each other" in refused(new_run())


def test_a_run_that_diverges_stops_with_one_line_and_no_checkpoint_of_bad_weights(
    tmp_path, monkeypatch, new_run
):
    run = new_run(policy="control", peak_lr=1e36, warmup_steps=0, checkpoint_every=1)
    assert "diverged: the gradient of the model in step" in refused(run)
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) <= 1
    assert not (tmp_path / "run" / "export").exists()
    monkeypatch.setattr("kvcat.training.loop.EXPLODED", 0.0)
    assert "diverged: the gradient of the routers in step 1" in refused(new_run("routers"))


def test_a_token_without_an_embedding_is_named_before_the_first_step(
    tiny_folder, tmp_path, new_run
):
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    tokenizer = load_tokenizer(model)
    size = len(tokenizer)
    tokenizer.add_tokens(["the cat"])
    tokenizer.save_pretrained(model)
    refusal_line = refused(dataclasses.replace(new_run(), model=str(model)))
    assert f"token {size} has no embedding: Qwen2ForCausalLM has" in refusal_line
