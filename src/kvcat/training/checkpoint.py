"""Checkpoints of a run: sharded, written in the background, complete or absent, verified when
read.
"""

import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import state_dict as torch_states
from torch.utils import _pytree as pytree

from kvcat.errors import InputError, one_line
from kvcat.files import (
    atomic_write,
    check_format,
    file_digest,
    parse_json,
    reason,
    remove_partial,
    write_json,
)
from kvcat.training.checkpoint_reader import SafePlanner, SafeReader
from kvcat.training.distributed import World, first_process

_FORMAT = 2
_STATE = "state.json"

States = list[dict[str, Any]]
"""JSON values of the processes that wrote a checkpoint, such as their places in the data."""


class DamagedError(InputError):
    """A checkpoint with a missing or changed file."""


class LoadedCheckpoint(NamedTuple):
    """The result of ``load``.

    Args:
        step: step of the checkpoint; 0 if there was none and nothing was loaded.
        states: states of the processes that wrote it.
        notes: one line for each newer damaged checkpoint.
    """

    step: int
    states: States
    notes: list[str]


class WholeCheckpoint(NamedTuple):
    """The newest whole checkpoint of a run.

    Args:
        folder: None if the run has no checkpoint.
        step, states: as in ``LoadedCheckpoint``.
        notes: one line for each newer damaged checkpoint.
    """

    folder: Path | None
    step: int
    states: States
    notes: list[str]


class Checkpoints:
    """The newest checkpoints of a run and the one being written; all processes call every method.

    A checkpoint contains the state of the module and of the optimizer in the form of
    ``torch.distributed.checkpoint``, which any number of processes can read, a small JSON state,
    and checksums of all files.

    Args:
        keep: number of checkpoints to keep.
        module, optimizer: what is saved and loaded.
    """

    run: Path
    keep: int
    world: World
    module: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        run: Path,
        keep: int,
        world: World,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.run = run
        self.keep = keep
        self.world = world
        self.module = module
        self.optimizer = optimizer
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._group: Any = dist.new_group(backend="gloo") if world.size > 1 else None

    def save(
        self, step: int, state: dict[str, Any], done: Callable[[Path], None] = lambda _: None
    ) -> None:
        """Copy the state and write it in the background, after the previous checkpoint.

        Args:
            state: JSON values of this process besides the tensors, such as its place in the data.
            done: called by the first process with the finished folder.
        """
        self.wait()
        states: States = [state] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(states, state, group=self._group)
        tensors = pytree.tree_map_only(torch.Tensor, _copy_to_cpu, self._tensors())
        arguments = (step, states, tensors, done)
        self._writing = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Wait until no checkpoint is being written.

        Raises:
            InputError: the last one could not be written.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            error = self._failure
            self._failure = None
            problem = f"a checkpoint of {self.run} cannot be written; earlier ones are in place"
            raise InputError(f"{problem}: {one_line(error)}")

    def load_newest(self) -> LoadedCheckpoint:
        """Load the newest whole checkpoint into module and optimizer.

        Raises:
            InputError: there are checkpoints and all are damaged, one cannot be read, or has
                another format.
        """
        checkpoint = self._newest()
        if checkpoint.folder is None:
            return LoadedCheckpoint(0, [], checkpoint.notes)
        tensors = self._tensors()
        self._transfer(_loading(), {"module": tensors["module"]}, checkpoint.folder)
        # in part: AdamW has no state of parameters that never had a gradient
        optimizer_tensors = {"optimizer": tensors["optimizer"]}
        self._transfer(_loading(is_partial=True), optimizer_tensors, checkpoint.folder)
        torch_states.set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=tensors["module"],
            optim_state_dict=tensors["optimizer"],
        )
        return LoadedCheckpoint(checkpoint.step, checkpoint.states, checkpoint.notes)

    @first_process
    def _newest(self) -> WholeCheckpoint:
        return newest(self.run)

    def _tensors(self) -> dict[str, Any]:
        module, optimizer = torch_states.get_state_dict(self.module, self.optimizer)
        return {"module": module, "optimizer": optimizer}

    def _write(
        self, step: int, states: States, tensors: dict[str, Any], done: Callable[[Path], None]
    ) -> None:
        try:
            if not self.world.is_first:
                self._transfer(dcp.save, tensors, None)
                return
            folder = checkpoint_folder(self.run, step)
            if folder.parent.exists():
                remove_partial(folder.parent)
            with atomic_write(folder) as partial:
                partial.mkdir()
                self._transfer(dcp.save, tensors, partial)
                digests = {file.name: file_digest(file) for file in sorted(partial.iterdir())}
                state = {"format": _FORMAT, "step": step, "states": states, "sha256": digests}
                write_json(partial / _STATE, state)
            self._remove_others(step)
            done(folder)
        except Exception as error:
            # of a full disk or a lost process; the next call of the main thread raises it
            self._failure = error

    def _remove_others(self, step: int) -> None:
        """Remove old checkpoints, and later ones, which the run skipped because of damage."""
        existing = folders(self.run)
        up_to_step = [folder for folder in existing if step_of(folder) <= step]
        for folder in set(existing) - set(up_to_step[-self.keep :]):
            shutil.rmtree(folder, ignore_errors=True)

    def _transfer(
        self, work: Callable[..., Any], tensors: dict[str, Any], folder: Path | None
    ) -> None:
        """Save or load this process' shards, in the folder of the first process."""
        shared = [folder]
        if self.world.size > 1:
            device = torch.device("cpu")
            dist.broadcast_object_list(shared, src=0, group=self._group, device=device)
        is_alone = self.world.size == 1
        _quietly(
            work, tensors, checkpoint_id=shared[0], process_group=self._group, no_dist=is_alone
        )


