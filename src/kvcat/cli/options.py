"""Parsing by tyro: option types that commands share, and one line for what a person got wrong."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro import _errors as events  # the hook for parse errors; tyro is pinned for it
from tyro.constructors import PrimitiveConstructorSpec

from kvcat.choices import Bos as BosChoice
from kvcat.choices import DocumentSupervision
from kvcat.errors import InputError

T = TypeVar("T")


def _number(kind: type, metavar: str, fits: Callable[[Any], bool]) -> PrimitiveConstructorSpec[Any]:
    """A number of which a value that does not fit is refused while the command line is read."""

    def read(words: list[str]) -> Any:
        if not fits(value := kind(words[0])):
            raise ValueError(repr(words[0]))
        return value

    return PrimitiveConstructorSpec(1, metavar, read, lambda value: isinstance(value, kind), lambda value: [str(value)])


Count = Annotated[int, _number(int, "INT>=1", lambda value: 1 <= value < 2**63)]
Fraction = Annotated[float, _number(float, "FRACTION", lambda value: 0 < value <= 1)]
Nats = Annotated[float, _number(float, "NATS>=0", lambda value: 0 <= value < math.inf)]
Seed = Annotated[
    int,
    _number(int, "INT>=0", lambda value: 0 <= value < 2**63),
    tyro.conf.arg(help="Seed of everything that is drawn."),
]
Strings = tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]]
Fractions = tyro.conf.UseAppendAction[tuple[tuple[Fraction, ...], ...]]
Counts = tyro.conf.UseAppendAction[tuple[tuple[Count, ...], ...]]
Seeds = tyro.conf.UseAppendAction[tuple[tuple[Seed, ...], ...]]
Output = Annotated[Path, tyro.conf.arg(aliases=["-o"])]
Model = Annotated[str, tyro.conf.arg(help="Folder, .gguf file or Hub name of a decoder-only causal LM; kvcat-base.")]
Models = Annotated[tuple[str, ...], tyro.conf.arg(help="Models to compare: FOLDER, Hub name, or LABEL=FOLDER.")]
Device = Annotated[str, tyro.conf.arg(help="Torch device: cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"],
    tyro.conf.arg(help="Type of the weights and of the forward pass."),
]
Overwrite = Annotated[bool, tyro.conf.arg(help="Replace an existing file.")]
Supervision = Annotated[
    DocumentSupervision,
    tyro.conf.arg(help="What caches are fitted to: the text repeated after an instruction, or its own queries."),
]
Bos = Annotated[
    BosChoice,
    tyro.conf.arg(help="What begins a text: what the tokenizer puts there, always BOS, or nothing."),
]
AllowSpecial = Annotated[
    bool,
    tyro.conf.arg(help="Control tokens that the text spells, such as <|im_end|>, become these tokens."),
]
Split = Annotated[
    Literal["all", "test", "validation", "train"],
    tyro.conf.arg(help="Documents to use; test and validation are held out by a hash of the document's name."),
]


def parse(target: Any, prog: str, arguments: Sequence[str], **settings: Any) -> Any:
    """Call a function, or make a dataclass, with what the command line says, or raise an ``InputError``."""
    config = (tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName, tyro.conf.FlagCreatePairsOff)
    with events.on_parse_error(_refuse):
        return tyro.cli(target, prog=prog, args=arguments, config=config, **settings)


def completion(commands: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Print or write a shell's completion script, as ``--tyro-print-completion SHELL`` asks."""
    tree: dict[str, Any] = {}
    for name, function in commands.items():
        *group, last = name.split()
        (tree.setdefault(group[0], {}) if group else tree)[last] = function
    tyro.cli(_union(tree), prog="kvcat", args=arguments)


def _union(tree: Mapping[str, Any]) -> Any:
    """Sub-commands as the union type that tyro makes sub-parsers of."""
    union: Any = Annotated[None, tyro.conf.Suppress]
    for name, branch in tree.items():
        kind, constructor = (_union(branch), None) if isinstance(branch, dict) else (Any, branch)
        union = union | Annotated[kind, tyro.conf.subcommand(name=name, constructor=constructor)]
    return union


def flat(values: Iterable[Iterable[T]]) -> list[T]:
    """The values of a list option: ``--keep 0.05 0.1`` and ``--keep 0.05 --keep 0.1`` are the same."""
    return [value for group in values for value in group]


def labelled(items: Sequence[str]) -> dict[str, str]:
    """Label to folder or Hub name, from FOLDER, Hub name or LABEL=FOLDER; without LABEL, the folder's name is it."""
    found: dict[str, str] = {}
    for item in items:
        label, equals, folder = ("", "", item) if Path(item).is_dir() else item.partition("=")
        label, folder = (label, folder) if equals else (Path(item).name or item, item)
        if label in found:
            raise InputError(f"two of them have the same label {label!r}; give LABEL=FOLDER: {', '.join(items)}")
        found[label] = folder
    if not found:
        raise InputError("name at least one model: FOLDER, or LABEL=FOLDER")
    return found


def check_output(file: Path, *, overwrite: bool) -> None:
    """Refuse a file that cannot be written, before any work."""
    if file.is_dir():
        raise InputError(f"{file} is a folder: name the file to write")
    if file.exists() and not overwrite:
        raise InputError(f"{file} exists; --overwrite replaces it")
    if not file.parent.is_dir():
        raise InputError(f"no folder {file.parent} to write {file.name} to")


def _refuse(event: events.ParseErrorEvent) -> None:
    """Say in one line what tyro refuses."""
    argument: Any = getattr(event, "argument", None)
    flag, reason = _flag(argument) if argument else "", getattr(event, "message", "these arguments do not fit")
    if isinstance(event, events.MissingArgs):
        line = "missing " + ", ".join(_flag(missing.arg) for missing in event.missing_arguments)
        line += f"; unknown: {' '.join(event.unrecognized_tokens)}" if event.unrecognized_tokens else ""
    elif isinstance(event, events.UnrecognizedArgs):
        line = f"unknown argument {' '.join(event.tokens)}"
    elif isinstance(event, events.InvalidChoice):
        line = f"{flag} is {event.value!r}; it must be one of {', '.join(event.choices)}"
    elif not flag:
        line = reason
    else:
        wrong = " ".join(re.findall(r"'([^']*)'", reason.partition("\n")[0]))
        line = f"{flag} takes {argument.lowered.metavar}{f', not {wrong}' if wrong else ''}"
    raise InputError(f"{line} (see {event.prog} --help)")


def _flag(argument: Any) -> str:
    return str(argument.lowered.metavar) if argument.is_positional() else max(argument.lowered.name_or_flags, key=len)
