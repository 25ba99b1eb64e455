"""Tool calls for the leaderboard: right calls by method and size, where a model can call at all."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from named_models import NamedModel

from kvcat.errors import InputError
from kvcat.evals.records import read_config
from kvcat.options import parse_spec
from kvcat.report import Results, read_results
from kvcat.stats.records import method_label

METRIC = "exact_match"


def measure_tool_calls(
    models: Sequence[NamedModel],
    methods: Sequence[str],
    keeps: Sequence[float],
    out: Path,
    *,
    cases: int,
    functions: int,
) -> None:
    """Run ``kvcat eval tools`` on each model, once for all methods that no earlier run measured.

    The methods of a run share traces and the answers on the whole cache. Earlier runs go first: one
    that was stopped continues, and one that is complete does nothing.
    """
    for model in models:
        begun = list(map(_methods_of, tool_runs(out, model.label)))
        known = {method_label(*parse_spec(method)) for run in begun for method in run}
        added = [spec for spec in methods if method_label(*parse_spec(spec)) not in known]
        for number, of_run in enumerate([*begun, added] if added else begun):
            folder = _runs_folder(out, model.label) / str(number)
            command = ["-m", "kvcat", "eval", "tools"]
            command += [f"{model.label}={model.path}", "--method", *of_run]
            command += ["--keep", *(f"{keep:g}" for keep in keeps)]
            command += ["--cases", str(cases), "--num-functions", str(functions)]
            run_python(*command, "--out", str(folder))


def run_python(*arguments: str) -> None:
    """Run Python with these arguments; where it fails, it has said why, and this program ends."""
    code = subprocess.run([sys.executable, *arguments], check=False).returncode
    if code:
        sys.exit(code)


def tool_runs(out: Path, label: str) -> list[Path]:
    """The results folders of a model, 0, 1, ..., in the order of their numbers."""
    return sorted(_runs_folder(out, label).glob("*"), key=lambda folder: int(folder.name))


def _runs_folder(out: Path, label: str) -> Path:
    return out / "tools" / label


def _methods_of(run: Path) -> list[str]:
    """The methods of a results folder, as specifications."""
    specs = []
    for method in read_config(run)["methods"]:
        options = [f"{name}={_as_text(value)}" for name, value in method["options"].items()]
        specs.append(",".join([method["name"], *options]))
    return specs


def _as_text(value: Any) -> str:
    """The value of an option as ``parse_spec`` reads it: JSON, or text, with commas in brackets."""
    if not isinstance(value, str):
        return json.dumps(value)
    return f"[{value}]" if "," in value else value


def tool_calls_section(
    out: Path, label: str, methods: dict[str, str], keeps: Sequence[float]
) -> tuple[str, list[str]]:
    """A sentence about the calls of a model, and the lines of a table of them.

    Without results there is neither. The table is empty if the model is not shown to call functions
    with the whole cache, because its calls would say nothing about caches.

    Args:
        out: folder of the leaderboard's records.
        label: label of the model.
        methods: methods by specification, and their names in words.
        keeps: shares of the slots, the columns.

    Raises:
        InputError: a run was stopped, so that methods would be compared on different contexts.
    """
    results = list(map(read_results, tool_runs(out, label)))
    if not results:
        return "", []
    for run in results:
        for warning in run.warnings:
            if warning.startswith("Incomplete"):
                raise InputError(f"{run.folder} was stopped: {warning} Run without --only-write.")
    first = results[0]
    all_rows = pd.concat(map(_right_calls, results))
    dense = all_rows[all_rows["method"] == "dense"]["figure"].iloc[0]
    sentence = (
        f"Right calls of a function, per cent, in {first.config['num_examples']} contexts that "
        f"describe several; the dense cache {dense.text} {dense.interval}."
    )
    if any(warning.startswith("Not a result") for warning in first.warnings):
        return f"{sentence} That is too few to compare methods, so there is no table.", []
    head = " | ".join(f"{100 * keep:g} %" for keep in keeps)
    lines = [f"| slots kept | {head} |", "|---" * (len(keeps) + 1) + "|"]
    for spec, name in methods.items():
        rows = all_rows[all_rows["method"] == method_label(*parse_spec(spec))]
        if rows.empty:
            continue
        figures = rows.set_index("keep_ratio")["figure"]
        cells = [f"{figures[keep].text} {figures[keep].interval}" for keep in keeps]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return sentence, lines


def _right_calls(results: Results) -> pd.DataFrame:
    """The rows of right calls over all contexts."""
    rows = results.rows
    return rows[(rows["metric"] == METRIC) & (rows["stratum"] == "")]
