"""``kvcat theory errata``: what fails as printed, shown."""

import textwrap


def errata_command() -> None:
    """Statements of the paper's theory that fail as printed, or are loose, each demonstrated beside what holds.

    Example: kvcat theory errata
    """
    from kvcat.theory.errata import errata

    for erratum in errata():
        print(erratum.place)
        lines = (("printed", erratum.printed), ("shown", erratum.shown), ("instead", erratum.instead))
        for name, text in lines:
            print(textwrap.fill(text, 110, initial_indent=f"  {name:8s} ", subsequent_indent=" " * 11))
