"""Reports: records to tables, plots and one page that works offline."""

from kvcat.report.tables import headline_text
from kvcat.report.write import write_report

__all__ = ["headline_text", "write_report"]
