"""Comparisons of the trained models with their controls, from the results of every window.

``records.csv.gz`` holds a row for every text, model, training seed,
method, keep ratio and window. A model's name is `VARIANT-wWEIGHT-STEPS`, without the weight if it
is 1; a step is 4,096 tokens. ``tables.py`` prints every table from it, ``plots.py``
draws the pictures.

Figures, intervals and p-values are those of ``kvcat report``: over documents and over the training
seeds that a model and its control both have.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvcat.evals import ClusterBootstrap, Estimate, Record, compare_models

FILE = Path(__file__).with_name("records.csv.gz")
PAPER = "attention-matching,preset=paper"
DEFAULT = "attention-matching"
METHODS = {PAPER: "paper's", DEFAULT: "default", "h2o": "H2O", "snapkv": "SnapKV"}
FIRST_DATE = "2026-11-25"
"""What the column ``evaluated`` has for the evaluations until this day.

Their ``preset=paper`` began from a ridge solution, and their default had other pulls than today's.
"""
TEXTS = {
    "books": ("books",),
    "other-books": ("other-books",),
    "thirty-books": ("books", "other-books"),
    "tech": ("tech",),
    "code": ("code",),
    "books-first-half": ("books-first-half",),
    "code-first-half": ("code-first-half",),
}
"""What the column ``text`` has, by the name of a text in a table.

``books`` are the twelve that forms were chosen on; ``other-books`` are the eighteen of books-train
that no run trained on and no choice was made on. A name that ends in ``-first-half`` has scores on
the second half of each suffix, of caches fitted to the first.
"""
PRIMARY = {"method": PAPER, "keep_ratio": 0.05, "metric": "kl"}
"""The primary cell of every form: the report's rule, first method, first size, first metric.

Where the paper's method was not measured, that is KL under the default.
"""
NUM_PREDICTED = 127  # tokens of a suffix of 128 that the prefix has an influence on
TOKENS_PER_STEP = 4096
UNTRAINED = ("base", "adapt-48")
"""Models without runs: the base, and the adapted one that all runs judged on a day began from."""
_DENSE = ["nll_dense", "context_gain"]


@dataclass(frozen=True)
class Comparison:
    """A model compared with its control.

    ``cells`` are the rows of ``compare_models`` with the metrics kl, kl_per_gain and nll, and
    ``dense`` those with nll_dense and context_gain, by metric.
    """

    evaluated: str
    model: str
    control: str
    text: str
    seeds: tuple[str, ...]
    cells: pd.DataFrame
    dense: pd.DataFrame

    def method_label(self, method: str) -> str:
        """A method's name for a reader."""
        return method_label(method, self.evaluated)

    def row(self, metric: str, method: str, keep_ratio: float) -> pd.Series | None:
        """The row of one cell; None if it was not measured."""
        frame = self.cells
        frame = frame[(frame["metric"] == metric) & (frame["method"] == method)]
        frame = frame[frame["keep_ratio"] == keep_ratio]
        return None if frame.empty else frame.iloc[0]


def method_label(method: str, evaluated: str) -> str:
    """A method's name for a reader, by the date of the code that evaluated."""
    label = METHODS[method]
    is_milder = method == PAPER and evaluated == FIRST_DATE
    return f"{label}, ridge start" if is_milder else label


def read(path: Path = FILE) -> pd.DataFrame:
    """The results of every window."""
    names = dict.fromkeys(["window", "document", "seed", "evaluated"], str)
    return pd.read_csv(path, dtype=names)


def control_of(model: str) -> str:
    """The control after as many steps."""
    return f"control-{model.rsplit('-', 1)[1]}"


def tokens_of(model: str) -> int:
    """The tokens that a model was trained on after the adaptation."""
    return int(model.rsplit("-", 1)[1]) * TOKENS_PER_STEP


def _for_every_run(rows: pd.DataFrame, model: str, control: str) -> pd.DataFrame:
    """The rows, with those of a control without runs repeated for every run of a model."""
    runs = rows.loc[rows["model"] == model, ["evaluated", "seed"]].drop_duplicates()
    of_control = rows[rows["model"] == control].drop(columns="seed").merge(runs, on="evaluated")
    return pd.concat([rows[rows["model"] != control], of_control], ignore_index=True)


