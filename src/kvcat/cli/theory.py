"""The commands ``kvcat theory histogram`` and ``theorem``."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from kvcat.errors import InputError, check_in, check_least, unknown_name
from kvcat.files import atomic_write, check_writable, write_json
from kvcat.option_types import Counts, Seed, Strings, flat
from kvcat.provenance import provenance
from kvcat.theory import theorem as t
from kvcat.theory.definitions import (
    FUNCTIONS,
    Budget,
    FunctionTable,
    Transformer,
    compressibility,
    random_function,
)
from kvcat.theory.histogram import (
    check_histogram,
    compressible_histogram,
    histogram_policy,
    incompressible_histogram,
)
from kvcat.theory.optimum import budget_curve, definition_optimum, optimal_policy, scaling_curve

_SCALING = (4, 8, 16, 32)
_MOST_PAIRS = 1_000_000
_MOST_SEQUENCES = 256
_MOST_CONSTANT = 1e6
_TABLE: Any = {"index": False, "na_rep": "--", "float_format": "{:.5f}".format}
_STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
}
_MARKERS = ("o", "s", "^")


def histogram(
    *,
    symbols: int = 3,
    length: int = 8,
    scaling: Counts = (),
    out: Path = Path("out/theory/histogram"),
) -> None:
    """Build two transformers for the same histogram task, of which only one is compressible.

    One needs a single slot; no policy compresses the other without error. Both are verified on
    every prefix and suffix. The exact optimum over all policies is printed by number of slots and
    by N, next to the paper's bound.

    Example: kvcat theory histogram --symbols 3 --length 8

    Args:
        symbols: Size m of the alphabet.
        length: N, the longest sequence, prefix and suffix together.
        scaling: Values of N for the growth curves, 3 to 256; by default 4 8 16 32.
        out: Folder for tables and the plot.
    """
    lengths = sorted(set(flat(scaling) or _SCALING))
    _check_histogram_request(symbols, length, lengths)
    check_writable(out / "report.json")
    checks = _verify_histograms(symbols, length)
    print(
        f"Histogram of {symbols} symbols, sequences of up to {length}, "
        "two networks of one architecture"
    )
    for name, check in checks.items():
        widths = "-".join(str(width) for width in check["widths"])
        print(
            f"{name}: widths {widths}, error of the histogram {check['task_error']:.1e}; "
            f"one slot, all {check['num_pairs']} pairs of histograms: "
            f"worst error {check['worst_error']:.4g}"
        )
    best = definition_optimum(symbols, length, lambda _: 1)
    print(f"  exact optimum over all policies {best.error:.10f}\n")
    budgets = budget_curve(symbols, length)
    budgets["ratio"] = budgets.optimum / budgets.paper_bound
    _print_columns(
        budgets,
        {
            "num_slots": "slots",
            "optimum": "optimum",
            "single_length": "one length",
            "paper_bound": "bound",
            "ratio": "optimum/bound",
        },
    )
    curves = {
        "r = 1": scaling_curve(symbols, lengths, lambda _: 1),
        "r = max(1, n - 1)": scaling_curve(symbols, lengths, lambda n: max(1, n - 1)),
        "r = n - 1": scaling_curve(symbols, lengths, lambda n: n - 1),
    }
    growth = pd.concat([rows.assign(budget=name) for name, rows in curves.items()])
    print()
    _print_columns(
        growth,
        {
            "longest": "N",
            "budget": "budget",
            "definition_optimum": "optimum",
            "definition_prefix_len": "at n",
            "last_optimum": "at n = N-1, k = 1",
            "last_bound": "bound",
        },
    )
    _write(out, {"budget.csv": budgets, "scaling.csv": growth}, checks)
    one_slot = checks["Proposition 2 behind its policy"]["worst_error"]
    figure = _histogram_figure(symbols, budgets, curves, one_slot)
    figure.savefig(out / "histogram.png", dpi=150)
    print(out / "histogram.png")


def theorem(
    *,
    function: Strings = (),
    symbols: int = 2,
    length: int = 4,
    constant: float = 1.0,
    budget: str = "n-1",
    out: Path = Path("out/theory/theorem"),
    seed: Seed = 0,
) -> None:
    """Build both networks of the main theorem for a function and verify them.

    The check covers every sequence, split and policy. The networks differ in 2N rows of one matrix.
    Their size grows as m^N. The certified bound holds in exact arithmetic; in float64, slots of
    1e15 and more can violate it.

    Example: kvcat theory theorem --function parity --symbols 2 --length 5 --budget 1

    Args:
        function: Functions f; by default all of them.
        symbols: Size m of the alphabet.
        length: N, the longest sequence, prefix and suffix together.
        constant: C > 0; the error of every policy must exceed it.
        budget: Slots r(n) for n tokens: a number, n-1, or n/2.
        out: Folder for the tables.
        seed: Seed of the random function.
    """
    names = list(dict.fromkeys(flat(function) or FUNCTIONS))
    _check_theorem_request(names, symbols, length, constant)
    slots = parse_budget(budget)
    check_writable(out / "report.json")
    rows: list[dict[str, Any]] = []
    bounds: list[pd.DataFrame] = []
    for name in names:
        table = FUNCTIONS[name](symbols, length)
        if name == "random":
            table = random_function(symbols, length, seed=seed)
        easy = t.compressible_network(table)
        hard = t.incompressible_network(table, constant=constant)
        if not rows:
            print(_sizes(table, easy, hard, budget))
        bound = t.certified_bounds(hard, slots)
        margin = bound.bound - constant
        bounds.append(bound.assign(function=name, constant=constant, margin=margin))
        row = _verify_networks(table, easy, hard, float(bound.bound.min()), constant)
        rows.append({"function": name, **row})
        print(
            f"{name}: |M - f| {row['compressible |M - f|']:.0e}, "
            f"{row['incompressible |M - f|']:.0e}\n"
            f"  one slot: worst error {row['compressible, one slot']:.0e} over all prefixes and "
            f"suffixes\n"
            f"  C = {constant:g}: every policy errs by "
            f"{row['incompressible, certified for every policy']:.4g} at least (exact arithmetic)"
        )
    tables = {"theorem.csv": pd.DataFrame(rows), "bounds.csv": pd.concat(bounds)}
    _write(out, tables, {"seed": seed, "budget": budget})


def parse_budget(text: str) -> Budget:
    """The budget r(n): min(r, n) for a number r, n - 1 for "n-1", floor(n/2) for "n/2"."""
    named: dict[str, Budget] = {"n-1": lambda n: n - 1, "n/2": lambda n: n // 2}
    if text in named:
        return named[text]
    if not text.isdecimal():
        raise InputError(f"--budget is {text!r}; it must be a number, n-1 or n/2")
    return lambda n: min(int(text), n)


def _check_histogram_request(symbols: int, length: int, lengths: list[int]) -> None:
    check_least(1, symbols=symbols, length=length)
    if len(lengths) < 2 or not 3 <= lengths[0] <= lengths[-1] <= 256:
        raise InputError(f"--scaling needs at least two values, 3 to 256, not {lengths}")
    num_pairs = math.comb(length + 2 * symbols, 2 * symbols)
    if num_pairs > _MOST_PAIRS:
        pairs = f"{num_pairs:,} pairs of histograms, too many to verify"
        raise InputError(f"{symbols} symbols and N = {length} have {pairs}")


def _verify_histograms(symbols: int, length: int) -> dict[str, dict[str, Any]]:
    """The errors of both networks on all pairs of histograms."""
    hard = incompressible_histogram(symbols, length, num_blocks=4)
    easy = compressible_histogram(symbols, length)
    best_policy = optimal_policy(symbols, length, lambda _: 1)
    return {
        "Proposition 1 behind the best policy": check_histogram(hard, best_policy),
        "Proposition 2 behind its policy": check_histogram(easy, histogram_policy(symbols)),
    }


def _check_theorem_request(names: list[str], symbols: int, length: int, constant: float) -> None:
    unknown = [name for name in names if name not in FUNCTIONS]
    if unknown:
        raise unknown_name("function", unknown[0], FUNCTIONS)
    check_least(1, symbols=symbols, length=length)
    if length > 9 or symbols**length > _MOST_SEQUENCES:
        most = f"at most {_MOST_SEQUENCES} sequences of length N are verified"
        raise InputError(f"{symbols} symbols and N = {length}: {most}")
    check_in(f"(0, {_MOST_CONSTANT:g}]", constant=constant)


def _verify_networks(
    table: FunctionTable, easy: Transformer, hard: Transformer, least: float, constant: float
) -> dict[str, float]:
    """The errors of both networks for a function, over all sequences and splits."""
    policy = t.summary_policy(table.num_symbols, table.longest)
    return {
        "constant": constant,
        "compressible |M - f|": t.value_error(easy, table),
        "incompressible |M - f|": t.value_error(hard, table),
        "compressible, one slot": compressibility(easy, policy, lambda _: 1).error,
        "incompressible, certified for every policy": least,
        "margin of the certificate": least - constant,
    }


def _print_columns(frame: pd.DataFrame, names: Mapping[str, str]) -> None:
    """Print some columns of a table under other names."""
    shown = pd.DataFrame(frame, columns=list(names))
    shown.columns = list(names.values())
    print(shown.to_string(**_TABLE))


def _sizes(table: FunctionTable, easy: Transformer, hard: Transformer, budget: str) -> str:
    m, length = table.num_symbols, table.longest
    widths = "-".join(str(width) for block in easy.blocks for width in block.feed_forward.w_1.shape)
    size = sum(matrix.numel() for matrix in t.matrices(easy).values())
    num_splits = sum((j - 1) * m**j for j in range(2, length + 1))
    differ = ", ".join(
        f"{len(rows)} rows of {matrix}" for matrix, rows in t.differing_rows(easy, hard).items()
    )
    return (
        f"{m} symbols, N = {length}, r(n) = {budget}: {sum(map(len, table.values))} sequences, "
        f"{num_splits} splits, all verified\nconstruction D: widths {widths}, "
        f"{size} parameters; the two networks differ in {differ}\n"
    )


def _write(out: Path, tables: Mapping[str, pd.DataFrame], report: Mapping[str, Any]) -> None:
    """Write a CSV file per table in full precision, and report.json; print their paths."""
    print()
    for name, frame in tables.items():
        with atomic_write(out / name) as partial:
            frame.to_csv(partial, index=False)
        print(out / name)
    write_json(out / "report.json", {**report, "provenance": provenance()})
    print(out / "report.json")


def _histogram_figure(
    symbols: int, budgets: pd.DataFrame, curves: Mapping[str, pd.DataFrame], one_slot: float
) -> Figure:
    """The figure of the error against r, and of the optimum and the bound against N."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9.0, 4.0), layout="tight")
        error_axes, growth_axes = figure.subplots(1, 2)
    _draw_errors(error_axes, symbols, budgets, one_slot)
    _draw_growth(growth_axes, curves)
    for axes in (error_axes, growth_axes):
        axes.legend(fontsize=8, frameon=False)
    return figure


