"""Checkpoints: sharded, written in the background, whole or absent, verified when read."""

import hashlib
import json
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
from kvcat.files import atomic_write, remove_partial, write_json
from kvcat.training.distributed import World

_FORMAT = 2
_STATE = "state.json"


class DamagedError(InputError):
    """A checkpoint with a missing or changed file."""


class Checkpoints:
    """The checkpoints of a run, and the one that is being written.

    A checkpoint holds the module's and the optimizer's state in the form of ``torch.distributed.checkpoint``, which
    any number of processes can read, a small JSON state, and checksums of all files.

    Args:
        run: the run's folder.
        keep: number of newest checkpoints to keep.
        world: the processes; all of them call every method.
        module: what is trained.
        optimizer: over the module's parameters.
    """

    def __init__(self, run: Path, keep: int, world: World, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.run, self.keep, self.world = run, keep, world
        self.module, self.optimizer = module, optimizer
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._group: Any = dist.new_group(backend="gloo") if world.size > 1 else None

    def save(self, step: int, state: dict[str, Any], done: Callable[[Path], None] = lambda _: None) -> None:
        """Copy the state and write it in the background; first wait for the previous checkpoint.

        Args:
            step: optimizer steps done.
            state: JSON values of this process besides the tensors, such as its place in the data.
            done: called with the finished folder, in the first process.

        Raises:
            InputError: the previous checkpoint could not be written; earlier ones are in place.
        """
        self.wait()
        states: list[dict[str, Any]] = [state] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(states, state, group=self._group)
        tensors = _copied(self._tensors())
        self._writing = threading.Thread(target=self._write, args=(step, states, tensors, done), daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Return when no checkpoint is being written.

        Raises:
            InputError: the last one could not be written.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            error, self._failure = self._failure, None
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"a checkpoint of {self.run} cannot be written; earlier ones are in place: {reason}")

    def load_newest(self) -> tuple[int, list[dict[str, Any]], list[str]]:
        """Load the newest whole checkpoint into module and optimizer.

        Returns:
            Its step, the JSON states of the processes that wrote it, and one line for each newer damaged checkpoint.
            Step 0 and no states where the run has no checkpoint: nothing was changed.

        Raises:
            InputError: there are checkpoints and all are damaged, one cannot be read, or has another format.
        """
        folder, described, notes = self.world.first(lambda: newest(self.run), self._group)
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
        self, step: int, states: list[dict[str, Any]], tensors: dict[str, Any], done: Callable[[Path], None]
    ) -> None:
        try:
            if not self.world.is_first:
                self._write_tensors(tensors, None)
                return
            folder = checkpoint_folder(self.run, step)
            if folder.parent.exists():
                remove_partial(folder.parent)
            with atomic_write(folder) as partial:
                partial.mkdir()
                self._write_tensors(tensors, partial)
                digests = {file.name: _digest(file) for file in sorted(partial.iterdir())}
                write_json(partial / _STATE, {"format": _FORMAT, "step": step, "states": states, "sha256": digests})
            self._remove_old(step)
            done(folder)
        except Exception as error:
            self._failure = error  # of a full disk or a lost process; the next call of the main thread raises it

    def _write_tensors(self, tensors: dict[str, Any], folder: Path | None) -> None:
        """Write this process' shards into the folder of the first process."""
        shared = [folder]
        if self.world.size > 1:
            dist.broadcast_object_list(shared, src=0, group=self._group, device=torch.device("cpu"))
        with _quiet():
            dcp.save(tensors, checkpoint_id=shared[0], process_group=self._group, no_dist=self.world.size == 1)

    def _remove_old(self, step: int) -> None:
        """Remove all but the newest checkpoints, and damaged later ones that the run skipped."""
        there = folders(self.run)
        kept = [folder for folder in there if step_of(folder) <= step][-self.keep :]
        for folder in there:
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)


def checkpoint_folder(run: Path, step: int) -> Path:
    """The folder of the checkpoint after ``step`` steps."""
    return run / "checkpoints" / f"step-{step:06d}"


def folders(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, damaged ones too."""
    return sorted((run / "checkpoints").glob("step-*"), key=step_of)


def step_of(folder: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def newest(run: Path) -> tuple[Path | None, dict[str, Any], list[str]]:
    """The newest whole checkpoint, what its ``state.json`` says, and one line for each newer damaged one.

    Raises:
        InputError: there are checkpoints and all are damaged, one cannot be read, or has another format.
    """
    notes: list[str] = []
    for folder in reversed(folders(run)):
        try:
            return folder, verify(folder), notes
        except DamagedError as error:
            notes.append(str(error))
    if notes:
        raise InputError(
            f"no checkpoint of {run} is whole ({'; '.join(notes)}): restore one, or choose another output folder"
        )
    return None, {}, []


def verify(folder: Path) -> dict[str, Any]:
    """Step and states in a checkpoint's ``state.json``, after the checksums of its files.

    Raises:
        DamagedError: a file is missing or changed.
        InputError: a file cannot be read, or the checkpoint has another format; it may be whole.
    """
    try:
        described = json.loads((folder / _STATE).read_text())
        if described["format"] != _FORMAT:
            raise InputError(f"checkpoint {folder} has format {described['format']}; this version reads {_FORMAT}")
        for name, digest in described["sha256"].items():
            if _digest(folder / name) != digest:
                raise DamagedError(f"checkpoint {folder} is damaged: {name} does not match its checksum")
        return {"step": int(described["step"]), "states": described["states"]}
    except InputError:
        raise
    except FileNotFoundError as error:
        raise DamagedError(f"checkpoint {folder} is damaged: {Path(error.filename).name} is missing") from None
    except OSError as error:
        raise InputError(f"checkpoint {folder} cannot be read: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"checkpoint {folder} is damaged: {_STATE}: {error!r}") from None


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


def _copied(value: Any) -> Any:
    """The same structure with copies of the tensors in main memory, sharded ones still sharded."""
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(part) for part in value)
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings about checkpoints of a single process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
