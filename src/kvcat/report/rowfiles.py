"""All rows with all their metrics as CSV, in full precision, for those who compute further."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvcat.evals.rows import ComparisonRow, SummaryRow
from kvcat.evals.rows_metrics import METRICS
from kvcat.report.writers import csv_text

_CELL = ("dataset", "stratum", "model", "method", "keep_ratio", "step", "num_examples", "num_documents")
_PAIR = (*_CELL[:3], "reference", *_CELL[3:])
_ENDS = (("", "value"), ("_low", "low"), ("_high", "high"))


def summary_csv(rows: Sequence[SummaryRow]) -> str:
    """A line per row; cells of metrics that a row does not have are empty."""
    names = [name for name in METRICS if any(name in row.metrics for row in rows)]
    heads = [*_CELL, *(f"{name}{end}" for name in names for end, _ in _ENDS)]
    lines = [
        [getattr(row, field) for field in _CELL]
        + [getattr(row[name], end) if name in row.metrics else "" for name in names for _, end in _ENDS]
        for row in rows
    ]
    return csv_text([heads, *lines])


def comparison_csv(rows: Sequence[ComparisonRow]) -> str:
    """A line per row: ratios, differences, McNemar's tests and warnings."""
    ratios = list(dict.fromkeys(name for row in rows for name in row.ratios))
    names = [name for name in METRICS if any(name in row.differences for row in rows)]
    tests = list(dict.fromkeys(name for row in rows for name in row.tests))
    heads = [*_PAIR, *(f"{name}_ratio{end}" for name in ratios for end, _ in _ENDS)]
    heads += [f"{name}_difference{end}" for name in names for end, _ in _ENDS]
    heads += [f"{name}_{part}" for name in tests for part in ("only_first", "only_second", "p")] + ["warning"]
    lines = []
    for row in rows:
        line = [getattr(row, field) for field in _PAIR]
        for found, wanted in ((row.ratios, ratios), (row.differences, names)):
            line += [getattr(found[name], end) if name in found else "" for name in wanted for _, end in _ENDS]
        for name in tests:
            test = row.tests.get(name)
            line += ["", "", ""] if test is None else [test.only_first, test.only_second, test.p]
        lines.append([*line, row.warning])
    return csv_text([heads, *lines])


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line per row, all with the names of the first."""
    heads = list(rows[0])
    return csv_text([heads, *([row[name] for name in heads] for row in rows)])
