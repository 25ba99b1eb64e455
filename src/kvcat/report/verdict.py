"""The verdict in words, from the comparison rows alone, whether or not it flatters."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcat.evals import METRICS, ComparisonRow
from kvcat.report.tables import final_comparisons, keep_label, number

_FEW_DOCUMENTS = 10
_ANSWERS = ("better", "worse", "not distinguishable")


@dataclass(frozen=True)
class PairVerdict:
    """What can be said of one model against another under one method.

    Args:
        model: label of the model judged.
        reference: label of the model it is compared with.
        method: name of the method.
        headline: one or two sentences on KL and on NLL together.
        points: one sentence per metric.
    """

    model: str
    reference: str
    method: str
    headline: str
    points: tuple[str, ...]

    def text(self) -> str:
        """The verdict as plain lines."""
        return "\n".join([self.headline, *(f"  - {point}" for point in self.points)]) + "\n"


def pair_verdicts(rows: Sequence[ComparisonRow], method: str) -> list[PairVerdict]:
    """A verdict per pair of models, in the order of the rows.

    Args:
        rows: comparison rows; those of other methods are ignored, of gradient steps the last counts.
        method: name of the method.
    """
    own = [row for row in final_comparisons(rows) if row.method == method]
    pairs = dict.fromkeys((row.model, row.reference) for row in own)
    return [_verdict(sorted(_of_pair(own, pair), key=lambda row: row.keep_ratio)) for pair in pairs]


def _of_pair(rows: Sequence[ComparisonRow], pair: tuple[str, str]) -> list[ComparisonRow]:
    return [row for row in rows if (row.model, row.reference) == pair]


def _verdict(rows: list[ComparisonRow]) -> PairVerdict:
    first = rows[0]
    headline = (
        f"{first.model} against {first.reference}, {first.method}: KL {_where(rows, 'kl')}; "
        f"NLL on the compact cache {_where(rows, 'nll')}. {_conclusion(rows)}"
    )
    ratios = [row.kl_ratio.value for row in rows]
    points = [f"KL: {_where(rows, 'kl')}; ratio to {first.reference} {_span([f'{r:.2f}' for r in ratios])}."]
    points += [_point(rows, name) for name in ("nll", "delta_nll", "top1", "retention")]
    points += [
        _level_point(max(rows, key=lambda row: row.num_examples), name) for name in ("nll_dense", "context_gain")
    ]
    num_documents = min(row.num_documents for row in rows)
    if num_documents < _FEW_DOCUMENTS:
        points.append(f"Only {num_documents} documents: the intervals are likely too narrow.")
    return PairVerdict(first.model, first.reference, first.method, headline, tuple(points))


def _conclusion(rows: list[ComparisonRow]) -> str:
    kl, nll = ({row.verdict(name) for row in rows} for name in ("kl", "nll"))
    if kl == {"better"} and nll == {"better"}:
        return "Its caches compress better, and what is left predicts the text better."
    if "better" not in kl:
        return "A gain in compressibility is not shown."
    if "worse" in kl or {"better", "worse"} <= nll:
        return "The picture is mixed."
    closer = "Its compact caches stay closer to its own dense model"
    if "worse" in nll:
        return f"{closer}, but predict the text worse{'' if nll == {'worse'} else ' at some keep ratios'}."
    if "better" in nll:
        return f"{closer}, and predict the text better{'' if nll == {'better'} else ' at some keep ratios'}."
    return f"{closer}; whether they predict the text better is open."


def _where(rows: list[ComparisonRow], metric: str) -> str:
    """E.g. ``better at 5% and 10%, not distinguishable at 40%``."""
    parts = []
    for answer in _ANSWERS:
        keeps = [keep_label(row.keep_ratio) for row in rows if row.verdict(metric) == answer]
        if len(keeps) == len(rows) > 1:
            return f"{answer} at all {len(rows)} keep ratios"
        if keeps:
            parts.append(f"{answer} at {_listed(keeps)} kept")
    return ", ".join(parts)


def _point(rows: list[ComparisonRow], metric: str) -> str:
    kind = METRICS[metric]
    values = [number(row.differences[metric].value, kind, sign=True) for row in rows]
    label = {"nll": "NLL on the compact cache"}.get(metric, kind.label)
    unit = " percentage points" if kind.percent else " nats per token"
    span = _span([value.removesuffix(" pt") for value in values])
    return f"{label[0].upper()}{label[1:]}: {_where(rows, metric)}; difference {span}{unit}."


def _level_point(row: ComparisonRow, metric: str) -> str:
    kind, difference, answer = METRICS[metric], row.differences[metric], row.verdict(metric)
    ends = f"[{number(difference.low, kind, sign=True)}, {number(difference.high, kind, sign=True)}]"
    label = {"nll_dense": "NLL with the whole cache", "context_gain": "Context gain"}[metric]
    return f"{label}: {answer}; difference {number(difference.value, kind, sign=True)} {ends} nats per token." + (
        " Part of a smaller KL may come from using the prefix less: retention corrects for it."
        if metric == "context_gain" and answer == "worse"
        else ""
    )


def _span(values: list[str]) -> str:
    distinct = sorted(set(values), key=float)
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
