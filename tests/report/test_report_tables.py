import csv
import io

import pytest
from report_examples import made_up_records

from kvcat.evals import METRICS, Estimate, compare_models, summarise
from kvcat.report import headline_markdown, headline_text
from kvcat.report.tables import comparison_csv, comparison_markdown, figure, number, summary_csv, summary_markdown


@pytest.fixture(scope="module")
def records():
    return made_up_records(num_documents=6, methods=("attention-matching", "gradient"))


def test_figures_carry_their_interval_and_their_unit():
    assert figure(Estimate(0.03214, 0.029, 0.0355), METRICS["kl"]) == "0.0321 [0.0290, 0.0355]"
    assert figure(Estimate(0.885, 0.88, 0.89), METRICS["top1"]) == "88.5% [88.0%, 89.0%]"
    assert figure(Estimate(0.5, float("nan"), float("nan")), METRICS["kl"]) == "0.5000 [one document]"
    assert number(0.05, METRICS["top1"], sign=True) == "+5.0 pt"


def test_the_markdown_table_begins_with_the_papers_columns(records):
    lines = summary_markdown(summarise(records)).splitlines()
    head = next(line for line in lines if line.startswith("| keep"))
    assert head.startswith("| keep | model | delta PPL | KL | top-1 | NLL compact | delta NLL | retention |")
    tables = [line for line in lines if line.startswith("| ")]
    assert {line.count("|") for line in tables} == {head.count("|"), head.count("|") + 1}


def test_csv_files_hold_every_row_in_full_precision(records):
    rows = summarise(records)
    lines = list(csv.DictReader(io.StringIO(summary_csv(rows))))
    assert len(lines) == len(rows)
    assert float(lines[0]["kl"]) == rows[0]["kl"].value
    assert float(lines[0]["retention_high"]) == rows[0]["retention"].high
    compared = compare_models(records)
    lines = list(csv.DictReader(io.StringIO(comparison_csv(compared))))
    assert float(lines[-1]["nll_difference_low"]) == compared[-1].differences["nll"].low
    assert float(lines[-1]["kl_ratio"]) == compared[-1].kl_ratio.value


def test_comparisons_say_better_or_worse_only_where_it_is_decided(records):
    text = comparison_markdown(compare_models(records))
    assert "### kvcat minus control" in text
    assert " better |" in text


def test_the_headline_names_the_method_and_how_much_data_stands_behind_it(records):
    text = headline_text(summarise(records))
    assert text.startswith("attention-matching, 12 windows of 6 documents\n")
    assert [line.split()[0] for line in text.splitlines() if "base" in line] == ["5%", "10%", "20%", "40%"]
    assert headline_markdown(summarise(records)).count("\n") == 2 + 4 * 3


def test_the_headline_of_a_method_with_steps_is_its_last_step(records):
    rows = [row for row in summarise(records) if row.method == "gradient"]
    last = next(row for row in rows if (row.model, row.keep_ratio, row.step) == ("base", 0.05, 100))
    assert f"{last['kl'].value:.4f}" in headline_text(rows)
    assert headline_text(rows).count("base") == 2
