"""Pictures of gain and price, from the results of every window.

python runs/smollm2/plots.py forms docs/results.png
python runs/smollm2/plots.py price price.png
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from records import DEFAULT, Comparison, tokens_of
from tables import SUMMARY, comparison_of, thousands

from kvcat.errors import run_script
from kvcat.report.plots import COLOURS, MARKERS, STYLE

METHODS = {DEFAULT: "caches of Attention Matching (our default)", "h2o": "caches of H2O (eviction)"}
KEEP = 0.05
LINES = {  # of the price curve: comparisons in the order of their tokens or weights
    "Router (paper), by tokens": ["books/router-128@0", "books/router-256@0"],
    "Rand (paper), 197,000 tokens, by weight": [
        "books/rand-w0.1-48@0",
        "books/rand-w0.3-48@0",
        "books/rand-48@0",
    ],
    "Attn (paper), 197,000 tokens": ["books/attn-48@0"],
    "attn-reader, weight .3, by tokens": [
        "books/attn-reader-w0.3-64@0",
        "books/attn-reader-w0.3-128@0",
        "books/attn-reader-w0.3-256@0",
    ],
    "attn-reader, weight 1, by tokens": ["books/attn-reader-64@0", "books/attn-reader-128@0"],
}
Bar = tuple[float, float, float]  # value, low, high


def change(comparison: Comparison, metric: str, method: str) -> Bar:
    """A difference to the control at 5 % of the slots; NaN if it was not measured."""
    row = comparison.row(metric, method, KEEP)
    if row is None:
        return np.nan, np.nan, np.nan
    return row["difference"], row["low"], row["high"]


def ratio(comparison: Comparison, method: str) -> Bar:
    """KL over the control's at 5 % of the slots; NaN if it was not measured."""
    row = comparison.row("kl", method, KEEP)
    if row is None:
        return np.nan, np.nan, np.nan
    return row["ratio"], row["ratio_low"], row["ratio_high"]


def price(comparison: Comparison) -> Bar:
    """The change of the dense loss."""
    row = comparison.dense.loc["nll_dense"]
    return row["difference"], row["low"], row["high"]


def forms() -> Figure:
    """A line for every form of the summary: its price, the KL, the loss on the cache."""
    comparisons = {title: comparison_of(name) for name, title in SUMMARY.items()}
    figure = Figure(figsize=(9.6, 5.2), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    _draw_bars(panels[0], [price(one) for one in comparisons.values()], 2, 0.0, "")
    for number, (method, label) in enumerate(METHODS.items()):
        shift = 0.14 if number else -0.14
        ratios = [ratio(one, method) for one in comparisons.values()]
        _draw_bars(panels[1], ratios, number, shift, label)
        losses = [change(one, "nll", method) for one in comparisons.values()]
        _draw_bars(panels[2], losses, number, shift, "")
    for axes, neutral in zip(panels, (0.0, 1.0, 0.0), strict=True):
        axes.axvline(neutral, color="black", linewidth=0.8)
        axes.grid(axis="y", visible=False)
    panels[0].set_title("price: the model itself,\nnats per token (left: better)", fontsize=9)
    panels[1].set_title("KL of the cache at 5 % of slots,\nover the control's", fontsize=9)
    panels[2].set_title("text on that cache,\nnats per token (left: better)", fontsize=9)
    labels = [
        f"{title.replace('`', '')}\n{thousands(one.model)} tokens"
        for title, one in comparisons.items()
    ]
    panels[0].set_yticks(range(len(labels)), labels, fontsize=8)
    panels[0].invert_yaxis()
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _draw_bars(axes: Axes, bars: Sequence[Bar], number: int, shift: float, label: str) -> None:
    """Horizontal intervals, one for each form."""
    values, lows, highs = np.array(bars).T
    axes.errorbar(
        values,
        np.arange(len(bars)) + shift,
        xerr=[values - lows, highs - values],
        linestyle="none",
        marker=MARKERS[number],
        color=COLOURS[number],
        elinewidth=0.9,
        label=label,
    )


def price_curve() -> Figure:
    """The KL against the price: a line for each form over its weights or tokens."""
    figure = Figure(figsize=(9.6, 5.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (method, label) in zip(panels, METHODS.items(), strict=True):
        for number, (form, names) in enumerate(LINES.items()):
            comparisons = [comparison_of(name) for name in names]
            x = np.array([price(one) for one in comparisons])
            y = np.array([ratio(one, method) for one in comparisons])
            axes.errorbar(
                x[:, 0],
                y[:, 0],
                xerr=np.abs(x[:, 1:] - x[:, :1]).T,
                yerr=np.abs(y[:, 1:] - y[:, :1]).T,
                color=COLOURS[number],
                marker=MARKERS[number],
                elinewidth=0.7,
                label=form,
            )
            for one, place in zip(comparisons, zip(x[:, 0], y[:, 0], strict=True), strict=True):
                axes.annotate(
                    _point_name(one), place, xytext=(4, 4), textcoords="offset points", fontsize=8
                )
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.axvline(0.0, color="black", linewidth=0.8)
        axes.set(title=f"{label}, 5 % of the slots", xlabel="price: dense NLL above the control's")
    panels[0].set_ylabel("gain: KL over the control's")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2)
    return figure


def _point_name(comparison: Comparison) -> str:
    """What distinguishes a point of a line: the weight of Rand, else the tokens."""
    if comparison.model.startswith("rand"):
        weight = comparison.model.partition("-w")[2].partition("-")[0]
        return weight or "1"
    return f"{tokens_of(comparison.model) / 1e6:.1f} M"


PLOTS: dict[str, Callable[[], Figure]] = {"forms": forms, "price": price_curve}


def main() -> None:
    """Draw a picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plot", choices=list(PLOTS))
    parser.add_argument("file", type=Path, metavar="FILE.png")
    options = parser.parse_args()
    style: dict[Any, Any] = STYLE
    with mpl.rc_context(style):
        figure = PLOTS[options.plot]()
        figure.savefig(options.file, dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    run_script(main)
