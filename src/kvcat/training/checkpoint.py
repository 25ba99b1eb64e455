"""The folder of a run: whose it is, what a continuation may change, and its checkpoints.

Checkpoints are sharded, written in the background, whole or absent, and verified when read.
"""

import dataclasses
import functools
import hashlib
import json
import math
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
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint import state_dict as torch_states
from torch.utils import _pytree as pytree

from kvcat.errors import InputError, one_line
from kvcat.files import append_jsonl, atomic_write, claim_folder, read_jsonl, remove_partial, write_json
from kvcat.training.config import TrainConfig
from kvcat.training.distributed import World

CONFIG_FILE = "config.json"
CHANGES_FILE = "changes.jsonl"
_MAY_CHANGE = (
    "output", "device", "micro_batch_size", "activation_checkpointing", "compile", "monitor", "log_every",
    "validation_every", "checkpoint_every", "keep_checkpoints", "export_dtype",
)  # fmt: skip
_FORMAT = 2
_STATE = "state.json"


class DamagedError(InputError):
    """A checkpoint with a missing or changed file."""


class Checkpoints:
    """The ``keep`` newest checkpoints of a run, and the one that is being written; all processes call every method.

    A checkpoint holds the module's and the optimizer's state in the form of ``torch.distributed.checkpoint``, which
    any number of processes can read, a small JSON state, and checksums of all files.
    """

    def __init__(self, run: Path, keep: int, world: World, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.run, self.keep, self.world = run, keep, world
        self.module, self.optimizer = module, optimizer
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._group: Any = dist.new_group(backend="gloo") if world.size > 1 else None

    def save(self, step: int, state: dict[str, Any], done: Callable[[Path], None] = lambda _: None) -> None:
        """Copy the state and write it in the background; first wait for the previous checkpoint.

        ``state`` are JSON values of this process besides the tensors, such as its place in the data; the first process
        calls ``done`` with the finished folder.
        """
        self.wait()
        states: list[dict[str, Any]] = [state] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(states, state, group=self._group)
        tensors = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().to("cpu", copy=True), self._tensors())
        self._writing = threading.Thread(target=self._write, args=(step, states, tensors, done), daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Return when no checkpoint is being written; refuse to go on where the last one could not be written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            error, self._failure = self._failure, None
            failed = f"a checkpoint of {self.run} cannot be written; earlier ones are in place"
            raise InputError(f"{failed}: {one_line(error)}")

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
        # AdamW has no state of parameters that never had a gradient
        partly = functools.partial(dcp.load, planner=DefaultLoadPlanner(allow_partial_load=True))
        try:
            self._transfer(dcp.load, {"module": tensors["module"]}, folder)
            self._transfer(partly, {"optimizer": tensors["optimizer"]}, folder)
        except RuntimeError as error:
            raise InputError(f"checkpoint {folder} is not of this model: {one_line(error)}") from error
        torch_states.set_state_dict(
            self.module, self.optimizer, model_state_dict=tensors["module"], optim_state_dict=tensors["optimizer"]
        )
        return described["step"], described["states"], notes

    def _tensors(self) -> dict[str, Any]:
        module, optimizer = torch_states.get_state_dict(self.module, self.optimizer)
        return {"module": module, "optimizer": optimizer}

    def _write(
        self, step: int, states: list[dict[str, Any]], tensors: dict[str, Any], done: Callable[[Path], None]
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
                digests = {file.name: _digest(file) for file in sorted(partial.iterdir())}
                write_json(partial / _STATE, {"format": _FORMAT, "step": step, "states": states, "sha256": digests})
            there = folders(self.run)
            kept = [folder for folder in there if step_of(folder) <= step][-self.keep :]
            for old in set(there) - set(kept):  # damaged later ones too, which the run skipped
                shutil.rmtree(old, ignore_errors=True)
            done(folder)
        except Exception as error:
            self._failure = error  # of a full disk or a lost process; the next call of the main thread raises it

    def _transfer(self, work: Callable[..., Any], tensors: dict[str, Any], folder: Path | None) -> None:
        """Save or load this process' shards, in the folder of the first process."""
        shared = [folder]
        if self.world.size > 1:
            dist.broadcast_object_list(shared, src=0, group=self._group, device=torch.device("cpu"))
        _quietly(work, tensors, checkpoint_id=shared[0], process_group=self._group, no_dist=self.world.size == 1)


def checkpoint_folder(run: Path, step: int) -> Path:
    """The folder of the checkpoint after ``step`` steps."""
    return run / "checkpoints" / f"step-{step:06d}"


def folders(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, damaged ones too."""
    found = (run / "checkpoints").glob("step-*")
    return sorted((f for f in found if f.name.removeprefix("step-").isdecimal()), key=step_of)


def step_of(folder: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def newest(run: Path) -> tuple[Path | None, dict[str, Any], list[str]]:
    """The newest whole checkpoint, what its ``state.json`` says, and one line for each newer damaged one."""
    notes: list[str] = []
    for folder in reversed(folders(run)):
        try:
            return folder, verify(folder), notes
        except DamagedError as error:
            notes.append(str(error))
    if notes:
        reason = "; ".join(notes)
        raise InputError(f"no checkpoint of {run} is whole ({reason}): restore one, or choose another output folder")
    return None, {}, []


def verify(folder: Path) -> dict[str, Any]:
    """What a checkpoint's ``state.json`` says, once the checksums of its files are right.

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
    """Load a verified checkpoint into an unsharded module on one process, without its optimizer."""
    tensors = {"module": torch_states.get_model_state_dict(module)}
    _quietly(dcp.load, tensors, checkpoint_id=folder, no_dist=True)
    torch_states.set_model_state_dict(module, tensors["module"])


def _quietly(work: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Without torch's warnings about checkpoints of a single process; a failure is the first one's own exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            work(*arguments, **options)
        except CheckpointException as error:  # which is no Exception
            raise next(iter(error.failures.values()))[0] from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Continuation(NamedTuple):
    """What stands in a run's folder: old and new value by name of what changes, and the first ``max_steps``."""

    changes: dict[str, list[Any]]
    begun_with: int  # decides what a run on local text reads


def check_folder(config: TrainConfig) -> Continuation:
    """What the run continues; refuses a folder that is neither empty nor of a run that computes the same.

    Call it under ``one_writer``. Nothing is written.
    """
    run = Path(config.output)
    found = claim_folder(run, CONFIG_FILE, None)
    if found is None:
        return Continuation({}, config.max_steps)
    # a run of an earlier version names no bos: the data say whether they are the same
    found.setdefault("bos", config.bos)
    try:
        previous = TrainConfig.from_dict(found)
    except InputError as error:
        reason = str(error).partition(";")[0]
        raise InputError(f"output folder {run} is not empty and holds no run of ours: {reason}") from None
    grown = [r["changed"]["max_steps"][0] for r in read_jsonl(run / CHANGES_FILE) if "max_steps" in r["changed"]]
    return Continuation(_changes(previous, config), [*grown, previous.max_steps][0])


def record_config(config: TrainConfig, step: int, changes: dict[str, list[Any]]) -> list[str]:
    """Write ``config.json``, and what a continuation changes to ``changes.jsonl``; returns lines for people."""
    run = Path(config.output)
    if changes:
        append_jsonl(run / CHANGES_FILE, {"step": step, "changed": changes})
    write_json(run / CONFIG_FILE, dataclasses.asdict(config))
    lines = [f"from step {step} on {name} is {new!r}, was {old!r}" for name, (old, new) in changes.items()]
    if "max_steps" in changes:
        lines.append(f"from step {step} on the learning rate follows the schedule of {config.max_steps} steps")
    return lines


def check_disk(config: TrainConfig, module: nn.Module) -> None:
    """Refuse to start where the checkpoints that will be kept, one more and the export do not fit.

    A checkpoint holds weights in float32 and two moments of each.
    """
    run = Path(config.output)
    there = folders(run)
    num_left = math.ceil((config.max_steps - (step_of(there[-1]) if there else 0)) / config.checkpoint_every)
    num_new = max(0, min(config.keep_checkpoints + 1 - len(there), num_left))
    exported = 2 if config.export_dtype == "bfloat16" else 4
    needed = sum(p.numel() for p in module.parameters()) * (12 * num_new + exported)
    if (free := shutil.disk_usage(run).free) < needed:
        room = f"{free / 1e6:,.1f} MB free, checkpoints and export need {needed / 1e6:,.1f} MB"
        raise InputError(f"no disk space for {run}: {room}")


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
