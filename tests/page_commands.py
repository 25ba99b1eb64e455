"""Commands in the Markdown pages: what code blocks and inline code show to a reader."""

import dataclasses
import functools
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcat.cli import app, train
from kvcat.cli.options import _options, parse
from kvcat.cli.threads import take_threads
from kvcat.recipes import RECIPES
from kvcat.training.config import TrainConfig

ROOT = Path(__file__).parent.parent
SHELL = ("sh", "bash", "console", "")
COMMON_OPTIONS = {"--help", "--threads"}
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")
_COMMAND_END = ("|", "&", "&&", ";", ">")


@dataclass(frozen=True)
class Command:
    """A command as a page shows it: the words after the name of the program."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def pages() -> list[str]:
    """The pages whose commands must work today; the log keeps those of its day."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    for folder in ("benchmarks", "examples", "runs"):
        paths += ROOT.glob(f"{folder}/**/*.md")
    names = sorted(str(path.relative_to(ROOT)) for path in paths)
    return [name for name in names if name != "docs/log.md"]


def _blocks_and_prose(page: str) -> tuple[list[tuple[str, str]], str]:
    """The code blocks of a page, each with its language, and its text without them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = [(match[1], match[2]) for match in _FENCED.finditer(text)]
    return blocks, _FENCED.sub("", text)


def inline_code(page: str) -> list[str]:
    """The pieces of code in the prose of a page, each on one line."""
    _, prose = _blocks_and_prose(page)
    return [" ".join(code.split()) for code in _INLINE.findall(prose)]


def shell_lines(page: str) -> Iterator[str]:
    """The lines in the code blocks of a page, without prompts and comments; continued joined."""
    blocks, _ = _blocks_and_prose(page)
    for language, code in blocks:
        if language in SHELL:
            joined = re.sub(r"(^| )#.*", "", re.sub(r" *\\\n *", " ", code), flags=re.MULTILINE)
            yield from (line.removeprefix("$ ") for line in joined.splitlines())


def commands(page: str, lines: Iterator[str] | list[str], program: str) -> list[Command]:
    """The commands of a program in lines of a page; those with an ellipsis are left out."""
    calls = []
    for line in lines:
        for start in re.finditer(rf"(?<![\w./'\"+-]){re.escape(program)} ", line):
            is_package = "pip install" in line[: start.start()]
            words = () if is_package else _words(line[start.end() :])
            if words and not any(word.endswith("...") for word in words):
                calls.append(Command(page, words))
    return calls


def _words(line: str) -> tuple[str, ...]:
    """The words of one command, up to a comment or to the next command of the line."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quotation that ends on a later line
        return ()
    for number, word in enumerate(words):
        if word in _COMMAND_END:
            return tuple(words[:number])
    return tuple(words)


def command_name(words: tuple[str, ...]) -> str:
    """The name of the command that words of a ``kvcat`` command line begin with; or nothing."""
    names = [name for name in app.commands() if tuple(name.split()) == words[: len(name.split())]]
    return names[0] if names else ""


def parsed_options(words: tuple[str, ...]) -> dict[str, Any]:
    """The options of a ``kvcat`` command line by name; nothing is run.

    Raises:
        InputError: the command line has no such command, option or value.
    """
    name = command_name(words)
    arguments = take_threads(name, list(words[len(name.split()) :]))
    if name == "train":
        recipe_name, options = train._split_recipe(arguments)
        return vars(train._parse_options(recipe_name, RECIPES[recipe_name], options).run)
    target = app._function(name)
    if not isinstance(target, type):
        target = _returns_its_arguments(target)
    options = parse(target, f"kvcat {name}", arguments)
    return options if isinstance(options, dict) else vars(options)


def _returns_its_arguments(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """A function with the parameters of another one that returns them by name."""

    @functools.wraps(function)
    def record(*arguments: Any, **options: Any) -> dict[str, Any]:
        positional = {str(number): value for number, value in enumerate(arguments)}
        return positional | options

    return record


def option_names(name: str) -> set[str]:
    """The options of a ``kvcat`` command, in their long form."""
    target = app._function(name)
    if name == "train":
        names = {field.name for field in dataclasses.fields(TrainConfig)} | {"config", "dry_run"}
    elif isinstance(target, type):
        names = {field.name for field in dataclasses.fields(target)}
    else:
        return COMMON_OPTIONS | set(_options(target))
    return COMMON_OPTIONS | {f"--{option.replace('_', '-')}" for option in names}


def script_options() -> set[str]:
    """The options that the Python scripts and tools of the repository name in their sources."""
    options: set[str] = set()
    for folder in ("benchmarks", "examples", "runs", "tools"):
        for file in ROOT.glob(f"{folder}/**/*.py"):
            options |= set(re.findall(r'"(--[a-z][\w-]*)"', file.read_text(encoding="utf-8")))
    return options
