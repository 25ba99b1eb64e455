"""The plots of a report: panels that stand side by side in a PNG file and one by one in the page."""

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvcat.errors import InputError, one_line
from kvcat.evals import METRICS
from kvcat.evals.profile import BEST
from kvcat.files import read_jsonl
from kvcat.report.results import NO_STEP, Results, final_steps
from kvcat.report.tables import keep_label, pair_rows, slug

# Okabe and Ito's palette, from the pair that differs most; markers differ as well
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#808080"
STYLE: dict[Any, Any] = {
    "font.size": 10.0, "axes.titlesize": 10.0, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.formatter.useoffset": False, "grid.color": GREY, "grid.alpha": 0.25,
    "grid.linewidth": 0.6, "lines.linewidth": 1.6, "lines.markersize": 5.0, "legend.frameon": False,
    "legend.fontsize": 8.5, "svg.fonttype": "none", "svg.hashsalt": "kvcat",
}  # fmt: skip
LOSSES = {"dense_loss": "dense loss", "masked_loss": "masked loss", "kl": "KL(dense || masked)"}
_WIDTH, _HEIGHT = 4.4, 3.6  # inches, of a panel
Draw = Callable[[Any], None]


@dataclass(frozen=True)
class Plot:
    """Panels that belong together: the title of each, and what draws it on matplotlib axes."""

    name: str  # of the file
    title: str
    panels: Sequence[tuple[str, Draw]]
    same_scale: bool = False  # all panels have the same y axis

    def save(self, target: Path) -> None:
        """Write the panels side by side as a PNG file."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(STYLE):
            figure, panels = _figure(len(self.panels))
            self._draw(panels)
            for axes, (title, _) in zip(panels, self.panels, strict=True):
                axes.set_title(title)
            figure.savefig(target, dpi=150, metadata={"Software": None})

    def images(self) -> list[tuple[str, str]]:
        """Title and address (``data:``) of an SVG image of each panel."""
        with mpl.rc_context(STYLE):
            made = [_figure(1) for _ in self.panels]
            self._draw([panels[0] for _, panels in made])
            return [(title, _svg_address(made[i][0])) for i, (title, _) in enumerate(self.panels)]

    def _draw(self, panels: Sequence[Any]) -> None:
        for axes, (_, draw) in zip(panels, self.panels, strict=True):
            draw(axes)
            handles, labels = axes.get_legend_handles_labels()
            if len(labels) > 1:
                columns = 2 if max(map(len, labels)) > 14 else 3
                axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=columns)
        if self.same_scale:
            limits = np.array([axes.get_ylim() for axes in panels])
            for axes in panels:
                axes.set_ylim(limits[:, 0].min(), limits[:, 1].max())


def result_plots(results: Results) -> list[Plot]:
    """All plots of a folder, the most telling first; none where nothing was compressed."""
    if not results.methods:
        return []
    differences = [difference_plot(results, *pair) for pair in results.pairs if len(pair_rows(results, *pair))]
    return [*differences[:1], headline_plot(results), *differences[1:], *_step_plots(results)]


def difference_plot(results: Results, model: str, reference: str) -> Plot:
    """Gain and what a user gets, a line per method, on one scale."""
    rows = final_steps(pair_rows(results, model, reference))
    panels = [
        (f"{METRICS[name].label}: {model} minus {reference}", partial(_differences, rows, name, results.methods))
        for name in _plotted(results)
    ]
    title = f"{model} against {reference} by method and share of slots kept"
    return Plot(f"differences-{slug(model)}-{slug(reference)}", title, panels, same_scale=True)


def headline_plot(results: Results) -> Plot:
    """Quality of the first method against the slots kept."""
    method = results.methods[0]
    own = results.whole[results.whole["method"] == method]
    panels = [
        (f"{METRICS[name].label}, {method}", partial(_quality, own, name, results.models)) for name in _plotted(results)
    ]
    return Plot("headline", "Against the slots kept", panels)


def _plotted(results: Results) -> list[str]:
    """The metric that decides, and what a user gets where it has the same unit."""
    first, *more = results.metrics[:2]
    return [first, *(name for name in more if METRICS[name].unit == METRICS[first].unit)]


def _step_plots(results: Results) -> Iterator[Plot]:
    """Quality against gradient steps, a panel per method and keep ratio; nothing without such methods."""
    rows = results.whole[results.whole["step"] != NO_STEP]
    names = ("kl", "delta_ppl") if results.config["evaluation"] == "suffix" else (results.evaluation.deciding,)
    for metric in names if len(rows) else ():
        panels = [
            (f"{name}, {keep_label(keep)} kept", partial(_steps, own, metric, results.models))
            for (name, keep), own in rows.groupby(["method", "keep_ratio"], sort=False)
        ]
        yield Plot(f"steps-{metric}", f"{METRICS[metric].label} against gradient steps", panels)


def draw_profile(axes: Any, table: pd.DataFrame, statistic: str, models: Sequence[str]) -> None:
    """One line per model, log-log: the best caches' errors by slots. Errors of zero have no place on the axes."""
    best = table[(table["method"] == BEST) & (table[statistic] > 0.0)]
    for model in models:
        own, style = best[best["model"] == model].sort_values("num_slots"), line_style(model, models)
        axes.plot(own["num_slots"].to_numpy(), own[statistic].to_numpy(), markersize=4.0, label=model, **style)
    slots = sorted(set(table["num_slots"]))
    axes.set_xscale("log", base=2)
    axes.set_xticks(slots, [str(count) for count in slots])
    axes.minorticks_off()
    axes.set_xlabel("slots per layer and head, log axis")
    axes.set_ylabel("KL (nats/token, log axis)")
    if len(best):
        log_axis(axes)


