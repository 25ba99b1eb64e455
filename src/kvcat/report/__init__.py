"""Reports on records: tables, plots and one page that works offline."""

from kvcat.report.page import write_report
from kvcat.report.results import Results, read_results
from kvcat.report.tables import headline_text, overview_text

__all__ = ["Results", "headline_text", "overview_text", "read_results", "write_report"]
