"""The tables that every evaluation has: quality, paired differences, strata, baselines, costs."""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

from kvcat.evals import Estimate
from kvcat.evals.rows import ComparisonRow, SummaryRow
from kvcat.evals.rows_metrics import METRICS
from kvcat.report.beside import Paper
from kvcat.report.reading import BASELINES, Results, final_steps
from kvcat.report.tabledata import Cell, Column, Figure, TableData, standing_out

FEW_DOCUMENTS = 10
STRATA = {"needle": "depth", "longbench": "sub-domain", "ruler": "task", "qa": "task"}
_THREE = ("nll", "nll_dense", "nll_none", "nll_choice", "nll_per_char", "context_gain")
_KIB = 1024.0


def metric_column(name: str, *, sign: bool = False) -> Column:
    """The column of a metric, or of its differences, with the digits that it deserves."""
    metric = METRICS[name]
    decimals = 3 if name.startswith("delta_ppl") or (name in _THREE and not sign) else 4
    head = f"{metric.label} diff." if sign else metric.label
    return Column(head, decimals=1 if metric.percent else decimals, percent=metric.percent, sign=sign)


def keep_label(keep_ratio: float) -> str:
    """A keep ratio in percent, e.g. ``5%``."""
    return f"{100.0 * keep_ratio:g}%"


def sizes(rows: Sequence[SummaryRow | ComparisonRow], evaluation: str) -> str:
    """How much data stands behind the rows, e.g. ``128 windows of 64 documents``."""
    thing = "window" if evaluation == "suffix" else "example"
    counts = sorted({(row.num_examples, row.num_documents) for row in rows})
    return ", or ".join(
        f"{examples} {thing}{'s' * (examples > 1)} of {documents} document{'s' * (documents > 1)}"
        for examples, documents in counts
    )


def sorted_by_keep(rows: Iterable[SummaryRow]) -> list[SummaryRow]:
    """Rows by keep ratio, then by step; models keep their order."""
    return sorted(rows, key=lambda row: (row.keep_ratio, _order(row.step)))


def quality_table(results: Results, paper: Paper, method: str, *, all_steps: bool = False) -> TableData:
    """Every figure of one method: a block per keep ratio, the models below one another.

    Args:
        results: of a folder.
        paper: for the paper's figures.
        method: name of the method with its options.
        all_steps: a block per keep ratio and step instead of the last step alone.
    """
    rows = [row for row in results.rows if row.method == method]
    rows = sorted_by_keep(rows if all_steps else final_steps(rows))
    steps = any(row.step is not None for row in rows)
    counts = _counts(rows)
    columns = (
        Column("keep", "left"), *([Column("steps")] if steps else []), Column("model", "left"),
        *([Column("n")] if counts else []), *map(metric_column, results.metrics),
    )  # fmt: skip
    blocks = []
    for _, group in groupby(rows, key=lambda row: (row.keep_ratio, row.step)):
        own = list(group)
        best = {name: best_model(results.comparisons, own, name) for name in results.metrics}
        blocks.append(tuple(
            (
                keep_label(row.keep_ratio), *([_step(row.step)] if steps else []), row.model,
                *([str(row.num_examples)] if counts else []),
                *(
                    Figure(
                        row[name], best[name] == row.model,
                        paper.printed(row.model, method, row.keep_ratio, row.step, name, _total(results)),
                    )
                    for name in results.metrics
                ),
            )
            for row in own
        ))  # fmt: skip
    caption = f"{_title(results)}, {method}: {sizes(rows, results.evaluation)}, 95% intervals."
    return TableData(
        columns,
        tuple(blocks),
        caption,
        results.label("steps" if all_steps else "quality", method),
        _notes(results, rows, paper, blocks),
    )


def differences_table(results: Results, model: str, reference: str, *, by_stratum: bool = False) -> TableData:
    """Paired differences of two models: a block per method, or per method, keep ratio and step with a row per stratum.

    Args:
        results: of a folder.
        model: label of the model judged.
        reference: label of the model it is compared with.
        by_stratum: per stratum, the deciding metric alone.
    """
    source = results.strata_comparisons if by_stratum else results.comparisons
    rows = [row for row in source if (row.model, row.reference) == (model, reference)]
    names = [name for name in results.metrics if all(name in row.differences for row in rows)]
    names = [results.deciding] if by_stratum else names
    ratio = "kl" in rows[0].ratios and not by_stratum
    binary = [name for name in names if name in rows[0].tests][:1]
    columns = (
        Column("method", "left"), Column("keep", "left"),
        *([Column(STRATA[results.evaluation], "left")] if by_stratum else []), Column("n"),
        *([Column("KL ratio")] if ratio else []), *(metric_column(name, sign=True) for name in names),
        *([Column("right alone"), Column("McNemar's p")] if binary else []),
    )  # fmt: skip
    blocks = []
    for _, group in groupby(rows, key=lambda row: (row.method, row.keep_ratio) if by_stratum else row.method):
        blocks.append(tuple(
            (
                row.method + _after(row.step), keep_label(row.keep_ratio), *([row.stratum] if by_stratum else []),
                str(row.num_examples), *([_difference(row, "kl", row.kl_ratio)] if ratio else []),
                *(_difference(row, name, row.differences[name]) for name in names), *_tested(row, binary),
            )
            for row in group
        ))  # fmt: skip
    kind = "strata" if by_stratum else "differences"
    caption = f"{_title(results)}: {model} minus {reference} on the same examples, 95% intervals of the differences."
    if binary:
        caption += f" Right alone: examples that only {model}, and only {reference}, gets right."
    label = results.label(kind, model, reference)
    return TableData(columns, tuple(blocks), caption, label, () if by_stratum else _warnings(rows))


