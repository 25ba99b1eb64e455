import dataclasses
import math

import numpy as np
import pytest

from kvcat.evals import Record, compare_models, comparison_pairs, models_below_chance, summarise


def record(model, document, window, dense=2.0, delta=0.1, gain=0.5, kl=0.2, **changes):
    values = {
        "nll": dense + delta,
        "nll_dense": dense,
        "nll_none": dense + gain,
        "delta_nll": delta,
        "delta_ppl": math.exp(dense + delta) - math.exp(dense),
        "kl": kl,
        "top1": 0.75,
        "context_gain": gain,
        "retention": 0.0,
        "num_tokens": 5.0,
        "num_predicted": 4.0,
    }
    new = Record(
        model, "f", "float32", "first", "{}", 0.1, None, None, "texts", "", document, window, values
    )
    return dataclasses.replace(new, **changes)


def row_of(table, metric="kl", **cell):
    """The one row of a metric and cell, over all examples unless the cell names a stratum."""
    for column, value in {"stratum": "", "metric": metric, **cell}.items():
        table = table[table[column] == value]
    (row,) = table.itertuples()
    return row


def test_a_row_holds_means_and_sizes():
    records = [
        record("base", d, w, delta=x)
        for d, w, x in [("a", "0", 0.1), ("a", "1", 0.2), ("b", "0", 0.9)]
    ]
    table = summarise(records)
    assert {(row.num_examples, row.num_documents, row.num_seeds) for row in table.itertuples()} == {
        (3, 2, 1)
    }
    row = row_of(table, "delta_nll")
    # two documents: Student's t of one degree of freedom, document d moves the mean by u_d / 3
    moves = np.array([0.1 + 0.2 - 2 * 0.4, 0.9 - 0.4])
    half = 12.7062047 * math.sqrt(2 * (moves**2).sum()) / 3
    assert (row.value, row.low, row.high) == pytest.approx((0.4, 0.4 - half, 0.4 + half))
    mean = sum(math.exp(2 + x) - math.exp(2) for x in (0.1, 0.2, 0.9)) / 3
    assert row_of(table, "delta_ppl").value == pytest.approx(mean)


def test_retention_is_a_ratio_of_sums_and_absent_unless_the_context_gain_is_clearly_above_0():
    figures = {"a": (0.1, 0.5), "b": (0.3, 1.5), "c": (0.2, 1.0), "d": (0.2, 1.0)}
    records = [record("base", d, "0", delta=x, gain=gain) for d, (x, gain) in figures.items()]
    assert row_of(summarise(records), "retention").value == pytest.approx(1 - (0.8 * 5) / (4.0 * 4))
    kept, lost = (
        summarise([record("m", d, "0", delta=x, gain=0.5) for d in "ab"]) for x in (0.0, 0.4)
    )
    assert row_of(kept, "retention").value == 1.0
    assert row_of(lost, "retention").value == pytest.approx(0.0)
    records = [record("m", d, "0", gain=g) for d, g in [("a", 0.5), ("b", -0.1), ("c", 0.3)]]
    assert math.isnan(row_of(summarise(records), "retention").value)
    both = [*records, *(record("base", d, "0") for d in "abc")]
    assert "retention" not in set(
        compare_models(both, "base").metric
    )  # one model has none to compare


def test_kl_per_gain_is_a_ratio_of_sums_over_the_predicted_tokens():
    figures = {"a": (0.2, 0.5, 4.0), "b": (0.3, 1.5, 8.0), "c": (0.1, 1.0, 4.0)}
    records = []
    for document, (kl, gain, num_predicted) in figures.items():
        for copy in "123":
            made = record("base", document + copy, "0", kl=kl, gain=gain)
            made.values["num_predicted"] = num_predicted
            records.append(made)
    kl_sum = 0.2 * 4 + 0.3 * 8 + 0.1 * 4
    gain_sum = 0.5 * 4 + 1.5 * 8 + 1.0 * 4
    assert row_of(summarise(records), "kl_per_gain").value == pytest.approx(kl_sum / gain_sum)
    # half of the KL with half of the gain is no better
    halved = [record("half", d, "0", kl=0.1, gain=0.25) for d in "abcdef"]
    whole = [record("whole", d, "0", kl=0.2, gain=0.5) for d in "abcdef"]
    row = row_of(compare_models([*halved, *whole], "whole"), "kl_per_gain")
    assert (row.ratio, row.verdict) == (pytest.approx(1.0), "level")


