"""A compressibility profile as Markdown and CSV."""

import csv
import io
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from kvcat.evals.profile_errors import MEASURES
from kvcat.evals.profile_suffixes import KINDS
from kvcat.evals.profile_summary import ALL, BEST, STATISTICS, ProfileRow, SlotsNeeded
from kvcat.evals.statistics import Estimate


def profile_markdown(rows: Sequence[ProfileRow], needed: Sequence[SlotsNeeded], *, measure: str = "kl") -> str:
    """Tables of the best caches, of every method, and of the slots needed, in one measure.

    Args:
        rows: of ``profile_rows``.
        needed: of ``slots_needed``.
        measure: a name in ``MEASURES``.
    """
    own = [row for row in rows if row.measure == measure]
    prefixes, outputs = own[0].num_prefixes, {row.kind: row.num_outputs for row in own if row.method == BEST}
    kinds = [kind for kind in KINDS if kind in outputs]
    counted = ", ".join(f"{outputs[kind]} {kind}" for kind in kinds)
    told = "\n".join(f"- {kind}: {KINDS[kind]}" for kind in kinds)
    return (
        f"Error: {MEASURES[measure]}. Mean / worst over {prefixes} prefix{'es' * (prefixes > 1)} and held-out outputs: "
        f"{counted}. Each is of the "
        "cache that the suffixes for the choice favour by it. The worst is a lower bound on the maximum over all "
        f"suffixes.\n\n{told}\n\n"
        f"### Best cache found\n\n{_best(own, kinds)}\n"
        f"### Every method, all kinds\n\n{_methods(own)}\n"
        f"### Fewest slots tried with an error below epsilon, by mean / worst\n\n{_needed(needed)}"
    )


def profile_csv(rows: Sequence[ProfileRow]) -> str:
    """Every row in full precision, all measures."""
    heads = [
        "model", "kind", "slots", "keep_ratio", "method", "measure", "mean", "mean_low", "mean_high", "worst",
        "ratio_to_first", "ratio_low", "ratio_high", "worst_ratio_to_first", "fit_mean", "prefixes", "outputs",
        "chosen_by_mean", "chosen_by_worst",
    ]  # fmt: skip
    lines: list[Sequence[object]] = [heads]
    for row in rows:
        ratio = row.ratio or Estimate(math.nan, math.nan, math.nan)
        figures = [row.mean.value, row.mean.low, row.mean.high, row.worst, ratio.value, ratio.low, ratio.high]
        lines.append(
            [
                row.model, row.kind, row.num_slots, f"{row.keep_ratio:.6g}", row.method, row.measure,
                *("" if math.isnan(value) else repr(value) for value in [*figures, row.worst_ratio, row.fit_mean]),
                row.num_prefixes, row.num_outputs, *(_chosen(row.chosen.get(s, {})) for s in STATISTICS),
            ]
        )  # fmt: skip
    return _csv(lines)


def needed_csv(needed: Sequence[SlotsNeeded]) -> str:
    """Slots needed; empty where no number tried suffices."""
    heads = ["model", "kind", "measure", "statistic", "epsilon", "slots"]
    lines = [
        [row.model, row.kind, row.measure, row.statistic, f"{row.epsilon:g}", row.num_slots] for row in needed
    ]  # fmt: skip
    return _csv([heads, *lines])


def _best(rows: Sequence[ProfileRow], kinds: Sequence[str]) -> str:
    best = {(row.model, row.num_slots, row.kind): row for row in rows if row.method == BEST}
    models = list(dict.fromkeys(model for model, _, _ in best))
    paired = len(models) > 1
    heads = ["model", "slots", "kept", ALL, *kinds, *([f"mean to {models[0]}'s"] if paired else []), "chosen by mean"]
    names = _short({row.method for row in rows})
    lines = []
    for model, slots in dict.fromkeys((model, slots) for model, slots, _ in best):
        cells = [best[model, slots, kind] for kind in [ALL, *kinds]]
        ratio = [_ratio(cells[0].ratio)] if paired else []
        figures = [f"{_figure(row.mean.value)} / {_figure(row.worst)}" if row.num_outputs else "" for row in cells]
        lines.append(
            [model, str(slots), f"{cells[0].keep_ratio:.1%}", *figures, *ratio, _chosen(cells[0].chosen["mean"], names)]
        )
    return _markdown(heads, lines)


def _methods(rows: Sequence[ProfileRow]) -> str:
    lines = [
        [row.model, row.method, str(row.num_slots), _figure(row.mean.value), _figure(row.worst), _figure(row.fit_mean)]
        for row in rows
        if row.kind == ALL and row.method != BEST
    ]
    return _markdown(["model", "method", "slots", "mean", "worst", "mean where fitted"], lines)


def _needed(needed: Sequence[SlotsNeeded]) -> str:
    found = {(row.model, row.epsilon, row.kind, row.statistic): row.num_slots for row in needed}
    kinds = list(dict.fromkeys(row.kind for row in needed))
    kinds = [ALL, *(kind for kind in kinds if kind != ALL)]
    lines = []
    for model, epsilon in dict.fromkeys((row.model, row.epsilon) for row in needed):
        slots = [[found[model, epsilon, kind, statistic] for statistic in STATISTICS] for kind in kinds]
        lines.append([model, f"{epsilon:g}", *(" / ".join("-" if n is None else str(n) for n in own) for own in slots)])
    return _markdown(["model", "epsilon", *kinds], lines)


def _chosen(counts: Mapping[tuple[str, int], int], names: Mapping[str, str] | None = None) -> str:
    """Methods with their slots, the most frequent first."""
    told = []
    for (method, slots), count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        of = "" if len(counts) == 1 else f"{count} x "
        told.append(f"{of}{(names or {}).get(method, method)} at {slots}")
    return ", ".join(told)


def _short(methods: Collection[str]) -> dict[str, str]:
    """Labels without options where no two methods differ in these alone."""
    first = Counter(method.partition(" ")[0] for method in methods)
    return {method: name for method in methods if first[name := method.partition(" ")[0]] == 1}


def _figure(value: float) -> str:
    return "" if math.isnan(value) else "0" if value == 0 else f"{value:.3g}"


def _ratio(ratio: Estimate | None) -> str:
    if ratio is None or math.isnan(ratio.value):
        return ""
    interval = "" if math.isnan(ratio.low) else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.value:.2f}{interval}"


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "".join("| " + " | ".join(line) + " |\n" for line in [heads, ["---"] * len(heads), *lines])


def _csv(lines: Sequence[Sequence[object]]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(lines)
    return stream.getvalue()
