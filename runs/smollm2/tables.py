"""The tables on KV-CAT's training, from the results of every window.

    python runs/smollm2/tables.py summary controls books/router-128@1 ...   # prints tables
    python runs/smollm2/tables.py --write        # renews those of docs/results.md
    python runs/smollm2/tables.py --check        # exit code 1 if they are different

A table's name is ``scale``, ``scratch``, ``recall``, ``summary``, ``controls``, ``price-shares``,
``exact``, ``exact-tech``, ``exact-code``, ``peers``, ``price``, ``price-router`` or
[DATE/]TEXT/MODEL[@SEED][:CONTROL], with TEXT and MODEL as in ``records.py``, and DATE that of the
code that evaluated (2026-11-25). Without a seed it is the mean of all runs that the model and its
control both have; runs of several dates are joined by a plus sign (2026-11-26+2026-11-27). The page
marks the place of a table by its name.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

import answers
import pandas as pd
from records import (
    DEFAULT,
    FIRST_DATE,
    METHODS,
    PAPER,
    TEXTS,
    UNTRAINED,
    Comparison,
    compared,
    method_label,
    price_share,
    read,
    tokens_of,
)

from kvcat.errors import run_script
from kvcat.evals import ClusterBootstrap, Estimate
from kvcat.report.figures import Figure, difference_figure, keep_label, ratio_figure
from kvcat.stats.significance import holm
from kvcat.stats.summary import SIGNIFICANT

sys.path.append(str(Path(__file__).parents[1] / "scale"))

import curve

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"
BLOCK = re.compile(
    r"<!-- table (?P<name>\S+) -->\n(?P<table>.*?)<!-- end of the table -->\n", re.DOTALL
)
PARAMETERS = 134_515_008  # of SmolLM2-135M
NAME = re.compile(
    r"((?P<date>\d{4}-\d\d-\d\d(\+\d{4}-\d\d-\d\d)*)/)?(?P<text>[a-z-]+)/(?P<model>[^@:]+)"
    r"(@(?P<seed>[^:]+))?(:(?P<control>.+))?"
)
SUMMARY = {  # what was trained, by the name of its comparison
    "books/router-128@0": "Router (the paper's KV-CAT), run 0",
    "books/router-128@1": "Router, run 1",
    "books/router-256@0": "Router",
    "books/rand-48@0": "Rand, run 0",
    "books/rand-48@1": "Rand, run 1",
    "books/rand-w0.3-48@0": "Rand, weight .3",
    "books/rand-w0.1-48@0": "Rand, weight .1",
    "books/attn-48@0": "Attn",
    "books/attn-reader-128@0": "`attn-reader` (ours)",
    "books/attn-reader-w0.3-64": "`attn-reader`, weight .3, three runs",
    "books/attn-reader-w0.3-256@0": "`attn-reader`, weight .3",
}
COLUMNS = {  # of the summary: metric, method, keep ratio
    "KL, paper's, ridge start": ("kl", PAPER, 0.05),
    "KL, default": ("kl", DEFAULT, 0.05),
    "KL, H2O": ("kl", "h2o", 0.05),
    "KL / gain, default": ("kl_per_gain", DEFAULT, 0.05),
    "NLL, default": ("nll", DEFAULT, 0.05),
}
PARTS = {"kl": "KL", "kl_per_gain": "KL per nat of context gain", "nll": "NLL on the cache"}
CONTROLS = ("control-48", "control-64", "control-128", "control-256")
EXACT_DATE = "2026-11-26"
EXACT = {
    "base": "base",
    "adapt-48": "adapted, 197,000 tokens (.0015 a parameter)",
    "control-64": "control, 262,000 more (.0019 a parameter)",
    "router-64": "Router, on the same",
    "attn-reader-w0.3-64": "`attn-reader`, weight .3, on the same",
    "rand-w0.1-64": "Rand, weight .1, on the same",
}
ELSEWHERE_DATE = "2026-11-27"
ELSEWHERE = (*UNTRAINED, "control-64", "rand-w0.1-64")
PRICES = [("rand-w0.3-48", "rand-48"), ("rand-w0.1-48", "rand-48")]
PRICES += [("attn-reader-w0.3-64", "attn-reader-64")]


SIDE_BY_SIDE = {  # cells of the tables that have a model in each column: metric, method, keep ratio
    "KL, default, 5 %": ("kl", DEFAULT, 0.05),
    "KL, default, 10 %": ("kl", DEFAULT, 0.1),
    "KL, SnapKV, 5 %": ("kl", "snapkv", 0.05),
    "KL, SnapKV, 10 %": ("kl", "snapkv", 0.1),
    "NLL on the cache, default, 5 %": ("nll", DEFAULT, 0.05),
    "NLL on the cache, SnapKV, 5 %": ("nll", "snapkv", 0.05),
}
PEERS = {"router-160": "Router", "dms-160": "DMS", "sp-kv-160": "SP-KV"}
SEPARATED = {
    "router-160": "Router",
    "projected-160": "projected",
    "own-moments-160": "own moments",
    "router-w0.3-160": "Router, weight .3",
    "own-moments-w0.3-160": "own moments, weight .3",
}


@lru_cache
def all_rows() -> pd.DataFrame:
    """The results of every window."""
    return read()


@lru_cache
def comparison_of(name: str) -> Comparison:
    """The comparison called [DATE[+DATE...]/]TEXT/MODEL[@SEED][:CONTROL]."""
    match = NAME.fullmatch(name)
    if match is None or match["text"] not in TEXTS:
        raise SystemExit(f"no table {name!r}; see --help")
    return compared(
        all_rows(),
        match["model"],
        control=match["control"] or "",
        text=match["text"],
        seeds=[match["seed"]] if match["seed"] else [],
        evaluated=match["date"] or FIRST_DATE,
    )


def table(name: str) -> str:
    """A table as Markdown, with the command that prints it."""
    special = {
        "scale": lambda: curve.table(curve.read()),
        "scratch": lambda: curve.table(curve.read(curve.SCRATCH)),
        "recall": recall,
        "summary": summary,
        "controls": controls,
        "price-shares": price_shares,
        "exact": exact,
        "exact-tech": partial(exact_elsewhere, "tech"),
        "exact-code": partial(exact_elsewhere, "code"),
        "peers": partial(side_by_side, "peers", "2026-11-26", PEERS),
        "price": partial(side_by_side, "price", "2026-11-27", SEPARATED),
        "price-router": partial(side_by_side, "price", "2026-11-27", SEPARATED, router=True),
    }
    body = special[name]() if name in special else comparison_table(comparison_of(name))
    command = f"(`python runs/smollm2/tables.py {name}`)"
    return f"{body}\n\n{textwrap.fill(command, 100, break_on_hyphens=False)}\n"


def comparison_table(comparison: Comparison) -> str:
    """The change of the dense model, then a row for each metric and method."""
    sizes = comparison.cells[["num_examples", "num_documents"]].max()
    runs = "one run" if len(comparison.seeds) == 1 else f"{len(comparison.seeds)} runs"
    changes = []
    for metric, title in (("nll_dense", "Dense NLL"), ("context_gain", "context gain")):
        row = comparison.dense.loc[metric]
        changes.append(f"{title} {shown(difference_figure(row))} p {p_text(row['p'])}")
    about = (
        f"`{comparison.model}` against `{comparison.control}`: {runs}, {sizes['num_examples']} "
        f"windows of {sizes['num_documents']} documents. {'; '.join(changes)}."
    )
    lines = [*textwrap.wrap(about, width=100, break_on_hyphens=False), ""]
    keeps = sorted(comparison.cells["keep_ratio"].unique())
    lines += header(["", *(keep_label(keep) for keep in keeps)])
    for metric, title in PARTS.items():
        for method in METHODS:
            label = comparison.method_label(method)
            rows = [comparison.row(metric, method, keep) for keep in keeps]
            if any(row is not None for row in rows):
                lines.append(line([f"{title}, {label}", *(cell(row) for row in rows)]))
    return "\n".join(lines)


def thousands(model: str) -> str:
    """The tokens that a model was trained on after the adaptation, rounded to thousands."""
    return f"{round(tokens_of(model), -3):,}"


def per_parameter(model: str) -> str:
    """The same tokens, divided by the model's parameters."""
    return short(f"{tokens_of(model) / PARAMETERS:.4f}")


