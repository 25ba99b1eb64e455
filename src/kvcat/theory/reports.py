"""The commands ``kvcat theory histogram`` and ``theorem``: tables, CSV, JSON and a plot."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from kvcat.errors import InputError, check_least
from kvcat.files import atomic_write, make_folder, write_json
from kvcat.provenance import provenance
from kvcat.theory import theorem as t
from kvcat.theory.definitions import FUNCTIONS, Budget, FunctionTable, Transformer, compressibility, random_function
from kvcat.theory.histogram import check_histogram, compressible_histogram, histogram_policy, incompressible_histogram
from kvcat.theory.optimum import budget_curve, definition_optimum, optimal_policy, scaling_curve

_MOST_PAIRS, _MOST_SEQUENCES, _MOST_CONSTANT = 1_000_000, 256, 1e6
_TABLE: Any = {"index": False, "na_rep": "--", "float_format": "{:.5f}".format}
_STYLE: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}


def run_histogram(
    *,
    symbols: int = 3,
    length: int = 8,
    scaling: tuple[int, ...] = (4, 8, 16, 32),
    out: Path = Path("out/theory/histogram"),
) -> None:
    """Build two transformers for the same histogram: one needs a single slot, no policy serves the other.

    Verifies both on every prefix and suffix, and prints the exact optimum over all policies against the
    number of slots and against N, beside the paper's bound.

    Example: kvcat theory histogram --symbols 3 --length 8

    Args:
        symbols: Size m of the alphabet.
        length: N, the longest sequence, prefix and suffix together.
        scaling: Values of N for the growth curves, 3 to 256.
        out: Folder for tables and the plot.
    """
    check_least(1, symbols=symbols, length=length)
    lengths = sorted(set(scaling))
    if len(lengths) < 2 or not 3 <= lengths[0] <= lengths[-1] <= 256:
        raise InputError(f"--scaling takes two values at least, 3 to 256, not {lengths}")
    pairs = math.comb(length + 2 * symbols, 2 * symbols)
    if pairs > _MOST_PAIRS:
        raise InputError(f"{symbols} symbols and N = {length} have {pairs:,} pairs of histograms, too many to verify")
    hard = incompressible_histogram(symbols, length, num_blocks=4)
    make_folder(out)
    best, easy = definition_optimum(symbols, length, lambda _: 1), compressible_histogram(symbols, length)
    checks = {
        "Proposition 1 behind the best policy": check_histogram(hard, optimal_policy(symbols, length, lambda _: 1)),
        "Proposition 2 behind its policy": check_histogram(easy, histogram_policy(symbols)),
    }
    print(f"Histogram of {symbols} symbols, sequences of up to {length}, two networks of one architecture")
    for name, check in checks.items():
        print(
            f"{name}: widths {'-'.join(map(str, check['widths']))}, error of the histogram {check['task_error']:.1e}; "
            f"one slot, all {check['num_pairs']} pairs of histograms: worst error {check['worst_error']:.4g}"
        )
    print(f"  exact optimum over all policies {best.error:.10f}\n")
    budgets = budget_curve(symbols, length)
    budgets["ratio"] = budgets.optimum / budgets.paper_bound
    shown = pd.DataFrame(budgets, columns=["num_slots", "optimum", "single_length", "paper_bound", "ratio"])
    print(shown.set_axis(["slots", "optimum", "one length", "bound", "optimum/bound"], axis=1).to_string(**_TABLE))
    curves = {
        "r = 1": scaling_curve(symbols, lengths, lambda _: 1),
        "r = max(1, n - 1)": scaling_curve(symbols, lengths, lambda n: max(1, n - 1)),
        "r = n - 1": scaling_curve(symbols, lengths, lambda n: n - 1),
    }
    growth = pd.concat([rows.assign(budget=name) for name, rows in curves.items()])
    names = "longest budget definition_optimum definition_prefix_len last_optimum last_bound"
    shown = pd.DataFrame(growth, columns=names.split())
    shown.columns = ["N", "budget", "optimum", "at n", "at n = N-1, k = 1", "bound"]
    print("\n" + shown.to_string(**_TABLE))
    _write(out, {"budget.csv": budgets, "scaling.csv": growth}, checks)
    figure = _histogram_figure(symbols, budgets, curves, checks["Proposition 2 behind its policy"]["worst_error"])
    figure.savefig(out / "histogram.png", dpi=150)
    print(out / "histogram.png")


def run_theorem(
    *,
    function: tuple[str, ...] = tuple(FUNCTIONS),
    symbols: int = 2,
    length: int = 4,
    constant: float = 1.0,
    budget: str = "n-1",
    out: Path = Path("out/theory/theorem"),
    seed: int = 0,
) -> None:
    """Build both networks of the main theorem for a function and verify every sequence, split and policy.

    The networks differ in 2N rows of one matrix; they grow as m^N. The certified bound holds in exact
    arithmetic: slots of 1e15 and more can deceive float64.

    Example: kvcat theory theorem --function parity --symbols 2 --length 5 --budget 1

    Args:
        function: f; several may be given.
        symbols: Size m of the alphabet.
        length: N, the longest sequence, prefix and suffix together.
        constant: C > 0, which the error of every policy has to exceed.
        budget: Slots r(n) for n tokens: a number, n-1, or n/2.
        out: Folder for the tables.
        seed: Seed of the random function.
    """
    names = list(dict.fromkeys(function))
    if unknown := [name for name in names if name not in FUNCTIONS]:
        raise InputError(f"no function {unknown[0]!r}; there are {', '.join(FUNCTIONS)}")
    check_least(1, symbols=symbols, length=length)
    slots = parse_budget(budget)
    if length > 9 or symbols**length > _MOST_SEQUENCES:
        most = f"at most {_MOST_SEQUENCES} sequences of length N are verified"
        raise InputError(f"{symbols} symbols and N = {length}: {most}")
    if not 0.0 < constant <= _MOST_CONSTANT:
        raise InputError(f"--constant is {constant:g}; it must be positive and at most {_MOST_CONSTANT:g}")
    make_folder(out)
    rows: list[dict[str, Any]] = []
    bounds: list[pd.DataFrame] = []
    for name in names:
        table = random_function(symbols, length, seed=seed) if name == "random" else FUNCTIONS[name](symbols, length)
        easy, hard = t.compressible_network(table), t.incompressible_network(table, constant=constant)
        if not rows:
            print(_sizes(table, easy, hard, budget))
        some = t.certified_bounds(hard, slots)
        bounds.append(some.assign(function=name, constant=constant, margin=some.bound - constant))
        errors = t.value_error(easy, table), t.value_error(hard, table)
        one_slot = compressibility(easy, t.summary_policy(symbols, length), lambda _: 1).error
        least = float(some.bound.min())
        rows.append({
            "function": name, "constant": constant, "compressible |M - f|": errors[0],
            "incompressible |M - f|": errors[1], "compressible, one slot": one_slot,
            "incompressible, certified for every policy": least, "margin of the certificate": least - constant,
        })  # fmt: skip
        print(
            f"{name}: |M - f| {errors[0]:.0e}, {errors[1]:.0e}\n"
            f"  one slot: worst error {one_slot:.0e} over all prefixes and suffixes\n"
            f"  C = {constant:g}: every policy errs by {least:.4g} at least (exact arithmetic)"
        )
    tables = {"theorem.csv": pd.DataFrame(rows), "bounds.csv": pd.concat(bounds)}
    _write(out, tables, {"seed": seed, "budget": budget})


def parse_budget(text: str) -> Budget:
    """r(n): a number r stands for min(r, n), "n-1" and "n/2" (rounded down) for themselves."""
    named: dict[str, Budget] = {"n-1": lambda n: n - 1, "n/2": lambda n: n // 2}
    if text in named:
        return named[text]
    if not text.isdecimal():
        raise InputError(f"--budget is {text!r}; it must be a number, n-1 or n/2")
    return lambda n: min(int(text), n)


def _sizes(table: FunctionTable, easy: Transformer, hard: Transformer, budget: str) -> str:
    m, length = table.num_symbols, table.longest
    widths = "-".join(str(width) for block in easy.blocks for width in block.feed_forward.w_1.shape)
    size = sum(matrix.numel() for matrix in t.matrices(easy).values())
    num_splits = sum((j - 1) * m**j for j in range(2, length + 1))
    differ = ", ".join(f"{len(rows)} rows of {matrix}" for matrix, rows in t.differing_rows(easy, hard).items())
    return (
        f"{m} symbols, N = {length}, r(n) = {budget}: {sum(map(len, table.values))} sequences, "
        f"{num_splits} splits, all verified\nconstruction D: widths {widths}, "
        f"{size} parameters; the two networks differ in {differ}\n"
    )


def _write(out: Path, tables: Mapping[str, pd.DataFrame], report: Mapping[str, Any]) -> None:
    """A CSV file per table in full precision and report.json; prints their paths."""
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
    """Error against r, and optimum and bound against N."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9.0, 4.0), layout="tight")
        error, growth = figure.subplots(1, 2)
    names = "exact optimum, suffixes of all lengths", "exact optimum, one suffix length", "the paper's bound"
    for column, name, marker in zip(("optimum", "single_length", "paper_bound"), names, "os^", strict=True):
        error.plot(budgets.num_slots, budgets[column], marker=marker, label=name)
    error.set(xlabel="slots r, r(n) = min(r, n)", ylabel="worst error over prefixes and suffixes")
    error.set_title(f"m = {symbols}, N = {len(budgets) + 1}: no policy below the optimum")
    error.set_ylim(bottom=0.0)
    error.text(0.97, 0.68, f"Proposition 2, one slot: {one_slot:.0e}", transform=error.transAxes, ha="right")
    for rank, (name, rows) in enumerate(curves.items()):
        style = {"color": f"C{rank}", "marker": "os^"[rank]}
        growth.plot(rows.longest, rows.definition_optimum, **style, label=f"optimum, {name}")
        growth.plot(rows.longest, rows.last_bound, **style, ls="--", mfc="white", label=f"the paper's constant, {name}")
    ticks = next(iter(curves.values())).longest
    growth.set(xscale="log", yscale="log", title="Against N", xlabel="N (log axis)", ylabel="worst error (log axis)")
    growth.set_xticks(ticks, [str(tick) for tick in ticks])
    growth.minorticks_off()
    growth.set_ylim(bottom=growth.get_ylim()[0] / 20)
    for axes in (error, growth):
        axes.legend(fontsize=8, frameon=False)
    return figure