def save_profile_plot(table: pd.DataFrame, folder: Path) -> Path:
    """Mean and worst KL of a ``profile_table`` side by side on one scale, ``profile.png``; returns its path."""
    models = list(dict.fromkeys(table["model"]))
    panels = [
        (f"Best cache found, {title}", partial(draw_profile, table=table, statistic=name, models=models))
        for name, title in (("mean", "mean over windows"), ("worst", "worst window"))
    ]
    Plot("profile", "Compressibility profile", panels, same_scale=True).save(target := folder / "profile.png")
    return target


def run_metrics(folder: Path) -> pd.DataFrame:
    """Metrics of a training run, a row per record, with a column ``kept LAYER`` per router.

    Raises:
        InputError: no ``metrics.jsonl`` with records in the folder, or a damaged one.
    """
    records = read_jsonl(folder / "metrics.jsonl")
    if not records:
        raise InputError(f"{folder} is no training run: it has no metrics.jsonl with records")
    try:
        kept = [{f"kept {layer}": share for layer, share in (r.pop("kept", None) or {}).items()} for r in records]
        rows = pd.DataFrame([record | shares for record, shares in zip(records, kept, strict=True)])
        rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, "kind", "step", *LOSSES, "tokens"])))
        numbers = rows[["step", *LOSSES, "tokens", *_routers(rows)]].apply(pd.to_numeric)
        return rows.assign(**numbers).astype({"step": int})
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{folder / 'metrics.jsonl'} is damaged: {one_line(error)}") from None


def training_plot(runs: Mapping[str, pd.DataFrame], models: Sequence[str]) -> Plot:
    """Losses of all runs by step, and the fraction of tokens that each router keeps, run by run.

    ``models``, all labels of the page in order, fix the colours.
    """
    labels = list(dict.fromkeys([*models, *runs]))
    measured = [name for name in LOSSES if any(rows[name].notna().any() for rows in runs.values())]
    panels = [(LOSSES[name], partial(_losses, runs, name, labels)) for name in measured]
    panels += [(f"{label}: fraction kept", partial(_kept, rows)) for label, rows in runs.items() if _routers(rows)]
    return Plot("training", "Training runs: lines are training batches, marks are validation", panels)


def line_style(name: str, names: Sequence[str]) -> dict[str, str]:
    """Colour and marker of a line, fixed by the place of its name."""
    rank = list(names).index(name)
    return {"color": COLOURS[rank % len(COLOURS)], "marker": MARKERS[rank % len(MARKERS)]}


