import math

import pytest
from report_examples import made_up_records, write_results

from kvcat.evals import Estimate
from kvcat.evals.rows import ComparisonRow, SummaryRow
from kvcat.report.beside import Paper
from kvcat.report.charts import pareto_front
from kvcat.report.derived import improvement, smallest_keeps, speed_ups
from kvcat.report.derived_tables import improvement_table, smallest_keep_table, speed_up_table
from kvcat.report.reading import final_steps, read_results


def curve(model, values, *, keep=0.1, metric="kl", method="gradient"):
    return [
        SummaryRow("t", "", model, method, keep, step, 8, 8, {metric: Estimate(value, value, value)})
        for step, value in values.items()
    ]


@pytest.mark.parametrize(
    ("model", "steps", "factor"),
    [
        ({0: 5.0, 10: 2.0, 50: 1.0, 100: 0.9}, 50, 2.0),
        ({0: 5.0, 10: 1.0, 50: 3.0, 100: 0.9}, 10, 10.0),
        ({0: 5.0, 10: 4.0, 50: 3.0, 100: 2.0}, None, math.nan),
        ({0: 0.5, 10: 0.4, 50: 0.3, 100: 0.2}, 0, math.inf),
        ({0: 5.0, 10: 4.0, 20: 1.0 + 1e-9, 100: 1.0}, 100, 1.0),
    ],
)
def test_the_speed_up_counts_the_first_recorded_steps_that_reach_the_references_best(model, steps, factor):
    base = {0: 4.0, 10: 3.0, 50: 2.0, 100: 1.0}
    (found,) = speed_ups([*curve("base", base), *curve("kvcat", model)], [("kvcat", "base")], "kl")
    assert (found.best, found.reference_steps, found.model_steps) == (1.0, 100, steps)
    assert found.factor == pytest.approx(factor, nan_ok=True)


def test_a_reference_that_gets_worse_again_counts_to_its_best():
    rows = [*curve("base", {0: 4.0, 20: 1.0, 100: 2.0}), *curve("kvcat", {0: 4.0, 10: 1.0, 100: 1.0})]
    (found,) = speed_ups(rows, [("kvcat", "base")], "kl")
    assert (found.reference_steps, found.factor) == (20, 2.0)


def test_of_shares_the_highest_is_the_best():
    rows = [
        *curve("base", {0: 0.1, 20: 0.3, 100: 0.5}, metric="exact_match"),
        *curve("kvcat", {0: 0.2, 20: 0.6, 100: 0.4}, metric="exact_match"),
    ]
    (found,) = speed_ups(rows, [("kvcat", "base")], "exact_match")
    assert (found.best, found.factor) == (0.5, 5.0)


def test_the_smallest_keep_ratio_is_told_by_mean_and_by_upper_end():
    rows = [
        SummaryRow("t", "", "m", "a", keep, None, 8, 8, {"delta_nll": Estimate(value, value - 0.01, high)})
        for keep, value, high in [(0.05, 0.2, 0.3), (0.1, 0.05, 0.06), (0.2, 0.03, 0.05), (0.4, 0.01, 0.02)]
    ]
    (found,) = smallest_keeps(rows)
    assert (found.by_value, found.by_interval) == (0.1, 0.2)
    (none,) = smallest_keeps(rows[:1])
    assert (none.by_value, none.by_interval) == (None, None)


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [
        (Estimate(0.5, 0.4, 0.8), (2.0, 1.25, 2.5)),
        (Estimate(0.5, -0.1, 0.8), (2.0, math.nan, math.nan)),
        (Estimate(-0.5, -1.0, 0.8), (math.nan, math.nan, math.nan)),
        (Estimate(0.5, math.nan, math.nan), (2.0, math.nan, math.nan)),
    ],
)
def test_an_improvement_is_the_ratio_turned_over_where_both_are_positive(ratio, shown):
    row = ComparisonRow("t", "", "kvcat", "base", "a", 0.1, None, 9, 5, {}, {"kl": ratio})
    found = improvement(row, "kl")
    assert (found.value, found.low, found.high) == pytest.approx(shown, nan_ok=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    records = made_up_records(num_documents=4, methods=("attention-matching", "gradient"))
    return read_results(write_results(tmp_path_factory.mktemp("results") / "r", records))


def test_the_improvement_table_is_the_ratio_of_the_summaries_beside_the_papers(results):
    table = improvement_table(results, Paper("Qwen2.5-0.5B", "suffix", "x"))
    row = next(row for row in table.rows if row[:4] == ("base", "kvcat", "attention-matching", "5%"))
    summary = {
        r.model: r for r in final_steps(results.rows) if (r.method, r.keep_ratio) == ("attention-matching", 0.05)
    }
    for cell, metric, paper in zip(row[4:], ("delta_ppl", "kl"), (0.780 / 0.461, 0.0562 / 0.0385), strict=True):
        assert cell.estimate.value == pytest.approx(summary["base"][metric].value / summary["kvcat"][metric].value)
        assert cell.estimate.low < cell.estimate.value < cell.estimate.high
        assert float(cell.paper) == pytest.approx(paper, abs=0.005)
    assert {row[:2] for row in table.rows} == {("control", "kvcat"), ("base", "kvcat"), ("base", "control")}


def test_speed_up_and_smallest_keep_have_tables(results):
    speed = speed_up_table(results)
    assert {row[3] for row in speed.rows} == {"5%", "20%"}
    assert "without interpolation" in speed.caption
    smallest = smallest_keep_table(results)
    assert [row[0] for row in smallest.rows] == ["attention-matching"] * 3 + ["gradient"] * 3


def test_the_pareto_front_holds_what_nothing_beats():
    points = [(1.0, 5.0), (2.0, 3.0), (2.0, 4.0), (3.0, 3.0), (4.0, 1.0), (5.0, 1.0)]
    assert pareto_front(points) == [0, 1, 4]
    assert pareto_front([(1.0, 1.0), (1.0, 1.0)]) == [0, 1]
