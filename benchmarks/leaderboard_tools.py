"""Tool calls for the leaderboard: right calls by method and size, where a model can call at all."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from named_models import NamedModel

from kvcat.report import Results, read_results

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
    """Run ``kvcat eval tools``; each method has a folder, so a new one repeats no other."""
    keep_options = [f"{keep:g}" for keep in keeps]
    for model in models:
        for method in methods:
            command = [sys.executable, "-m", "kvcat", "eval", "tools"]
            command += [f"{model.label}={model.path}", "--method", method, "--keep", *keep_options]
            command += ["--cases", str(cases), "--num-functions", str(functions)]
            command += ["--out", str(tools_folder(out, model.label, method))]
            subprocess.run(command, check=True)


def tools_folder(out: Path, label: str, method: str) -> Path:
    """The results folder of a method on a model."""
    return out / "tools" / label / re.sub(r"[^\w.,=-]", "-", method)


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
    """
    folders = {method: tools_folder(out, label, method) for method in methods}
    measured = {method: folder for method, folder in folders.items() if folder.exists()}
    if not measured:
        return "", []
    head = " | ".join(f"{100 * keep:g} %" for keep in keeps)
    lines = [f"| slots kept | {head} |", "|---" * (len(keeps) + 1) + "|"]
    results = [read_results(folder) for folder in measured.values()]
    for method, of_method in zip(measured, results, strict=True):
        rows = _right_calls(of_method)
        figures = rows[~rows["baseline"]].set_index("keep_ratio")["figure"]
        cells = [f"{figures[keep].text} {figures[keep].interval}" for keep in keeps]
        lines.append(f"| {methods[method]} | {' | '.join(cells)} |")
    first = results[0]
    rows = _right_calls(first)
    dense = rows[rows["method"] == "dense"]["figure"].iloc[0]
    sentence = (
        f"Right calls of a function, per cent, in {first.config['num_examples']} contexts that "
        f"describe several; the dense cache {dense.text} {dense.interval}."
    )
    if any(warning.startswith("Not a result") for warning in first.warnings):
        return f"{sentence} That is too few to compare methods, so there is no table.", []
    return sentence, lines


def _right_calls(results: Results) -> pd.DataFrame:
    """The rows of right calls over all contexts."""
    rows = results.rows
    return rows[(rows["metric"] == METRIC) & (rows["stratum"] == "")]
