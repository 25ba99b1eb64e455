"""Reports: records to tables, plots and one page that works offline."""

from kvcat.evals.provenance import provenance
from kvcat.report.reading import headline_method
from kvcat.report.sections import headline_markdown, headline_text
from kvcat.report.verdict import PairVerdict, pair_verdicts
from kvcat.report.write import write_report

__all__ = [
    "PairVerdict",
    "headline_markdown",
    "headline_method",
    "headline_text",
    "pair_verdicts",
    "provenance",
    "write_report",
]
