"""The gradient steps that a model needs to reach another one's level, where the answer is known."""

import math

import numpy as np
import pytest

from kvcat.stats import Record
from kvcat.stats.samples import record_table, samples_by_cell
from kvcat.stats.steps import first_step_at, steps_to_level

STEPS = (0, 10, 20, 50, 100)


def records(curves, num_documents=8):
    """NLL after each step: that of the curve, times a factor of the document."""
    made = []
    for model, curve in curves.items():
        for document in range(num_documents):
            hardness = 1 + 0.1 * document
            for step, nll in zip(STEPS, curve(document), strict=True):
                place = ("made-up", "", f"d{document}", "0", {"nll": nll * hardness})
                made.append(
                    Record(model, model, "float32", "gradient", "{}", 0.1, step, None, *place)
                )
    return made


def only_row(curves, **options):
    samples = samples_by_cell(record_table(records(curves, **options)), 2000)
    table = steps_to_level(samples, [("kvcat", "base")], ["nll"])
    assert len(table) == 1
    return table.iloc[0]


def test_the_level_is_reached_between_two_steps_at_one_or_never():
    curves = np.array([[4.0, 4.0, 4.0, 1.0], [2.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 1.0]])
    reached = first_step_at([0, 10, 20], curves, np.array([1.5, 3.0, 1.0, 1.0]))
    assert reached.tolist() == [15.0, 10.0, math.inf, 0.0]


def test_five_times_fewer_steps_are_found_with_an_interval_that_documents_alike_make_narrow():
    row = only_row(
        {
            "base": lambda _document: (10.0, 8.0, 6.0, 3.0, 2.0),
            "kvcat": lambda _document: (9.0, 4.0, 2.0, 1.5, 1.0),
        }
    )
    assert (row["steps"], row["fewer"]) == pytest.approx((20, 5))
    assert (row["fewer_low"], row["fewer_high"]) == pytest.approx((5, 5))
    assert (row["num_examples"], row["num_documents"]) == (8, 8)


def test_documents_that_differ_widen_the_interval_to_where_the_level_is_not_reached():
    row = only_row(
        {
            "base": lambda _document: (10.0, 8.0, 6.0, 3.0, 2.0),
            "kvcat": lambda document: (9.0, 6.0, 4.0, 3.0, 0.5 if document % 2 else 3.2),
        }
    )
    assert 50 < row["steps"] < 100
    assert row["steps_low"] < row["steps"] < row["steps_high"] == math.inf
    assert row["fewer_low"] == 0 < row["fewer"] < row["fewer_high"]


def test_a_reference_that_rises_again_counts_from_where_it_was_as_good_first():
    row = only_row(
        {
            "base": lambda _document: (10.0, 4.0, 1.0, 2.0, 4.0),
            "kvcat": lambda _document: (9.0, 6.0, 2.0, 1.5, 1.0),
        }
    )
    assert (row["steps"], row["fewer"]) == pytest.approx((15, 10 / 15))


def test_one_document_has_no_interval_and_one_step_no_row():
    curves = {
        "base": lambda _document: range(5, 0, -1),
        "kvcat": lambda _document: range(4, -1, -1),
    }
    row = only_row(curves, num_documents=1)
    assert math.isnan(row["fewer_low"])
    final = [record for record in records(curves) if record.step == 100]
    samples = samples_by_cell(record_table(final), 100)
    assert steps_to_level(samples, [("kvcat", "base")], ["nll"]).empty