def _copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def checkpoint_folder(run: Path, step: int) -> Path:
    """The folder of the checkpoint after ``step`` steps."""
    return run / "checkpoints" / f"step-{step:06d}"


def folders(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, damaged ones too."""
    candidates = (run / "checkpoints").glob("step-*")
    named = [folder for folder in candidates if folder.name.removeprefix("step-").isdecimal()]
    return sorted(named, key=step_of)


def step_of(folder: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def newest(run: Path) -> WholeCheckpoint:
    """The newest whole checkpoint of a run.

    Raises:
        InputError: there are checkpoints and all are damaged, or one cannot be read.
    """
    notes: list[str] = []
    for folder in reversed(folders(run)):
        try:
            state = verify(folder)
            return WholeCheckpoint(folder, state["step"], state["states"], notes)
        except DamagedError as error:
            notes.append(str(error))
    if notes:
        reasons = "; ".join(notes)
        remedy = "restore one, or choose another output folder"
        raise InputError(f"no checkpoint of {run} is whole ({reasons}): {remedy}")
    return WholeCheckpoint(None, 0, [], [])


def verify(folder: Path) -> dict[str, Any]:
    """Step and states in a checkpoint's ``state.json``, if the checksums of its files are right.

    Raises:
        DamagedError: a file is missing or changed.
        InputError: a file cannot be read, or the checkpoint has another format; it may be whole.
    """
    damaged = f"checkpoint {folder} is damaged"
    try:
        state = _read_state(folder / _STATE)
        remedy = "begin the run in another folder"
        check_format(f"checkpoint {folder}", state["format"], _FORMAT, remedy)
        for name, digest in state["sha256"].items():
            if file_digest(folder / name) != digest:
                raise DamagedError(f"{damaged}: {name} does not match its checksum")
        return {"step": int(state["step"]), "states": state["states"]}
    except InputError:
        raise
    except FileNotFoundError as error:
        raise DamagedError(f"{damaged}: {Path(error.filename).name} is missing") from None
    except OSError as error:
        raise InputError(f"checkpoint {folder} cannot be read: {reason(error)}") from None
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedError(f"{damaged}: {_STATE}: {error!r}") from None


def _read_state(path: Path) -> dict[str, Any]:
    """The content of a ``state.json``; ``DamagedError`` if it does not match its checksum."""
    content = path.read_bytes()
    try:
        return parse_json(content, path)
    except InputError as error:
        problem = str(error).partition(";")[0]
        raise DamagedError(f"checkpoint {path.parent} is damaged: {problem}") from None


def load_module(folder: Path, module: nn.Module) -> None:
    """Load a verified checkpoint into an unsharded module on one process, without its optimizer."""
    tensors = {"module": torch_states.get_model_state_dict(module)}
    _quietly(_loading(), tensors, checkpoint_id=folder, no_dist=True)
    torch_states.set_model_state_dict(module, tensors["module"])


def _quietly(work: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Do the work without torch's warnings about checkpoints of a single process.

    If a process fails, the exception of the first one is raised.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            work(*arguments, **options)
        except CheckpointException as error:  # not a subclass of Exception
            raise _first_failure(error) from error


def _loading(*, is_partial: bool = False) -> Callable[..., Any]:
    """A function that loads tensors from a checkpoint.

    Args:
        is_partial: tensors that the checkpoint lacks stay as they are.
    """

    def load(tensors: dict[str, Any], *, checkpoint_id: Path, **options: Any) -> None:
        reader = SafeReader(checkpoint_id)
        planner = SafePlanner(allow_partial_load=is_partial)
        try:
            dcp.load(
                tensors,
                checkpoint_id=checkpoint_id,
                storage_reader=reader,
                planner=planner,
                **options,
            )
        except CheckpointException as error:
            raise InputError(_load_problem(checkpoint_id, _first_failure(error))) from error
        except Exception as error:  # whatever a checkpoint that somebody made lets torch raise
            raise InputError(_load_problem(checkpoint_id, error)) from error

    return load


def _load_problem(folder: Path, error: BaseException) -> str:
    """A line about a checkpoint with the right checksums that cannot be loaded."""
    problem = "is not of this model" if isinstance(error, RuntimeError) else "cannot be loaded"
    return f"checkpoint {folder} {problem}: {one_line(error)}"


def _first_failure(error: CheckpointException) -> BaseException:
    """The exception of the first process that failed."""
    failure, _ = next(iter(error.failures.values()))
    return failure
