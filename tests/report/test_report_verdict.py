import dataclasses

import pytest
from report_examples import made_up_longbench, made_up_needle, made_up_qa, write_results

from kvcat.evals import Estimate
from kvcat.evals.rows import ComparisonRow
from kvcat.evals.rows_metrics import METRICS
from kvcat.report import pair_verdicts
from kvcat.report.reading import read_results
from kvcat.report.verdict import folder_verdicts

BETTER, WORSE, OPEN = Estimate(-0.2, -0.3, -0.1), Estimate(0.2, 0.1, 0.3), Estimate(0.0, -0.1, 0.1)


def row(keep_ratio, kl, nll, context_gain=OPEN, method="attention-matching", step=None):
    differences = dict.fromkeys(METRICS, OPEN) | {"kl": kl, "nll": nll, "context_gain": context_gain}
    ratio = Estimate(0.7, 0.6, 0.8)
    return ComparisonRow("t", "", "kvcat", "control", method, keep_ratio, step, 9, 5, differences, {"kl": ratio})


def headline(rows):
    (verdict,) = pair_verdicts(rows, "attention-matching")
    return verdict.headline


@pytest.mark.parametrize(
    ("kl", "nll", "said"),
    [
        ([BETTER, BETTER], [BETTER, BETTER], "predicts the text better"),
        ([BETTER, BETTER], [WORSE, OPEN], "but predict the text worse at some keep ratios"),
        ([BETTER, BETTER], [WORSE, WORSE], "but predict the text worse."),
        ([BETTER, BETTER], [BETTER, OPEN], "predict the text better at some keep ratios"),
        ([BETTER, OPEN], [OPEN, OPEN], "whether they predict the text better is open"),
        ([BETTER, BETTER], [BETTER, WORSE], "mixed"),
        ([BETTER, WORSE], [BETTER, BETTER], "mixed"),
        ([OPEN, OPEN], [BETTER, BETTER], "not shown"),
        ([WORSE, WORSE], [WORSE, WORSE], "not shown"),
    ],
)
def test_the_conclusion_follows_the_intervals(kl, nll, said):
    text = headline([row(keep, k, n) for keep, k, n in zip((0.05, 0.4), kl, nll, strict=True)])
    assert said in text


def test_each_keep_ratio_is_named_with_its_answer():
    text = headline([row(0.05, BETTER, WORSE), row(0.1, BETTER, OPEN), row(0.2, BETTER, WORSE)])
    assert "KL better at all 3 keep ratios" in text
    assert "NLL on the compact cache worse at 5% and 20% kept, not distinguishable at 10% kept" in text


def test_a_smaller_context_gain_comes_with_a_warning():
    (verdict,) = pair_verdicts([row(0.1, BETTER, BETTER, context_gain=BETTER)], "attention-matching")
    assert "using the prefix less" in verdict.text()


def test_of_gradient_steps_the_last_counts():
    rows = [dataclasses.replace(row(0.1, kl, OPEN), step=step) for step, kl in [(0, BETTER), (100, WORSE)]]
    assert "KL worse" in headline(rows)


def test_other_methods_do_not_enter():
    assert pair_verdicts([row(0.1, BETTER, BETTER, method="random")], "attention-matching") == []


def test_few_documents_come_with_a_warning():
    (verdict,) = pair_verdicts([row(0.1, BETTER, BETTER)], "attention-matching")
    assert "Only 5 documents" in verdict.points[-1]


def test_right_and_wrong_answers_are_judged_by_the_metric_that_decides(tmp_path):
    folder = write_results(tmp_path / "r", made_up_needle(("base", "kvcat"), 4, (0.1, 0.5)), "needle")
    (verdict,) = folder_verdicts(read_results(folder))
    assert verdict.headline.startswith("kvcat against base, gradient: exact match ")
    assert verdict.points[0].startswith("Exact match: ")
    assert verdict.points[0].endswith(" percentage points.")
    assert any("examples: differences under" in point or "agree on all" in point for point in verdict.points)


def test_averages_over_tasks_make_the_headline_of_questions(tmp_path):
    folder = write_results(tmp_path / "r", made_up_qa(("base", "kvcat"), 10), "qa")
    results = read_results(folder)
    (verdict,) = folder_verdicts(results)
    assert verdict.headline.startswith("kvcat against base: average of six tasks ")
    assert [point.partition(" tasks")[0] for point in verdict.points[:2]] == ["Average of seven", "Average of eight"]
    six = next(a for a in results.averages if (a.name, a.reference) == ("six", "base")).estimate
    assert f"{100 * six.value:+.1f} [{100 * six.low:+.1f}, {100 * six.high:+.1f}]" in verdict.headline


def test_of_models_that_cannot_do_the_task_nothing_is_said(tmp_path):
    folder = write_results(tmp_path / "r", made_up_longbench(skill=0.25), "longbench")
    (verdict,) = folder_verdicts(read_results(folder))
    assert "no result" in verdict.headline
    assert all("not above chance" in point for point in verdict.points)
    assert "better" not in verdict.text()
