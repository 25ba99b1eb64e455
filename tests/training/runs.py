"""Short training runs and what they leave (a module of the tests, not a test)."""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from kvcat.training import TrainConfig, read_metrics

POLICIES = ("router", "random", "attention", "control")


def config(model, data, output, **options):
    values = {
        "model": str(model), "data": str(data), "output": str(output), "num_groups": 2, "feature_dim": 8,
        "seq_len": 32, "batch_size": 4, "max_steps": 6, "warmup_steps": 2, "peak_lr": 1e-2, "min_lr": 1e-3,
        "router_noise": 0.3, "validation_every": 3, "validation_sequences": 6, "checkpoint_every": 2, "seed": 3,
    }  # fmt: skip
    return TrainConfig.from_dict({**values, **options})


def start_command(run, told):
    """``kvcat train`` in a process of its own, its messages appended to ``told``; the imports are done once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvcat.cli.app", "kvcat.training.loop", "transformers.models.qwen2"])
    options = {
        name: value for name, value in vars(run).items() if value is not None and name not in ("betas", "keep_self")
    }
    argv = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", str(value))]
    child = context.Process(target=_command, args=(["train", "small", *argv], str(told)), daemon=True)
    child.start()
    return child


def _command(argv, told):
    from kvcat.cli.app import run

    descriptor = os.open(told, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    torch.set_num_threads(1)
    code = run(argv)
    sys.stderr.flush()
    os._exit(code)


def exported(run):
    return load_file(Path(run) / "export" / "model.safetensors")


def records(run):
    """metrics.jsonl without the fields that tell time."""
    return [{k: v for k, v in r.items() if k != "tokens_per_s"} for r in read_metrics(Path(run) / "metrics.jsonl")]


def state(run):
    """Everything that the newest checkpoint holds, flat."""
    folder = sorted((Path(run) / "checkpoints").glob("step-*"))[-1]
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    moments = {f"optimizer.{i}.{k}": v for i, values in optimizer["state"].items() for k, v in values.items()}
    step = torch.tensor(json.loads((folder / "state.json").read_text())["step"])
    weights = {**load_file(folder / "model.safetensors"), **load_file(folder / "routers.safetensors")}
    return {"step": step, **weights, **moments}


def assert_same(a, b):
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different
