"""A run that was stopped equals one that was not."""

import dataclasses
import hashlib
import os
import pickle
import shutil
import signal
import time
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from kvcat.errors import InputError
from kvcat.files import read_json, read_jsonl, write_json
from kvcat.training import loop as loop_module
from kvcat.training import run as run_module
from kvcat.training.checkpoint import Checkpoints, folders, verify
from kvcat.training.checkpoint_reader import _MetadataUnpickler
from kvcat.training.config import TrainConfig
from kvcat.training.distributed import World
from kvcat.training.export import export_checkpoint
from kvcat.training.loop import train
from kvcat.training.schedule import learning_rate
from kvcat.training.signals import Stopped, stop_requests
from training_runs import assert_same, config, exported, records, start_command, state


@pytest.mark.parametrize("policy", ["router", pytest.param("random", marks=pytest.mark.slow)])
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    policy, monkeypatch, new_run
):
    whole, broken = (new_run(name, policy=policy) for name in "ab")
    train(whole, progress=False)
    for step in (1, 3):
        stopped(broken, step, monkeypatch)
    first = train(broken, progress=False)
    assert_equal_runs(whole, broken)
    monkeypatch.setattr(
        run_module, "load", lambda *_, **__: pytest.fail("the model was loaded again")
    )
    assert train(broken, progress=False) == first  # a finished run does nothing


