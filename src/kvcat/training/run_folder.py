"""The folder of a run: which run it belongs to, what a continuation may change, and whether the run
is complete.
"""

import dataclasses
import math
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from kvcat.cache import fingerprint
from kvcat.errors import InputError
from kvcat.files import append_jsonl, claim_folder, one_writer, read_json, read_jsonl, write_json
from kvcat.training.checkpoint import folders, step_of
from kvcat.training.config import TrainConfig
from kvcat.training.distributed import World, first_process
from kvcat.training.log import METRICS_FILE
from kvcat.training.objective import Record

CONFIG_FILE = "config.json"
CHANGES_FILE = "changes.jsonl"
DONE_FILE = "done.json"
START_FILE = "start.json"
_MAY_CHANGE = {
    "output",
    "device",
    "micro_batch_size",
    "activation_checkpointing",
    "compile",
    "monitor",
    "log_every",
    "validation_every",
    "checkpoint_every",
    "keep_checkpoints",
    "export_dtype",
}

Changes = dict[str, list[Any]]
"""Old and new value of fields of the configuration, by name."""


class FolderState(NamedTuple):
    """The content of a run's folder.

    Args:
        changes: what the continuation changes.
        first_max_steps: ``max_steps`` of the run's first configuration. It decides what a run on
            local text reads.
        finished: the last record of a run that is complete; None if there is something to do.
    """

    changes: Changes
    first_max_steps: int
    finished: Record | None


class RunFolder:
    """The folder of a run, in which no other process writes; all processes call every method.

    Args:
        world: the first process alone looks at files.
        state: what the folder contains.
    """

    config: TrainConfig
    world: World
    path: Path
    export: Path
    state: FolderState

    def __init__(self, config: TrainConfig, world: World, state: FolderState) -> None:
        self.config = config
        self.world = world
        self.path = Path(config.output)
        self.export = self.path / "export"
        self.state = state

    @classmethod
    @contextmanager
    def open(cls, config: TrainConfig, world: World) -> Iterator["RunFolder"]:
        """The folder, locked during the block; nothing is written yet.

        Raises:
            InputError: another process writes into it, or it is neither empty nor the folder of a
                run that computes the same or has no checkpoint yet.
        """
        with ExitStack() as stack:

            def lock_and_read() -> FolderState:
                stack.enter_context(one_writer(Path(config.output)))
                return _read_state(config)

            yield cls(config, world, world.first(lock_and_read))

    @first_process
    def check_disk(self, module: nn.Module) -> None:
        """Reject a disk on which the checkpoints to be kept, one more and the export do not fit."""
        config = self.config
        existing = folders(self.path)
        last_step = step_of(existing[-1]) if existing else 0
        num_coming = math.ceil((config.max_steps - last_step) / config.checkpoint_every)
        num_kept = config.keep_checkpoints + 1  # while the newest is written, one more
        num_new = max(0, min(num_kept - len(existing), num_coming))
        export_bytes = 2 if config.export_dtype == "bfloat16" else 4
        num_parameters = sum(p.numel() for p in module.parameters())
        # a checkpoint holds weights in float32 and two moments of each
        needed = num_parameters * (12 * num_new + export_bytes)
        free = shutil.disk_usage(self.path).free
        if free < needed:
            figures = (
                f"{free / 1e6:,.1f} MB free, checkpoints and export need {needed / 1e6:,.1f} MB"
            )
            raise InputError(f"no disk space for {self.path}: {figures}")

    @first_process
    def check_start(self, model: PreTrainedModel) -> str:
        """``check_start`` of this folder."""
        return check_start(self.path, model)

    @first_process
    def record_config(self, step: int, start: str) -> list[str]:
        """Write the configuration, and what it changes from a step on; returns lines for people.

        ``start`` is the fingerprint of the model that the run starts from.
        """
        write_json(self.path / START_FILE, {"fingerprint": start})
        changes = self.state.changes
        if step == 0:
            (self.path / CHANGES_FILE).unlink(missing_ok=True)
        if changes:
            append_jsonl(self.path / CHANGES_FILE, {"step": step, "changed": changes})
        write_json(self.path / CONFIG_FILE, dataclasses.asdict(self.config))
        since = f"from step {step} on"
        lines = [f"{since} {name} is {new!r}, was {old!r}" for name, (old, new) in changes.items()]
        if "max_steps" in changes:
            schedule = f"the schedule of {self.config.max_steps} steps"
            lines.append(f"{since} the learning rate follows {schedule}")
        return lines

    def mark_done(self) -> None:
        """Record that the run is complete."""
        write_json(self.path / DONE_FILE, _done_record(self.config))


def check_start(run: Path, model: PreTrainedModel) -> str:
    """The fingerprint of the model that a run starts from, as it was loaded.

    Raises:
        InputError: the run has checkpoints, and started from another model.
    """
    file = run / START_FILE
    actual = fingerprint(model)
    # a run without checkpoints begins again
    if folders(run) and actual != read_json(file)["fingerprint"]:
        name = model.config.name_or_path
        raise InputError(
            f"{run} holds another run: {name} is no longer the model that it started from"
        )
    return actual


def _read_state(config: TrainConfig) -> FolderState:
    run = Path(config.output)
    saved = claim_folder(run, CONFIG_FILE, None)
    if saved is None:
        return FolderState({}, config.max_steps, None)
    try:
        previous = TrainConfig.from_dict(saved)
    except InputError as error:
        reason = str(error).partition(";")[0]
        problem = f"output folder {run} is not empty and holds no run of ours"
        raise InputError(f"{problem}: {reason}") from None
    if not folders(run) and not (run / "export").exists():  # it died before its first checkpoint
        return FolderState({}, config.max_steps, None)
    first_max_steps = previous.max_steps
    for record in reversed(read_jsonl(run / CHANGES_FILE)):
        if "max_steps" in record["changed"]:
            first_max_steps = record["changed"]["max_steps"][0]
    changes = _changes(previous, config)
    finished = None if "export_dtype" in changes else _last_record(config)
    return FolderState(changes, first_max_steps, finished)


def _changes(previous: TrainConfig, config: TrainConfig) -> Changes:
    """Old and new values of the fields that differ; a continuation may change all of them."""
    changes: Changes = {}
    for name, new in dataclasses.asdict(config).items():
        old = getattr(previous, name)
        is_unused = config.policy == "control" and name.startswith("router_")
        if old == new or is_unused:
            continue
        is_longer = name == "max_steps" and new > old
        if name not in _MAY_CHANGE and not is_longer:
            difference = f"its {name} is {old!r}, not {new!r}"
            raise InputError(f"{config.output} holds another run: {difference}")
        changes[name] = [old, new]
    return changes


def _done_record(config: TrainConfig) -> dict[str, Any]:
    return {"steps": config.max_steps, "export_dtype": config.export_dtype}


def _last_record(config: TrainConfig) -> Record | None:
    """The last record of a run that is complete; None for any other."""
    run = Path(config.output)
    if not (run / DONE_FILE).exists() or not (run / "export" / "config.json").exists():
        return None
    if read_json(run / DONE_FILE) != _done_record(config):
        return None
    records = read_jsonl(run / METRICS_FILE)
    return records[-1] if records else {}
