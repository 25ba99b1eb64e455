"""``kvcat theory``: the paper's theory as commands; each has a file of its own. What they share: where results go."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcat.errors import InputError


def results_folder(out: Path) -> Path:
    """The folder for results, made if absent; asked for before any heavy work.

    Raises:
        InputError: a file stands there.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; --out needs a folder")
    out.mkdir(parents=True, exist_ok=True)
    return out


def write_results(
    out: Path, tables: Mapping[str, Sequence[Mapping[str, Any]]], report: Mapping[str, Any]
) -> list[Path]:
    """A CSV file per table, and ``report.json`` with further figures, command, versions and hardware; returns all."""
    from kvcat.evals.provenance import provenance
    from kvcat.report.rowfiles import rows_csv

    paths = [out / name for name in tables]
    for path, rows in zip(paths, tables.values(), strict=True):
        path.write_text(rows_csv(rows), encoding="utf-8")
    whole = json.dumps({**report, "provenance": provenance()}, indent=2)
    (out / "report.json").write_text(whole + "\n", encoding="utf-8")
    return [*paths, out / "report.json"]