def test_rows_are_sorted_by_stratum_model_method_keep_and_step_whatever_the_order_of_records():
    records = [
        record(m, d, "0", keep_ratio=k, step=s, stratum=d)
        for s in (5, None, 0)
        for k in (0.4, 0.05)
        for m in "ba"
        for d in "xy"
    ]
    table = summarise(records, num_resamples=9).fillna({"step": -1})
    cells = table[table.metric == "kl"][["stratum", "model", "keep_ratio", "step"]]
    wanted = [
        (g, m, k, s) for g in ("", "x", "y") for m in "ba" for k in (0.05, 0.4) for s in (-1, 0, 5)
    ]
    assert list(cells.itertuples(index=False, name=None)) == wanted
    records = [
        record("m", d, "0", options=o, method=n, stratum="x")
        for d in "ab"
        for n, o in [("first", "{}"), ("first", '{"preset": "paper"}'), ("dense", "{}")]
    ]
    rows = summarise(records, num_resamples=9)
    assert set(rows.stratum) == {""}  # one alone has no rows of its own
    rows = rows.drop_duplicates("method")
    assert dict(zip(rows.method, rows.baseline, strict=True)) == {
        "first": False,
        "first preset=paper": False,
        "dense": True,
    }


def test_differences_and_ratios_are_paired_on_the_examples_that_both_models_have():
    noise = [0.3, 0.1, 0.8, 0.5, 0.4, 0.6, 0.7, 0.2]
    base = [record("base", f"d{i}", "0", kl=x + 0.1, delta=x) for i, x in enumerate(noise)]
    other = [
        record("kvcat", f"d{i}", "0", kl=x + 0.05, delta=x / 2) for i, x in enumerate(noise[:7])
    ]
    table = compare_models(base + other, "base")
    row = row_of(table)
    assert (row.model, row.reference, row.num_examples) == ("kvcat", "base", 7)
    assert (row.difference, row.low, row.high) == pytest.approx((-0.05,) * 3)
    assert row.verdict == "better"
    delta = row_of(table, "delta_nll")
    assert (delta.ratio, delta.ratio_low, delta.ratio_high) == pytest.approx((0.5,) * 3)
    assert math.isnan(row_of(table, "nll").ratio)
    assert row_of(table, "nll_dense").verdict == "level"
    swapped = row_of(compare_models(base + other, "kvcat"))
    assert (swapped.difference, swapped.verdict) == (pytest.approx(0.05), "worse")
    assert comparison_pairs(["base", "kvcat", "control"])[0] == ("kvcat", "control")
    assert comparison_pairs(["a", "b", "c"]) == [("b", "a"), ("c", "a")]


def test_the_interval_of_a_ratio_of_kls_ends_at_0_and_that_of_another_ratio_does_not():
    values = (0.0, 0.0, 3.0)  # mean 1 and standard error 1: Student's t interval is 1 -/+ 4.30
    base = [record("base", f"d{i}", "0", kl=1.0, delta=1.0) for i in range(3)]
    other = [record("kvcat", f"d{i}", "0", kl=x, delta=x) for i, x in enumerate(values)]
    table = compare_models(base + other, "base")
    kl = row_of(table)
    assert (kl.ratio, kl.ratio_low, kl.ratio_high) == pytest.approx((1.0, 0.0, 5.3027), abs=1e-4)
    delta = row_of(table, "delta_nll")
    assert (delta.ratio, delta.ratio_low) == pytest.approx((1.0, -3.3027), abs=1e-4)


def drawn(model, shift, seed=3):
    rng = np.random.default_rng(seed)
    made = []
    for i in range(24):
        delta = float(rng.normal(0.2, 0.1)) + shift
        kl = float(rng.uniform(0.1, 0.3)) + shift
        for keep in (0.1, 0.4):
            known = {"keep_ratio": keep, "stratum": "ab"[i % 2]}
            made.append(record(model, f"d{i % 12}", str(i), delta=delta, kl=kl, **known))
    return made


def test_holm_leaves_the_primary_cell_alone_and_corrects_the_others_of_its_metric():
    records = drawn("kvcat", -0.01) + drawn("control", 0.0, seed=4)
    primary_cell = {"method": "first", "keep_ratio": 0.4, "metric": "kl"}
    table = compare_models(records, "control", primary=primary_cell, num_resamples=99)
    assert table.primary.sum() == 1
    (primary,) = table[table.primary].itertuples()
    assert (primary.keep_ratio, primary.metric, primary.stratum) == (0.4, "kl", "")
    assert np.isnan(primary.p_holm)
    other = table[(table.stratum == "") & (table.metric == "kl") & ~table.primary]
    assert other.p_holm.tolist() == other.p.tolist()
    nll = table[(table.stratum == "") & (table.metric == "nll")]
    assert nll.p_holm.min() == pytest.approx(min(1.0, 2 * nll.p.min()))
    for r in records:  # the dense model's loss, the same at both keep ratios, is one test
        r.values["nll_dense"] += 0.01 * math.sin(int(r.example) + (r.model == "control"))
    dense = compare_models(records, "control", num_resamples=99).query(
        "stratum == '' and metric == 'nll_dense'"
    )
    assert 0.0 < dense.p.max() < 0.9
    assert dense.p_holm.tolist() == dense.p.tolist()
    whole = [
        dataclasses.replace(r, method="dense", keep_ratio=1.0)
        for r in records
        if r.keep_ratio == 0.1
    ]
    with_baseline = compare_models(
        records + whole, "control", num_resamples=99
    )  # baselines do not count among the methods
    assert (
        with_baseline[with_baseline.method == "first"].p_holm.tolist()
        == compare_models(records, "control", num_resamples=99).p_holm.tolist()
    )
    steps = [dataclasses.replace(r, step=step) for r in records for step in (5, 9)]
    primary = {"method": "first", "keep_ratio": 0.4, "metric": "kl"}
    assert compare_models(steps, "control", primary=primary, num_resamples=9).query(
        "primary"
    ).step.tolist() == [9]


