"""Many processes compute what one computes."""

import dataclasses
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from kvcat.errors import InputError
from kvcat.models import decoder_layers
from kvcat.training import run as run_module
from kvcat.training.distributed import prepare_layers
from kvcat.training.loop import train
from tiny import loud_model
from training_runs import assert_close, context, records


def train_in_processes(run, folder, size=2):
    """The run on so many gloo processes, as torchrun would start them; returns the message of each:
    "" for success.

    As under torchrun, the store lives in the process that starts them: no port is chosen here and
    lost to another.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = [
        context().Process(target=_member, args=(run, folder, rank, size, store.port))
        for rank in range(size)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    said = [
        (folder / f"{rank}.txt").read_text()
        for rank in range(size)
        if (folder / f"{rank}.txt").exists()
    ]
    return (
        said
        if any(said)
        else [f"exit code {child.exitcode}" if child.exitcode else "" for child in children]
    )


def _member(run, folder, rank, size, port):
    torch.set_num_threads(1)
    names = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    names |= {"TORCHELASTIC_USE_AGENT_STORE": True, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {name: str(value) for name, value in names.items()}
    said = ""
    try:
        train(run, progress=False)
    except InputError as error:
        said = str(error)
    (folder / f"{rank}.txt").write_text(said)
    os._exit(2 if said else 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "random", "prefix_range": (0.25, 0.9)},
        {"policy": "attention", "dtype": "bfloat16", "micro_batch_size": None, "max_steps": 2},
    ],
    ids=str,
)
@pytest.mark.slow
def test_two_processes_equal_one(options, tmp_path, new_run):
    options = {
        "max_steps": 4,
        "peak_lr": 1e-3,
        "validation_sequences": 5,
        "micro_batch_size": 1,
        **options,
    }
    # both processes find no folder, nor its parents
    one, two = (new_run(name, **options) for name in ("one", "a/b/two"))
    train(one, progress=False)
    assert train_in_processes(two, tmp_path) == ["", ""]
    if one.dtype == "float32":
        assert_close(one.output, two.output, weights=2e-4)
    for a, b in zip(records(one.output), records(two.output), strict=True):
        assert a["dense_loss"] == pytest.approx(b["dense_loss"], rel=1e-2)


@pytest.mark.slow
def test_a_run_continues_with_another_number_of_processes(tmp_path, new_run):
    options = {"max_steps": 6, "peak_lr": 1e-3, "checkpoint_every": 2, "keep_checkpoints": 9}
    whole, split = (new_run(name, **options) for name in ("whole", "split"))
    train(whole, progress=False)
    shutil.copytree(whole.output, split.output)
    for removed_steps, num_processes in (((4, 6), 2), ((6,), 1)):
        for step in removed_steps:
            shutil.rmtree(tmp_path / "split" / "checkpoints" / f"step-{step:06d}")
        (tmp_path / "split" / "done.json").unlink()
        if num_processes == 1:
            train(split, progress=False)
        else:
            train_in_processes(split, tmp_path)
        assert_close(whole.output, split.output, weights=2e-4)


@pytest.mark.slow
def test_a_mistake_is_reported_by_every_process_before_anything_is_written(tmp_path, new_run):
    said = train_in_processes(new_run(batch_size=3), tmp_path)
    assert ["batch_size 3 does not divide into 2 processes" in message for message in said] == [
        True,
        True,
    ]
    assert not (tmp_path / "run").exists()


def test_layers_in_training_mode_drop_nothing(new_run):
    model = loud_model("opt", ffn_dim=48, word_embed_proj_dim=32, dropout=0.5)
    before = model(tokens := torch.arange(12)[None]).logits
    prepare_layers(model, new_run(activation_checkpointing=True))
    assert all(layer.training for layer in decoder_layers(model))
    torch.testing.assert_close(model(tokens).logits, before)


def test_products_are_bfloat16_made_again_where_wanted_and_gradients_float32_reduced_once_a_step(
    monkeypatch, new_run
):
    flags = []
    inputs = []
    rounded = []
    set_sync = FSDPModule.set_requires_gradient_sync
    make_optimizer = run_module.make_optimizer

    def watched(model, routers, config):
        layer = decoder_layers(model)[0].mlp.up_proj
        made = make_optimizer(model, routers, config)
        layer.register_forward_pre_hook(
            lambda _, arguments: (
                inputs.append(arguments[0].dtype) if torch.is_grad_enabled() else None
            )
        )
        made.register_step_pre_hook(lambda *_: rounded.append(layer.weight.grad.full_tensor()))
        return made

    monkeypatch.setattr(run_module, "make_optimizer", watched)
    monkeypatch.setattr(
        FSDPModule,
        "set_requires_gradient_sync",
        lambda self, flag: (flags.append(flag), set_sync(self, flag)),
    )
    options = {
        "policy": "control",
        "max_steps": 2,
        "dtype": "bfloat16",
        "micro_batch_size": 1,
        "max_grad_norm": 1e9,
    }
    train(new_run(**options, activation_checkpointing=True), progress=False)
    assert flags == [False, False, False, True] * 2
    assert inputs == [torch.bfloat16] * 2 * 8  # each layer runs again in the backward
    assert all((gradient != gradient.bfloat16()).any() for gradient in rounded)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["router", "attention"])
def test_compiled_layers_share_graphs_and_give_the_same_losses(policy, tmp_path, new_run):
    plain = new_run("plain", policy=policy, max_steps=3, peak_lr=1e-3)
    compiled = dataclasses.replace(plain, output=str(tmp_path / "compiled"), compile=True)
    train(plain, progress=False)
    assert train_in_processes(compiled, tmp_path, size=1) == [
        ""
    ]  # where no type checks meet the compiler
    assert_close(plain.output, compiled.output, weights=1e-3)
