"""The record of a run: ``metrics.jsonl``, its copy in TensorBoard, and the progress on standard error."""

import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from tqdm import tqdm

from kvcat.files import append_jsonl, atomic_write, read_jsonl
from kvcat.training.config import TrainConfig
from kvcat.training.distributed import World
from kvcat.training.objective import Record

METRICS_FILE = "metrics.jsonl"
_LINE_EVERY = 60.0  # seconds between lines
_LINES = 20  # lines of a short run


class RunLog:
    """Records ``{"kind": "train" or "validation", "step": ..., ...}`` of a run, written and shown.

    Opened at a step, it first drops later records, so that a resumed run has neither gaps nor duplicates. Standard
    error gets a line every now and then. A process where the log is not enabled only remembers the newest records.
    """

    def __init__(self, config: TrainConfig, step: int, *, enabled: bool, progress: bool) -> None:
        self._config, self._path, self._enabled = config, Path(config.output) / METRICS_FILE, enabled
        kept = [record for record in read_jsonl(self._path) if record["step"] <= step] if enabled and step else []
        self.last: dict[str, dict[str, Any]] = {record["kind"]: record for record in kept}
        self._board: Any = None
        if enabled:
            with atomic_write(self._path) as partial:
                partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
            if config.monitor == "tensorboard":
                board = importlib.import_module("torch.utils.tensorboard")
                self._board = board.SummaryWriter(str(self._path.with_name("tensorboard")), purge_step=step + 1)
        self._shown, self._begun, self._line_at = enabled and progress, (step, time.monotonic()), time.monotonic()

    def close(self) -> None:
        """Close TensorBoard's files."""
        if self._board is not None:
            self._board.close()

    def note(self, *lines: str) -> None:
        """Print lines."""
        for line in lines if self._shown else ():
            print(line, file=sys.stderr, flush=True)

    def write(self, record: dict[str, Any]) -> None:
        """Show a record and append it, a training record every ``log_every`` steps and after the last."""
        self.last[record["kind"]] = record
        if record["kind"] == "validation":
            self.note(f"validation at step {record['step']}: {_losses(record)}")
        else:
            self._show_progress(record)
            if record["step"] % self._config.log_every and record["step"] != self._config.max_steps:
                return
        if self._enabled:
            append_jsonl(self._path, record)
        if self._board is not None:
            for name, value in _numbers(record).items():
                self._board.add_scalar(name, value, record["step"])

    def _show_progress(self, record: dict[str, Any]) -> None:
        step, total, now = record["step"], self._config.max_steps, time.monotonic()
        if step % max(1, total // _LINES) == 0 or step == total or now > self._line_at + _LINE_EVERY:
            self._line_at, (before, begun) = now, self._begun
            left = tqdm.format_interval((now - begun) / max(1, step - before) * (total - step))
            self.note(f"step {step}/{total}  {_losses(record)}  {record['tokens_per_s']:,.0f} tokens/s  {left} left")


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record by ``kind/name`` or ``kind/name/group``."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= {f"{name}/{group}": v for group, v in value.items()} if isinstance(value, dict) else {name: value}
    del flat["step"]
    return {f"{record['kind']}/{name}": float(v) for name, v in flat.items() if isinstance(v, int | float)}


def mean_record(records: Sequence[Record], weights: Sequence[float], world: World) -> dict[str, Any]:
    """The weighted average of all processes' records of the same names as plain numbers; devices are read once."""
    rows = torch.stack([torch.stack(pytree.tree_leaves(record)).double() for record in records])
    weight = torch.tensor(weights, dtype=rows.dtype, device=rows.device)
    sums = world.mean(torch.cat([(weight[:, None] * rows).sum(0), weight.sum()[None]]))
    return pytree.tree_unflatten((sums[:-1] / sums[-1]).tolist(), pytree.tree_structure(records[0]))


def _losses(record: dict[str, Any]) -> str:
    parts = [f"dense {record['dense_loss']:.3f}"]
    if "masked_loss" in record:
        kept = [f"{value:.2f}" for value in record["kept"].values()]
        kept = kept[:1] if len(set(kept)) == 1 else kept  # random and attention policies keep equally many
        parts += [f"masked {record['masked_loss']:.3f}", f"kl {record['kl']:.4f}", f"kept {' '.join(kept)}"]
    return "  ".join(parts)