def header(titles: list[str]) -> list[str]:
    """The first two lines of a table."""
    return [line(titles), "|---" * len(titles) + "|"]


def line(cells: list[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def cell(row: pd.Series | None, *, with_p: bool = True) -> str:
    """A figure of the comparisons: a ratio for KL, else a difference."""
    if row is None:
        return "-"
    text = shown(difference_figure(row) if row["metric"] == "nll" else ratio_figure(row))
    return f"{text} p {p_text(row['p'])}" if with_p else text


def shown(figure: Figure) -> str:
    """A figure with its interval."""
    return f"{marked(figure)} {interval(figure)}"


def marked(figure: Figure) -> str:
    """Bold: better or worse than the control after Holm's correction; a dagger: before it only."""
    text = short(figure.text)
    if not figure.decided:
        return text
    return f"{text}†" if figure.exploratory else f"**{text}**"


def interval(figure: Figure | Estimate) -> str:
    """An interval, without zeros before the points."""
    if isinstance(figure, Figure):
        return short(figure.interval)
    return short(f"[{figure.low:.3f}, {figure.high:.3f}]")


def short(text: str) -> str:
    """The text with numbers below 1 that begin with their point."""
    return re.sub(r"(?<!\d)0\.", ".", text)


def p_text(p_value: float) -> str:
    """A p-value in three decimals."""
    return "< .001" if p_value < 0.0005 else short(f"{p_value:.3f}")


def summary() -> str:
    """A row for every form: its price, and figures at 5 % of the slots."""
    lines = header(["", "tokens", "tokens a parameter", "dense NLL", *COLUMNS])
    primary = []
    for name, title in SUMMARY.items():
        comparison = comparison_of(name)
        primary.append(comparison.row(*next(iter(COLUMNS.values()))))
        price = shown(difference_figure(comparison.dense.loc["nll_dense"]))
        rows = [comparison.row(*place) for place in COLUMNS.values()]
        cells = [cell(row, with_p=False) for row in rows]
        tokens = [thousands(comparison.model), per_parameter(comparison.model)]
        lines.append(line([title, *tokens, price, *cells]))
    return "\n".join([*lines, "", *_over_forms(pd.DataFrame(primary))])


def _over_forms(rows: pd.DataFrame) -> list[str]:
    """How many forms are better in the primary cell, corrected for having tried as many."""
    better = rows["verdict"] == "better"
    corrected = holm(rows["p"].to_numpy(float))
    is_left = better & (corrected <= SIGNIFICANT)
    lost = [
        f"{title} (p {p_text(p_value)})"
        for title, p_value, was, still in zip(
            SUMMARY.values(), corrected, better, is_left, strict=True
        )
        if was and not still
    ]
    sentence = (
        f"In the primary cell, the first column of KL, {better.sum()} of the {len(rows)} rows are "
        f"better than their control, and {is_left.sum()} after Holm's correction over the rows."
    )
    if lost:
        sentence += f" Better before it only: {', '.join(lost)}."
    return textwrap.wrap(sentence, width=100, break_on_hyphens=False)


def controls() -> str:
    """Plain training alone: values of the control after more and more tokens, on books."""
    first = {model: thousands(model) for model in CONTROLS}
    keeps = (0.05, 0.1, 0.2)
    return values_of(first, "books", FIRST_DATE, "0", keeps, "tokens after the adaptation")


def exact() -> str:
    """Values of each model under the exact method of the paper and the others, on books."""
    return values_of(EXACT, "books", EXACT_DATE, "0", (0.05, 0.1, 0.2, 0.4), "model")


def exact_elsewhere(text: str) -> str:
    """The same on other text, for the models of another day, run 1."""
    models = {name: label for name, label in EXACT.items() if name in ELSEWHERE}
    return values_of(models, text, ELSEWHERE_DATE, "1", (0.05, 0.1, 0.2, 0.4), "model")


def recall() -> str:
    """Right answers of the models that were trained to recall, and values on plain books."""
    tables = [answers.table(), answers.choices()]
    rows = all_rows()
    for seed in ("0", "1"):
        known = set(rows.loc[rows["seed"] == seed, "model"]) | set(UNTRAINED)
        names = {model: f"recall-{model}" for model in answers.MODELS if model not in UNTRAINED}
        models = {
            names.get(model, model): title
            for model, title in answers.MODELS.items()
            if names.get(model, model) in known
        }
        values = partial(values_of, models, "books", "2026-11-30", seed, (0.05, 0.1))
        tables.append(values(f"on books, run {seed}", (PAPER, DEFAULT)))
    return "\n\n".join(tables)


def values_of(
    models: dict[str, str],
    text: str,
    evaluated: str,
    seed: str,
    keeps: tuple[float, ...],
    title: str,
    methods: Sequence[str] = tuple(METHODS),
) -> str:
    """Means of some models over the windows of a text.

    Args:
        models: what a row is called, by the model's name.
        text: what the column has.
        evaluated: date of the code that evaluated.
        seed: of the runs.
        keeps: shares of the slots.
        title: of the first column.
        methods: that compressed.
    """
    rows = all_rows()
    rows = rows[(rows["text"] == text) & (rows["evaluated"] == evaluated)]
    rows = rows[(rows["seed"] == seed) | rows["model"].isin(UNTRAINED)]
    sizes = " / ".join(f"{100 * keep:.0f}" for keep in keeps)
    labels = [method_label(method, evaluated) for method in methods]
    lines = header([title, "dense NLL", "context gain", *(f"KL, {x}, {sizes} %" for x in labels)])
    for model, label in models.items():
        run = rows[rows["model"] == model]
        dense = run.drop_duplicates(["document", "window"])
        means = [mean(dense, name, 3) for name in ("nll_dense", "context_gain")]
        cells = []
        for method in methods:
            at = [run[(run["method"] == method) & (run["keep_ratio"] == keep)] for keep in keeps]
            cells.append(" ".join(short(f"{cell_rows['kl'].mean():.4f}") for cell_rows in at))
        lines.append(line([label, *means, *cells]))
    return "\n".join(lines)


def mean(rows: pd.DataFrame, column: str, decimals: int) -> str:
    """The mean over windows with its interval over documents."""
    estimate = ClusterBootstrap(rows["document"].tolist()).mean(rows[column].to_numpy())
    text = short(f"{estimate.value:.{decimals}f}")
    return f"{text} {interval(estimate)}"


def price_shares() -> str:
    """The price of light weights over that of weight 1."""
    lines = header(["", "dense NLL over the control's, divided by that of weight 1"])
    for model, other in PRICES:
        share = price_share(all_rows(), model, other)
        text = short(f"{share.value:.2f} [{share.low:.2f}, {share.high:.2f}]")
        lines.append(line([f"`{model}`", text]))
    return "\n".join(lines)


def side_by_side(
    folder: str, evaluated: str, titles: dict[str, str], *, router: bool = False
) -> str:
    """A column for every model of a folder of runs: what it is over its control.

    With ``router`` it is over Router of the same weight, where there is one.
    """
    rows = read(ROOT / "runs" / folder / "records.csv.gz")
    compare = partial(compared, rows, text="code-first-half", evaluated=evaluated)
    heading = "over the control's"
    if router:
        heading = "over Router's"
        titles = {model: title for model, title in titles.items() if "router" not in model}
    comparisons = []
    for model in titles:
        weight = "-w0.3" if "-w0.3" in model else ""
        comparisons.append(compare(model, control=f"router{weight}-160" if router else ""))
    lines = header([heading, *titles.values()])
    for metric, title in (("nll_dense", "dense NLL, nats"), ("context_gain", "context gain, nats")):
        figures = [shown(difference_figure(each.dense.loc[metric])) for each in comparisons]
        lines.append(line([title, *figures]))
    for title, place in SIDE_BY_SIDE.items():
        figures = [cell(each.row(*place), with_p=False) for each in comparisons]
        lines.append(line([title, *figures]))
    return "\n".join(lines)


def page_with_tables(text: str) -> str:
    """The page's text with every table as it is printed now."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- table {name} -->\n\n{table(name)}\n<!-- end of the table -->\n"

    return BLOCK.sub(block, text)


def main() -> None:
    """Print tables, write them into the pages, or check these."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="TABLE")
    parser.add_argument("--write", action="store_true", help="renew the tables of the page")
    parser.add_argument("--check", action="store_true", help="compare the page with the records")
    options = parser.parse_args()
    print("\n".join(table(name) for name in options.names), end="")
    if not (options.write or options.check):
        return
    text = PAGE.read_text(encoding="utf-8")
    written = page_with_tables(text)
    if options.write:
        PAGE.write_text(written, encoding="utf-8")
    elif written != text:
        print(f"{PAGE.relative_to(ROOT)} differs: see --write")
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