def test_a_run_killed_between_its_last_checkpoint_and_the_export_only_exports(monkeypatch, new_run):
    run = new_run(max_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(
            loop_module, "export_checkpoint", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            train(run, progress=False)
    before = records(run.output)
    result = train(run, progress=False)
    assert records(run.output) == before
    assert result.validation["step"] == 2
    assert (result.export / "model.safetensors").exists()


def stopped(run, step, monkeypatch):
    """A run that gets a SIGTERM while it computes a step."""

    def rate_and_signal(steps_done, config):
        if steps_done == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return learning_rate(steps_done, config)

    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "learning_rate", rate_and_signal)
        with pytest.raises(Stopped):
            train(run, progress=False)
    return run


def test_a_signal_to_another_process_stops_this_one_after_the_same_step(monkeypatch, new_run):
    monkeypatch.setattr(World, "any", lambda *_: True)
    with pytest.raises(Stopped, match="after step 1;") as stop:
        train(new_run(), progress=False)
    assert stop.value.signum == signal.SIGTERM


def test_a_second_signal_ends_a_run_that_waits_for_data_unless_it_comes_at_once(
    monkeypatch, new_run
):
    monkeypatch.setattr(loop_module, "stop_requests", partial(stop_requests, 0.2))

    def wait(*_):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        survived.append(True)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    survived = []
    monkeypatch.setattr("kvcat.data.TokenLoader.read", wait)
    with pytest.raises(Stopped, match="at once"):
        train(new_run(), progress=False)
    assert survived


def test_a_mistake_lets_the_checkpoint_that_is_being_written_come_to_its_end(monkeypatch, new_run):
    run = new_run(checkpoint_every=1)

    def slowly(file, state):
        time.sleep(0.5)
        write_json(file, state)

    def mistake_after_one_step(steps_done, config):
        if steps_done:
            raise InputError("the text is gone")
        return learning_rate(steps_done, config)

    monkeypatch.setattr("kvcat.training.checkpoint.write_json", slowly)
    monkeypatch.setattr(loop_module, "learning_rate", mistake_after_one_step)
    with pytest.raises(InputError, match="the text is gone"):
        train(run, progress=False)
    assert [folder.name for folder in folders(Path(run.output))] == ["step-000001"]


@pytest.mark.slow
def test_a_finished_run_is_exported_again_in_another_type_even_after_a_kill(monkeypatch, new_run):
    run = new_run(max_steps=1)
    train(run, progress=False)
    smaller = dataclasses.replace(run, export_dtype="bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr(
            loop_module, "export_checkpoint", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            train(smaller, progress=False)
    train(smaller, progress=False)
    assert {value.dtype for value in exported(run.output).values()} == {torch.bfloat16}
    assert read_json(Path(run.output) / "config.json")["export_dtype"] == "bfloat16"
    (Path(run.output) / "done.json").unlink()
    train(run, progress=False)
    assert {value.dtype for value in exported(run.output).values()} == {torch.float32}


@pytest.mark.slow
def test_a_run_with_parameters_that_get_no_gradient_resumes(monkeypatch, new_run):
    original = run_module.load

    def load(*arguments, **options):
        model, tokenizer = original(*arguments, **options)
        model.vision = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.eye_(model.vision.weight)  # the same model each time
        return model, tokenizer

    monkeypatch.setattr(run_module, "load", load)
    monkeypatch.setattr(loop_module, "export_checkpoint", lambda *_: None)
    run = stopped(new_run(), 1, monkeypatch)
    train(run, progress=False)
    assert records(run.output)[-1]["step"] == run.max_steps


def assert_equal_runs(whole, broken):
    assert_same(state(whole.output), state(broken.output))
    assert_same(exported(whole.output), exported(broken.output))
    assert records(whole.output) == records(broken.output)


@pytest.mark.slow
def test_a_continuation_may_change_how_the_work_is_done_and_records_it(
    tmp_path, monkeypatch, new_run
):
    options = {"policy": "random", "peak_lr": 1e-3}
    whole, broken = (new_run(name, **options) for name in "ab")
    train(whole, progress=False)
    stopped(broken, 3, monkeypatch)
    changed = {
        "micro_batch_size": 2,
        "activation_checkpointing": True,
        "validation_every": 2,
        "checkpoint_every": 5,
    }
    train(dataclasses.replace(broken, **changed), progress=False)
    losses = [
        [r["dense_loss"] for r in records(run.output) if r["kind"] == "train"]
        for run in (whole, broken)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    (record,) = read_jsonl(tmp_path / "b" / "changes.jsonl")
    assert record == {
        "step": 3,
        "changed": {n: [getattr(broken, n), new] for n, new in changed.items()},
    }
    assert TrainConfig.from_dict(read_json(tmp_path / "b" / "config.json")) == dataclasses.replace(
        broken, **changed
    )


@pytest.mark.slow
def test_a_run_is_neither_continued_nor_exported_with_another_model_in_the_place_of_its_first(
    tiny_folder, texts_folder, tmp_path, monkeypatch
):
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    run = config(model, texts_folder, tmp_path / "run", policy="random", teacher="frozen")
    stopped(run, 3, monkeypatch)
    settings = read_json(model / "config.json")
    write_json(model / "config.json", {**settings, "rms_norm_eps": 0.1})
    problem = "holds another run: .* is no longer the model that it started from"
    with pytest.raises(InputError, match=problem):
        train(run, progress=False)
    (checkpoint,) = folders(tmp_path / "run")[-1:]
    with pytest.raises(InputError, match=problem):
        export_checkpoint(checkpoint, tmp_path / "export")
    write_json(model / "config.json", settings)
    train(run, progress=False)


@pytest.mark.slow
def test_a_finished_run_continues_to_a_larger_number_of_steps(capsys, new_run):
    run = new_run(policy="control", max_steps=4, checkpoint_every=1)
    train(run, progress=False)
    before = records(run.output)
    longer = dataclasses.replace(run, max_steps=7)
    assert train(longer).validation["step"] == 7
    assert (
        "from step 4 on the learning rate follows the schedule of 7 steps"
        in capsys.readouterr().err
    )
    after = records(run.output)
    assert after[: len(before)] == before
    rates = [r["lr"] for r in after if r["kind"] == "train"]
    assert rates[4:] == [learning_rate(step, longer) for step in (4, 5, 6)]
    again = train(
        dataclasses.replace(longer, max_steps=8), progress=False
    )  # the table of 4 steps is still used
    assert again.validation["step"] == 8


def checkpoints(run, keep=2, value=0.0):
    """The checkpoints of a run that trains two numbers."""
    module = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(module.weight, value)
    return Checkpoints(
        run, keep, World(0, 1, torch.device("cpu")), module, torch.optim.AdamW(module.parameters())
    )


def save(run, step, **options):
    """A checkpoint whose weights are its step; returns when it is complete."""
    made = checkpoints(run, value=float(step), **options)
    made.save(step, {"place": step})
    made.wait()


def test_what_is_saved_is_the_state_at_the_call_and_what_is_loaded_is_what_was_saved(tmp_path):
    made = checkpoints(tmp_path, value=1.0)
    assert made.load_newest() == (0, [], [])
    assert (made.module.weight == 1).all()
    made.module.weight.sum().backward()
    made.optimizer.step()
    weight = made.module.weight.detach().clone()
    moment = made.optimizer.state[made.module.weight]["exp_avg"].clone()
    made.save(1, {"place": 5})
    with torch.no_grad():
        made.module.weight.fill_(7)
        made.optimizer.state[made.module.weight]["exp_avg"].fill_(7)
    made.wait()
    again = checkpoints(tmp_path)
    assert again.load_newest() == (1, [{"place": 5}], [])
    assert torch.equal(again.module.weight, weight)
    assert torch.equal(again.optimizer.state[again.module.weight]["exp_avg"], moment)
    other = checkpoints(tmp_path)
    other.module.renamed = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(InputError, match=r"step-000001 is not of this model: .*renamed"):
        other.load_newest()


class Command:
    """What a pickle of somebody else may hold: reading it runs a command."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("place", ["metadata", "value"])
def test_a_command_in_a_checkpoint_does_not_run(place, tmp_path):
    saving = checkpoints(tmp_path)
    if place == "value":
        tensors = saving._tensors()
        tensors["optimizer"]["param_groups"][0]["weight_decay"] = Command(tmp_path / "ran")
        saving._tensors = lambda: tensors
    saving.save(1, {"place": 1})
    saving.wait()
    folder = tmp_path / "checkpoints" / "step-000001"
    if place == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Command(tmp_path / "ran")))
        state = read_json(folder / "state.json")
        digest = hashlib.sha256((folder / ".metadata").read_bytes()).hexdigest()
        state["sha256"] = {**state["sha256"], ".metadata": digest}
        write_json(folder / "state.json", state)
    with pytest.raises(InputError, match=r"step-000001 cannot be loaded: [^\n]*$"):
        checkpoints(tmp_path).load_newest()
    assert not (tmp_path / "ran").exists()


class Attribute:
    """What Python before 3.11.4 writes for a member of an enumeration."""

    def __init__(self, owner, name):
        self.owner = owner
        self.name = name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_a_member_of_an_enumeration_is_read_as_older_pythons_write_it_and_no_other_attribute():
    def read(owner, name):
        return _MetadataUnpickler(BytesIO(pickle.dumps(Attribute(owner, name)))).load()

    kept = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    assert read(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT") is kept
    for owner, name in ((Metadata, "__init__"), (Path, "home")):
        with pytest.raises(pickle.UnpicklingError):
            read(owner, name)
    with pytest.raises(KeyError):
        read(_MEM_FORMAT_ENCODING, "__class__")


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("__0_0.distcp", lambda file: file.write_bytes(file.read_bytes()[:-9])),
        (
            "__0_0.distcp",
            lambda file: file.write_bytes(
                bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]
            ),
        ),
        ("state.json", Path.unlink),
        ("state.json", lambda file: file.write_text("[]")),
    ],
)
def test_damage_to_a_checkpoint_is_seen_and_where_none_is_whole_each_is_named(name, harm, tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    harm(tmp_path / "checkpoints" / "step-000002" / name)
    step, states, notes = checkpoints(tmp_path).load_newest()
    assert (step, states) == (1, [{"place": 1}])
    assert [note.partition(":")[0].partition(" is ")[2] for note in notes] == ["damaged"]
    harm(tmp_path / "checkpoints" / "step-000001" / name)
    with pytest.raises(
        InputError, match=r"step-000002 is damaged: [^\n]*step-000001 is damaged: [^\n]*$"
    ):
        checkpoints(tmp_path).load_newest()


def test_a_checkpoint_that_may_be_whole_is_never_passed_over(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)
    described = tmp_path / "checkpoints" / "step-000002" / "state.json"
    state = read_json(described)
    write_json(described, {**state, "format": 3})
    with pytest.raises(InputError, match=r"step-000002 .*format 3, .* reads 2: begin"):
        checkpoints(tmp_path).load_newest()
    monkeypatch.setattr(
        Path, "read_bytes", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    )
    with pytest.raises(InputError, match=r"step-000002 cannot be read: Input/output error"):
        checkpoints(tmp_path).load_newest()


def test_only_the_newest_checkpoints_stay_and_damaged_later_ones_go(tmp_path):
    (tmp_path / "checkpoints" / "step-000002-copy").mkdir(parents=True)
    for step in (2, 10, 999_999, 1_000_000):
        save(tmp_path, step)
    assert {f.name for f in (tmp_path / "checkpoints").iterdir()} == {
        "step-000002-copy",
        "step-999999",
        "step-1000000",
    }
    (tmp_path / "checkpoints" / "step-1000000" / "state.json").write_text("{")
    save(tmp_path, 999_999, keep=1)
    assert checkpoints(tmp_path).load_newest() == (999_999, [{"place": 999_999}], [])


@pytest.mark.parametrize(
    "place",
    ["kvcat.training.checkpoint.write_json", "torch.distributed.checkpoint.filesystem._write_item"],
)
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("failed writing file")]
)
def test_a_full_disk_in_mid_checkpoint_is_one_line_and_leaves_the_previous_checkpoint(
    error, place, tmp_path, monkeypatch
):
    save(tmp_path, 1, keep=1)
    monkeypatch.setattr(place, lambda *_, **__: (_ for _ in ()).throw(error))
    with pytest.raises(InputError, match=r"cannot be written.*(space|failed)") as caught:
        save(tmp_path, 2, keep=1)
    assert "\n" not in str(caught.value)
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    monkeypatch.undo()
    assert checkpoints(tmp_path).load_newest()[0] == 1


def interrupt(run, log, moment, how=signal.SIGKILL):
    """Start the command and signal it at a moment (seconds after its first checkpoint); returns its
    exit code."""
    before = folders(Path(run.output))
    child = start_command(run, log)
    while child.is_alive() and folders(Path(run.output)) == before:
        time.sleep(0.002)
    time.sleep(moment)
    os.kill(child.pid, how)
    child.join()
    return child.exitcode


@pytest.mark.slow
def test_a_killed_run_has_what_it_said_was_saved_and_resumes_bit_for_bit(new_run, tmp_path):
    options = {"max_steps": 40, "checkpoint_every": 1}
    log = tmp_path / "log"
    whole = new_run("a", **options)
    broken = new_run("b", **options)
    train(whole, progress=False)
    assert interrupt(broken, log, 0.0, signal.SIGTERM) == 143
    assert "the same command continues" in log.read_text().splitlines()[-1]
    assert not (tmp_path / "b" / "export").exists()
    for moment in (0.05, 0.3):
        interrupt(broken, log, moment)
        said = [
            int(line.rsplit("step-", 1)[1])
            for line in log.read_text().splitlines()
            if line.startswith("saved ")
        ]
        assert verify(folders(tmp_path / "b")[-1])["step"] >= max(said)
    train(broken, progress=False)
    assert_equal_runs(whole, broken)
    assert not list((tmp_path / "b").rglob(".*partial*"))