def test_training_seeds_become_one_row_whose_interval_knows_of_them():
    seeds = [
        dataclasses.replace(r, model=f"kvcat@{s}", fingerprint=str(s))
        for s in range(3)
        for r in drawn("kvcat", 0.1 * s)
    ]
    records = seeds + drawn("control", 0.0)
    table = summarise(records)
    kl = table[
        (table.metric == "kl") & (table.stratum == "") & (table.keep_ratio == 0.1)
    ].set_index("model")
    assert kl.loc["kvcat"].num_seeds == 3
    assert kl.loc["kvcat"].value == pytest.approx(kl.loc["control"].value + 0.1)
    assert kl.loc["kvcat"].high - kl.loc["kvcat"].low > 2 * (
        kl.loc["control"].high - kl.loc["control"].low
    )
    compared = compare_models(records, "control")
    row = compared[
        (compared.metric == "kl") & (compared.stratum == "") & (compared.keep_ratio == 0.1)
    ].iloc[0]
    assert row.difference == pytest.approx(0.1)
    assert row.low < 0.05
    assert (
        row_of(summarise(records[1:]), model="kvcat", keep_ratio=0.1).num_examples == 23
    )  # one run lacks one


def answers(model, right, dense=None, documents=None):
    dense = dense or [1.0] * len(right)
    documents = documents or [f"d{i:03}" for i in range(len(right))]
    records = []
    for i, (one, native, document) in enumerate(zip(right, dense, documents, strict=True)):
        values = {"exact_match": float(one), "dense_exact_match": float(native)}
        place = ("first", "{}", 0.1, None, None, "n", "", document, str(i))
        records.append(Record(model, "f" + model, "float32", *place, values))
    return records


def test_a_share_has_wilsons_interval_at_the_number_of_documents():
    row = row_of(summarise(answers("m", [1, 1, 1, 0])), "exact_match")
    assert (row.value, row.low, row.high) == pytest.approx((0.75, 0.3006, 0.9544), abs=1e-4)
    row = row_of(summarise(answers("m", [1] * 10, documents=["a", "b"] * 5)), "exact_match")
    assert (row.value, row.high) == (1.0, 1.0)
    assert row.low == pytest.approx(0.3424, abs=1e-4)  # two documents
    several = [dataclasses.replace(r, values={"string_match": 0.5}) for r in answers("m", [1] * 48)]
    row = row_of(summarise(several), "string_match")
    assert row.high - row.low == pytest.approx(
        1.96 / math.sqrt(48 + 1.96**2), rel=1e-4
    )  # Wilson at 1/2


def test_the_interval_of_a_share_of_several_training_runs_holds_wilsons_and_knows_of_the_runs():
    for second, low, verdict in (([1] * 40, 0.9123, "better"), ([0] * 40, 0.0, "level")):
        runs = [*answers("m@0", [1] * 40), *answers("m@1", second)]
        row = row_of(summarise(runs), "exact_match")
        assert row.low == pytest.approx(low, abs=1e-4)
        compared = row_of(
            compare_models([*runs, *answers("base", [0] * 40)], "base"), "exact_match"
        )
        assert ((compared.p > 0.05), compared.verdict) == (verdict == "level", verdict)


def test_the_native_share_is_over_the_examples_that_the_dense_pass_gets_right():
    records = answers("m", [1, 0, 1, 1], dense=[1, 1, 0, 1]) + answers(
        "base", [1, 1, 1, 1], dense=[1, 1, 1, 1]
    )
    table = summarise(records)
    assert row_of(table, "native_exact_match", model="m").value == pytest.approx(2 / 3)
    assert "native_exact_match" not in set(
        compare_models(records, "base").metric
    )  # of different examples
    none = summarise(answers("m", [1, 0], dense=[0, 0]))
    assert math.isnan(row_of(none, "native_exact_match").value)
    half = [1] * 20 + [0] * 20
    low = [
        row_of(summarise(made), "native_exact_match").low
        for made in (
            answers("m", half, half),
            answers("m@0", half, half) + answers("m@1", half, half),
        )
    ]
    assert low == pytest.approx([0.8389, 0.8389], abs=1e-4)  # Wilson of 20 of 20, not of 20 of 40


