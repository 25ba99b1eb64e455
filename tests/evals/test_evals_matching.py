import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcat.errors import InputError
from kvcat.evals import Record
from kvcat.evals.rows import compare_models, summarise
from kvcat.evals.statistics import share as accuracy
from kvcat.evals.statistics import wilson

OUTCOMES = st.lists(st.tuples(*[st.sampled_from([0.0, 1.0])] * 4), min_size=2, max_size=25)


def records(model, right, dense=None, documents=None, strata=None):
    dense = [1.0] * len(right) if dense is None else dense
    documents = [f"d{i:03}" for i in range(len(right))] if documents is None else documents
    found = []
    for i, (one, native, document) in enumerate(zip(right, dense, documents, strict=True)):
        values = {"exact_match": float(one), "dense_exact_match": float(native)}
        stratum = strata[i] if strata else ""
        found.append(
            Record(
                model, "f" + model, "float32", "first", "{}", 0.1, None, None, "n", stratum, document, str(i), values
            )
        )
    return found


def compared(right, other, num_resamples=2000, **kinds):
    (row,) = compare_models(
        [*records("base", other, **kinds), *records("kvcat", right, **kinds)], num_resamples=num_resamples
    )
    return row


def test_an_accuracy_has_wilsons_interval_at_all_examples():
    names = [f"d{i}" for i in range(50)]
    assert accuracy(np.array([1.0, 1.0, 0.0, 1.0]), names[:4]) == wilson(3, 4)
    assert accuracy(np.ones(50), names).low < 0.95


def test_examples_of_one_document_do_not_narrow_an_accuracy():
    copies = accuracy(np.repeat([1.0, 0.0, 1.0], 10), np.repeat(["a", "b", "c"], 10).tolist())
    single = accuracy(np.array([1.0, 0.0, 1.0]), ["a", "b", "c"])
    assert (copies.value, copies.low, copies.high) == pytest.approx((single.value, single.low, single.high))


def test_the_native_accuracy_is_over_the_examples_that_the_dense_pass_gets_right():
    (row,) = summarise(records("m", [1, 0, 1, 0, 1], dense=[1, 1, 1, 0, 0]))
    assert row["native_exact_match"] == wilson(2, 3)
    assert row["exact_match"] == wilson(3, 5)
    (row,) = summarise(records("m", [1, 0], dense=[0, 0]))
    assert np.isnan(row["native_exact_match"].value)


def test_a_clear_difference_is_told_with_its_direction():
    row = compared([1] * 30 + [0] * 10, [1] * 5 + [0] * 35)
    assert row.differences["exact_match"].value == pytest.approx(25 / 40)
    test = row.tests["exact_match"]
    assert (test.only_first, test.only_second) == (25, 0)
    assert row.verdict("exact_match") == "better"
    assert compared([1] * 5 + [0] * 35, [1] * 30 + [0] * 10).verdict("exact_match") == "worse"
    assert row.warning == ""


def test_four_differing_examples_decide_nothing_though_the_bootstrap_would():
    row = compared([1] * 4 + [0] * 96, [0] * 100)
    assert row.differences["exact_match"].excludes(0.0)
    assert row.tests["exact_match"].p == 0.125
    assert row.verdict("exact_match") == "not distinguishable"
    assert row.warning == "100 examples: differences under 6.0 points cannot be told at 95 %, 4.0 among them"


def test_many_examples_of_few_documents_decide_nothing_though_mcnemar_would():
    row = compared([1] * 20 + [0] * 40, [0] * 60, documents=np.repeat(["a", "b", "c"], 20).tolist())
    assert row.tests["exact_match"].p < 0.001
    assert row.verdict("exact_match") == "not distinguishable"
    assert (row.num_examples, row.num_documents) == (60, 3)
    assert row.warning == "3 examples: no difference can be told at 95 %"


def test_models_that_agree_everywhere_are_said_to():
    row = compared([1, 0, 1], [1, 0, 1])
    assert row.warning == "the models agree on all 3 examples"
    difference = row.differences["exact_match"]
    assert (difference.low, difference.high, row.tests["exact_match"].p) == (0.0, 0.0, 1.0)


def test_strata_narrow_the_interval_where_they_explain_the_difference():
    ours, theirs, strata = ([1] * 10 + [0] * 10) * 3, [0] * 60, (["deep"] * 10 + ["shallow"] * 10) * 3
    whole, within = (compared(ours, theirs, strata=s).differences["exact_match"] for s in (None, strata))
    assert within.high - within.low < 1e-9 < whole.high - whole.low
    assert within.value == whole.value == pytest.approx(0.5)


def test_means_over_seeds_are_not_tested_as_if_they_were_right_or_wrong():
    both = [dataclasses.replace(r, seed=1) for r in records("kvcat", [1, 0, 1, 1])] + [
        dataclasses.replace(r, seed=2) for r in records("kvcat", [0, 0, 1, 1])
    ]
    (row,) = compare_models([*records("base", [0, 0, 1, 1]), *both])
    assert row.differences["exact_match"].value == pytest.approx(0.125)
    assert "exact_match" not in row.tests


@given(OUTCOMES)
def test_differences_equal_those_of_the_plain_formulas(rows):
    right, dense, other, other_dense = np.array(rows).T
    pair = [*records("base", other, other_dense), *records("kvcat", right, dense)]
    (row,) = compare_models(pair, num_resamples=20)
    shares = [r[d == 1].mean() if d.any() else float("nan") for r, d in ((right, dense), (other, other_dense))]
    assert row.differences["exact_match"].value == pytest.approx(right.mean() - other.mean())
    assert row.differences["native_exact_match"].value == pytest.approx(shares[0] - shares[1], nan_ok=True)


def test_nothing_has_no_accuracy():
    with pytest.raises(InputError, match="no example"):
        accuracy(np.array([]), [])
