"""The folder of a run: whose it is, what a continuation may change, and whether the disk has room."""

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from kvcat.errors import InputError
from kvcat.files import LOCK_FILE, append_jsonl, claim_folder, read_jsonl, write_json
from kvcat.training.checkpoint import folders, step_of
from kvcat.training.config import TrainConfig

CONFIG_FILE = "config.json"
CHANGES_FILE = "changes.jsonl"
_MAY_CHANGE = (
    "output", "device", "micro_batch_size", "activation_checkpointing", "compile", "workers", "monitor", "log_every",
    "validation_every", "checkpoint_every", "keep_checkpoints", "export_dtype",
)  # fmt: skip


def check_folder(config: TrainConfig) -> dict[str, list[Any]]:
    """Accept a folder that is absent, empty, or of the same run; nothing is written.

    Returns:
        What the continuation changes: old and new value by name.

    Raises:
        InputError: the folder belongs to something else, or to a run that computes something else.
    """
    run = Path(config.output)
    if (run / CONFIG_FILE).exists():
        try:
            previous = TrainConfig.load(run / CONFIG_FILE)
        except InputError as error:
            reason = str(error).partition(";")[0]
            raise InputError(f"output folder {run} is not empty and holds no run of ours: {reason}") from None
        return _changes(previous, config)
    if run.exists() and (not run.is_dir() or any(map(_is_foreign, run.iterdir()))):
        raise InputError(f"output folder {run} is not empty and holds no run of ours")
    return {}


def claim_run(config: TrainConfig) -> int:
    """Make the folder this run's, under ``one_writer``; an existing configuration stays until ``record_changes``.

    Returns:
        The ``max_steps`` that the run began with, which decides what a run on local text reads.

    Raises:
        InputError: as ``check_folder``, or the folder cannot be written.
    """
    run = Path(config.output)
    previous = claim_folder(run, CONFIG_FILE, dataclasses.asdict(config))
    if previous is None:
        return config.max_steps
    _changes(before := TrainConfig.from_dict(previous), config)
    grown = [r["changed"]["max_steps"][0] for r in read_jsonl(run / CHANGES_FILE) if "max_steps" in r["changed"]]
    return grown[0] if grown else before.max_steps


def record_changes(config: TrainConfig, step: int, changes: dict[str, list[Any]]) -> list[str]:
    """Record in ``changes.jsonl`` and ``config.json`` what a continuation changes.

    Args:
        config: of the continuation.
        step: optimizer steps done so far.
        changes: of ``check_folder``.

    Returns:
        A line for people about each change.
    """
    if not changes:
        return []
    run = Path(config.output)
    append_jsonl(run / CHANGES_FILE, {"step": step, "changed": changes})
    write_json(run / CONFIG_FILE, dataclasses.asdict(config))
    lines = [f"from step {step} on {name} is {new!r}, was {old!r}" for name, (old, new) in changes.items()]
    if "max_steps" in changes:
        lines.append(f"from step {step} on the learning rate follows the schedule of {config.max_steps} steps")
    return lines


def check_disk(config: TrainConfig, module: nn.Module) -> None:
    """Refuse to start where the checkpoints still to be written and the export do not fit.

    A new checkpoint is written before the oldest is removed. It holds weights, in float32, and two moments for those
    that are trained, the routers among them.

    Args:
        config: of the run; its folder need not exist.
        module: what is trained, not sharded.

    Raises:
        InputError: less free space than the run will need.
    """
    run = Path(config.output)
    existing = folders(run)
    still = math.ceil((config.max_steps - (step_of(existing[-1]) if existing else 0)) / config.checkpoint_every)
    num_written = min(max(1, config.keep_checkpoints + 1 - len(existing)), max(0, still))
    one = sum(p.numel() * (12 if p.requires_grad else 4) for p in module.parameters())
    export = sum(p.numel() for p in module.parameters()) * (2 if config.export_dtype == "bfloat16" else 4)
    needed = num_written * one + export
    free = shutil.disk_usage(
        next(folder for folder in (run.absolute(), *run.absolute().parents) if folder.is_dir())
    ).free
    if free < needed:
        raise InputError(
            f"no disk space for {run}: {free / 1e6:,.1f} MB free, checkpoints and export need {needed / 1e6:,.1f} MB"
        )


def _changes(previous: TrainConfig, config: TrainConfig) -> dict[str, list[Any]]:
    """Old and new value of what differs, all of which a continuation may change."""
    changed: dict[str, list[Any]] = {}
    for name, new in dataclasses.asdict(config).items():
        old = getattr(previous, name)
        if old == new or (config.policy == "control" and name.startswith("router_")):
            continue
        if name not in _MAY_CHANGE and not (name == "max_steps" and new > old):
            raise InputError(f"{config.output} holds another run: its {name} is {old!r}, not {new!r}")
        changed[name] = [old, new]
    return changed


def _is_foreign(file: Path) -> bool:
    return file.name != LOCK_FILE and not file.name.startswith(".partial-")
