"""Figures of what is right or wrong: shares with intervals, and what so many examples cannot tell."""

from collections.abc import Sequence

from jaxtyping import Float

from kvcat.errors import InputError
from kvcat.evals.statistics import Array, Estimate, McNemar, carries, wilson


def accuracy(right: Float[Array, " examples"], documents: Sequence[str], *, level: float = 0.95) -> Estimate:
    """Share of examples that are right, with Wilson's interval at n = number of documents.

    Where every example is a document of its own this is the usual interval; where documents hold several, it counts
    them as copies of one another and is rather too wide than too narrow.

    Args:
        right: 0 or 1 per example.
        documents: name of each example's document.
        level: coverage of the interval, in (0, 1).

    Raises:
        InputError: no example.
    """
    if not len(right):
        raise InputError("no example to take an accuracy of")
    num_documents = len(set(documents))
    return wilson(float(right.mean()) * num_documents, num_documents, level=level)


def cannot_tell(test: McNemar, difference: float, num_examples: int, num_documents: int) -> str:
    """One line on what a comparison of this size cannot tell; empty where it carries the difference.

    Args:
        test: of the two models.
        difference: of their shares.
        num_examples: examples compared.
        num_documents: documents they come from.
    """
    differing = test.only_first + test.only_second
    if differing == 0:
        return f"the models agree on all {num_examples} examples"
    return carries(num_documents, difference, discordant=differing / num_examples)
