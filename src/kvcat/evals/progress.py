"""How far a run is, on standard error: a bar in a terminal, a line now and then elsewhere."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


class EvalProgress:
    """Windows done out of all, with what is being evaluated.

    Args:
        total: windows times models, methods and keep ratios.
        shown: False prints nothing.
        name: of what goes on.
    """

    def __init__(self, total: int, *, shown: bool = True, name: str = "eval") -> None:
        self._total, self._done, self._shown, self._name = total, 0, shown, name
        self._last_line = time.monotonic()
        console = Console(file=sys.stderr)
        self._bar: Progress | None = None
        if shown and console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task(name, total=total)

    def advance(self, count: int, what: str) -> None:
        """``count`` more windows are done, the last of them for ``what``."""
        self._done += count
        if self._bar is not None:
            self._bar.update(self._task, advance=count, description=what)
        elif self._shown:
            now = time.monotonic()
            if now - self._last_line > _SECONDS_BETWEEN_LINES or self._done == self._total:
                self._last_line = now
                print(f"{self._name} {self._done}/{self._total} {what}", file=sys.stderr, flush=True)

    def __enter__(self) -> "EvalProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
