"""Reports on records: tables, plots and one page that works offline."""

from kvcat.report.page import write_report
from kvcat.report.results import read_results
from kvcat.report.tables import headline_text

__all__ = ["headline_text", "read_results", "write_report"]
