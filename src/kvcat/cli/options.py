"""Parsing with tyro, one-line messages for user errors, and the option types of commands."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro import _errors as events  # the hook for parse errors; tyro is pinned for it

from kvcat.errors import InputError
from kvcat.option_types import (
    Bos,
    CacheBits,
    Count,
    Counts,
    Device,
    Dtype,
    Files,
    Fraction,
    Fractions,
    Megabytes,
    Model,
    Models,
    Nats,
    Output,
    OutputAddress,
    Overwrite,
    Protect,
    SeamTokens,
    Seed,
    Seeds,
    Several,
    Split,
    Strings,
    Supervision,
    Unset,
    flat,
)

__all__ = [
    "Bos",
    "CacheBits",
    "Count",
    "Counts",
    "Device",
    "Dtype",
    "Files",
    "Fraction",
    "Fractions",
    "Megabytes",
    "Model",
    "Models",
    "Nats",
    "Output",
    "OutputAddress",
    "Overwrite",
    "Protect",
    "SeamTokens",
    "Seed",
    "Seeds",
    "Several",
    "Split",
    "Strings",
    "Supervision",
    "Unset",
    "check_output",
    "completion",
    "flat",
    "labelled",
    "parse",
]

_MODEL_FILES = (
    "*config*.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*",
    "merges.txt", "chat_template*", "*.model", "model*.safetensors*", "pytorch_model*.bin*",
)  # fmt: skip
"""The files that loading a model's folder may read; an output may be next to them."""
_INPUTS = ("cache", "config", "corpus", "data", "id", "protect_text", "store", "text")
"""Arguments that name what a command reads."""


def parse(target: Any, prog: str, arguments: Sequence[str], **settings: Any) -> Any:
    """The result of calling a function or a dataclass with the arguments of a command line.

    Raises:
        InputError: the arguments are not valid.
    """
    config = (
        tyro.conf.DisallowNone,
        tyro.conf.PositionalMetavarFromFieldName,
        tyro.conf.FlagCreatePairsOff,
    )
    _check_single_inputs(target, prog, arguments)
    if target.__doc__:
        target.__doc__ = _unwrapped(target.__doc__)
    with events.on_parse_error(_reject):
        return tyro.cli(target, prog=prog, args=arguments, config=config, **settings)


def _check_single_inputs(target: Any, prog: str, arguments: Sequence[str]) -> None:
    """Reject an input that is named twice where a command reads one: only the last would be read.

    Settings may be given twice, and the last counts, so that a script's can be overridden.
    """
    for name, parameter in inspect.signature(target).parameters.items():
        markers = getattr(parameter.annotation, "__metadata__", ())
        if name not in _INPUTS or tyro.conf.UseAppendAction in markers:
            continue
        flag = f"--{name.replace('_', '-')}"
        num_given = sum(word.partition("=")[0].replace("_", "-") == flag for word in arguments)
        if num_given > 1:
            raise InputError(f"{flag} is given {num_given} times; {prog} reads one")


def _unwrapped(docstring: str) -> str:
    """A docstring with each paragraph and each description of an argument on one line.

    tyro keeps some line breaks of the source in help texts.
    """
    text = inspect.cleandoc(docstring)
    text = re.sub(r"\n {8,}(?=\S)", " ", text)  # lines below "    argument: ..."
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def completion(commands: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Print or write a shell's completion script, as ``--tyro-print-completion SHELL`` requests."""
    tree: dict[str, Any] = {}
    for name, function in commands.items():
        group, space, command = name.partition(" ")
        if space:
            tree.setdefault(group, {})[command] = function
        else:
            tree[name] = function
    tyro.cli(_union(tree), prog="kvcat", args=arguments)


def _union(tree: Mapping[str, Any]) -> Any:
    """A union type of sub-commands, from which tyro makes sub-parsers."""
    union: Any = Annotated[None, tyro.conf.Suppress]
    for name, branch in tree.items():
        if isinstance(branch, dict):
            command = Annotated[_union(branch), tyro.conf.subcommand(name=name)]
        else:
            command = Annotated[Any, tyro.conf.subcommand(name=name, constructor=branch)]
        union = union | command
    return union


def labelled(items: Sequence[str]) -> dict[str, str]:
    """The folders or Hub names by label, from items FOLDER, Hub name or LABEL=FOLDER.

    Without LABEL, the name of the folder is the label.
    """
    folders: dict[str, str] = {}
    for item in items:
        label, folder = _split_label(item)
        if label in folders:
            raise InputError(
                f"two items have the same label {label!r}; give LABEL=FOLDER: {', '.join(items)}"
            )
        folders[label] = folder
    if not folders:
        raise InputError("name at least one model: FOLDER, or LABEL=FOLDER")
    return folders


def _split_label(item: str) -> tuple[str, str]:
    """The label and folder of FOLDER (which may contain an equals sign) or LABEL=FOLDER."""
    label, equals, folder = item.partition("=")
    if equals and not Path(item).is_dir():
        return label, folder
    return Path(item).name or item, item


def check_output(file: Path, *, overwrite: bool, sources: Iterable[str | Path | None] = ()) -> None:
    """Reject an output file that cannot be written, before any work.

    Args:
        file: file to write.
        overwrite: the file may exist.
        sources: what the command reads; files among them, and the files of models in folders among
            them, must not be replaced.
    """
    if file.is_dir():
        raise InputError(f"{file} is a folder: name the file to write")
    if file.exists() and not overwrite:
        raise InputError(f"{file} exists; --overwrite replaces it")
    read = [Path(source).expanduser() for source in sources if source is not None]
    if file.exists() and any(path.is_file() and file.samefile(path) for path in read):
        raise InputError(f"{file} is an input file: name another output file")
    is_of_model = any(fnmatch(file.name, pattern) for pattern in _MODEL_FILES)
    for folder in read:
        if file.exists() and is_of_model and file.parent.resolve() == folder.resolve():
            raise InputError(f"{file} is a file of the model {folder}: name another output file")
    if not file.parent.is_dir():
        raise InputError(f"no folder {file.parent} to write {file.name} to")


def _reject(event: events.ParseErrorEvent) -> None:
    """Raise an ``InputError`` with one line about the arguments that tyro rejects."""
    raise InputError(f"{_mistake(event)} (see {event.prog} --help)")


def _mistake(event: events.ParseErrorEvent) -> str:
    """One line about the arguments that are not valid."""
    if isinstance(event, events.MissingArgs):
        missing = ", ".join(_flag(missing.arg) for missing in event.missing_arguments)
        unknown = " ".join(event.unrecognized_tokens)
        return f"missing {missing}; unknown: {unknown}" if unknown else f"missing {missing}"
    if isinstance(event, events.UnrecognizedArgs):
        return f"unknown argument {' '.join(event.tokens)}"
    argument: Any = getattr(event, "argument", None)
    flag = _flag(argument) if argument else ""
    if isinstance(event, events.InvalidChoice):
        return f"{flag} is {event.value!r}; it must be one of {', '.join(event.choices)}"
    reason = getattr(event, "message", "these arguments are not valid")
    if not flag:
        return reason
    quoted = re.findall(r"'([^']*)'", reason.partition("\n")[0])  # the rejected words
    allowed = f"{flag} takes {argument.lowered.metavar}"
    return f"{allowed}, not {' '.join(quoted)}" if quoted else allowed


def _flag(argument: Any) -> str:
    """The name of an argument as the help text shows it."""
    if argument.is_positional():
        return str(argument.lowered.metavar)
    return max(argument.lowered.name_or_flags, key=len)
