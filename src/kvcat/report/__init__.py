"""Reports on records: tables, plots and one page that works offline."""

from kvcat.report.page import write_report as write_report
from kvcat.report.results import Results as Results
from kvcat.report.results import read_results as read_results
from kvcat.report.tables import headline_text as headline_text
from kvcat.report.tables import overview_text as overview_text
