"""What the suffix figures imply: how many times better, how many steps fewer, how few slots suffice."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcat.evals import Estimate
from kvcat.evals.rows import ComparisonRow, SummaryRow
from kvcat.evals.rows_metrics import METRICS

TOLERANCE = 0.05
_NAN = float("nan")


def improvement(row: ComparisonRow, metric: str) -> Estimate:
    """Figure of the reference over that of the model, above 1 where the model is better; NaN where either is not > 0.

    Args:
        row: of two models.
        metric: ``kl``, ``delta_ppl`` or ``delta_nll``.
    """
    ratio = row.ratios[metric]
    if not ratio.value > 0.0:
        return Estimate(_NAN, _NAN, _NAN)
    if not ratio.low > 0.0:
        return Estimate(1.0 / ratio.value, _NAN, _NAN)
    return Estimate(1.0 / ratio.value, 1.0 / ratio.high, 1.0 / ratio.low)


@dataclass(frozen=True)
class SpeedUp:
    """Steps that two models need for the reference's best figure.

    Args:
        model: label of the model judged.
        reference: label of the other.
        method: name of the method with its options.
        keep_ratio: fraction kept.
        best: the reference's best figure over the recorded steps.
        reference_steps: the first recorded step where the reference has it.
        model_steps: the first recorded step where the model is at least as good; None where it never is.
    """

    model: str
    reference: str
    method: str
    keep_ratio: float
    best: float
    reference_steps: int
    model_steps: int | None

    @property
    def factor(self) -> float:
        """Steps of the reference over steps of the model; infinite at step 0, NaN where never reached."""
        if self.model_steps is None:
            return _NAN
        return self.reference_steps / self.model_steps if self.model_steps else float("inf")


def speed_ups(rows: Sequence[SummaryRow], pairs: Sequence[tuple[str, str]], metric: str) -> list[SpeedUp]:
    """One per pair of models (model, reference), method with steps and keep ratio; recorded steps only, none between.

    Args:
        rows: summary rows of one data set.
        pairs: labels (model, reference).
        metric: what must be reached.
    """
    sign = 1.0 if METRICS[metric].better == "lower" else -1.0
    curves: dict[tuple[str, float, int], dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        if row.step is not None:
            cell = (row.method, row.keep_ratio, row.num_examples)  # means over other examples are not comparable
            own = curves.setdefault(cell, {}).setdefault(row.model, [])
            own.append((row.step, sign * row[metric].value))
    found = []
    for model, reference in pairs:
        for (method, keep, _), by_model in curves.items():
            if model in by_model and reference in by_model and len(by_model[reference]) > 1:
                best, steps = min((value, step) for step, value in by_model[reference])
                if steps == 0:  # no step helped: there is nothing to reach
                    continue
                needed = min((step for step, value in by_model[model] if value <= best), default=None)
                found.append(SpeedUp(model, reference, method, keep, sign * best, steps, needed))
    return found


@dataclass(frozen=True)
class SmallestKeep:
    """The fewest slots of those tried that cost at most ``TOLERANCE`` nats per token; None where none do.

    Args:
        model: label of the model.
        method: name of the method with its options.
        by_value: smallest keep ratio whose delta NLL is within it.
        by_interval: smallest keep ratio whose whole interval is.
    """

    model: str
    method: str
    by_value: float | None
    by_interval: float | None


def smallest_keeps(rows: Sequence[SummaryRow], tolerance: float = TOLERANCE) -> list[SmallestKeep]:
    """One per method and model.

    Args:
        rows: at the last step, of one data set.
        tolerance: nats per token.
    """
    cells: dict[tuple[str, str], list[SummaryRow]] = {}
    for row in rows:
        cells.setdefault((row.method, row.model), []).append(row)
    return [
        SmallestKeep(
            model, method,
            min((row.keep_ratio for row in own if row["delta_nll"].value <= tolerance), default=None),
            min((row.keep_ratio for row in own if row["delta_nll"].high <= tolerance), default=None),
        )
        for (method, model), own in cells.items()
    ]  # fmt: skip
