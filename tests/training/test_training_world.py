"""Many processes compute what one computes."""

import dataclasses
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from runs import POLICIES, assert_same, config, context, exported, records

from kvcat.errors import InputError
from kvcat.training import train
from kvcat.training.world import join_world


def train_in_processes(run, told, size=2):
    """The run on so many gloo processes, as torchrun would start them; returns what each had to say: "" for success.

    As under torchrun, the store lives in the process that starts them: no port is chosen here and lost to another.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = [context().Process(target=_member, args=(run, told, rank, size, store.port)) for rank in range(size)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    said = [(told / f"{rank}.txt").read_text() for rank in range(size) if (told / f"{rank}.txt").exists()]
    return said if any(said) else [f"exit code {child.exitcode}" if child.exitcode else "" for child in children]


def _member(run, told, rank, size, port):
    torch.set_num_threads(1)
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    names |= {"TORCHELASTIC_USE_AGENT_STORE": True, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {name: str(value) for name, value in names.items()}
    said = ""
    try:
        train(run, progress=False)
    except InputError as error:
        said = str(error)
    (told / f"{rank}.txt").write_text(said)
    os._exit(2 if said else 0)


def assert_close(ours, theirs):
    """Records agree to rounding; AdamW's first steps make of rounding what they make of gradients."""
    for one, two in zip(records(ours), records(theirs), strict=True):
        assert one.keys() == two.keys()
        assert one["step"] == two["step"]
        for name in ("dense_loss", "masked_loss", "kl"):
            assert one.get(name, 0.0) == pytest.approx(two.get(name, 0.0), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_processes_equal_one(policy, tiny_folder, texts_folder, tmp_path):
    options = {"policy": policy, "max_steps": 4, "peak_lr": 1e-3, "validation_sequences": 5}
    one, two = (config(tiny_folder, texts_folder, tmp_path / name, **options) for name in ("one", "two"))
    train(one, progress=False)
    assert train_in_processes(two, tmp_path) == ["", ""]
    assert_close(one.output, two.output)
    a, b = exported(one.output), exported(two.output)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=2e-4)


@pytest.mark.parametrize("options", [{"prefix_range": (0.25, 0.9)}, {"lora_rank": 4}], ids=["prefix", "lora"])
def test_options_beyond_the_paper_on_two_processes_equal_one(options, tiny_folder, texts_folder, tmp_path):
    options = {"max_steps": 3, "peak_lr": 1e-3, "keep_range": (0.3, 0.6), **options}
    one, two = (config(tiny_folder, texts_folder, tmp_path / name, **options) for name in ("one", "two"))
    train(one, progress=False)
    assert train_in_processes(two, tmp_path) == ["", ""]
    for ours, theirs in zip(records(one.output), records(two.output), strict=True):
        assert ours["dense_loss"] == pytest.approx(theirs["dense_loss"], rel=1e-4)
        if ours["kind"] == "train":  # validation keeps what exceeds tau: everything, so early
            assert 1e-4 < ours["kl"] == pytest.approx(theirs["kl"], rel=1e-2)


def test_a_run_goes_on_with_another_number_of_processes(tiny_folder, texts_folder, tmp_path):
    options = {"max_steps": 6, "peak_lr": 1e-3, "checkpoint_every": 2, "keep_checkpoints": 9}
    whole, split = (config(tiny_folder, texts_folder, tmp_path / name, **options) for name in ("whole", "split"))
    train(whole, progress=False)
    shutil.copytree(whole.output, split.output)
    for later in ("step-000004", "step-000006"):
        shutil.rmtree(tmp_path / "split" / "checkpoints" / later)
    (tmp_path / "split" / "done.json").unlink()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "split" / "config.json")
    assert train_in_processes(split, tmp_path) == ["", ""]
    assert_close(whole.output, split.output)
    shutil.rmtree(tmp_path / "split" / "checkpoints" / "step-000006")
    (tmp_path / "split" / "done.json").unlink()
    train(split, progress=False)
    assert_close(whole.output, split.output)


def test_bfloat16_agrees_between_one_process_and_two(tiny_folder, texts_folder, tmp_path):
    options = {"dtype": "bfloat16", "max_steps": 2, "peak_lr": 1e-3, "router_noise": 0.0}
    one, two = (config(tiny_folder, texts_folder, tmp_path / name, **options) for name in ("one", "two"))
    train(one, progress=False)
    assert train_in_processes(two, tmp_path) == ["", ""]
    for a, b in zip(records(one.output), records(two.output), strict=True):
        assert a["dense_loss"] == pytest.approx(b["dense_loss"], rel=1e-2)


def test_a_batch_that_does_not_divide_is_refused_before_anything_is_loaded(tiny_folder, texts_folder, tmp_path):
    run = config(tiny_folder, texts_folder, tmp_path / "run", batch_size=3)
    said = train_in_processes(run, tmp_path)
    assert [("batch_size 3 does not divide into 2 processes" in told) for told in said] == [True, True]
    assert not (tmp_path / "run").exists()


def test_a_single_process_needs_no_group_unless_it_is_asked_for():
    with join_world("cpu") as world:
        assert (world.rank, world.size, world.mesh) == (0, 1, None)
    with join_world("cpu", group=True) as world:
        assert world.mesh is not None
        assert world.mean(torch.ones(2)).tolist() == [1.0, 1.0]
        assert not world.any(False)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["router", "attention"])
def test_compiled_layers_share_graphs_and_give_the_same_losses(policy, tiny_folder, texts_folder, tmp_path):
    plain = config(tiny_folder, texts_folder, tmp_path / "plain", policy=policy, max_steps=3, peak_lr=1e-3)
    compiled = dataclasses.replace(plain, output=str(tmp_path / "compiled"), compile=True)
    train(plain, progress=False)
    assert train_in_processes(compiled, tmp_path, size=1) == [""]  # where no type checks meet the compiler
    assert_close(plain.output, compiled.output)


def test_activation_checkpointing_changes_nothing(tiny_folder, texts_folder, tmp_path):
    plain = config(tiny_folder, texts_folder, tmp_path / "plain", policy="random", max_steps=3)
    again = dataclasses.replace(plain, output=str(tmp_path / "again"), activation_checkpointing=True)
    train(plain, progress=False)
    train(again, progress=False)
    assert_same(exported(plain.output), exported(again.output))