def strata_table(results: Results, paper: Paper, method: str) -> TableData:
    """The deciding metric by stratum and model: a block per keep ratio and step, all strata together at its end.

    Args:
        results: of a folder with strata.
        paper: for the paper's figures.
        method: name of the method with its options, or of a baseline.
    """
    name = results.deciding
    rows = sorted_by_keep(row for row in results.strata if row.method == method)
    steps = any(row.step is not None for row in rows)
    told = {(row.keep_ratio, row.step) for row in rows}
    whole = [r for r in [*results.rows, *results.baselines] if r.method == method and (r.keep_ratio, r.step) in told]
    models = list(dict.fromkeys(row.model for row in rows))
    metric = metric_column(name)
    several = len({row.keep_ratio for row in rows}) > 1 or method not in BASELINES
    columns = (
        *([Column("keep", "left")] if several else []), *([Column("steps")] if steps else []),
        Column(STRATA[results.evaluation], "left"), Column("n"),
        *(Column(model, decimals=metric.decimals, percent=metric.percent) for model in models),
    )  # fmt: skip
    blocks = []
    for (keep, step), group in groupby(rows, key=lambda row: (row.keep_ratio, row.step)):
        cells: dict[str, list[SummaryRow]] = {}
        for row in [*group, *(r for r in whole if (r.keep_ratio, r.step) == (keep, step))]:
            cells.setdefault(row.stratum, []).append(row)
        lines = []
        for stratum, own in cells.items():
            best = best_model(results.strata_comparisons if stratum else results.comparisons, own, name)
            found = {
                row.model: Figure(
                    row[name], row.model == best,
                    paper.printed(row.model, method, keep, step, name, stratum or _total(results)),
                )
                for row in own
            }  # fmt: skip
            lead = [*([keep_label(keep)] if several else []), *([_step(step)] if steps else [])]
            lines.append(
                (*lead, stratum or "all", str(own[0].num_examples), *(found.get(model, "") for model in models))
            )
        if results.averages:
            lines[-1:] = _average_lines(results, paper, models)  # instead of the mean over questions
        blocks.append(tuple(lines))
    caption = f"{_title(results)}, {method}: {METRICS[name].label} by {STRATA[results.evaluation]}, 95% intervals."
    label = results.label(STRATA[results.evaluation], method)
    return TableData(columns, tuple(blocks), caption, label, _notes(results, whole, paper, blocks))


def baselines_table(results: Results) -> TableData:
    """The scores without compression: a block per baseline."""
    counts = _counts(results.baselines)
    blocks = []
    for _, group in groupby(results.baselines_in_order, key=lambda row: (row.method, row.keep_ratio)):
        own = list(group)
        best = {name: best_model(results.comparisons, own, name) for name in results.metrics}
        blocks.append(tuple(
            (
                row.method, keep_label(row.keep_ratio), row.model, *([str(row.num_examples)] if counts else []),
                *(Figure(row[name], best[name] == row.model) for name in results.metrics),
            )
            for row in own
        ))  # fmt: skip
    columns = (Column("baseline", "left"), Column("text seen"), Column("model", "left"))
    columns += (Column("n"),) if counts else ()
    caption = f"{_title(results)} without compression: {sizes(results.baselines, results.evaluation)}, 95% intervals."
    columns += tuple(map(metric_column, results.metrics))
    return TableData(columns, tuple(blocks), caption, results.label("baselines"), _plumbing(results))


def costs_table(results: Results) -> TableData:
    """Quality and cost side by side, at the last step of every method: a block per method and keep ratio."""
    name = results.deciding
    quality = {(row.model, row.method, row.keep_ratio, row.step): row for row in results.rows}
    rows = final_steps(results.costs)
    answers = any(not math.isnan(row.speed_ratio) for row in rows)
    columns = [
        Column("method", "left"), Column("keep", "left"), Column("model", "left"), metric_column(name),
        Column("s per example", decimals=3), Column("peak MiB", decimals=0), Column("KiB per cache", decimals=1),
        Column("bytes / dense", decimals=1, percent=True),
    ]  # fmt: skip
    if answers:
        columns += [Column("first token / dense", decimals=2), Column("tokens/s / dense", decimals=2)]
    order = {method: rank for rank, method in enumerate(results.methods)}
    rows = [row for row in rows if (row.model, row.method, row.keep_ratio, row.step) in quality]
    rows.sort(key=lambda row: (order[row.method], row.keep_ratio))
    blocks = []
    for _, group in groupby(rows, key=lambda row: (row.method, row.keep_ratio)):
        blocks.append(tuple(
            (
                row.method + _after(row.step), keep_label(row.keep_ratio), row.model,
                Figure(quality[row.model, row.method, row.keep_ratio, row.step][name]),
                *map(_plain, [row.seconds, row.peak_mib, row.num_bytes / _KIB, row.dense_share]),
                *(map(_plain, [row.ttft_ratio, row.speed_ratio]) if answers else ()),
            )
            for row in group
        ))  # fmt: skip
    caption = f"{_title(results)}: quality and cost. Costs are of one batch, without work shared with other sizes."
    return TableData(tuple(columns), tuple(blocks), caption, results.label("costs"), _plumbing(results))


