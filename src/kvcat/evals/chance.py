"""Whether a model can do a task at all: without that, its figures show no more than that the code runs."""

from collections.abc import Iterable

import numpy as np

from kvcat.evals.metrics import METRICS
from kvcat.evals.records import Record
from kvcat.evals.statistics import ClusterBootstrap, share

FEWEST = 20
"""Documents below which no share of right answers counts as evidence."""

SCORES = ("accuracy", "exact_match", "string_match", "acc_per_char")
"""Scores of right answers; an evaluation is judged by the first that its records hold."""

QA_CHANCE = {
    "hellaswag": 1 / 4, "winogrande": 1 / 2, "piqa": 1 / 2, "social_i_qa": 1 / 3, "openbookqa": 1 / 4,
    "arc_easy": 1 / 4, "arc_challenge": 1 / 4, "commonsense_qa": 1 / 5,
}  # fmt: skip
"""One over the number of choices."""


def plumbing(records: Iterable[Record]) -> dict[str, str]:
    """Models that do not show that they can do the task, with the reason: their figures are plumbing, no results.

    A model can do it where, with the whole cache and no compression, the 95 % interval of its score lies
    above chance on at least ``FEWEST`` documents; in text prediction, where the interval of its context
    gain lies above 0: a model that does not use its prefix has nothing to lose.

    Args:
        records: of one evaluation and any number of models.
    """
    models: dict[str, list[Record]] = {}
    for record in records:
        models.setdefault(record.model, []).append(record)
    reasons = {label: _reason(own) for label, own in models.items()}
    return {label: f"plumbing: {reason}" for label, reason in reasons.items() if reason}


def _reason(records: list[Record]) -> str:
    known = records[0].values
    for name in SCORES:
        if name in known or f"dense_{name}" in known:
            return _cannot_answer(records, name)
    if "context_gain" in known:
        own = list({(record.document, record.example): record for record in records}.values())
        documents = [record.document for record in own]
        gain = ClusterBootstrap(documents).mean(np.array([record.values["context_gain"] for record in own]))
        if not gain.low > 0.0:
            interval = "" if np.isnan(gain.low) else f" [{gain.low:.3g}, {gain.high:.3g}]"
            return f"context gain {gain.value:.3g}{interval} nats/token is not clearly above 0"
    return ""


def _cannot_answer(records: list[Record], name: str) -> str:
    scores = {}
    for record in records:
        if f"dense_{name}" in record.values:
            scores[record.document, record.example] = record.values[f"dense_{name}"]
        elif record.method == "dense":
            scores[record.document, record.example] = record.values[name]
    documents = [document for document, _ in scores]
    count = len(set(documents))
    if count < FEWEST:
        return f"{count} documents with a dense score, fewer than {FEWEST}"
    guesses = [QA_CHANCE.get(record.stratum, 0.0) for record in records]  # answers written freely: 0
    chance = 0.25 if name == "accuracy" else float(np.mean(guesses))
    found = share(np.array(list(scores.values())), documents)
    if found.low > chance:
        return ""
    label = METRICS[name].label
    return (
        f"dense {label} {found.value:.1%} [{found.low:.1%}, {found.high:.1%}] on {count} documents is not above "
        f"chance, {chance:.0%}"
    )
