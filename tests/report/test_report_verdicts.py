"""The demo's answers depend on its figures alone."""

from itertools import product

import numpy as np
import pytest

from kvcat.evals import Record, ResultsFolder
from kvcat.report import read_results
from kvcat.report.verdicts import compression_verdicts, training_verdicts

DOCUMENTS = 8
KEEPS = (0.1, 0.2)


def record(model, method, keep, document, values):
    """A record of one window of a document."""
    return Record(
        model,
        model,
        "float32",
        method,
        "{}",
        keep,
        None,
        None,
        "d",
        "",
        f"d{document}",
        "0",
        values,
    )


def results_of(folder, kls, *, top1=0.9, dense_losses=None):
    """Results with these KLs by model and method, the same at every size, with little noise."""
    records = []
    for (model, method), document, keep in product(kls, range(DOCUMENTS), KEEPS):
        noise = 1.0 + 0.01 * np.random.default_rng(document).normal()
        other_noise = 1e-4 * np.random.default_rng([document, len(model)]).normal()
        dense = 2.0 + (dense_losses or {}).get(model, 0.0) + other_noise
        kl = kls[model, method] * noise + abs(other_noise)
        share = top1 if method == "attention-matching" else 0.8
        values = {
            "kl": kl,
            "nll": dense + kl,
            "nll_dense": dense,
            "delta_nll": kl,
            "delta_ppl": kl,
            "top1": share if keep == 0.2 else 0.5,
            "context_gain": 1.0,
            "num_tokens": 8.0,
            "num_predicted": 7.0,
        }
        records.append(record(model, method, keep, document, values))
    methods = [
        {"name": name, "options": {}, "num_examples": DOCUMENTS, "keep_ratios": list(KEEPS)}
        for name in dict.fromkeys(method for _, method in kls)
    ]
    config = {
        "evaluation": "suffix",
        "dataset": "d",
        "num_examples": DOCUMENTS,
        "methods": methods,
        "prefix_len": 8,
        "suffix_len": 8,
    }
    with ResultsFolder(folder, config) as written:
        written.append(records)
    return read_results(folder, num_resamples=500)


@pytest.mark.parametrize(
    ("snapkv", "top1", "loss", "size"),
    [
        (0.2, 0.97, "10 times as much", "with 20 % of the slots; not even with 20 %: snapkv."),
        (0.001, 0.97, "less, 0.05", "with 20 % of the slots; not even with 20 %: snapkv."),
        (0.0201, 0.9, "the intervals overlap", "With none of the sizes up to 20 % of the slots do"),
    ],
)
def test_compression_is_judged_against_the_best_other_method(tmp_path, snapkv, top1, loss, size):
    kls = {("base", "attention-matching"): 0.02, ("base", "snapkv"): snapkv}
    answers = list(compression_verdicts(results_of(tmp_path / "r", kls, top1=top1)).values())
    assert loss in answers[0]
    assert f"stays the same in {100 * top1:.1f} % of places" in answers[0]
    assert size in answers[1]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("kl", "dense", "begins"),
    [
        (0.1, 0.0, ("Yes", "Nothing measurable", "Yes")),
        (0.19, 0.05, ("Yes", "With the whole cache, the model predicts text worse", "No")),
        (0.4, -0.5, ("No", "Nothing: with the whole cache, the model predicts text better", "Yes")),
        (0.2, 0.0, ("Not measurably", "Nothing measurable", "Neither gain nor loss")),
    ],
)
def test_training_is_judged_against_the_control_in_gain_cost_and_sum(tmp_path, kl, dense, begins):
    kls = {
        ("base", "attention-matching"): 0.2,
        ("control", "attention-matching"): 0.2,
        ("KV-CAT", "attention-matching"): kl,
    }
    results = results_of(tmp_path / "r", kls, dense_losses={"KV-CAT": dense})
    answers = list(training_verdicts(results).values())
    assert [answer.startswith(begin) for answer, begin in zip(answers, begins, strict=True)] == [
        True
    ] * 3, answers
    assert "At 10 % of the slots" in answers[0]
