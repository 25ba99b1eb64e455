"""The record of a run: ``metrics.jsonl``, its copy in TensorBoard, progress on standard error."""

import importlib
import re
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from tqdm import tqdm

from kvcat.files import append_jsonl, atomic_write, jsonl_bytes, read_jsonl
from kvcat.training.config import TrainConfig
from kvcat.training.distributed import World
from kvcat.training.objective import Record

METRICS_FILE = "metrics.jsonl"
_SECONDS_PER_LINE = 60.0
_LINES_OF_SHORT_RUN = 20


class RunLog:
    """Records ``{"kind": "train" or "validation", "step": ..., ...}`` of a run, written and shown.

    Opened at a step, it first drops later records, so that a resumed run has neither gaps nor
    duplicates. From time to time a line goes to standard error.

    Args:
        step: steps that are done.
        enabled: whether this process writes; else it only remembers the newest records.
        progress: whether lines are shown.
    """

    last: dict[str, dict[str, Any]]
    """The newest record of each kind."""

    def __init__(self, config: TrainConfig, step: int, *, enabled: bool, progress: bool) -> None:
        self._config = config
        self._path = Path(config.output) / METRICS_FILE
        self._enabled = enabled
        self._shows = enabled and progress
        self._start_step = step
        self._start_time = time.monotonic()
        self._line_time = self._start_time
        kept: list[dict[str, Any]] = []
        if enabled and step:
            kept = [record for record in read_jsonl(self._path) if record["step"] <= step]
        self.last = {record["kind"]: record for record in kept}
        if enabled:
            with atomic_write(self._path) as partial:
                partial.write_bytes(jsonl_bytes(*kept))
        self._board: Any = None
        if enabled and config.monitor == "tensorboard":
            tensorboard = importlib.import_module("torch.utils.tensorboard")
            folder = self._path.with_name("tensorboard")
            self._board = tensorboard.SummaryWriter(str(folder), purge_step=step + 1)

    def close(self) -> None:
        """Close TensorBoard's files."""
        if self._board is not None:
            self._board.close()

    def note(self, *lines: str) -> None:
        """Print lines."""
        if self._shows:
            for line in lines:
                print(line, file=sys.stderr, flush=True)

    def write(self, record: dict[str, Any]) -> None:
        """Show a record and append it.

        Of training records, one every ``log_every`` steps and the last are appended.
        """
        self.last[record["kind"]] = record
        step = record["step"]
        if record["kind"] == "validation":
            self.note(f"validation at step {step}: {_losses(record)}")
        else:
            self._show_progress(record)
            is_last = step == self._config.max_steps
            if step % self._config.log_every and not is_last:
                return
        if self._enabled:
            append_jsonl(self._path, record)
        if self._board is not None:
            for name, value in _numbers(record).items():
                self._board.add_scalar(name, value, step)

    def _show_progress(self, record: dict[str, Any]) -> None:
        step = record["step"]
        num_steps = self._config.max_steps
        now = time.monotonic()
        is_due = step % max(1, num_steps // _LINES_OF_SHORT_RUN) == 0 or step == num_steps
        if not is_due and now <= self._line_time + _SECONDS_PER_LINE:
            return
        self._line_time = now
        seconds_per_step = (now - self._start_time) / max(1, step - self._start_step)
        remaining = tqdm.format_interval(seconds_per_step * (num_steps - step))
        speed = f"{record['tokens_per_s']:,.0f} tokens/s"
        self.note(f"step {step}/{num_steps}  {_losses(record)}  {speed}  {remaining} left")


def mean_record(
    records: Sequence[Record], weights: Sequence[float], world: World
) -> dict[str, Any]:
    """The weighted average of all processes' records of the same names, as plain numbers.

    Values are copied from the device once.
    """
    rows = [torch.stack(pytree.tree_leaves(record)).double() for record in records]
    values = torch.stack(rows)  # (records, names)
    weight = torch.tensor(weights, dtype=values.dtype, device=values.device)
    sums = (weight.unsqueeze(1) * values).sum(0)
    # the total weight as one more name, so that one message serves all processes
    sums = world.mean(torch.cat([sums, weight.sum().unsqueeze(0)]))
    means = (sums[:-1] / sums[-1]).tolist()
    return pytree.tree_unflatten(means, pytree.tree_structure(records[0]))


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process so far, in GiB: memory of the GPU, or else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would include the process that started this one
        kibibytes = re.search(r"VmHWM:\s*(\d+)", status.read_text())[1]  # type: ignore[index]
        return int(kibibytes) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record by ``kind/name`` or ``kind/name/group``."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            for group, number in value.items():
                numbers[f"{record['kind']}/{name}/{group}"] = float(number)
        elif isinstance(value, int | float) and name != "step":
            numbers[f"{record['kind']}/{name}"] = float(value)
    return numbers


def _losses(record: dict[str, Any]) -> str:
    words = [f"dense {record['dense_loss']:.3f}"]
    if "masked_loss" in record:
        kept = [f"{value:.2f}" for value in record["kept"].values()]
        if len(set(kept)) == 1:  # random and attention policies keep equally many
            kept = kept[:1]
        if "dense_suffix_loss" in record:  # of the tokens that the masked loss is about
            words.append(f"after the split {record['dense_suffix_loss']:.3f}")
        words.append(f"masked {record['masked_loss']:.3f}")
        words.append(f"kl {record['kl']:z.4f}")
        words.append(f"kept {' '.join(kept)}")
    return "  ".join(words)
