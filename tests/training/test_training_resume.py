"""A run that was stopped equals one that was not."""

import os
import random
import signal
import time

import pytest
import torch
from runs import POLICIES, assert_same, config, exported, records, start_command, state

from kvcat.errors import InputError
from kvcat.training import Stopped, train
from kvcat.training import loop as loop_module
from kvcat.training.checkpoint import TrainState, load_newest, save_checkpoint


def interrupt_after(monkeypatch, step):
    """The process gets a SIGTERM while it computes the given step."""
    original = loop_module.Trainer._train_step

    def train_step(self):
        if self.step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self)

    monkeypatch.setattr(loop_module.Trainer, "_train_step", train_step)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    policy, tiny_folder, texts_folder, tmp_path, monkeypatch
):
    whole, broken = (config(tiny_folder, texts_folder, tmp_path / name, policy=policy) for name in "ab")
    train(whole, progress=False)
    for step in (1, 3):
        with monkeypatch.context() as patch:
            interrupt_after(patch, step)
            with pytest.raises(Stopped, match=f"after step {step};"):
                train(broken, progress=False)
    train(broken, progress=False)
    assert_same(state(whole.output), state(broken.output))
    assert_same(exported(whole.output), exported(broken.output))
    assert records(whole.output) == records(broken.output)


def test_a_finished_run_started_again_does_nothing(tiny_folder, texts_folder, tmp_path, monkeypatch):
    done = config(tiny_folder, texts_folder, tmp_path / "run", policy="control", max_steps=2)
    first = train(done, progress=False)
    monkeypatch.setattr(loop_module, "load", lambda *_, **__: pytest.fail("the model was loaded again"))
    assert train(done, progress=False) == first
    assert first.validation["step"] == 2


def test_a_run_killed_between_its_last_checkpoint_and_the_export_only_exports(
    tiny_folder, texts_folder, tmp_path, monkeypatch
):
    run = config(tiny_folder, texts_folder, tmp_path / "run", max_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "export", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(run, progress=False)
    before = records(run.output)
    result = train(run, progress=False)
    assert records(run.output) == before
    assert result.validation["step"] == 2
    assert (result.export / "model.safetensors").exists()


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_message(
    tiny_folder, texts_folder, tmp_path, monkeypatch, capsys
):
    whole, broken = (config(tiny_folder, texts_folder, tmp_path / name, checkpoint_every=1) for name in "ab")
    train(whole, progress=False)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        with pytest.raises(Stopped):
            train(broken, progress=False)
    damaged = tmp_path / "b" / "checkpoints" / "step-000004" / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    capsys.readouterr()
    train(broken)
    lines = [line for line in capsys.readouterr().err.splitlines() if "is damaged" in line]
    assert len(lines) == 1
    assert "step-000004" in lines[0]
    assert_same(state(whole.output), state(broken.output))
    assert records(whole.output) == records(broken.output)


@pytest.mark.parametrize("harm", ["truncate", "empty state", "no state", "list"])
def test_every_kind_of_damage_to_a_checkpoint_is_seen(harm, tmp_path):
    for step in (1, 2):
        save_checkpoint(tmp_path, TrainState(step, {"w": torch.ones(9)}, {}, {"x": torch.ones(2)}), keep=2)
    newest = tmp_path / "checkpoints" / "step-000002"
    if harm == "truncate":
        (newest / "optimizer.pt").write_bytes((newest / "optimizer.pt").read_bytes()[:-9])
    elif harm == "no state":
        (newest / "state.json").unlink()
    else:
        (newest / "state.json").write_text("" if harm == "empty state" else "[]")
    found, notes = load_newest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(notes) == 1


def test_a_damaged_later_checkpoint_does_not_push_a_whole_one_out(tmp_path):
    def save(step):
        save_checkpoint(tmp_path, TrainState(step, {"w": torch.full((3,), float(step))}, {}, {}), keep=1)

    save(9)
    (tmp_path / "checkpoints" / "step-000009" / "state.json").write_text("{")
    save(4)
    found, notes = load_newest(tmp_path)
    assert found is not None
    assert (found.step, notes) == (4, [])


def test_only_the_newest_checkpoints_stay(tmp_path):
    for step in (2, 10, 999_999, 1_000_000):
        save_checkpoint(tmp_path, TrainState(step, {"w": torch.ones(1)}, {}, {}), keep=2)
    assert {f.name for f in (tmp_path / "checkpoints").iterdir()} == {"step-999999", "step-1000000"}
    found, _ = load_newest(tmp_path)
    assert found is not None
    assert found.step == 1_000_000


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("failed writing file")])
def test_a_full_disk_in_mid_checkpoint_is_one_line_and_leaves_the_previous_checkpoint(error, tmp_path, monkeypatch):
    save_checkpoint(tmp_path, TrainState(1, {"w": torch.ones(1)}, {}, {}), keep=1)
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(InputError, match=r"step-000002.*(space|failed)") as caught:
        save_checkpoint(tmp_path, TrainState(2, {"w": torch.zeros(1)}, {}, {}), keep=1)
    assert "\n" not in str(caught.value)
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    monkeypatch.undo()
    found, notes = load_newest(tmp_path)
    assert found is not None
    assert (found.step, notes) == (1, [])


