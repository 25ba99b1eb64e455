"""Which tables an evaluation has, and where on the page they stand."""

from kvcat.evals import HEADLINES
from kvcat.evals.rows import SummaryRow
from kvcat.report.beside import Paper
from kvcat.report.derived_tables import improvement_table, smallest_keep_table, speed_up_table
from kvcat.report.reading import BASELINES, Results, final_steps, headline_method
from kvcat.report.tabledata import Column, Figure, TableData
from kvcat.report.tables import (
    baselines_table,
    costs_table,
    differences_table,
    keep_label,
    metric_column,
    quality_table,
    sizes,
    sorted_by_keep,
    strata_table,
)
from kvcat.report.writers import markdown_table, text_table


def tables_by_part(results: Results, paper: Paper) -> dict[str, list[TableData]]:
    """All tables of a folder by the part of its section, in order; parts without tables are left out.

    Args:
        results: of a folder.
        paper: for the paper's figures.
    """
    head = results.headline_method
    others = [method for method in results.methods if method != head]
    stratified = {row.method for row in results.strata}
    first = [quality_table(results, paper, head)] if results.rows else []
    first += [strata_table(results, paper, head)] if head in stratified else []
    first += [baselines_table(results)] if results.baselines and results.rows else []
    implied = [improvement_table(results, paper), speed_up_table(results), smallest_keep_table(results)]
    by_stratum = bool(results.averages)
    pairs = [differences_table(results, *pair, by_stratum=by_stratum) for pair in results.main_pairs]
    rest = [quality_table(results, paper, method) for method in others]
    rest += [
        differences_table(results, *p, by_stratum=by_stratum) for p in results.pairs if p not in results.main_pairs
    ]
    if results.strata_comparisons and not by_stratum:
        rest += [differences_table(results, *pair, by_stratum=True) for pair in results.main_pairs]
    rest += [strata_table(results, paper, m) for m in [*others, *BASELINES] if m in stratified and m != head]
    rest += [
        quality_table(results, paper, method, all_steps=True)
        for method in results.methods
        if len({row.step for row in results.rows if row.method == method}) > 1
    ]
    costs = [costs_table(results)] if results.costs else []
    parts = {
        "Results": first,
        "Improvement": [table for table in implied if table is not None],
        "Differences": pairs,
        "Costs": costs,
        "All tables": rest,
    }
    return {part: tables for part, tables in parts.items() if tables}


def headline_text(rows: list[SummaryRow], method: str | None = None) -> str:
    """Aligned text for a terminal: one method, keep ratio by keep ratio, models below one another.

    Args:
        rows: summary rows.
        method: name of the method; None takes ``headline_method``.
    """
    table = _headline_table(rows, method)
    return f"{table.caption}\n{text_table(table)}"


def headline_markdown(rows: list[SummaryRow], method: str | None = None) -> str:
    """The same figures as ``headline_text`` as a Markdown table, for a README."""
    return markdown_table(_headline_table(rows, method), intervals=False)


def _headline_table(rows: list[SummaryRow], method: str | None) -> TableData:
    method = headline_method(rows) if method is None else method
    own = sorted_by_keep(final_steps([row for row in rows if row.method == method]))
    known = own[0].metrics  # RULER has exact matches as well as the needle, so it is asked first
    names = next(names for names in reversed(HEADLINES.values()) if names[0] in known)
    names = [name for name in names if name in known]
    columns = (Column("keep", "left"), Column("model", "left"), *map(metric_column, names))
    keeps = dict.fromkeys(row.keep_ratio for row in own)
    blocks = tuple(
        tuple(
            (keep_label(keep), row.model, *(Figure(row[name]) for name in names))
            for row in own
            if row.keep_ratio == keep
        )
        for keep in keeps
    )
    evaluation = "suffix" if "kl" in names else ""
    return TableData(columns, blocks, f"{method}, {sizes(own, evaluation)}", "headline")
