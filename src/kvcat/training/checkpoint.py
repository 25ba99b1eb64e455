"""Checkpoints: sharded, written in the background, whole or not at all, verified when read."""

import hashlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from kvcat.errors import InputError
from kvcat.training.world import World

_FORMAT = 2
_STATE = "state.json"


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` steps stands."""
    return run / "checkpoints" / f"step-{step:06d}"


class Checkpoints:
    """The checkpoints of a run: what they hold, and the one that is being written.

    A checkpoint holds the module's and the optimizer's state in the form of ``torch.distributed.checkpoint``, which
    any number of processes can read, a small JSON state, and checksums of all files. It is written beside its place and
    renamed when whole.

    Args:
        run: the run's folder.
        keep: newest checkpoints that stay.
        world: the processes; all of them call every method.
        module: what is trained.
        optimizer: over the module's parameters.
    """

    def __init__(self, run: Path, keep: int, world: World, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.run, self.keep, self.world = run, keep, world
        self.module, self.optimizer = module, optimizer
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._group: Any = dist.new_group(backend="gloo") if world.size > 1 else None

    def save(self, step: int, state: dict[str, Any], done: Callable[[Path], None] = lambda _: None) -> None:
        """Copy the state and write it in the background; waits for the checkpoint before it, if that is not on disk.

        Args:
            step: optimizer steps done.
            state: JSON values of this process beside the tensors, such as its place in the data.
            done: called with the folder when it stands, in the first process.

        Raises:
            InputError: the checkpoint before this one could not be written; earlier ones are in place.
        """
        self.wait()
        states: list[dict[str, Any] | None] = [None] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(states, state, group=self._group)
        else:
            states = [state]
        tensors = _copied(self._tensors())
        self._writing = threading.Thread(target=self._write, args=(step, states, tensors, done), daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Return when the checkpoint that is being written stands.

        Raises:
            InputError: it could not be written.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            error, self._failure = self._failure, None
            told = " ".join(str(error).split())[:200]
            raise InputError(f"a checkpoint of {self.run} cannot be written; earlier ones are in place: {told}")

    def load_newest(self) -> tuple[int, list[dict[str, Any]], list[str]]:
        """Load the newest whole checkpoint into module and optimizer.

        Returns:
            Its step, the JSON states of the processes that wrote it, and one line for each damaged checkpoint that was
            passed over. Step 0 and no states where there is none: nothing was changed.
        """
        found: list[Any] = [_newest(self.run) if self.world.is_first else None]
        if self.world.size > 1:
            dist.broadcast_object_list(found, src=0, group=self._group)
        folder, described, notes = found[0]
        if folder is None:
            return 0, [], notes
        tensors = self._tensors()
        with _quiet():
            dcp.load(tensors, checkpoint_id=folder, process_group=self._group, no_dist=self.world.size == 1)
        set_state_dict(
            self.module, self.optimizer, model_state_dict=tensors["module"], optim_state_dict=tensors["optimizer"]
        )
        return described["step"], described["states"], notes

    def _tensors(self) -> dict[str, Any]:
        module, optimizer = get_state_dict(self.module, self.optimizer)
        return {"module": module, "optimizer": optimizer}

    def _write(
        self, step: int, states: list[dict[str, Any] | None], tensors: dict[str, Any], done: Callable[[Path], None]
    ) -> None:
        folder = checkpoint_folder(self.run, step)
        partial = folder.with_name(f".partial-{folder.name}")
        try:
            if self.world.is_first:
                _clear_partial(self.run)
                partial.mkdir(parents=True)
            with _quiet():
                dcp.save(tensors, checkpoint_id=partial, process_group=self._group, no_dist=self.world.size == 1)
            if self.world.is_first:
                self._commit(step, states, partial, folder)
                done(folder)
        except Exception as error:
            # whatever a full disk or a lost process raises in the writer is told by the next call
            self._failure = error
            if self.world.is_first:
                shutil.rmtree(partial, ignore_errors=True)

    def _commit(self, step: int, states: list[dict[str, Any] | None], partial: Path, folder: Path) -> None:
        digests = {file.name: _digest(file) for file in sorted(partial.iterdir())}
        described = {"format": _FORMAT, "step": step, "states": states, "sha256": digests}
        (partial / _STATE).write_text(json.dumps(described, indent=2) + "\n")
        for file in partial.iterdir():
            _sync(file)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        _sync(folder.parent)
        for old in folders(self.run):
            if _step(old) > step:  # a damaged one that the run passed over
                shutil.rmtree(old, ignore_errors=True)
        for old in folders(self.run)[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)


def folders(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, damaged ones too."""
    return sorted((run / "checkpoints").glob("step-*"), key=_step)


def verify(folder: Path) -> dict[str, Any]:
    """What a checkpoint's ``state.json`` says, after the checksums of its files.

    Raises:
        InputError: a file is missing, damaged or of a newer format.
    """
    try:
        described = json.loads((folder / _STATE).read_text())
        if described["format"] != _FORMAT:
            raise InputError(f"checkpoint {folder} has format {described['format']}, this version reads {_FORMAT}")
        for name, digest in described["sha256"].items():
            if _digest(folder / name) != digest:
                raise InputError(f"checkpoint {folder} is damaged: {name} does not match its checksum")
        return {"step": int(described["step"]), "states": described["states"]}
    except InputError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"checkpoint {folder} is damaged: {error!r}") from None


def load_module(folder: Path, module: nn.Module) -> None:
    """Load a checkpoint's tensors into a module on one process, without its optimizer.

    Args:
        folder: a checkpoint that ``verify`` accepts.
        module: the module whose state was saved, not sharded.
    """
    tensors = {"module": get_model_state_dict(module)}
    with _quiet():
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(module, tensors["module"])


def _newest(run: Path) -> tuple[Path | None, dict[str, Any], list[str]]:
    notes = []
    for folder in reversed(folders(run)):
        try:
            return folder, verify(folder), notes
        except InputError as error:
            notes.append(f"{error}; it is passed over")
    return None, {}, notes


def _copied(value: Any) -> Any:
    """The same structure with the tensors' own copies in main memory, sharded ones still sharded."""
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(part) for part in value)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value


def _clear_partial(run: Path) -> None:
    """Remove what a kill in the middle of writing left."""
    for left in (run / "checkpoints").glob(".partial-*"):
        shutil.rmtree(left)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the notes that torch's checkpoints make of a single process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