def test_a_clear_difference_of_shares_is_found_and_five_differing_examples_decide_nothing():
    clear = row_of(
        compare_models(answers("m", [1] * 40) + answers("base", [1, 0] * 20), "base"), "exact_match"
    )
    assert (clear.verdict, clear.warning) == ("better", "")
    assert clear.p < 1e-4
    none = row_of(
        compare_models(answers("m", [1, 0] * 6) + answers("base", [1, 0] * 6), "base"),
        "exact_match",
    )
    assert (none.difference, none.verdict, none.warning) == (
        0.0,
        "level",
        "the models agree on all 12 examples",
    )
    assert none.low < -0.1 < 0.1 < none.high
    small_sample = row_of(
        compare_models(answers("m", [1] * 40) + answers("base", [0] * 5 + [1] * 35), "base"),
        "exact_match",
    )
    assert (small_sample.p, small_sample.verdict) == (0.0625, "level")
    assert "differences under" in small_sample.warning
    documents = [f"d{i % 3}" for i in range(60)]
    records = answers("m", [1] * 60, documents=documents) + answers(
        "base", [0, 1] * 30, documents=documents
    )
    assert row_of(compare_models(records, "base"), "exact_match").verdict == "level"


def test_models_without_shown_ability_are_models_below_chance_in_every_evaluation():
    made = [
        *answers("able", [1] * 20, dense=[1] * 5 + [0] * 15),
        *answers("blind", [0] * 20, dense=[0] * 20),
        *answers("few", [1] * 5, dense=[1] * 5),
    ]
    below = models_below_chance(made)
    assert set(below) == {"blind", "few"}
    assert below["blind"].startswith(
        "dense exact match 0.0 % [0.0, 16.1] on 20 documents is not above"
    )
    assert below["few"] == "5 documents with a dense score, fewer than 20"

    def choose(model, right, total, value, method="dense", stratum="Legal"):
        return [
            dataclasses.replace(r, method=method, stratum=stratum, values={value: float(i < right)})
            for i, r in enumerate(answers(model, [1] * total))
        ]

    below = models_below_chance(
        [
            *choose("able", 100, 221, "accuracy"),
            *choose("guesser", 60, 221, "accuracy"),
            *choose("unknown", 221, 221, "accuracy", "gradient"),
        ]
    )
    assert below == {
        "guesser": "dense accuracy 27.1 % [21.7, 33.4] on 221 documents is not above chance, 25 %",
        "unknown": "0 documents with a dense score, fewer than 20",
    }
    tasks = {"piqa": "m", "commonsense_qa": "n"}
    made = [
        r
        for task, model in tasks.items()
        for r in choose(model, 90, 200, "acc_per_char", stratum=task)
    ]
    assert set(models_below_chance(made)) == {"m"}  # 45 % of two choices and of five
    made = [
        dataclasses.replace(r, document=task + r.document)
        for task, methods in {
            "piqa": ["dense"],
            "commonsense_qa": ["dense", "h2o", "snapkv"],
        }.items()
        for method in methods
        for r in choose("m", 60, 200, "acc_per_char", method, task)
    ]
    assert "not above chance, 35 %" in models_below_chance(made)["m"]  # each example counts once
    gains = {"uses": (0.4, 0.5, 0.6), "ignores": (0.1, -0.1, 0.0)}
    made = [
        record(m, f"d{i}", "0", gain=g)
        for m, model_gains in gains.items()
        for i, g in enumerate(model_gains)
    ]
    assert set(models_below_chance(made)) == {"ignores"}


def test_a_difference_is_no_verdict_while_the_interval_of_the_ratio_holds_1():
    """Heavy tails: the two intervals disagree now and then, and the table shows the ratio's."""
    num_disagreeing = 0
    for seed in (*range(8), 42):  # 7 and 42 are those of the first sixty that disagree
        draws = np.random.default_rng(seed)
        values = np.exp(1.5 * draws.standard_normal(8))
        changed = values * np.exp(0.5 * draws.standard_normal(8) - 0.5)
        records = [record("base", f"d{i}", "0", kl=x) for i, x in enumerate(values)]
        records += [record("kvcat", f"d{i}", "0", kl=x) for i, x in enumerate(changed)]
        row = row_of(compare_models(records, "base", num_resamples=400))
        holds_1 = row.ratio_low <= 1 <= row.ratio_high
        if holds_1:
            assert row.verdict == "level"
        excludes_0 = row.high < 0 or row.low > 0
        num_disagreeing += holds_1 and excludes_0 and row.p <= 0.05
    assert num_disagreeing
