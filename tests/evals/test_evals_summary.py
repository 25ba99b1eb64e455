import dataclasses
import math

import pytest

from kvcat.evals import Record, comparison_pairs
from kvcat.evals.rows import compare_models, summarise


def record(model, document, window, dense=2.0, delta=0.1, gain=0.5, kl=0.2, **changes):
    values = {
        "nll": dense + delta, "nll_dense": dense, "nll_none": dense + gain, "delta_nll": delta,
        "delta_ppl": math.exp(dense + delta) - math.exp(dense), "kl": kl, "top1": 0.75, "context_gain": gain,
        "retention": 0.0, "num_tokens": 5.0, "num_predicted": 4.0,
    }  # fmt: skip
    new = Record(model, "f", "float32", "first", "{}", 0.1, None, None, "texts", "", document, window, values)
    return dataclasses.replace(new, **changes)


def test_a_row_holds_means_medians_and_sizes():
    records = [record("base", d, w, delta=x) for d, w, x in [("a", "0", 0.1), ("a", "1", 0.2), ("b", "0", 0.9)]]
    (row,) = summarise(records)
    assert (row.num_examples, row.num_documents) == (3, 2)
    assert row["delta_nll"].value == pytest.approx(0.4)
    assert row["delta_ppl_median"].value == pytest.approx(math.exp(2.2) - math.exp(2.0))
    assert row["delta_ppl"].value == pytest.approx(sum(math.exp(2 + x) - math.exp(2) for x in (0.1, 0.2, 0.9)) / 3)
    assert row["delta_ppl_corpus"].value == pytest.approx(math.exp(2.4) - math.exp(2.0))
    assert row["nll"].value - row["nll_dense"].value == pytest.approx(row["delta_nll"].value)


def test_retention_is_a_ratio_of_sums_over_the_tokens_each_part_counts():
    records = [record("base", "a", "0", delta=0.1, gain=0.5), record("base", "b", "0", delta=0.3, gain=1.5)]
    (row,) = summarise(records)
    assert row["retention"].value == pytest.approx(1 - (0.4 * 5) / (2.0 * 4))


def test_a_cache_that_loses_nothing_retains_everything_and_one_that_loses_all_nothing():
    kept, lost = (summarise([record("m", d, "0", delta=x, gain=0.5) for d in "ab"])[0] for x in (0.0, 0.4))
    assert kept["retention"].value == 1.0
    assert lost["retention"].value == pytest.approx(0.0)


def test_rows_are_sorted_by_model_method_keep_and_step_whatever_the_order_of_records():
    records = [
        record(m, d, "0", keep_ratio=k, step=s) for s in (5, None, 0) for k in (0.4, 0.05) for m in "ba" for d in "xy"
    ]
    rows = summarise(records)
    assert [(r.model, r.keep_ratio, r.step) for r in rows] == [
        (m, k, s) for m in "ba" for k in (0.05, 0.4) for s in (None, 0, 5)
    ]


def test_the_order_of_records_does_not_change_a_row():
    records = [record("m", f"d{i % 5}", str(i), delta=0.01 * i) for i in range(20)]
    assert summarise(records)[0].metrics == summarise(records[::-1])[0].metrics


def test_options_make_another_method():
    records = [record("m", d, "0", options=o) for d in "ab" for o in ("{}", '{"preset": "paper"}')]
    assert [row.method for row in summarise(records)] == ["first", "first preset=paper"]


def test_a_constant_difference_has_zero_width_however_documents_differ():
    records = [record("base", f"d{i}", "0", dense=float(i), kl=0.2 * (i + 1)) for i in range(6)]
    records += [record("kvcat", f"d{i}", "0", dense=i - 0.25, kl=0.1 * (i + 1)) for i in range(6)]
    (row,) = compare_models(records)
    difference = row.differences["nll_dense"]
    assert difference.value == pytest.approx(-0.25)
    assert difference.high - difference.low < 1e-12
    assert row.kl_ratio.value == pytest.approx(0.5)
    assert row.kl_ratio.high - row.kl_ratio.low < 1e-12
    assert row.verdict("nll_dense") == row.verdict("kl") == "better"


def test_only_windows_that_both_models_have_are_compared():
    records = [record("base", f"d{i}", "0") for i in range(5)] + [record("kvcat", f"d{i}", "0") for i in range(3, 9)]
    (row,) = compare_models(records)
    assert row.num_examples == 2
    assert compare_models([record("base", "a", "0"), record("kvcat", "b", "0")]) == []


def test_a_difference_whose_interval_holds_zero_is_not_distinguishable():
    records = [record("base", f"d{i}", "0", kl=0.2) for i in range(8)]
    records += [record("kvcat", f"d{i}", "0", kl=0.2 + 0.1 * (-1) ** i) for i in range(8)]
    assert compare_models(records)[0].verdict("kl") == "not distinguishable"


def test_one_document_decides_nothing():
    records = [record("base", "a", str(i), kl=0.2) for i in range(8)]
    records += [record("kvcat", "a", str(i), kl=0.1) for i in range(8)]
    assert compare_models(records)[0].verdict("kl") == "not distinguishable"


def test_higher_is_better_for_retention_and_context_gain():
    records = [record("base", d, "0", gain=0.5) for d in "abc"] + [record("kvcat", d, "0", gain=0.4) for d in "abc"]
    (row,) = compare_models(records)
    assert row.verdict("context_gain") == row.verdict("retention") == "worse"


@pytest.mark.parametrize(
    ("models", "pairs"),
    [
        (["base", "control", "kvcat"], [("kvcat", "control"), ("kvcat", "base"), ("control", "base")]),
        (["base", "kvcat"], [("kvcat", "base")]),
        (["a", "b", "c"], [("b", "a"), ("c", "a")]),
        (["a"], []),
    ],
)
def test_pairs_put_the_control_first(models, pairs):
    assert comparison_pairs(models) == pairs