def _draw_errors(axes: Any, symbols: int, budgets: pd.DataFrame, one_slot: float) -> None:
    names = {
        "optimum": "exact optimum, suffixes of all lengths",
        "single_length": "exact optimum, one suffix length",
        "paper_bound": "the paper's bound",
    }
    for marker, (column, name) in zip(_MARKERS, names.items(), strict=True):
        axes.plot(budgets.num_slots, budgets[column], marker=marker, label=name)
    axes.set(xlabel="slots r, r(n) = min(r, n)", ylabel="worst error over prefixes and suffixes")
    axes.set_title(f"m = {symbols}, N = {len(budgets) + 1}: no policy below the optimum")
    axes.set_ylim(bottom=0.0)
    text = f"Proposition 2, one slot: {one_slot:.0e}"
    axes.text(0.97, 0.68, text, transform=axes.transAxes, ha="right")


def _draw_growth(axes: Any, curves: Mapping[str, pd.DataFrame]) -> None:
    lengths: list[int] = []
    for rank, (name, rows) in enumerate(curves.items()):
        lengths = rows.longest.tolist()
        style = {"color": f"C{rank}", "marker": _MARKERS[rank]}
        axes.plot(rows.longest, rows.definition_optimum, **style, label=f"optimum, {name}")
        bound = {"ls": "--", "mfc": "white", "label": f"the paper's constant, {name}"}
        axes.plot(rows.longest, rows.last_bound, **style, **bound)
    axes.set(xscale="log", yscale="log", title="Against N")
    axes.set(xlabel="N (log axis)", ylabel="worst error (log axis)")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=axes.get_ylim()[0] / 20)
