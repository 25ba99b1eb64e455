import math

import pytest

from kvcat.errors import InputError
from kvcat.evals import Record
from kvcat.evals.profile_summary import profile_rows, slots_needed


def record(slots, method, choice, test, *, document="d", model="m", kind="model", fit=0.0):
    values = {"num_slots": float(slots), "num_outputs": 5.0, "kl": test[0], "kl_worst": test[1]}
    if choice is not None:
        values |= {"choice_kl": choice[0], "choice_kl_worst": choice[1], "fit_kl": fit}
    return Record(model, "f", "float32", method, "{}", slots / 8, None, None, f"text:{kind}", "", document, "0", values)


CACHES = [
    record(0, "no-context", (9.0, 9.0), (9.0, 9.5)),
    record(2, "snapkv", (1.0, 6.0), (2.0, 2.5)),
    record(2, "gradient", (2.0, 5.0), (1.0, 7.0)),
    record(4, "snapkv", (1.5, 3.0), (0.5, 4.0)),
    record(4, "gradient", (1.2, 8.0), (0.1, 0.2)),
    record(8, "dense", (0.0, 0.0), (0.0, 0.0)),
]


def rows_of(records, **options):
    return profile_rows(records, measures=["kl"], num_resamples=50, **options)


def best(records, kind="model", model="m"):
    rows = rows_of(records)
    return [row for row in rows if (row.method, row.kind, row.model) == ("best", kind, model)]


def test_the_best_cache_is_chosen_without_a_look_at_the_test_and_may_have_fewer_slots():
    curve = best(CACHES)
    assert [(row.num_slots, row.keep_ratio) for row in curve] == [(0, 0.0), (2, 0.25), (4, 0.5), (8, 1.0)]
    assert [row.mean.value for row in curve] == [9.0, 2.0, 2.0, 0.0]
    assert [row.worst for row in curve] == [9.5, 7.0, 4.0, 0.0]
    assert [dict(row.chosen["mean"]) for row in curve[1:3]] == [{("snapkv", 2): 1}] * 2
    assert [dict(row.chosen["worst"]) for row in curve[1:3]] == [{("gradient", 2): 1}, {("snapkv", 4): 1}]


def test_the_best_cache_is_chosen_prefix_by_prefix_over_all_kinds_at_once():
    other = [
        record(0, "no-context", (9.0, 9.0), (9.0, 9.0), document="e"),
        record(2, "snapkv", (3.0, 3.0), (3.0, 3.0), document="e"),
        record(2, "gradient", (1.0, 1.0), (0.5, 0.6), document="e"),
        record(4, "snapkv", (3.0, 3.0), (3.0, 3.0), document="e"),
        record(4, "gradient", (1.0, 1.0), (0.5, 0.6), document="e"),
        record(8, "dense", (0.0, 0.0), (0.0, 0.0), document="e"),
    ]
    (row,) = [row for row in best([*CACHES, *other]) if row.num_slots == 2]
    assert (row.mean.value, row.worst, row.num_prefixes, row.num_outputs) == (1.25, 7.0, 2, 10)
    assert (row.mean.low, row.mean.high) == (0.5, 2.0)
    assert dict(row.chosen["mean"]) == {("snapkv", 2): 1, ("gradient", 2): 1}
    kinds = [
        record(r.values["num_slots"], r.method, (0.0, 0.0) if r.method == "gradient" else (4.0, 4.0), (0.3, 0.7),
               kind="random") for r in CACHES
    ]  # fmt: skip
    (row,) = [row for row in best([*CACHES, *kinds], "all") if row.num_slots == 2]
    assert (row.mean.value, row.worst) == ((1.0 + 0.3) / 2, 7.0)


def test_by_the_worst_means_the_worst_of_all_kinds():
    worst = {"model": {"snapkv": 6.0, "gradient": 5.0}, "random": {"snapkv": 1.0, "gradient": 5.9}}
    records = [record(2, m, (1.0, worst[kind][m]), (1.0, 2.0), kind=kind) for kind in worst for m in worst[kind]]
    assert [dict(row.chosen["worst"]) for row in best(records)] == [{("gradient", 2): 1}]


def test_a_kind_without_suffixes_for_the_choice_is_judged_by_the_others_choice():
    true = [record(r.values["num_slots"], r.method, None, (r.values["num_slots"], 7.0), kind="true") for r in CACHES]
    curve = best([*CACHES, *true], "true")
    assert [row.mean.value for row in curve] == [0.0, 2.0, 2.0, 8.0]
    assert all(math.isnan(row.fit_mean) for row in curve)


def test_every_method_keeps_its_own_figures():
    rows = {(row.method, row.num_slots): row for row in rows_of(CACHES) if row.kind == "model"}
    assert (rows["gradient", 4].mean.value, rows["gradient", 4].worst) == (0.1, 0.2)
    assert rows["gradient", 4].chosen == {}
    assert rows["gradient", 4].fit_mean == 0.0
    assert len(rows) == 4 + 6


def test_models_are_paired_with_the_first_on_the_same_prefixes():
    double = [
        record(r.values["num_slots"], r.method, (r.values["choice_kl"], r.values["choice_kl_worst"]),
               (2 * r.values["kl"], 3 * r.values["kl_worst"]), model="n") for r in CACHES
    ]  # fmt: skip
    assert all(row.ratio is None for row in best([*CACHES, *double]))
    curve = best([*CACHES, *double], model="n")
    assert [row.ratio.value for row in curve[:3]] == [2.0] * 3
    assert [row.worst_ratio for row in curve[:3]] == [3.0] * 3
    assert math.isnan(curve[3].ratio.value)
    with pytest.raises(InputError, match="model 'n' and the first one have records of different caches"):
        rows_of([*CACHES[:3], *double])
    with pytest.raises(InputError, match="nothing was profiled"):
        rows_of([])


def test_the_curve_inverted_names_the_fewest_slots_whose_error_is_below_epsilon():
    needed = slots_needed(rows_of(CACHES[:5]), [10.0, 9.0, 2.0, 2.1, 4.5])
    found = {(row.statistic, row.epsilon): row.num_slots for row in needed if row.kind == "model"}
    assert found == {
        ("mean", 10.0): 0, ("mean", 9.0): 2, ("mean", 2.0): None, ("mean", 2.1): 2, ("mean", 4.5): 2,
        ("worst", 10.0): 0, ("worst", 9.0): 2, ("worst", 2.0): None, ("worst", 2.1): None, ("worst", 4.5): 4,
    }  # fmt: skip
    with_all = slots_needed(rows_of(CACHES), [1e-9])
    assert {row.num_slots for row in with_all} == {8}
    with pytest.raises(InputError, match="epsilon is 0"):
        slots_needed([], [0.0])


def test_an_infinite_error_is_never_chosen_and_stands_in_its_row():
    broken = [*CACHES, record(2, "random", (math.inf, math.inf), (math.inf, math.inf))]
    assert [row.mean.value for row in best(broken)] == [9.0, 2.0, 2.0, 0.0]
    (row,) = [row for row in rows_of(broken) if row.method == "random" and row.kind == "model"]
    assert row.mean.value == math.inf
