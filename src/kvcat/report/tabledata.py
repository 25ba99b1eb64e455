"""A table before it is written: columns, blocks of rows, figures with intervals and the paper's beside them.

Every table of a report is defined once, as a ``TableData``; Markdown, CSV, LaTeX, HTML and the terminal only write it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvcat.evals import Estimate


@dataclass(frozen=True)
class Column:
    """One column.

    Args:
        head: its name, plain text.
        align: of its cells.
        decimals: of its figures, as shown.
        percent: figures are shares, shown in percent.
        sign: figures are differences, of shares in percentage points.
    """

    head: str
    align: Literal["left", "center", "right"] = "right"
    decimals: int = 3
    percent: bool = False
    sign: bool = False

    @property
    def title(self) -> str:
        """The name with the unit of shares."""
        return self.head + ((" (pt)" if self.sign else " (%)") if self.percent else "")

    def number(self, value: float) -> str:
        """A value as shown, without unit; ``--`` where there is none."""
        if math.isnan(value):
            return "--"
        value = 100.0 * value if self.percent else value
        if not self.percent and abs(value) >= 1000.0:
            return f"{value:{'+' if self.sign else ''}.3g}"
        shown = f"{value:{'+' if self.sign else ''}.{self.decimals}f}"
        return shown.removeprefix("+").removeprefix("-") if float(shown) == 0.0 else shown


@dataclass(frozen=True)
class Figure:
    """A cell with a number.

    Args:
        estimate: value and interval; NaN ends where there is no interval.
        best: stands out from every other model of its block, see ``standing_out``.
        paper: the paper's figure for the same cell as it prints it, without the unit; empty where it has none.
        verdict: of a difference, ``better`` or ``worse`` where it is decided, else empty.
    """

    estimate: Estimate
    best: bool = False
    paper: str = ""
    verdict: str = ""

    @property
    def has_interval(self) -> bool:
        """Whether the ends are known."""
        return not math.isnan(self.estimate.low)


Cell = str | Figure


@dataclass(frozen=True)
class TableData:
    """What every writer of tables needs.

    Args:
        columns: from left to right.
        blocks: rows that are compared with one another, e.g. the models at one keep ratio; a rule stands between
            blocks. A row has one cell per column.
        caption: plain text.
        label: to refer to it, letters, digits and ``:-_.``.
        notes: what a reader of the figures must know, one sentence each.

    Raises:
        ValueError: no column, a row with too many or too few cells, another character in the label.
    """

    columns: tuple[Column, ...]
    blocks: tuple[tuple[tuple[Cell, ...], ...], ...]
    caption: str
    label: str
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError(f"table {self.label!r} has no column")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of table {self.label!r} has {len(row)} cells for {len(self.columns)} columns")
        if not self.label or not all(c.isascii() and (c.isalnum() or c in ":-_.") for c in self.label):
            raise ValueError(f"{self.label!r} cannot be the label of a table")

    @property
    def name(self) -> str:
        """The end of the label as the name of a file."""
        return self.label.rpartition(":")[2]

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        """All rows in order."""
        return [row for block in self.blocks for row in block]

    def repeated(self, block: tuple[tuple[Cell, ...], ...], index: int) -> int:
        """How many texts at the beginning of a row of a block are those of the row above, and need not be repeated."""
        if index == 0:
            return 0
        pairs = zip(block[index - 1], block[index], strict=True)
        return next(
            i for i, (above, own) in enumerate([*pairs, ("", None)]) if above != own or not isinstance(own, str)
        )

    def has_paper(self, column: int) -> bool:
        """Whether any figure of a column has one of the paper beside it."""
        cells = [row[column] for row in self.rows]
        return any(isinstance(cell, Figure) and cell.paper != "" for cell in cells)


def standing_out(models: Sequence[str], verdicts: Mapping[tuple[str, str], str]) -> str | None:
    """The model that is better than every other one by paired differences, or None.

    The best value of a block is not enough: it is bold only where its interval of the difference from each other
    model excludes 0. Overlap of the models' own intervals says little, for documents differ for all models alike.

    Args:
        models: of a block, two or more.
        verdicts: (model, reference) to ``better``, ``worse`` or anything else, in either order of the pair.
    """
    opposite = {"better": "worse", "worse": "better"}
    known = {(b, a): opposite.get(verdict, "") for (a, b), verdict in verdicts.items()} | dict(verdicts)
    for model in models:
        others = [other for other in models if other != model]
        if others and all(known.get((model, other)) == "better" for other in others):
            return model
    return None
