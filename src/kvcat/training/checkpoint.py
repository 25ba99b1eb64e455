"""Checkpoints: written whole or not at all, verified when read."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvcat.errors import InputError

_FILES = ("model.safetensors", "routers.safetensors", "optimizer.pt")


@dataclass
class TrainState:
    """What a run needs to continue as if it had not stopped.

    Args:
        step: optimizer steps done.
        model: the model's tensors by name, shared ones once.
        routers: the routers' tensors by name.
        optimizer: the optimizer's state.
    """

    step: int
    model: dict[str, Tensor]
    routers: dict[str, Tensor]
    optimizer: dict[str, Any]


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` steps stands."""
    return run / "checkpoints" / f"step-{step:06d}"


def save_checkpoint(run: Path, state: TrainState, keep: int) -> Path:
    """Write a checkpoint atomically, then remove all but the newest ``keep``; returns its folder.

    Checkpoints of later steps are damaged ones that the run passed over; they go first.

    Raises:
        InputError: it cannot be written; the earlier checkpoints are as they were.
    """
    folder = checkpoint_folder(run, state.step)
    partial = folder.with_name(f".partial-{folder.name}")
    try:
        _clear_partial(run)
        partial.mkdir(parents=True)
        save_file({k: v.detach().cpu().contiguous() for k, v in state.model.items()}, partial / _FILES[0])
        save_file({k: v.detach().cpu().contiguous() for k, v in state.routers.items()}, partial / _FILES[1])
        torch.save(state.optimizer, partial / _FILES[2])
        digests = {name: _digest(partial / name) for name in _FILES}
        (partial / "state.json").write_text(json.dumps({"step": state.step, "sha256": digests}, indent=2) + "\n")
        for file in partial.iterdir():
            _sync(file)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch.save and safetensors tell a full disk as RuntimeError and SafetensorError
        told = " ".join(str(error).split())[:200]
        raise InputError(f"checkpoint {folder} cannot be written; earlier ones are in place: {told}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for old in _folders(run):
        if _step(old) > state.step:
            shutil.rmtree(old)
    for old in _folders(run)[:-keep]:
        shutil.rmtree(old)
    return folder


def _clear_partial(run: Path) -> None:
    """Remove what a kill in the middle of writing left."""
    for left in (run / "checkpoints").glob(".partial-*"):
        shutil.rmtree(left)


def load_newest(run: Path) -> tuple[TrainState | None, list[str]]:
    """The newest whole checkpoint of a run, or None, and one line for each damaged one that was passed over."""
    warnings = []
    for folder in reversed(_folders(run)):
        try:
            return load_checkpoint(folder), warnings
        except InputError as error:
            warnings.append(f"{error}; it is passed over")
    return None, warnings


def load_checkpoint(folder: Path) -> TrainState:
    """A checkpoint, after its checksums were verified.

    Raises:
        InputError: a file is missing or damaged.
    """
    try:
        described = json.loads((folder / "state.json").read_text())
        for name, digest in described["sha256"].items():
            if _digest(folder / name) != digest:
                raise InputError(f"checkpoint {folder} is damaged: {name} does not match its checksum")
        return TrainState(
            step=described["step"],
            model=load_file(folder / _FILES[0]),
            routers=load_file(folder / _FILES[1]),
            optimizer=torch.load(folder / _FILES[2], map_location="cpu", weights_only=True),
        )
    except InputError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"checkpoint {folder} is damaged: {error}") from None


def _folders(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
