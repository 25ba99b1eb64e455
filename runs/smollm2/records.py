"""The tables and the price curve of docs/results.md, from docs/results-records.csv.

    python runs/smollm2/records.py rand-48 [--control control-48] [--text books]
        [--share-of rand-w0.3-48]
    python runs/smollm2/records.py --plot price.png

A model's name is `VARIANT-wWEIGHT-STEPS`, without the weight if it is 1. Figures are those of
`kvcat report`: ratios of KL and differences of NLL to the control, with intervals over documents
and over the training seeds that both have. `--share-of` divides the model's price in dense loss by
another one's.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvcat.evals import ClusterBootstrap, Estimate, Record, compare_models
from kvcat.report.figures import Figure as TableFigure
from kvcat.report.figures import difference_figure, keep_label, ratio_figure
from kvcat.report.plots import COLOURS, MARKERS, STYLE

FILE = Path(__file__).parents[2] / "docs" / "results-records.csv"
VALUES = ["kl", "nll", "nll_dense", "context_gain"]
FORMS = {  # lines of the curve: by label of the point its model
    "Router (paper), weight 1, by tokens": {"524,000": "router-128", "1,049,000": "router-256"},
    "Rand (paper), 197,000 tokens, by weight": {
        "0.1": "rand-w0.1-48",
        "0.3": "rand-w0.3-48",
        "1": "rand-48",
    },
    "Attn (paper), so": {"1": "attn-48"},
    "attn-reader, 262,000 tokens, by weight": {"0.3": "attn-reader-w0.3-64", "1": "attn-reader-64"},
    "attn-reader, 1,049,000 tokens": {"0.3": "attn-reader-w0.3-256"},
}
TOY = {
    "0.03": (0.0008, 0.980),
    "0.1": (0.0045, 0.945),
    "0.3": (0.0166, 0.889),
}  # docs/log-training-1.md
PARTS = {  # of the tables: title, metric, what is shown of it
    "KL over the control's": ("kl", ratio_figure),
    "NLL on the compact cache": ("nll", difference_figure),
    "what compression loses": ("delta_nll", difference_figure),
}


def compared(rows: pd.DataFrame, model: str, control: str) -> pd.DataFrame:
    """Rows of `compare_models`, on the training seeds that both models have."""
    ours, theirs = (rows[rows["model"] == name] for name in (model, control))
    for name, model_rows in ((model, ours), (control, theirs)):
        if model_rows.empty:
            raise SystemExit(
                f"no records of {name}; there are {', '.join(sorted(set(rows['model'])))}"
            )
    seeds = set(ours["seed"]) & set(theirs["seed"])
    shared: list[Record] = []
    for model_rows in (ours, theirs):
        shared += records(model_rows[model_rows["seed"].isin(seeds)])
    return compare_models(shared, control)


def records(rows: pd.DataFrame) -> Iterator[Record]:
    """Rows of the file as records of one data set."""
    for row in rows.to_dict("records"):
        label = f"{row['model']}@{row['seed']}"
        values = {name: row[name] for name in VALUES} | {"delta_nll": row["nll"] - row["nll_dense"]}
        yield Record(
            label,
            label,
            "",
            row["method"],
            "{}",
            row["keep_ratio"],
            None,
            None,
            row["text"],
            "",
            row["document"],
            str(row["window"]),
            values,
        )


def control_of(model: str) -> str:
    """The control after as many steps."""
    return f"control-{model.rsplit('-', 1)[1]}"


def share(rows: pd.DataFrame, model: str, other: str, control: str) -> Estimate:
    """The dense loss that a model costs, divided by what another one costs.

    On the windows and seeds that the two and the control have.
    """
    windows = rows.drop_duplicates(["model", "seed", "document", "window"])
    dense = windows.pivot_table(
        index=["document", "window", "seed"], columns="model", values="nll_dense"
    )
    dense = dense[[model, other, control]].dropna().groupby(["document", "window"]).mean()
    bootstrap = ClusterBootstrap(dense.index.get_level_values("document").to_numpy(dtype=str))
    columns = (dense[name].to_numpy() for name in (model, other, control))
    return bootstrap.estimate(bootstrap.of_means(lambda a, b, c: (a - c) / (b - c), *columns))


def printed(figure: TableFigure) -> str:
    """In bold where the model is better or worse than the control."""
    return f"{f'**{figure.text}**' if figure.decided else figure.text} {figure.interval}"


def markdown(table: pd.DataFrame) -> str:
    """The price, then tables of KL over the control's, NLL on the compact cache and what
    compression loses.
    """
    keeps = list(table["keep_ratio"].unique())
    once = table.drop_duplicates("metric").set_index("metric")
    lines = [
        f"{table['num_seeds'].max()} training seeds, {table['num_examples'].max()} windows",
        "",
    ]
    lines += [f"{name}: {printed(difference_figure(once.loc[name]))}" for name in VALUES[2:]]
    for title, (metric, figure) in PARTS.items():
        heads = map(keep_label, keeps)
        lines += ["", f"| {title} | {' | '.join(heads)} |", "|---" * (len(keeps) + 1) + "|"]
        for method, method_rows in table[table["metric"] == metric].groupby("method", sort=False):
            cells = {row["keep_ratio"]: printed(figure(row)) for _, row in method_rows.iterrows()}
            lines.append(f"| {method} | {' | '.join(cells.get(keep, '') for keep in keeps)} |")
    return "\n".join(lines)


def draw(rows: pd.DataFrame, target: Path) -> None:
    """Gain against price: a line for each form over its weights or tokens, and the toy model."""
    panels = {
        "attention-matching": "Attention Matching (default), 5 % of the slots",
        "h2o": "H2O, 5 % of the slots",
    }
    forms = {
        form: [compared(rows, model, control_of(model)) for model in points.values()]
        for form, points in FORMS.items()
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 5.0), layout="constrained")
        for axes, (method, title) in zip(
            figure.subplots(1, 2, sharey=True), panels.items(), strict=True
        ):
            for number, (form, tables) in enumerate(forms.items()):
                cells = [
                    table[(table["method"] == method) & (table["keep_ratio"] == 0.05)].set_index(
                        "metric"
                    )
                    for table in tables
                ]
                x = np.array(
                    [table.loc["nll_dense", ["difference", "low", "high"]] for table in cells],
                    dtype=float,
                ).T
                y = np.array(
                    [table.loc["kl", ["ratio", "ratio_low", "ratio_high"]] for table in cells],
                    dtype=float,
                ).T
                bars = {
                    "xerr": np.abs(x[1:] - x[0]),
                    "yerr": np.abs(y[1:] - y[0]),
                    "elinewidth": 0.7,
                }
                axes.errorbar(
                    x[0], y[0], **bars, color=COLOURS[number], marker=MARKERS[number], label=form
                )
                _name_points(axes, FORMS[form], x[0], y[0])
            if method == "attention-matching":
                x, y = np.array(list(TOY.values())).T
                axes.plot(
                    x,
                    y,
                    "--",
                    color=COLOURS[-1],
                    marker=MARKERS[-1],
                    label="toy: Router, by weight",
                )
                _name_points(axes, TOY, x, y)
            axes.axhline(1.0, color="black", linewidth=0.8)
            axes.axvline(0.0, color="black", linewidth=0.8)
            axes.set(title=title, xlabel="price: dense NLL above the control's, nats a token")
        figure.axes[0].set_ylabel("gain: KL over the control's")
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2
        )
        figure.savefig(target, dpi=120, metadata={"Software": None})


def _name_points(axes: Any, names: Iterable[str], x: np.ndarray, y: np.ndarray) -> None:
    for name, *place in zip(names, x, y, strict=True):
        axes.annotate(name, place, xytext=(4, 4), textcoords="offset points", fontsize=8)


def main() -> None:
    """Print the tables of a model, or draw the curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="e.g. attn-reader-w0.3-64")
    parser.add_argument("--control", help="(default: the control after as many steps)")
    parser.add_argument("--text", default="books", choices=("books", "tech", "code"))
    parser.add_argument(
        "--share-of", metavar="MODEL", help="print the price over that of MODEL as well"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the price curve")
    parser.add_argument("--records", type=Path, default=FILE)
    options = parser.parse_args()
    rows = pd.read_csv(options.records, dtype={"window": str, "document": str, "seed": str})
    rows = rows[rows["text"] == options.text]
    if options.plot:
        draw(rows, options.plot)
    if options.model:
        control = options.control or control_of(options.model)
        print(markdown(compared(rows, options.model, control)))
        if options.share_of:
            ratio = share(rows, options.model, options.share_of, control)
            print(
                f"\nprice over that of {options.share_of}: {ratio.value:.2f} [{ratio.low:.2f}, "
                f"{ratio.high:.2f}]"
            )


if __name__ == "__main__":
    main()
