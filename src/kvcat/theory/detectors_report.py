"""The main theorem for one function: both networks of Construction D, everything verified, in one record.

References: KV-CAT, the main theorem ("the same architecture") and appendix "Compressible Transformers for General
Functions".
"""

from dataclasses import dataclass

from kvcat.theory.compression import Budget, WorstCase
from kvcat.theory.detectors import (
    Layout,
    alarm_gain,
    compressible_network,
    differing_rows,
    incompressible_network,
)
from kvcat.theory.detectors_bound import Certificate, compressed_lengths, verify_incompressible
from kvcat.theory.detectors_checks import (
    UnitErrors,
    Widths,
    num_splits,
    verify_compressible,
    verify_units,
    verify_values,
    widths,
)
from kvcat.theory.detectors_search import FoundPolicy, search_policies
from kvcat.theory.functions import FunctionTable


@dataclass(frozen=True)
class TheoremReport:
    """What Construction D does for one f, C and r. Errors are Euclidean norms in the unit of f.

    Attributes:
        constant: C.
        gain: U, the weight of an alarm in the incompressible network (0 in the other).
        widths: sizes of both networks.
        compressible_values: the largest |M_1 - f| over every sequence.
        incompressible_values: the largest |M_2 - f| over every sequence.
        one_slot: the largest error of M_1 behind one slot over every split, and the split.
        units: deviations of the feed-forward maps of M_1 from what they claim.
        certificate: below it no policy's error on M_2 falls, whatever the prefix of a length with r(n) < n.
        found: the smallest worst error on M_2 that a search over policies found.
        rows: rows that differ between the two networks, by matrix.
        num_sequences: number of sequences looked at.
        num_splits: number of splits looked at.
    """

    constant: float
    gain: float
    widths: Widths
    compressible_values: float
    incompressible_values: float
    one_slot: WorstCase
    units: UnitErrors
    certificate: Certificate
    found: FoundPolicy
    rows: dict[str, tuple[int, ...]]
    num_sequences: int
    num_splits: int


def theorem_report(
    table: FunctionTable,
    constant: float,
    budget: Budget,
    *,
    num_starts: int = 4,
    num_steps: int = 60,
    seed: int = 0,
) -> TheoremReport:
    """Both networks built and verified, exhaustively over every sequence of 1 to N symbols and every split.

    Args:
        table: f, on sequences of 1 to N >= 2 symbols.
        constant: C > 0, in the unit of f.
        budget: r(n), 0 <= r(n) <= n, with r(n) < n at one n < N at least.
        num_starts: random starts of the search, per prefix.
        num_steps: gradient steps of the search from every start.
        seed: of the search.

    Raises:
        ValueError: N < 2, C not positive or not finite, a budget that compresses nothing.
    """
    gain = alarm_gain(table, constant)
    compressed_lengths(table.longest, budget)
    first, second = compressible_network(table), incompressible_network(table, constant=constant)
    return TheoremReport(
        constant=constant,
        gain=gain,
        widths=widths(table.num_symbols, table.longest, table.d_out),
        compressible_values=verify_values(first, table),
        incompressible_values=verify_values(second, table),
        one_slot=verify_compressible(first),
        units=verify_units(first),
        certificate=verify_incompressible(second, constant, budget),
        found=search_policies(second, budget, num_starts=num_starts, num_steps=num_steps, seed=seed),
        rows=differing_rows(first, second),
        num_sequences=Layout(table.num_symbols, table.longest).num_sequences,
        num_splits=num_splits(table.num_symbols, table.longest),
    )
