"""Results folders and training runs to one report: tables, plots, a self-contained page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from kvcat.errors import InputError
from kvcat.evals import ComparisonRow, SummaryRow, compare_models, models_of, read_config, read_records, summarise
from kvcat.report import html
from kvcat.report.diagnostics import LOSSES, Records, run_metrics
from kvcat.report.figures import diagnostic_plots, difference_plots, quality_plots, save_pngs, step_plots
from kvcat.report.tables import (
    comparison_csv,
    comparison_markdown,
    final_steps,
    headline_method,
    summary_csv,
    summary_markdown,
)
from kvcat.report.verdict import pair_verdicts


@dataclass(frozen=True)
class _Results:
    """One results folder, read."""

    name: str
    config: Mapping[str, Any]
    models: Mapping[str, Mapping[str, str]]
    rows: list[SummaryRow]
    comparisons: list[ComparisonRow]
    events: list[Mapping[str, Any]]


def write_report(
    folders: Sequence[Path],
    out_dir: Path,
    *,
    title: str,
    runs: Mapping[str, Path] | None = None,
    context: Mapping[str, Any] | None = None,
) -> Path:
    """Path of ``report.html``; tables (``.md``, ``.csv``) and ``plots/*.png`` stand beside it.

    Args:
        folders: results folders of ``evaluate_suffix``, each a section of its own; may be empty where runs are given.
        out_dir: where the report goes; made if absent, files of an earlier report are replaced.
        title: of the page.
        runs: model label to training run with ``metrics.jsonl``, for the training diagnostics.
        context: more facts about what was run: name to text, list or mapping.

    Raises:
        InputError: nothing to report, a folder without results, a run without metrics.
    """
    if not folders and not runs:
        raise InputError("nothing to report: no results folder and no run given")
    if out_dir.exists() and not out_dir.is_dir():
        raise InputError(f"{out_dir} is a file, not a folder")
    results = [_read(folder) for folder in folders]
    metrics = {label: run_metrics(folder) for label, folder in (runs or {}).items()}
    models = list(dict.fromkeys([row.model for result in results for row in result.rows] + list(metrics)))
    out_dir.mkdir(parents=True, exist_ok=True)
    if results:
        _write_tables(results, out_dir)
    for result in results:
        prefix = "" if len(results) == 1 else f"{result.name}-"
        save_pngs(result.rows, result.comparisons, models, out_dir / "plots", prefix)
    sections: dict[str, str] = {}
    for result in results:
        sections |= _result_sections(result, models, "" if len(results) == 1 else f" ({result.name})")
    if metrics:
        sections["Training"] = _training_section(metrics, models)
        save_pngs([], [], models, out_dir / "plots", metrics=metrics)
    if results:
        sections["How to read this"] = html.definitions()
    sections["What was run"] = html.facts(context or {}) + "".join(_run_facts(result) for result in results)
    target = out_dir / "report.html"
    target.write_text(html.page(title, _subtitle(results), sections), encoding="utf-8")
    return target


def _write_tables(results: Sequence[_Results], out_dir: Path) -> None:
    rows = [row for result in results for row in result.rows]
    comparisons = [row for result in results for row in result.comparisons]
    for name, text in [
        ("summary.md", summary_markdown(rows)),
        ("summary.csv", summary_csv(rows)),
        ("comparisons.md", comparison_markdown(comparisons)),
        ("comparisons.csv", comparison_csv(comparisons)),
    ]:
        (out_dir / name).write_text(text, encoding="utf-8")


def _read(folder: Path) -> _Results:
    config, records = read_config(folder), read_records(folder)
    if not records:
        raise InputError(f"{folder} holds no records yet")
    log = folder / "provenance.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return _Results(
        folder.name,
        config,
        models_of(records),
        summarise(records),
        compare_models(records),
        [json.loads(s) for s in lines],
    )


def _subtitle(results: Sequence[_Results]) -> str:
    parts = [
        f"{r.config['num_examples']} windows of {r.config['dataset']}, {r.config['prefix_len']} prefix and "
        f"{r.config['suffix_len']} suffix tokens"
        for r in results
    ]
    return "; ".join(parts) + "." if parts else "Training runs."


def _result_sections(result: _Results, models: Sequence[str], suffix: str) -> dict[str, str]:
    method = headline_method(result.rows)
    boxes = [html.verdict_box(verdict) for verdict in pair_verdicts(result.comparisons, method)]
    sections = {f"Verdict{suffix}": "".join(boxes) or "<p>One model: nothing to compare.</p>\n"}
    headline = [row for row in final_steps(result.rows) if row.method == method]
    sections[f"Results{suffix}"] = f"<h3>{method}</h3>\n" + html.summary_table(headline)
    sections[f"Plots{suffix}"] = quality_plots(result.rows, models, result.name)
    stepped = [row for row in result.rows if row.step is not None]
    if stepped:
        sections[f"Optimization steps{suffix}"] = step_plots(stepped, models, result.name)
    if result.comparisons:
        sections[f"Comparisons{suffix}"] = _comparison_section(result, models)
    sections[f"All methods{suffix}"] = "".join(
        _folded(method, html.summary_table([row for row in result.rows if row.method == method]))
        for method in dict.fromkeys(row.method for row in result.rows)
    )
    return sections


def _folded(head: str, content: str) -> str:
    return f"<details><summary>{escape(head)}</summary>{content}</details>\n"


def _comparison_section(result: _Results, models: Sequence[str]) -> str:
    rows = result.comparisons
    parts = ["<p>Paired differences on the same windows; below the line at 1 or 0 is better.</p>\n"]
    parts.append(difference_plots(rows, models, result.name))
    for model, reference in dict.fromkeys((row.model, row.reference) for row in rows):
        own = [row for row in rows if (row.model, row.reference) == (model, reference)]
        parts.append(f"<h3>{escape(f'{model} minus {reference}')}</h3>\n{html.comparison_table(own)}")
    return "".join(parts)


def _training_section(metrics: Mapping[str, Records], models: Sequence[str]) -> str:
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
    return html.table(heads, body) + note + diagnostic_plots(metrics, models)


def _run_facts(result: _Results) -> str:
    starts = [event for event in result.events if event["event"] == "start"]
    ends = [event for event in result.events if event["event"] == "end"]
    config = result.config
    shown: dict[str, Any] = {name: config[name] for name in ("dataset", "num_examples", "batch_size", "seeds")}
    shown["prefix + suffix"] = f"{config['prefix_len']} + {config['suffix_len']} tokens"
    shown["models"] = [f"{label}: weights {m['fingerprint'][:12]}, {m['dtype']}" for label, m in result.models.items()]
    shown["methods"] = [
        f"{m['name']} {json.dumps(m['options']) if m['options'] else ''} at "
        f"{', '.join(f'{keep:g}' for keep in m['keep_ratios'])} on {m['num_examples']} windows"
        for m in config["methods"]
    ]
    if starts:
        shown["command"] = list(dict.fromkeys(event["command"] for event in starts))
        shown |= {name: value for name, value in starts[-1].items() if name not in ("event", "command")}
    if ends:
        stopped = len(starts) - len(ends)
        more = f", without {stopped} interrupted run{'s' * (stopped > 1)}" if stopped > 0 else ""
        shown["evaluation time"] = f"{sum(event['seconds'] for event in ends):.0f} s{more}"
    return f"<h3>{escape(result.name)}</h3>\n" + html.facts(shown)
