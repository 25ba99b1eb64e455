"""The progress bar of a run."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """A bar on standard error with losses and kept fractions; plain lines where there is no terminal.

    Args:
        total: steps of the run.
        done: steps done before.
        enabled: False shows nothing.
    """

    def __init__(self, total: int, done: int, *, enabled: bool = True) -> None:
        self._console = Console(stderr=True, quiet=not enabled)
        text = TextColumn("{task.description}")
        columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._live = self._console.is_terminal and enabled
        self._bar = RichProgress(*columns, console=self._console, disable=not self._live)
        self._task = self._bar.add_task("training", total=total, completed=done)
        self._total = total
        self._every = max(1, total // 20)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def note(self, *lines: str) -> None:
        """Print lines above the bar, each unbroken where there is no terminal."""
        for line in lines:
            self._console.print(line, highlight=False, markup=False, soft_wrap=not self._live)

    def update(self, step: int, record: dict[str, Any]) -> None:
        """Show a step's losses."""
        text = _losses(record)
        if self._live:
            self._bar.update(self._task, completed=step, description=text)
        elif step % self._every == 0 or step == self._total:
            self.note(f"step {step}/{self._total}  {text}")

    def validated(self, record: dict[str, Any]) -> None:
        """Print a validation's losses."""
        self.note(f"validation at step {record['step']}: {_losses(record)}")

    def saved(self, folder: Path) -> None:
        """Print where a checkpoint was saved."""
        self.note(f"saved {folder}")


def _losses(record: dict[str, Any]) -> str:
    parts = [f"dense {record['dense_loss']:.3f}"]
    if "masked_loss" in record:
        kept = " ".join(f"{value:.2f}" for value in record["kept"].values())
        parts += [f"masked {record['masked_loss']:.3f}", f"kl {record['kl']:.4f}", f"kept {kept}"]
    return "  ".join(parts)
