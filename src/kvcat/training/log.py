"""The record of a run: ``metrics.jsonl``, its copy in a monitor, and the progress on standard error."""

import dataclasses
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
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
_LINE_EVERY = 60.0  # seconds between lines where there is no terminal
_LINES = 20  # lines of a short run


class RunLog:
    """Records ``{"kind": "train" or "validation", "step": ..., ...}`` of a run, written and shown.

    Opened at a step, it first drops later records, so that a resumed run has neither gaps nor duplicates. On standard
    error stands a bar with losses and kept fractions, without a terminal a line every now and then. A process where
    the log is not enabled only remembers the newest records.
    """

    def __init__(self, config: TrainConfig, step: int, *, enabled: bool, progress: bool) -> None:
        self._config, self._path, self._enabled = config, Path(config.output) / METRICS_FILE, enabled
        kept = [record for record in read_jsonl(self._path) if record["step"] <= step] if enabled and step else []
        self.last: dict[str, dict[str, Any]] = {record["kind"]: record for record in kept}
        if enabled:
            with atomic_write(self._path) as partial:
                partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
        self._copy, self._close = _open_monitor(config) if enabled else (lambda _: None, lambda: None)
        self._shown, self._begun, self._line_at = enabled and progress, (step, time.monotonic()), time.monotonic()
        live = self._shown and sys.stderr.isatty()
        self._bar = tqdm(total=config.max_steps, initial=step, unit="step", disable=not live, dynamic_ncols=True)

    def close(self) -> None:
        """End the bar and the monitor."""
        self._bar.close()
        self._close()

    def note(self, *lines: str) -> None:
        """Print lines, above the bar where there is one."""
        for line in lines if self._shown else ():
            self._bar.write(line, file=sys.stderr)
            sys.stderr.flush()

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
            self._copy(record)

    def _show_progress(self, record: dict[str, Any]) -> None:
        step, total, now = record["step"], self._config.max_steps, time.monotonic()
        if not self._bar.disable:
            self._bar.set_postfix_str(_losses(record), refresh=False)
            self._bar.update(step - self._bar.n)
        elif step % max(1, total // _LINES) == 0 or step == total or now > self._line_at + _LINE_EVERY:
            self._line_at, (before, begun) = now, self._begun
            left = tqdm.format_interval((now - begun) / max(1, step - before) * (total - step))
            self.note(f"step {step}/{total}  {_losses(record)}  {record['tokens_per_s']:,.0f} tokens/s  {left} left")


def _open_monitor(config: TrainConfig) -> tuple[Callable[[dict[str, Any]], Any], Callable[[], None]]:
    """What copies a record into the run's monitor, and what closes the monitor; a resumed run continues in it."""
    folder = Path(config.output).resolve()
    if config.monitor == "tensorboard":
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))

        def copy(record: dict[str, Any]) -> None:
            for name, value in _numbers(record).items():
                writer.add_scalar(name, value, record["step"])

        return copy, writer.close
    if config.monitor == "wandb":
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        run = importlib.import_module("wandb").init(
            project="kvcat", name=folder.name, id=name, resume="allow", dir=folder, config=dataclasses.asdict(config)
        )
        return lambda record: run.log(_numbers(record), step=record["step"]), run.finish
    return lambda _: None, lambda: None


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
    sums = world.mean(torch.cat([weight @ rows, weight.sum()[None]]))
    return pytree.tree_unflatten((sums[:-1] / sums[-1]).tolist(), pytree.tree_structure(records[0]))


def _losses(record: dict[str, Any]) -> str:
    parts = [f"dense {record['dense_loss']:.3f}"]
    if "masked_loss" in record:
        kept = " ".join(f"{value:.2f}" for value in record["kept"].values())
        parts += [f"masked {record['masked_loss']:.3f}", f"kl {record['kl']:.4f}", f"kept {kept}"]
    return "  ".join(parts)
