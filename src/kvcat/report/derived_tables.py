"""Tables of what the suffix figures imply."""

from itertools import groupby

from kvcat.evals import Estimate
from kvcat.report.beside import Paper
from kvcat.report.derived import TOLERANCE, SmallestKeep, SpeedUp, improvement, smallest_keeps, speed_ups
from kvcat.report.reading import Results, final_steps
from kvcat.report.tabledata import Cell, Column, Figure, TableData
from kvcat.report.tables import keep_label, metric_column

_IMPROVED = ("delta_ppl", "kl")
_NAN = float("nan")


def improvement_table(results: Results, paper: Paper) -> TableData | None:
    """How many times smaller delta PPL and KL are than the reference's, per cell; None without pairs or these ratios.

    Args:
        results: of a folder.
        paper: for the paper's ratios.
    """
    rows = [
        row
        for row in final_steps(results.comparisons)
        if row.ratios.keys() >= set(_IMPROVED) and (row.model, row.reference) in results.main_pairs
    ]
    blocks = []
    for _, group in groupby(rows, key=lambda row: (row.model, row.reference, row.method)):
        blocks.append(tuple(
            (
                row.reference, row.model, row.method, keep_label(row.keep_ratio),
                *(
                    Figure(
                        improvement(row, name),
                        paper=paper.improvement(row.model, row.reference, row.method, row.keep_ratio, row.step, name),
                    )
                    for name in _IMPROVED
                ),
            )
            for row in group
        ))  # fmt: skip
    columns = (
        Column("reference", "left"), Column("model", "left"), Column("method", "left"), Column("keep", "left"),
        Column("delta PPL ratio", decimals=2), Column("KL ratio", decimals=2),
    )  # fmt: skip
    caption = (
        f"Improvement on {results.config['dataset']}: the reference's figure over the model's, above 1 where the model "
        "loses less, 95% intervals; none where a figure is not above 0."
    )
    return _table(results, columns, blocks, caption, "improvement", (paper.note,) if paper.note else ())


def speed_up_table(results: Results) -> TableData | None:
    """Steps that the models need for the reference's best figure; None without steps or pairs.

    Args:
        results: of a folder.
    """
    name = results.deciding
    found = speed_ups(results.rows, results.main_pairs, name)
    blocks = []
    for _, group in groupby(found, key=lambda speed: (speed.model, speed.reference, speed.method)):
        blocks.append(tuple(_speed_line(speed) for speed in group))
    best = metric_column(name)
    columns = (
        Column("reference", "left"), Column("model", "left"), Column("method", "left"), Column("keep", "left"),
        Column(f"best {best.head}, reference", decimals=best.decimals, percent=best.percent),
        Column("steps, reference"), Column("steps, model"), Column("speed-up"),
    )  # fmt: skip
    caption = (
        f"Gradient steps until the best {best.head} of the reference on {results.config['dataset']}: the first "
        "recorded step that reaches it, without interpolation between recorded steps; means alone, no intervals."
    )
    return _table(results, columns, blocks, caption, "speed-up")


def smallest_keep_table(results: Results) -> TableData | None:
    """The smallest keep ratio within the tolerance, per model and method; None without delta NLL.

    Args:
        results: of a folder.
    """
    if not results.rows or "delta_nll" not in results.rows[0].metrics:
        return None
    found = sorted(smallest_keeps(final_steps(results.rows)), key=lambda s: results.methods.index(s.method))
    blocks = [
        tuple(_smallest_line(smallest) for smallest in group) for _, group in groupby(found, key=lambda s: s.method)
    ]
    columns = (
        Column("method", "left"), Column("model", "left"), Column("smallest keep, mean"),
        Column("smallest keep, upper end"),
    )  # fmt: skip
    caption = (
        f"Fewest slots of those tried that cost at most {TOLERANCE:g} nats per token (delta NLL) on "
        f"{results.config['dataset']}: by the mean, and by the upper end of its 95% interval."
    )
    return _table(results, columns, blocks, caption, "smallest-keep")


def _speed_line(speed: SpeedUp) -> tuple[Cell, ...]:
    if speed.model_steps is None:
        needed, factor = "not reached", "--"
    else:
        needed, factor = str(speed.model_steps), f"{speed.factor:.2g}x" if speed.model_steps else "at the start"
    best = Figure(Estimate(speed.best, _NAN, _NAN))
    steps = str(speed.reference_steps)
    return speed.reference, speed.model, speed.method, keep_label(speed.keep_ratio), best, steps, needed, factor


def _smallest_line(smallest: SmallestKeep) -> tuple[Cell, ...]:
    shown = ("none" if keep is None else keep_label(keep) for keep in (smallest.by_value, smallest.by_interval))
    return smallest.method, smallest.model, *shown


def _table(
    results: Results,
    columns: tuple[Column, ...],
    blocks: list[tuple[tuple[Cell, ...], ...]],
    caption: str,
    name: str,
    notes: tuple[str, ...] = (),
) -> TableData | None:
    return TableData(columns, tuple(blocks), caption, results.label(name), notes) if blocks else None
