"""``kvcat theory``: the constructions of the paper's theory, built and verified."""

from pathlib import Path

from kvcat.cli.options import Ints, Seed, Strings, flat


def histogram(symbols: int = 3, length: int = 8, scaling: Ints = (), out: Path = Path("out/theory/histogram")) -> None:
    """Build two transformers for the same histogram: one needs a single slot, no policy serves the other.

    Verifies both on every prefix and suffix, and prints the exact optimum over all policies against the
    number of slots and against N, beside the paper's bound.

    Example: kvcat theory histogram --symbols 3 --length 8

    Args:
        symbols: Size m of the alphabet.
        length: N, the longest sequence, prefix and suffix together.
        scaling: Values of N for the growth curves, 3 to 256; 4 8 16 32 by default.
        out: Folder for tables and the plot.
    """
    from kvcat.evals import provenance
    from kvcat.theory import run_histogram

    lengths = flat(scaling) or [4, 8, 16, 32]
    run_histogram(symbols=symbols, length=length, scaling=lengths, out=out, provenance=provenance())


def theorem(
    function: Strings = (),
    symbols: int = 2,
    length: int = 4,
    constant: float = 1.0,
    budget: str = "n-1",
    out: Path = Path("out/theory/theorem"),
    seed: Seed = 0,
) -> None:
    """Build both networks of the main theorem for a function and verify every sequence, split and policy.

    The networks differ in 2N rows of one matrix; they grow as m^N. The certified bound holds in exact
    arithmetic: slots of 1e15 and more can deceive float64.

    Example: kvcat theory theorem --function parity --symbols 2 --length 5 --budget 1

    Args:
        function: f: random, parity, last, majority, mean; all by default.
        symbols: Size m of the alphabet.
        length: N, the longest sequence, prefix and suffix together.
        constant: C > 0, which the error of every policy has to exceed.
        budget: Slots r(n) for n tokens: a number, n-1, or n/2.
        out: Folder for the tables.
    """
    from kvcat.evals import provenance
    from kvcat.theory import FUNCTIONS, run_theorem

    run_theorem(
        function=flat(function) or list(FUNCTIONS),
        symbols=symbols,
        length=length,
        constant=constant,
        budget=budget,
        seed=seed,
        out=out,
        provenance=provenance(),
    )


def errata() -> None:
    """Demonstrate what fails as printed or is loose, and print what holds instead.

    Example: kvcat theory errata
    """
    from kvcat.theory import run_errata

    run_errata()
