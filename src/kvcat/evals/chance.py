"""Whether a model can do a multiple-choice task at all: without that, its figures show no more than that it ran."""

from collections.abc import Iterable

import numpy as np

from kvcat.evals.records import Record
from kvcat.evals.statistics import share

FEWEST = 20  # documents below which no accuracy counts as evidence


def plumbing(records: Iterable[Record], *, chance: float = 0.25) -> dict[str, str]:
    """Models that do not show that they can do the task, with the reason: their figures are plumbing, no results.

    A model can do it where, with the whole context and no compression (the ``dense`` records), Wilson's 95 % interval
    of its accuracy lies above chance, on at least 20 documents.

    Args:
        records: with ``accuracy``, of any number of models.
        chance: accuracy of guessing, in (0, 1).
    """
    dense: dict[str, list[Record]] = {}
    for record in records:
        own = dense.setdefault(record.model, [])
        if record.method == "dense":
            own.append(record)
    reasons = {label: _reason(found, chance) for label, found in dense.items()}
    return {label: reason for label, reason in reasons.items() if reason}


def _reason(dense: list[Record], chance: float) -> str:
    documents = [record.document for record in dense]
    count = len(set(documents))
    if count < FEWEST:
        return f"plumbing: {count} documents with a dense score, fewer than {FEWEST}"
    found = share(np.array([record.values["accuracy"] for record in dense]), documents)
    if found.low > chance:
        return ""
    return (
        f"plumbing: dense accuracy {found.value:.1%} [{found.low:.1%}, {found.high:.1%}] on {count} documents is not "
        f"above chance, {chance:.0%}"
    )
