"""``kvcat theory theorem``: for any function, a network that one slot serves and one that no policy serves."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcat.cli.options import Seed, Strings, check_least, flat
from kvcat.cli.theory import results_folder, write_results
from kvcat.errors import InputError

if TYPE_CHECKING:
    from kvcat.theory.detectors_report import TheoremReport

FUNCTION_NAMES = ("random", "parity", "last", "majority", "mean")
_ERRORS = (
    "compressible, one slot",
    "incompressible, certified for every policy",
    "incompressible, best policy found",
)

_MOST_SEQUENCES, _MOST_CONSTANT = 256, 1e6


def theorem_command(
    function: Strings = (),
    symbols: int = 2,
    length: int = 4,
    constant: float = 1.0,
    budget: str = "n-1",
    out: Path = Path("out/theory/theorem"),
    seed: Seed = 0,
) -> None:
    """The main theorem for a function: everything built, and verified on every sequence, split and budgeted policy.

    Construction D makes both networks, equal but for 2N rows of one matrix; they grow as m^N. Certificates hold in
    exact arithmetic: slots of 1e15 and more can deceive float64.

    Example: kvcat theory theorem --function parity --symbols 2 --length 5 --budget 1

    Args:
        function: f: random, parity, last, majority, mean; all by default.
        symbols: Size m of the alphabet.
        length: N, the longest sequence, prefix and suffix together.
        constant: C > 0: what every policy's error has to exceed.
        budget: Slots r(n) for n tokens: a number, n-1, or n/2.
        out: Folder for the table and the plot.
    """
    check_least(2, symbols=symbols, length=length)
    names = list(dict.fromkeys(flat(function) or FUNCTION_NAMES))
    for name in names:
        if name not in FUNCTION_NAMES:
            raise InputError(f"no function {name!r}; there are {', '.join(FUNCTION_NAMES)}")
    slots = parse_budget(budget)
    if length > 9 or symbols**length > _MOST_SEQUENCES:
        raise InputError(
            f"{symbols} symbols and N = {length}: at most {_MOST_SEQUENCES} sequences of length N are verified"
        )
    if not 0.0 < constant <= _MOST_CONSTANT:
        raise InputError(f"--constant is {constant:g}; it must be positive and at most {_MOST_CONSTANT:g}")

    from kvcat.report.theory_plots import save_theorem_plot
    from kvcat.theory.detectors import incompressible_network
    from kvcat.theory.detectors_bound import certified_bound, compressed_lengths
    from kvcat.theory.detectors_report import theorem_report
    from kvcat.theory.functions import FUNCTIONS, random_function

    chosen = {
        name: random_function(symbols, length, seed=seed) if name == "random" else FUNCTIONS[name](symbols, length)
        for name in names
    }
    lengths = compressed_lengths(length, slots)
    results_folder(out)

    rows: list[dict[str, Any]] = []
    bounds: list[dict[str, Any]] = []
    for name, table in chosen.items():
        both = theorem_report(table, constant, slots, seed=seed)
        network = incompressible_network(table, constant=constant)
        for n, k, r in lengths:
            bound = certified_bound(network, n, k, r)
            bounds.append(
                {
                    "function": name,
                    "n": n,
                    "k": k,
                    "r": r,
                    "bound": bound,
                    "constant": constant,
                    "margin": bound - constant,
                }
            )
        if not rows:
            print(_sizes(symbols, length, budget, both))
        rows.append(_row(name, both))
        print(_told(rows[-1], both))
    written = write_results(out, {"theorem.csv": rows, "bounds.csv": bounds}, {"seed": seed, "budget": budget})
    errors = {row["function"]: {name: row[name] for name in _ERRORS} for row in rows}
    for path in [*written, *save_theorem_plot(errors, constant, out)]:
        print(path)


def parse_budget(text: str) -> Callable[[int], int]:
    """r(n): a number r stands for min(r, n), "n-1" and "n/2" (rounded down) for themselves."""
    named: dict[str, Callable[[int], int]] = {"n-1": lambda n: n - 1, "n/2": lambda n: n // 2}
    if text in named:
        return named[text]
    if not text.isdecimal():
        raise InputError(f"--budget is {text!r}; it must be a number, n-1 or n/2")
    return lambda n: min(int(text), n)


def _sizes(symbols: int, length: int, budget: str, report: "TheoremReport") -> str:
    widths, (matrix, *others) = report.widths, report.rows
    same = f"{len(report.rows[matrix])} rows of {matrix}" + "".join(
        f", {len(report.rows[name])} of {name}" for name in others
    )
    return (
        f"{symbols} symbols, N = {length}, r(n) = {budget}: {report.num_sequences} sequences, "
        f"{report.num_splits} splits, all verified\n"
        f"construction D: widths {widths.embedding}-{widths.first_hidden}-{widths.residual}-{widths.second_hidden}, "
        f"{widths.num_parameters} parameters; the two networks differ in {same}\n"
    )


def _row(name: str, both: "TheoremReport") -> dict[str, Any]:
    errors = (both.one_slot.error, both.certificate.bound, both.found.error)
    return {
        "function": name,
        "constant": both.constant,
        "compressible |M - f|": both.compressible_values,
        "incompressible |M - f|": both.incompressible_values,
        **dict(zip(_ERRORS, errors, strict=True)),
        "margin of the certificate": both.certificate.margin,
    }


def _told(row: dict[str, Any], report: "TheoremReport") -> str:
    first, second, third = (row[name] for name in _ERRORS)
    return (
        f"{row['function']}: |M - f| {row['compressible |M - f|']:.0e}, {row['incompressible |M - f|']:.0e}\n"
        f"  one slot: worst error {first:.0e} over all prefixes and suffixes\n"
        f"  C = {row['constant']:g}: every policy errs by {second:.4g} at least (exact arithmetic; the best of "
        f"{report.found.num_caches} found: {third:.4g})"
    )