def saved_steps(text):
    return [int(line.rsplit("step-", 1)[1]) for line in text.splitlines() if line.startswith("saved ")]


def wait_for_a_checkpoint(run):
    while not list((run / "checkpoints").glob("step-*")):
        time.sleep(0.002)


def test_sigterm_saves_and_exits_and_the_same_command_continues(tiny_folder, texts_folder, tmp_path):
    whole, broken = (config(tiny_folder, texts_folder, tmp_path / n, max_steps=40, policy="random") for n in "ab")
    train(whole, progress=False)
    child = start_command(broken, tmp_path / "told")
    wait_for_a_checkpoint(tmp_path / "b")
    os.kill(child.pid, signal.SIGTERM)
    child.join()
    assert child.exitcode == 143
    assert "the same command continues" in (tmp_path / "told").read_text().splitlines()[-1]
    assert not (tmp_path / "b" / "export").exists()
    train(broken, progress=False)
    assert_same(state(whole.output), state(broken.output))
    assert records(whole.output) == records(broken.output)


def kill_and_resume(moments, model, data, tmp_path, **options):
    """Kill the command at moments (seconds after a checkpoint), then let it finish; compare with a whole run."""
    whole, broken = (config(model, data, tmp_path / name, **options) for name in "ab")
    train(whole, progress=False)
    for moment in moments:
        child = start_command(broken, tmp_path / "told")
        wait_for_a_checkpoint(tmp_path / "b")
        time.sleep(moment)
        child.kill()
        child.join()
        found, notes = load_newest(tmp_path / "b")
        assert notes == []
        assert found is not None
        assert found.step >= max(saved_steps((tmp_path / "told").read_text()), default=0)
    train(broken, progress=False)
    assert_same(state(whole.output), state(broken.output))
    assert_same(exported(whole.output), exported(broken.output))
    assert records(whole.output) == records(broken.output)
    assert not list((tmp_path / "b").rglob(".*partial*"))


def test_a_killed_run_has_what_it_said_was_saved_and_resumes_bit_for_bit(tiny_folder, texts_folder, tmp_path):
    kill_and_resume([0.0, 0.3], tiny_folder, texts_folder, tmp_path, max_steps=24, checkpoint_every=1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_killed_at_many_moments_a_run_resumes_bit_for_bit(policy, tiny_folder, texts_folder, tmp_path):
    draw = random.Random(POLICIES.index(policy))
    moments = [draw.uniform(0, 1.0) for _ in range(8)]
    kill_and_resume(moments, tiny_folder, texts_folder, tmp_path, max_steps=400, checkpoint_every=1, policy=policy)
