"""The ``kvcat`` command and how it ends."""

import errno
import os
import sys
from itertools import pairwise
from typing import Any

import typer

from kvcat.cli.compress import compress_command
from kvcat.cli.demo import demo_command
from kvcat.cli.eval_longbench import longbench_command
from kvcat.cli.eval_needle import needle_command
from kvcat.cli.eval_qa import qa_command
from kvcat.cli.eval_ruler import ruler_command
from kvcat.cli.eval_suffix import suffix_command
from kvcat.cli.evaluate import eval_app
from kvcat.cli.export import export_command
from kvcat.cli.generate import generate_command
from kvcat.cli.info import info_command
from kvcat.cli.options import spread_values
from kvcat.cli.pack import pack_command
from kvcat.cli.prepare import prepare_command
from kvcat.cli.report import report_command
from kvcat.cli.theory import theory_app
from kvcat.cli.theory_errata import errata_command
from kvcat.cli.theory_histogram import histogram_command
from kvcat.cli.theory_profile import profile_command
from kvcat.cli.theory_theorem import theorem_command
from kvcat.cli.theory_train import train_histogram_command
from kvcat.cli.train import train_command
from kvcat.errors import InputError

app = typer.Typer(
    name="kvcat",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=(
        "Transformers with compressible KV caches: train them (KV-CAT), compress their caches, measure both.\n\n"
        "Start with `kvcat demo --quick`: it trains a small model that comes with the package, compresses held-out "
        "text and writes a report; no download, no GPU."
    ),
)
app.command("demo", short_help="The whole story on a small model, offline.")(demo_command)
app.command("prepare", short_help="Tokenise text once, for training on any number of nodes.")(prepare_command)
app.command("train", short_help="Continue a checkpoint's pretraining with KV-CAT.")(train_command)
app.command("export", short_help="A checkpoint of a run as a Hugging Face folder.")(export_command)
app.command("compress", short_help="Compress a document's KV cache and save it.")(compress_command)
app.command("generate", short_help="Answer prompts from a saved cache.")(generate_command)
app.command("info", short_help="What a cache file holds and saves.")(info_command)
app.command("pack", short_help="A saved cache for another engine.")(pack_command)
eval_app.command("suffix", short_help="Held-out text behind a compressed prefix.")(suffix_command)
eval_app.command("needle", short_help="A passkey found in a compressed haystack.")(needle_command)
eval_app.command("longbench", short_help="LongBench v2 on compressed contexts.")(longbench_command)
eval_app.command("ruler", short_help="RULER's synthetic tasks on compressed contexts.")(ruler_command)
eval_app.command("qa", short_help="Multiple choice without compression.")(qa_command)
app.add_typer(eval_app, name="eval", short_help="Measure what a compressed cache costs.")
theory_app.command("histogram", short_help="The motivating example and its exact optimum.")(histogram_command)
theory_app.command("theorem", short_help="The main theorem for any function, verified.")(theorem_command)
theory_app.command("train", short_help="Which solution of the histogram training finds.")(train_histogram_command)
theory_app.command("errata", short_help="What fails as printed or is loose, demonstrated.")(errata_command)
theory_app.command("profile", short_help="Error of the best cache found against its slots.")(profile_command)
app.add_typer(theory_app, name="theory", short_help="Compressibility as the paper defines it.")
app.command("report", short_help="Tables, plots and a page from evaluations.")(report_command)

_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _show_version(wanted: bool | None) -> None:
    if wanted:
        import kvcat

        print(f"kvcat {kvcat.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool | None = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_show_version
    ),
) -> None:
    """Options of the program itself."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 a person's mistake (one line), 128 + signal when stopped by one."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Run the command line; returns the exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        result: object = app(args=spread_values(argv), prog_name="kvcat", standalone_mode=False)
    except InputError as error:
        return _say(str(error), 2)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.ctx.get_help())
            return 0
        return _say(error.format_message() + _value_given(error, argv), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", 130)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _say(f"no space left on the disk{f' for {error.filename}' if error.filename else ''}", 2)
        if error.errno in _NOT_ALLOWED and error.filename:
            return _say(f"cannot use {error.filename}: {error.strerror}", 2)
        raise
    except Exception as error:
        if type(error).__name__ == "Stopped":
            return _say(str(error), 128 + error.signum)  # type: ignore[attr-defined]
        raise
    return result if isinstance(result, int) else 0


def _value_given(error: Any, argv: list[str]) -> str:
    """The offending value of an option, which typer's own message leaves out."""
    names = getattr(getattr(error, "param", None), "opts", ())
    for argument, following in pairwise([*argv, ""]):
        name, separator, value = argument.partition("=")
        if name in names and name.startswith("-"):
            return f", not {value if separator else following!r}"
    return ""


def _say(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"kvcat: {line}", file=sys.stderr)
    return code