def compared(
    rows: pd.DataFrame,
    model: str,
    *,
    control: str = "",
    text: str = "books",
    seeds: Sequence[str] = (),
    evaluated: str = FIRST_DATE,
) -> Comparison:
    """A model's comparison with a control on one text, where every run was measured.

    Args:
        rows: rows of ``read``.
        model: its name in the file.
        control: name of the reference; empty: the control after as many steps.
        text: one of ``TEXTS``.
        seeds: training seeds; empty: all that both models have.
        evaluated: date of the code that evaluated; or several, joined by +, of which each run has
            one.

    Raises:
        SystemExit: one of the models has no records of this text and these seeds, or a run has
            several of these dates.
    """
    control = control or control_of(model)
    days = evaluated.split("+")
    rows = rows[rows["text"].isin(TEXTS[text]) & rows["evaluated"].isin(days)].assign(text=text)
    names = ", ".join(sorted(set(rows["model"])))
    if control in UNTRAINED:  # the same for every run
        rows = _for_every_run(rows, model, control)
    # a run and its control were judged on the same day
    runs = rows["evaluated"] + " " + rows["seed"]
    judged = set(runs[rows["model"] == model]) & set(runs[rows["model"] == control])
    rows = rows[runs.isin(judged)]
    shared = {run.partition(" ")[2] for run in judged}
    if len(shared) < len(judged):
        raise SystemExit(f"a run of {model} was judged on several days of {evaluated}: name one")
    chosen = sorted(shared & set(seeds) if seeds else shared)
    if not chosen:
        raise SystemExit(
            f"no records of {model} and {control} on {text}, evaluated {evaluated}; there are "
            f"{names}"
        )
    rows = rows[rows["model"].isin([model, control]) & rows["seed"].isin(chosen)]
    labels = rows["model"] + "@" + rows["seed"]
    num_runs = labels.groupby([rows["method"], rows["keep_ratio"]]).transform("nunique")
    rows = rows[num_runs == 2 * len(chosen)]  # what every run was judged by
    primary = PRIMARY if PAPER in set(rows["method"]) else None
    records = [cell_record(row, NUM_PREDICTED) for row in rows.to_dict("records")]
    cells = compare_models(records, control, primary=primary)
    cells = cells[~cells["metric"].isin(_DENSE)]
    place = rows[["method", "keep_ratio"]].iloc[0]
    first = rows[(rows["method"] == place["method"]) & (rows["keep_ratio"] == place["keep_ratio"])]
    dense = compare_models(_dense_records(first), control).set_index("metric", drop=False)
    return Comparison(evaluated, model, control, text, tuple(chosen), cells, dense)


def cell_record(row: dict[str, Any], num_predicted: int) -> Record:
    """A window's record; KL per nat of context gain is the ratio of two sums over its tokens."""
    values = {name: row[name] for name in ("kl", "nll", "nll_dense", "context_gain")}
    values["diverged"] = row["kl"] * num_predicted
    values["gained"] = row["context_gain"] * num_predicted
    return _record(row, values)


def _dense_records(rows: pd.DataFrame) -> Iterator[Record]:
    """Records with the values of the dense pass."""
    for row in rows.to_dict("records"):
        yield _record(row, {name: row[name] for name in _DENSE})


def _record(row: dict[str, Any], values: dict[str, float]) -> Record:
    label = f"{row['model']}@{row['seed']}"
    return Record(
        model=label,
        fingerprint=label,
        dtype="",
        method=row["method"],
        options="{}",
        keep_ratio=row["keep_ratio"],
        step=None,
        seed=None,
        dataset=row.get("text", ""),
        stratum="",
        document=row["document"],
        example=row["window"],
        values=values,
    )


def price_share(rows: pd.DataFrame, model: str, other: str) -> Estimate:
    """The dense loss that a model costs, divided by the dense loss that another one costs.

    On the books and seeds that both and their common control have.
    """
    control = control_of(model)
    rows = rows[(rows["text"] == "books") & (rows["evaluated"] == FIRST_DATE)]
    windows = rows.drop_duplicates(["model", "seed", "document", "window"])
    dense = windows.pivot_table(
        index=["document", "window", "seed"], columns="model", values="nll_dense"
    )
    dense = dense[[model, other, control]].dropna().groupby(["document", "window"]).mean()
    bootstrap = ClusterBootstrap(dense.index.get_level_values("document").to_numpy(dtype=str))
    columns = (dense[name].to_numpy() for name in (model, other, control))
    return bootstrap.estimate(bootstrap.of_means(lambda a, b, c: (a - c) / (b - c), *columns))
