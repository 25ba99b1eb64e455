"""``kvcat theory``: the paper's theory as commands; each has a file of its own."""

import typer

theory_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Compressibility, as the paper defines it: what its theory says and what a model shows.",
)


@theory_app.callback()
def _group() -> None:
    """Keeps a sub-command's name part of the command line, even where there is one only."""
