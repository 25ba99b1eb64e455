"""Short training runs and their files (a helper of the tests)."""

import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from kvcat.files import LOCK_FILE, read_jsonl
from kvcat.training.config import TrainConfig

POLICIES = ("router", "random", "attention", "control")


def config(model, data, output, **options):
    values = {
        "model": str(model),
        "data": str(data),
        "output": str(output),
        "num_groups": 2,
        "feature_dim": 8,
        "seq_len": 32,
        "batch_size": 4,
        "max_steps": 6,
        "warmup_steps": 2,
        "peak_lr": 1e-2,
        "min_lr": 1e-3,
        "router_noise": 0.3,
        "validation_every": 3,
        "validation_sequences": 6,
        "checkpoint_every": 2,
        "seed": 3,
    }
    return TrainConfig.from_dict({**values, **options})


def context():
    """A context that starts processes from a server that has done the imports once."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(
        ["kvcat.cli.app", "kvcat.training.loop", "transformers.models.qwen2"]
    )
    return made


def start_command(run, out):
    """``kvcat train`` in a process of its own, its messages appended to ``out``."""
    file = Path(f"{out}.json")
    file.write_text(json.dumps(dataclasses.asdict(run)))
    child = context().Process(
        target=_command, args=(["train", "small", "--config", str(file)], str(out)), daemon=True
    )
    child.start()
    return child


def _command(argv, out):
    from kvcat.cli.app import run

    descriptor = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    torch.set_num_threads(int(os.environ.get("KVCAT_TEST_THREADS", "1")))
    code = run(argv)
    sys.stderr.flush()
    os._exit(code)


def exported(run):
    return load_file(Path(run) / "export" / "model.safetensors")


def contents(folder):
    return {
        f: f.read_bytes() for f in Path(folder).rglob("*") if f.is_file() and f.name != LOCK_FILE
    }


def records(run):
    """metrics.jsonl without the fields that measure time and memory."""
    measured = ("tokens_per_s", "peak_memory_gib")
    return [
        {k: v for k, v in r.items() if k not in measured}
        for r in read_jsonl(Path(run) / "metrics.jsonl")
    ]


def state(run):
    """Everything that the newest checkpoint holds, flat."""
    folder = sorted((Path(run) / "checkpoints").glob("step-*"))[-1]
    with tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(folder, Path(scratch) / "whole.pt")
        whole = torch.load(Path(scratch) / "whole.pt", weights_only=True)
    step = torch.tensor(json.loads((folder / "state.json").read_text())["step"])
    return {"step": step, **{k: v for k, v in _flat(whole, "") if isinstance(v, torch.Tensor)}}


def _flat(value, name):
    if not isinstance(value, dict):
        return [(name, value)]
    return [pair for key, entry in value.items() for pair in _flat(entry, f"{name}.{key}")]


def assert_same(a, b):
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


def assert_close(ours, theirs, weights):
    """Losses and weights of two runs agree to rounding; AdamW's first steps magnify that of the
    gradients."""
    for one, two in zip(records(ours), records(theirs), strict=True):
        assert (one.keys(), one["kind"], one["step"]) == (two.keys(), two["kind"], two["step"])
        norms = ("grad_norm", "router_grad_norm") if one["step"] == 1 else ()
        for name in ("dense_loss", "masked_loss", "kl", *norms):
            assert one.get(name, 0.0) == pytest.approx(two.get(name, 0.0), rel=1e-4, abs=1e-4)
    a = exported(ours)
    b = exported(theirs)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=weights)
