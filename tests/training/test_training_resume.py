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
from kvcat.training.checkpoint import Checkpoints, folders, verify
from kvcat.training.world import World


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
        patch.setattr(loop_module, "export_checkpoint", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
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
    damaged = tmp_path / "b" / "checkpoints" / "step-000004" / "__0_0.distcp"
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


def checkpoints(run, keep=2, value=0.0):
    """The checkpoints of a run that trains two numbers."""
    module = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(module.weight, value)
    return Checkpoints(run, keep, World(0, 1, torch.device("cpu")), module, torch.optim.AdamW(module.parameters()))


def save(run, step, **options):
    """A checkpoint whose weights are its step; returns when it stands."""
    made = checkpoints(run, value=float(step), **options)
    made.save(step, {"place": step})
    made.wait()


def test_what_is_saved_is_the_state_at_the_call_and_what_is_loaded_is_what_was_saved(tmp_path):
    made = checkpoints(tmp_path, value=1.0)
    made.module.weight.sum().backward()
    made.optimizer.step()
    weight, moment = made.module.weight.detach().clone(), made.optimizer.state[made.module.weight]["exp_avg"].clone()
    made.save(1, {"place": 5})
    with torch.no_grad():
        made.module.weight.fill_(7)
        made.optimizer.state[made.module.weight]["exp_avg"].fill_(7)
    made.wait()
    again = checkpoints(tmp_path)
    assert again.load_newest() == (1, [{"place": 5}], [])
    assert torch.equal(again.module.weight, weight)
    assert torch.equal(again.optimizer.state[again.module.weight]["exp_avg"], moment)


def test_without_a_checkpoint_nothing_changes(tmp_path):
    made = checkpoints(tmp_path, value=3.0)
    assert made.load_newest() == (0, [], [])
    assert (made.module.weight == 3).all()


@pytest.mark.parametrize("harm", ["truncate", "flip", "empty state", "no state", "list", "newer"])
def test_every_kind_of_damage_to_a_checkpoint_is_seen(harm, tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    newest = tmp_path / "checkpoints" / "step-000002"
    tensors, described = newest / "__0_0.distcp", newest / "state.json"
    if harm == "truncate":
        tensors.write_bytes(tensors.read_bytes()[:-9])
    elif harm == "flip":
        tensors.write_bytes(bytes([tensors.read_bytes()[0] ^ 1]) + tensors.read_bytes()[1:])
    elif harm == "no state":
        described.unlink()
    elif harm == "newer":
        described.write_text(described.read_text().replace('"format": 2', '"format": 3'))
    else:
        described.write_text("" if harm == "empty state" else "[]")
    step, states, notes = checkpoints(tmp_path).load_newest()
    assert (step, states) == (1, [{"place": 1}])
    assert len(notes) == 1


def test_a_damaged_later_checkpoint_does_not_push_a_whole_one_out(tmp_path):
    save(tmp_path, 9, keep=1)
    (tmp_path / "checkpoints" / "step-000009" / "state.json").write_text("{")
    save(tmp_path, 4, keep=1)
    assert checkpoints(tmp_path).load_newest() == (4, [{"place": 4}], [])


def test_only_the_newest_checkpoints_stay(tmp_path):
    for step in (2, 10, 999_999, 1_000_000):
        save(tmp_path, step)
    assert {f.name for f in (tmp_path / "checkpoints").iterdir()} == {"step-999999", "step-1000000"}
    assert checkpoints(tmp_path).load_newest()[0] == 1_000_000


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("failed writing file")])
def test_a_full_disk_in_mid_checkpoint_is_one_line_and_leaves_the_previous_checkpoint(error, tmp_path, monkeypatch):
    save(tmp_path, 1, keep=1)
    monkeypatch.setattr("kvcat.training.checkpoint._digest", lambda _: (_ for _ in ()).throw(error))
    with pytest.raises(InputError, match=r"cannot be written.*(space|failed)") as caught:
        save(tmp_path, 2, keep=1)
    assert "\n" not in str(caught.value)
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    monkeypatch.undo()
    assert checkpoints(tmp_path).load_newest()[0] == 1


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
        steps = [verify(folder)["step"] for folder in folders(tmp_path / "b")]
        assert steps[-1] >= max(saved_steps((tmp_path / "told").read_text()), default=0)
    train(broken, progress=False)
    assert_same(state(whole.output), state(broken.output))
    assert_same(exported(whole.output), exported(broken.output))
    assert records(whole.output) == records(broken.output)
    assert not list((tmp_path / "b").rglob(".*partial*"))


def test_a_killed_run_has_what_it_said_was_saved_and_resumes_bit_for_bit(tiny_folder, texts_folder, tmp_path):
    kill_and_resume([0.0, 0.15, 0.3], tiny_folder, texts_folder, tmp_path, max_steps=24, checkpoint_every=1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_killed_at_many_moments_a_run_resumes_bit_for_bit(policy, tiny_folder, texts_folder, tmp_path):
    draw = random.Random(POLICIES.index(policy))
    moments = [draw.uniform(0, 1.0) for _ in range(8)]
    kill_and_resume(moments, tiny_folder, texts_folder, tmp_path, max_steps=400, checkpoint_every=1, policy=policy)
