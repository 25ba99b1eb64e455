"""Results folders and training runs to one report: tables, plots, a self-contained page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from kvcat.errors import InputError
from kvcat.evals.rows_metrics import METRICS
from kvcat.report import html
from kvcat.report.beside import Paper
from kvcat.report.diagnostics import LOSSES, Records, run_metrics
from kvcat.report.figures import PlotGroup, headline_plot, result_plots, training_plots
from kvcat.report.latex import latex_table
from kvcat.report.reading import PLUMBING, Results, read_results
from kvcat.report.rowfiles import comparison_csv, summary_csv
from kvcat.report.sections import tables_by_part
from kvcat.report.tabledata import TableData
from kvcat.report.verdict import folder_verdicts
from kvcat.report.writers import csv_table, markdown_section

_TITLES = {
    "suffix": "Text after a compressed prefix", "needle": "Needle in a haystack", "ruler": "RULER",
    "longbench": "LongBench v2", "qa": "Questions without compression",
}  # fmt: skip
_PARTS = ("Results", "Plots", "Optimization steps", "Improvement", "Differences", "Costs", "All tables")


def write_report(
    folders: Sequence[Path],
    out_dir: Path,
    *,
    title: str,
    runs: Mapping[str, Path] | None = None,
    context: Mapping[str, Any] | None = None,
    paper_model: str | None = None,
) -> Path:
    """Path of ``report.html``; beside it ``tables/*`` (``.md``, ``.csv``, ``.tex``), ``plots/*.png``, and every row
    in full precision, ``summary.csv`` and ``comparisons.csv``.

    Args:
        folders: results folders of any evaluations, each a section of its own; may be empty where runs are given.
        out_dir: where the report goes; made if absent, files of an earlier report are replaced.
        title: of the page.
        runs: model label to training run with ``metrics.jsonl``, for the training diagnostics.
        context: more facts about what was run: name to text, list or mapping.
        paper_model: which of the paper's models ours are, so that its figures stand beside them; see ``Paper``.

    Raises:
        InputError: nothing to report, a folder without results, a run without metrics, a model the paper lacks.
    """
    if not folders and not runs:
        raise InputError("nothing to report: no results folder and no run given")
    if out_dir.exists() and not out_dir.is_dir():
        raise InputError(f"{out_dir} is a file, not a folder")
    Paper(paper_model, "", "")
    results = _read_all(folders)
    metrics = {label: run_metrics(folder) for label, folder in (runs or {}).items()}
    models = _labels(results, metrics)
    out_dir.mkdir(parents=True, exist_ok=True)
    sections: dict[str, str] = {}
    for name, result in results.items():
        heading = _TITLES.get(result.evaluation, result.evaluation) + (f" ({name})" if len(results) > 1 else "")
        prefix = f"{name}-" if len(results) > 1 else ""
        sections[heading] = _section(result, models, out_dir, prefix, paper_model)
    if results:
        _write_rows(list(results.values()), out_dir)
    if metrics:
        sections["Training"] = _training_section(metrics, training_plots(metrics, models), out_dir)
    if results:
        used = {name for result in results.values() for name in [*result.metrics, *_judged(result)]}
        sections["How to read this"] = html.definitions([name for name in METRICS if name in used])
    facts = "".join(_run_facts(name, result) for name, result in results.items())
    sections["What was run"] = html.facts(context or {}) + facts
    target = out_dir / "report.html"
    target.write_text(html.page(title, _lead(results), sections), encoding="utf-8")
    return target


def _read_all(folders: Sequence[Path]) -> dict[str, Results]:
    """Results by the names of their folders, with the parent's where two are called alike."""
    names = [folder.resolve().name for folder in folders]
    apart = [
        folder.resolve().name if names.count(folder.resolve().name) == 1 else "-".join(folder.resolve().parts[-2:])
        for folder in folders
    ]
    if len(set(apart)) < len(apart):
        raise InputError(f"two results folders cannot be told apart by their names: {', '.join(map(str, folders))}")
    return {name: replace(read_results(folder), name=name) for name, folder in zip(apart, folders, strict=True)}


def _labels(results: Mapping[str, Results], metrics: Mapping[str, Records]) -> list[str]:
    """All models of the page, so that one has the same colour everywhere."""
    plain = [label.removesuffix(PLUMBING) for result in results.values() for label in result.models]
    return list(dict.fromkeys([*plain, *metrics]))


def _section(result: Results, models: Sequence[str], out_dir: Path, prefix: str, paper_model: str | None) -> str:
    """An evaluation's part of the page; its tables and plots become files as well."""
    shown = [label + PLUMBING if label + PLUMBING in result.models else label for label in models]
    tables = tables_by_part(result, Paper(paper_model, result.evaluation, result.config["dataset"]))
    for table in (table for part in tables.values() for table in part):
        _write_table(table, out_dir / "tables", prefix)
    plots = result_plots(result, shown)
    headline = headline_plot(result, shown)
    for group in [*plots, *([headline] if headline else [])]:
        group.save(out_dir / "plots" / f"{prefix}{group.name}.png")
    page = [
        f'<p class="soft">{escape(_subtitle(result))}</p>\n',
        _alarms(result),
        "<h3>Verdict</h3>\n",
        _verdict(result),
    ]
    for part in _PARTS:
        own = [group.page(prefix or result.evaluation) for group in plots if group.part == part]
        open_ones = {"All tables": 0, "Differences": 1}.get(part)
        for rank, table in enumerate(tables.get(part, [])):
            content = html.data_table(table)
            own.append(content if open_ones is None or rank < open_ones else html.folded(table.caption, content))
        if own:
            page += [f"<h3>{part}</h3>\n", *own]
    return "".join(page)


def _alarms(result: Results) -> str:
    return "".join(
        html.alarm(f"PLUMBING, NOT A RESULT: {label.removesuffix(PLUMBING)}. {reason.removeprefix('plumbing: ')}.")
        for label, reason in result.plumbing.items()
    ) + "".join(
        html.alarm(f"INCOMPLETE: {line}. Tables and curves of single models are then over different examples.")
        for line in result.incomplete
    )


def _verdict(result: Results) -> str:
    boxes = [html.verdict_box(verdict) for verdict in folder_verdicts(result)]
    first = sum(pair[1] == result.pairs[0][1] for pair in result.pairs) if result.pairs else 0
    rest = html.folded(f"{len(boxes) - first} more comparisons", "".join(boxes[first:])) if boxes[first:] else ""
    return "".join(boxes[:first]) + rest or "<p>One model: nothing to compare.</p>\n"


def _lead(results: Mapping[str, Results]) -> str:
    """The verdicts against each first reference, one sentence each."""
    lines = []
    for name, result in results.items():
        where = f"{name}: " if len(results) > 1 else ""
        own = [verdict for verdict in folder_verdicts(result) if verdict.reference == result.pairs[0][1]]
        lines += [f"<li>{escape(where + verdict.headline)}</li>" for verdict in own]
    return f'<h2 class="first">In short</h2>\n<ul>{"".join(lines)}</ul>\n' if lines else ""


def _judged(result: Results) -> list[str]:
    return list(result.comparisons[0].differences) if result.comparisons else []


def _write_table(table: TableData, folder: Path, prefix: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in (("md", markdown_section(table)), ("csv", csv_table(table)), ("tex", latex_table(table))):
        (folder / f"{prefix}{table.name}.{suffix}").write_text(text, encoding="utf-8")


def _write_rows(results: Sequence[Results], out_dir: Path) -> None:
    """Every row with all metrics, those by stratum as well."""
    rows = [row for result in results for row in [*result.baselines, *result.rows, *result.strata]]
    comparisons = [row for result in results for row in [*result.comparisons, *result.strata_comparisons]]
    (out_dir / "summary.csv").write_text(summary_csv(rows), encoding="utf-8")
    (out_dir / "comparisons.csv").write_text(comparison_csv(comparisons), encoding="utf-8")


def _subtitle(result: Results) -> str:
    config = result.config
    thing = "windows" if result.evaluation == "suffix" else "examples"
    text = f"{config['num_examples']} {thing} of {config['dataset']}"
    if "prefix_len" in config:
        text += f", {config['prefix_len']} prefix and {config['suffix_len']} suffix tokens"
    if "length" in config:
        text += f", {config['length']} tokens each"
    return text + "."


def _training_section(metrics: Mapping[str, Records], plots: PlotGroup, out_dir: Path) -> str:
    heads = ["run", "steps", "tokens", *LOSSES.values(), "kept"]
    body = []
    for label, records in metrics.items():
        train = [record for record in records if record["kind"] == "train"]
        last = next((r for r in reversed(records) if r["kind"] == "validation"), records[-1])
        kept = ", ".join(f"{value:.2f}" for value in (last.get("kept") or {}).values())
        losses = ["-" if last.get(name) is None else f"{last[name]:.4f}" for name in LOSSES]
        tokens = train[-1].get("tokens") if train else None
        body.append([label, str(last["step"]), "-" if tokens is None else f"{tokens:,}", *losses, kept or "-"])
    note = '<p class="soft">Losses and kept fraction per router at the last validation.</p>\n'
    plots.save(out_dir / "plots" / "training.png")
    return html.table(heads, body) + note + plots.page("runs")


def _run_facts(name: str, result: Results) -> str:
    starts = [event for event in result.events if event["event"] == "start"]
    ends = [event for event in result.events if event["event"] == "end"]
    config = result.config
    apart = ("methods", "baselines", "prefix_len", "suffix_len")
    shown: dict[str, Any] = {field: value for field, value in config.items() if field not in apart}
    if "prefix_len" in config:
        shown["prefix + suffix"] = f"{config['prefix_len']} + {config['suffix_len']} tokens"
    shown["models"] = [f"{label}: weights {m['fingerprint'][:12]}, {m['dtype']}" for label, m in result.models.items()]
    shown["methods"] = [
        f"{m['name']} {json.dumps(m['options']) if m['options'] else ''} at "
        f"{', '.join(f'{keep:g}' for keep in m['keep_ratios'])} on {m['num_examples']} examples"
        for m in config["methods"]
    ]
    if starts:
        shown["command"] = list(dict.fromkeys(event["command"] for event in starts))
        shown |= {name: value for name, value in starts[-1].items() if name not in ("event", "command")}
    if ends:
        stopped = len(starts) - len(ends)
        more = f", without {stopped} interrupted run{'s' * (stopped > 1)}" if stopped > 0 else ""
        shown["evaluation time"] = f"{sum(event['seconds'] for event in ends):.0f} s{more}"
    return f"<h3>{escape(name)}</h3>\n" + html.facts(shown)
