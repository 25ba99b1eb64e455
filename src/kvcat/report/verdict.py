"""The verdict in words, from the comparison rows alone, whether or not it flatters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvcat.evals import HEADLINES
from kvcat.evals.rows import ComparisonRow
from kvcat.evals.rows_metrics import METRICS
from kvcat.report.reading import BASELINES, Results, final_steps
from kvcat.report.tables import FEW_DOCUMENTS, keep_label, metric_column

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


def pair_verdicts(
    rows: Sequence[ComparisonRow], method: str, metrics: Sequence[str] = HEADLINES["suffix"]
) -> list[PairVerdict]:
    """A verdict per pair of models, in the order of the rows.

    Args:
        rows: comparison rows; those of other methods are ignored, of gradient steps the last counts.
        method: name of the method.
        metrics: those of the evaluation, the deciding one first.
    """
    own = [row for row in final_steps(rows) if row.method == method]
    pairs = dict.fromkeys((row.model, row.reference) for row in own)
    judge = _suffix_verdict if metrics[0] == "kl" else _verdict
    return [judge(sorted(_of_pair(own, pair), key=lambda row: row.keep_ratio), metrics) for pair in pairs]


def folder_verdicts(results: Results) -> list[PairVerdict]:
    """The verdicts of a folder; of a model that cannot do the task only that.

    Args:
        results: of a folder.
    """
    metrics = list(dict.fromkeys([results.deciding, *HEADLINES.get(results.evaluation, results.metrics)]))
    others = {
        (verdict.model, verdict.reference, method): verdict.headline
        for method in results.methods
        if method != results.headline_method
        for verdict in pair_verdicts(results.comparisons, method, metrics)
    }
    return [
        _no_result(verdict, results.plumbing)
        if {verdict.model, verdict.reference} & results.plumbing.keys()
        else _with_averages(results, _beside(verdict, others))
        for verdict in pair_verdicts(results.comparisons, results.headline_method, metrics)
    ]


def _beside(verdict: PairVerdict, others: Mapping[tuple[str, str, str], str]) -> PairVerdict:
    """The headlines of the same pair under the other methods below its own points."""
    own = [
        line
        for (model, reference, _), line in others.items()
        if (model, reference) == (verdict.model, verdict.reference)
    ]
    return replace(verdict, points=(*verdict.points, *own))


def _no_result(verdict: PairVerdict, plumbing: Mapping[str, str]) -> PairVerdict:
    reasons = [f"{label}: {plumbing[label]}." for label in (verdict.model, verdict.reference) if label in plumbing]
    head = f"{verdict.model} against {verdict.reference}: no result, a check that everything runs."
    return replace(verdict, headline=head, points=tuple(reasons))


def _with_averages(results: Results, verdict: PairVerdict) -> PairVerdict:
    """Averages over tasks decide where there are any; the mean over questions depends on the sizes of the tasks."""
    column, points, pair = metric_column(results.deciding, sign=True), [], (verdict.model, verdict.reference)
    for average in results.averages:
        if (average.model, average.reference) == pair:
            estimate = average.estimate
            value, low, high = (column.number(end) for end in (estimate.value, estimate.low, estimate.high))
            side = "not distinguishable"
            if estimate.excludes(0.0):
                side = "better" if estimate.value > 0.0 else "worse"
            points.append(f"average of {average.name} tasks {side}, {value} [{low}, {high}] points")
    if not points:
        return verdict
    headline = f"{verdict.model} against {verdict.reference}: {points[0]}."
    rest = tuple(f"{point[0].upper()}{point[1:]}." for point in points[1:])
    return replace(verdict, headline=headline, points=(*rest, *verdict.points))


def _verdict(rows: list[ComparisonRow], metrics: Sequence[str]) -> PairVerdict:
    """Of an evaluation by right and wrong answers."""
    first, deciding = rows[0], metrics[0]
    label = METRICS[deciding].label
    headline = f"{first.model} against {first.reference}, {first.method}: {label} {_where(rows, deciding)}."
    points = [_point(rows, name) for name in metrics if all(name in row.differences for row in rows)]
    points += [f"At {keep_label(row.keep_ratio)} kept, {row.warning}." for row in rows if row.warning]
    return PairVerdict(first.model, first.reference, first.method, headline, (*points, *_few(rows)))


def _few(rows: list[ComparisonRow]) -> list[str]:
    count = min(row.num_documents for row in rows)
    return [f"Only {count} documents: the intervals are likely too narrow."] if count < FEW_DOCUMENTS else []


def _of_pair(rows: Sequence[ComparisonRow], pair: tuple[str, str]) -> list[ComparisonRow]:
    return [row for row in rows if (row.model, row.reference) == pair]


def _suffix_verdict(rows: list[ComparisonRow], metrics: Sequence[str]) -> PairVerdict:  # noqa: ARG001
    """On KL and NLL together: KL alone rewards a model that ignores its prefix."""
    first = rows[0]
    headline = (
        f"{first.model} against {first.reference}, {first.method}: KL {_where(rows, 'kl')}; "
        f"NLL on the compact cache {_where(rows, 'nll')}. {_conclusion(rows)}"
    )
    ratios = [row.kl_ratio.value for row in rows]
    points = [f"KL: {_where(rows, 'kl')}; ratio to {first.reference} {_span([f'{r:.2f}' for r in ratios])}."]
    known = [name for name in METRICS if all(name in row.differences for row in rows)]
    points += [_point(rows, name) for name in ("nll", "delta_nll", "top1", "retention") if name in known]
    points += [
        _level_point(max(rows, key=lambda row: row.num_examples), name)
        for name in ("nll_dense", "context_gain")
        if name in known
    ]
    return PairVerdict(first.model, first.reference, first.method, headline, (*points, *_few(rows)))


def _conclusion(rows: list[ComparisonRow]) -> str:
    kl, nll = ({row.verdict(name) for row in rows} for name in ("kl", "nll"))
    if kl == {"better"} and nll == {"better"}:
        return "Its caches compress better, and what is left predicts the text better."
    if "better" not in kl:
        return "A gain in compressibility is not shown."
    if "worse" in kl or {"better", "worse"} <= nll:
        return "The picture is mixed."
    closer = (
        f"Its compact caches stay closer to its own dense model{'' if kl == {'better'} else ' at some keep ratios'}"
    )
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
        if keeps and rows[0].method in BASELINES:
            return answer
        if keeps:
            parts.append(f"{answer} at {_listed(keeps)} kept")
    return ", ".join(parts)


def _point(rows: list[ComparisonRow], metric: str) -> str:
    column, kind = metric_column(metric, sign=True), METRICS[metric]
    values = [column.number(row.differences[metric].value) for row in rows]
    label = {"nll": "NLL on the compact cache"}.get(metric, kind.label)
    return f"{label[0].upper()}{label[1:]}: {_where(rows, metric)}; difference {_span(values)}{_unit(metric)}."


def _level_point(row: ComparisonRow, metric: str) -> str:
    column, difference, answer = metric_column(metric, sign=True), row.differences[metric], row.verdict(metric)
    value, low, high = (column.number(end) for end in (difference.value, difference.low, difference.high))
    label = {"nll_dense": "NLL with the whole cache", "context_gain": "Context gain"}[metric]
    return f"{label}: {answer}; difference {value} [{low}, {high}] nats per token." + (
        " Part of a smaller KL may come from using the prefix less: retention corrects for it."
        if metric == "context_gain" and answer == "worse"
        else ""
    )


def _unit(metric: str) -> str:
    if METRICS[metric].percent:
        return " percentage points"
    return {"nll_choice": " nats", "nll_per_char": " nats per character"}.get(metric, " nats per token")


def _span(values: list[str]) -> str:
    distinct = sorted({value for value in values if value != "--"}, key=float)
    if not distinct:
        return "undefined"
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