def log_axis(axes: Any) -> None:
    """A logarithmic y axis with plain numbers at 1, 2 and 5."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _quality(rows: pd.DataFrame, metric: str, models: Sequence[str], axes: Any) -> None:
    """A metric against the keep ratio, a line per model; dashed the level with the whole cache."""
    last = final_steps(rows)
    _lines(axes, last, "keep_ratio", metric, models)
    dense = last[last["metric"].isin([f"dense_{metric}", f"{metric}_dense"])]
    for model, level in dense.groupby("model")["value"].last().items():
        style = line_style(str(model), models)["color"]
        axes.axhline(_scale(metric) * level, color=style, linestyle="--", linewidth=1.0)
    if len(dense):
        axes.plot([], [], color=GREY, linestyle="--", linewidth=1.0, label="whole cache")
    _keep_axis(axes, last)


def _steps(rows: pd.DataFrame, metric: str, models: Sequence[str], axes: Any) -> None:
    """A metric against gradient steps, a line per model."""
    _lines(axes, rows, "step", metric, models)
    steps = sorted(rows["step"].unique())
    axes.set_xscale("symlog", linthresh=1.0, linscale=0.5)
    axes.set_xticks(steps, [str(step) for step in steps])
    axes.minorticks_off()
    axes.set_xlabel("gradient steps")


def _differences(rows: pd.DataFrame, metric: str, methods: Sequence[str], axes: Any) -> None:
    """Paired differences with intervals against the keep ratio, a line per method."""
    own = rows[rows["metric"] == metric].sort_values("keep_ratio")
    shown = [name for name in methods if name in set(own["method"])]
    for rank, name in enumerate(shown):
        line = own[own["method"] == name]
        value, low, high = (_scale(metric) * line[end].to_numpy() for end in ("difference", "low", "high"))
        errors = np.nan_to_num(np.maximum(np.stack([value - low, high - value]), 0.0))
        x = line["keep_ratio"].to_numpy() * (1.0 + 0.03 * (rank - (len(shown) - 1) / 2))
        axes.errorbar(x, value, yerr=errors, label=name, capsize=2.5, elinewidth=1.0, **line_style(name, methods))
    axes.axhline(0.0, color="black", linewidth=1.0)
    _keep_axis(axes, own)
    unit = "points" if METRICS[metric].percent else METRICS[metric].unit
    axes.set_ylabel(f"{unit}, {'below' if METRICS[metric].lower_is_better else 'above'} 0 is better")


def _lines(axes: Any, rows: pd.DataFrame, x: str, metric: str, models: Sequence[str]) -> None:
    """A line per model without its interval, for paired differences say who is better; KL on a log axis."""
    own = rows[(rows["metric"] == metric) & rows["value"].notna()].sort_values(x)
    log = metric == "kl" and (own["value"] > 0.0).any()
    own = own[own["value"] > 0.0] if log else own
    for model in (model for model in models if model in set(own["model"])):
        line = own[own["model"] == model]
        axes.plot(line[x], _scale(metric) * line["value"], label=model, **line_style(model, models))
    unit = "%" if METRICS[metric].percent else METRICS[metric].unit
    axes.set_ylabel(f"{METRICS[metric].label} ({unit}{', log axis' if log else ''})")
    if log:
        log_axis(axes)


def _losses(runs: Mapping[str, pd.DataFrame], name: str, labels: Sequence[str], axes: Any) -> None:
    """One loss by step: training as a faint smoothed line, validation as marks."""
    for label, rows in runs.items():
        own, style = rows[rows[name].notna()], line_style(label, labels)
        train, validation = (own[own["kind"] == kind] for kind in ("train", "validation"))
        axes.plot(train["step"], _smooth(train[name]), color=style["color"], alpha=0.45, linewidth=1.0)
        if len(validation):
            axes.plot(validation["step"], validation[name], label=label, **style)
    axes.set_xlabel("training step")
    axes.set_ylabel("nats per token")


def _kept(rows: pd.DataFrame, axes: Any) -> None:
    """Fraction of tokens that each router keeps by training step."""
    train = rows[rows["kind"] == "train"]
    for rank, name in enumerate(_routers(rows)):
        shade, label = COLOURS[rank % len(COLOURS)], name.replace("kept", "layer")
        axes.plot(train["step"], _smooth(train[name]), color=shade, linewidth=1.2, label=label)
    axes.set_ylim(0.0, 1.05)
    axes.set_xlabel("training step")
    axes.set_ylabel("kept fraction of tokens")


def _routers(rows: pd.DataFrame) -> list[str]:
    return [name for name in rows if name.startswith("kept ")]


def _smooth(values: pd.Series) -> pd.Series:
    """Running mean over about a fiftieth of the run, shorter at the ends."""
    return values.rolling(2 * (len(values) // 100) + 1, center=True, min_periods=1).mean()


def _keep_axis(axes: Any, rows: pd.DataFrame) -> None:
    keeps = sorted(rows["keep_ratio"].unique())
    axes.set_xscale("log")
    axes.set_xticks(keeps, [keep_label(keep).rstrip("%") for keep in keeps], fontsize=10 if len(keeps) < 7 else 8)
    axes.minorticks_off()
    axes.set_xlim(keeps[0] / 1.25, keeps[-1] * 1.25)
    axes.set_xlabel("slots kept (%)")


def _figure(num_panels: int) -> tuple[Figure, list[Any]]:
    """Panels in rows of three."""
    columns = min(3, num_panels)
    lines = -(-num_panels // columns)
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * lines), layout="constrained")
    return figure, [figure.add_subplot(lines, columns, rank + 1) for rank in range(num_panels)]


def _scale(metric: str) -> float:
    return 100.0 if METRICS[metric].percent else 1.0


def _svg_address(figure: Any) -> str:
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(stream.getvalue()).decode()