def best_model(comparisons: Sequence[ComparisonRow], rows: Sequence[SummaryRow], metric: str) -> str | None:
    """The model whose row stands out from all the others' in a metric, see ``standing_out``."""
    first = rows[0]
    cell = (first.dataset, first.stratum, first.method, first.keep_ratio, first.step)
    verdicts = {
        (row.model, row.reference): row.verdict(metric)
        for row in comparisons
        if (row.dataset, row.stratum, row.method, row.keep_ratio, row.step) == cell and metric in row.differences
    }
    return standing_out([row.model for row in rows], verdicts)


def _counts(rows: Sequence[SummaryRow]) -> bool:
    """Whether rows stand on different numbers of examples, so that each must tell its own."""
    return len({row.num_examples for row in rows}) > 1


def _average_lines(results: Results, paper: Paper, models: Sequence[str]) -> list[tuple[Cell, ...]]:
    lines = []
    for name in dict.fromkeys(average.name for average in results.averages):
        own = [average for average in results.averages if average.name == name]
        verdicts = {(a.model, a.reference): _side(a.estimate) for a in own if a.reference}
        levels = {average.model: average for average in own if not average.reference}
        best = standing_out(list(levels), verdicts)
        figures = [
            Figure(
                levels[model].estimate, model == best,
                paper.printed(model, "", 1.0, None, results.deciding, "average") if name == "six" else "",
            )
            if model in levels
            else ""
            for model in models
        ]  # fmt: skip
        lines.append((f"average of {name}", str(next(iter(levels.values())).num_examples), *figures))
    return lines


def _side(difference: Estimate) -> str:
    return ("better" if difference.value > 0.0 else "worse") if difference.excludes(0.0) else ""


def _difference(row: ComparisonRow, metric: str, estimate: Estimate) -> Figure:
    verdict = row.verdict(metric)
    return Figure(estimate, verdict="" if verdict == "not distinguishable" else verdict)


def _tested(row: ComparisonRow, binary: Sequence[str]) -> list[Cell]:
    if not binary:
        return []
    test = row.tests.get(binary[0])
    return (
        ["", ""]
        if test is None
        else [f"{test.only_first} : {test.only_second}", f"{test.p:.3f}" if test.p >= 0.001 else "<0.001"]
    )


def _notes(results: Results, rows: Sequence[SummaryRow], paper: Paper, blocks: Sequence) -> tuple[str, ...]:
    notes = list(_plumbing(results))
    fewest = min(row.num_documents for row in rows)
    if fewest < FEW_DOCUMENTS:
        notes.append(f"Only {_documents(fewest)}: the intervals are likely too narrow.")
    if paper.note and any(isinstance(cell, Figure) and cell.paper for block in blocks for row in block for cell in row):
        notes.append(paper.note)
    return tuple(notes)


def _documents(count: int) -> str:
    return f"{count} document{'s' * (count != 1)}"


def _plumbing(results: Results) -> tuple[str, ...]:
    return tuple(f"Not a result, {label}: {reason}." for label, reason in results.plumbing.items())


def _warnings(rows: Sequence[ComparisonRow]) -> tuple[str, ...]:
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.warning and row.method not in BASELINES:
            found.setdefault(row.warning.partition(", ")[0], []).append(
                f"{row.method}{_after(row.step)} at {keep_label(row.keep_ratio)}"
            )
    notes = [f"{text[0].upper()}{text[1:]} ({', '.join(where)})." for text, where in found.items()]
    fewest = min(row.num_documents for row in rows)
    if fewest < FEW_DOCUMENTS:
        notes.append(f"Only {_documents(fewest)}: the intervals are likely too narrow.")
    return tuple(notes)


def _plain(value: float) -> Figure:
    return Figure(Estimate(value, float("nan"), float("nan")))


def _total(results: Results) -> str:
    return {"longbench": "total"}.get(results.evaluation, "")


def _title(results: Results) -> str:
    return f"{results.evaluation} on {results.config['dataset']}"


def _order(step: int | None) -> int:
    return -1 if step is None else step


def _step(step: int | None) -> str:
    return "" if step is None else str(step)


def _after(step: int | None) -> str:
    return "" if step is None else f" after {step} step{'s' * (step != 1)}"
