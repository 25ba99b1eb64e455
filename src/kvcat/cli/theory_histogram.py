"""``kvcat theory histogram``: the motivating example, its exact optimum and the paper's bound."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvcat.cli.options import Ints, Seed, check_least, flat
from kvcat.cli.theory import results_folder, write_results
from kvcat.errors import InputError

if TYPE_CHECKING:
    from kvcat.theory.histogram_curves import ScalingRow
    from kvcat.theory.histogram_report import HistogramReport, NetworkCheck

_MOST_COUNTS = 5000


def histogram_command(
    symbols: int = 3,
    length: int = 8,
    scaling: Ints = (),
    out: Path = Path("out/theory/histogram"),
    seed: Seed = 0,
) -> None:
    """Two transformers for the same histogram: one needs a single slot, the other resists every policy.

    Builds both with explicit weights, verifies them on every prefix and suffix (or a sample where there are too
    many), and prints the exact optimum over all policies against the number of slots beside the paper's bound.

    Example: kvcat theory histogram --symbols 3 --length 8

    Args:
        symbols: Size m of the alphabet.
        length: N, the longest sequence, prefix and suffix together.
        scaling: Values of N for the growth curves, 3 to 256; 4 8 16 32 by default.
        out: Folder for tables and the plot.
    """
    check_least(2, symbols=symbols, length=length)
    lengths = sorted(set(flat(scaling) or [4, 8, 16, 32]))
    if not 3 <= lengths[0] <= lengths[-1] <= 256 or len(lengths) < 2:
        raise InputError(f"--scaling takes two values at least, 3 to 256, not {lengths}")
    counts = math.comb(length + symbols - 1, symbols - 1)
    if counts > _MOST_COUNTS:
        raise InputError(
            f"{symbols} symbols and N = {length} have {counts} histograms; at most {_MOST_COUNTS} are verified"
        )
    results_folder(out)

    from kvcat.report.theory_plots import save_histogram_plot
    from kvcat.theory.histogram_curves import budget_curve, scaling_curve
    from kvcat.theory.histogram_report import histogram_report

    report = histogram_report(symbols, length, seed=seed)
    print(_networks(symbols, length, report))
    budgets = budget_curve(symbols, length)
    print("\n slots   optimum  one length     bound  optimum/bound")
    for row in budgets:
        ratio = f"{row.optimum / row.paper_bound:14.3f}" if row.paper_bound else f"{'--':>14}"
        print(f"{row.num_slots:6d} {row.optimum:9.5f} {row.single_length:11.5f} {row.paper_bound:9.5f} {ratio}")
    curves = {
        "r = 1": scaling_curve(symbols, lengths, lambda _: 1),
        "r = max(1, n - 1)": scaling_curve(symbols, lengths, lambda n: max(1, n - 1)),
        "r = n - 1": scaling_curve(symbols, lengths, lambda n: n - 1),
    }
    print(_growth(curves))
    grown = [{"budget": name, **asdict(row)} for name, rows in curves.items() for row in rows]
    tables = {"budget.csv": [asdict(row) for row in budgets], "scaling.csv": grown}
    written = write_results(out, tables, {"seed": seed, "networks": asdict(report)})
    one_slot = report.compressible.behind_policy.error
    for path in [*written, *save_histogram_plot(budgets, curves, one_slot, out)]:
        print(path)


def _networks(symbols: int, length: int, report: "HistogramReport") -> str:
    def line(name: str, check: "NetworkCheck") -> str:
        looked = f"all {check.num_pairs}" if check.exhaustive else f"{check.num_pairs} drawn"
        return (
            f"{name}: widths {'-'.join(map(str, check.widths))}, error of the histogram {check.task_error:.1e}, "
            f"of its maps {check.map_error:.1e}; one slot, {looked} prefixes and suffixes: worst error "
            f"{check.behind_policy.error:.4g}"
        )

    return "\n".join(
        [
            f"Histogram of {symbols} symbols, sequences of up to {length}, two networks of one architecture",
            line("Proposition 1 behind the best policy", report.incompressible),
            f"  exact optimum over all policies {report.optimum:.10f}; a gradient search reached {report.found:.10f}",
            line("Proposition 2 behind its policy", report.compressible),
        ]
    )


def _growth(curves: "dict[str, list[ScalingRow]]") -> str:
    from kvcat.theory.histogram_optimum import fitted_exponent

    lines = ["\n     N  budget              optimum  at n  at n = N-1, k = 1   bound"]
    for name, rows in curves.items():
        lines += [
            f"{row.longest:6d}  {name:17s} {row.definition_optimum:9.5f} {row.definition_prefix_len:5d} "
            f"{row.last_optimum:18.5f} {row.last_bound:9.5f}"
            for row in rows
        ]
    long = curves["r = n - 1"]
    rate = fitted_exponent([row.longest for row in long], [row.last_bound for row in long])
    lines.append(f"The paper's constant at r = n - 1 falls as N^{rate:.2f}; no optimum over all n falls with N.")
    return "\n".join(lines)
