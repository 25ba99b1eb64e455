"""Parsing with tyro, one-line messages for user errors, and the option types of commands."""

import dataclasses
import inspect
import os
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro import _errors as events  # the hook for parse errors; tyro is pinned for it
from tyro import _strings as strings

from kvcat.cli.names import method_lines
from kvcat.cli.threads import THREADS
from kvcat.errors import InputError, did_you_mean
from kvcat.files import check_writable, expanded

_MODEL_FILES = (
    "*config*.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*",
    "merges.txt", "chat_template*", "*.model", "model*.safetensors*", "pytorch_model*.bin*",
)  # fmt: skip
"""The files that loading a model's folder may read; an output may be next to them."""
_MAX_COLUMNS = 100  # of the paragraphs of a help text
_SHORT = {"-o": "--output"}
_LIBRARY_NAMES = {
    "--keep": "keep_ratio",
    "--slots": "num_slots",
    "--mb": "max_megabytes",
    "--documents": "num_documents",
    "--tokens": "num_tokens",
    "--windows": "num_windows",
}
"""Names of options in the library, where they differ."""


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
    repeatable = _options(target)
    _check_given_once(repeatable, prog, arguments)
    _check_output_has_name(arguments)
    for described in _described(target):
        if described.__doc__:
            described.__doc__ = _unwrapped(described.__doc__)
    about = settings.pop("description", target.__doc__ or "").partition("\nArgs:\n")[0]
    settings |= {"config": config, "description": _wrapped(about.strip())}
    with events.on_parse_error(partial(_reject, [*repeatable, THREADS])), _line_breaks_kept():
        return tyro.cli(target, prog=prog, args=arguments, **settings)


def _options(target: Any) -> dict[str, bool]:
    """The options of a function or a dataclass by flag, and whether each may be given several
    times.
    """
    options: dict[str, bool] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        annotation = parameter.annotation
        markers = getattr(annotation, "__metadata__", ())
        kind = getattr(annotation, "__origin__", annotation)
        if tyro.conf.OmitArgPrefixes in markers and dataclasses.is_dataclass(kind):
            options |= _options(kind)
        elif parameter.kind is not parameter.POSITIONAL_ONLY:
            # an option may have another name than its field: tyro.conf.arg(name="keep")
            others = [marker.name for marker in markers if getattr(marker, "name", None)]
            flag = (others or [name])[0].replace("_", "-")
            options[f"--{flag}"] = tyro.conf.UseAppendAction in markers
    return options


def _described(target: Any) -> Iterator[Any]:
    """A function or a dataclass, and the dataclasses whose fields are among its options."""
    yield target
    parents = target.__mro__[1:] if inspect.isclass(target) else ()
    yield from (parent for parent in parents if dataclasses.is_dataclass(parent))
    for parameter in inspect.signature(target).parameters.values():
        kind = getattr(parameter.annotation, "__origin__", None)
        if dataclasses.is_dataclass(kind):
            yield from _described(kind)


def _check_given_once(repeatable: Mapping[str, bool], prog: str, arguments: Sequence[str]) -> None:
    """Reject an option that is given twice and is not for a list: only the last would count."""
    counts = Counter(_flag_of(word) for word in arguments)
    for flag, may_repeat in repeatable.items():
        if counts[flag] > 1 and not may_repeat:
            raise InputError(f"{flag} is given {counts[flag]} times; {prog} takes it once")


def _check_output_has_name(arguments: Sequence[str]) -> None:
    """Reject ``-o -``, which would write a file named ``-`` and nothing to standard output."""
    for word, after in pairwise([*arguments, ""]):
        flag = _flag_of(word)
        value = word.partition("=")[2] if "=" in word else after
        if flag in ("--output", "--out") and value == "-":
            raise InputError(f"{flag} is -: nothing is written to standard output, name a file")


def _flag_of(word: str) -> str:
    """The option that a word of a command line names, in the way that help texts spell it."""
    flag = word.partition("=")[0].replace("_", "-")
    return _SHORT.get(flag, flag)


def _unwrapped(docstring: str) -> str:
    """A docstring with each paragraph and each description of an argument on one line.

    tyro keeps some line breaks of the source in help texts.
    """
    text = inspect.cleandoc(docstring)
    if "{methods}" in text:
        lines = method_lines()
        width = max(map(len, lines))
        shown = [f"  {name:{width}}  {line}" for name, line in lines.items()]
        text = text.replace("{methods}", "\n".join(["Methods:", *shown]))
    text = re.sub(r"\n {8,}(?=\S)", " ", text)  # lines below "    argument: ..."
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


@contextmanager
def _line_breaks_kept() -> Iterator[None]:
    """In the block tyro keeps the lines of a description, which it joins otherwise."""
    join = strings.remove_single_line_breaks
    strings.remove_single_line_breaks = str.rstrip
    try:
        yield
    finally:
        strings.remove_single_line_breaks = join


def _wrapped(text: str) -> str:
    """A text with its lines no longer than the terminal's, as tyro's boxes; nor than 100 columns.

    A name and what it is, with blanks between them, stay two columns, and an example one line.
    """
    width = min(shutil.get_terminal_size().columns, _MAX_COLUMNS)
    lines = []
    for line in text.splitlines():
        hanging = re.match(r"  \S+ +(?=\S)", line)
        indent = " " * len(hanging[0]) if hanging else ""
        if not line.startswith("Example:"):
            line = textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)
        lines.append(line)
    return "\n".join(lines)


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
        if not label.partition("@")[0]:
            raise InputError(f"{item!r} has no label before its =: name FOLDER or LABEL=FOLDER")
        return label, folder
    return Path(item).name or item, item


def check_output(file: Path, *, overwrite: bool, sources: Iterable[str | Path | None] = ()) -> None:
    """Reject an output file that cannot be written, or a device, before any work.

    Args:
        file: file to write.
        sources: what the command reads; files among them, and the files of models in folders among
            them, must not be replaced.
    """
    if file.is_dir():
        raise InputError(f"{file} is a folder: name the file to write")
    if file.exists() and not overwrite:
        raise InputError(f"{file} exists; --overwrite replaces it")
    if file.exists() and not file.is_file():
        raise InputError(f"{file} is a device: name the file to write")
    read = [expanded(source) for source in sources if source is not None]
    if file.exists() and any(path.is_file() and file.samefile(path) for path in read):
        raise InputError(f"{file} is an input file: name another output file")
    is_of_model = any(fnmatch(file.name, pattern) for pattern in _MODEL_FILES)
    for folder in read:
        if (
            file.exists()
            and is_of_model
            and os.path.realpath(file.parent) == os.path.realpath(folder)
        ):
            raise InputError(f"{file} is a file of the model {folder}: name another output file")
    if not file.parent.is_dir():
        raise InputError(f"no folder {file.parent} to write {file.name} to")
    check_writable(file)


def _reject(flags: Sequence[str], event: events.ParseErrorEvent) -> None:
    """Raise an ``InputError`` with one line about the arguments that tyro rejects.

    Args:
        flags: the options that exist.
        event: what tyro found.
    """
    raise InputError(f"{_mistake(flags, event)} (see {event.prog} --help)")


def _mistake(flags: Sequence[str], event: events.ParseErrorEvent) -> str:
    """One line about the arguments that are not valid."""
    if isinstance(event, events.MissingArgs):
        missing = ", ".join(_flag(missing.arg) for missing in event.missing_arguments)
        unknown = _unknown(flags, event.unrecognized_tokens)
        return f"missing {missing}; unknown: {unknown}" if unknown else f"missing {missing}"
    if isinstance(event, events.UnrecognizedArgs):
        return f"unknown argument {_unknown(flags, event.tokens)}"
    argument: Any = getattr(event, "argument", None)
    flag = _flag(argument) if argument else ""
    if isinstance(event, events.InvalidChoice):
        hint = did_you_mean(event.value, event.choices)
        return f"{flag} is {event.value!r}{hint}; it must be one of {', '.join(event.choices)}"
    reason = getattr(event, "message", "these arguments are not valid")
    if not flag:
        return reason
    quoted = re.findall(r"'([^']*)'", reason.partition("\n")[0])  # the rejected words
    allowed = f"{flag} takes {argument.lowered.metavar}"
    return f"{allowed}, not {' '.join(quoted)}" if quoted else allowed


def _unknown(flags: Sequence[str], words: Sequence[str]) -> str:
    """Words that are not arguments, with the options that were probably meant."""
    hints = [did_you_mean(_flag_of(word), flags) for word in words if word.startswith("-")]
    return f"{' '.join(words)}{''.join(dict.fromkeys(hints))}"


def in_options(message: str, arguments: Sequence[str]) -> str:
    """A message of the library in the words of a command line: ``--slots`` for ``num_slots``.

    Only options that the command line gives are named so; a field of a file keeps its name.
    """
    for word in arguments:
        flag = _flag_of(word)
        if not flag.startswith("--"):
            continue
        name = flag.removeprefix("--").replace("-", "_")
        for known in {_LIBRARY_NAMES.get(flag, name), name}:
            if "_" in known:  # not as a part of a file's name, for example
                pattern = rf"(?<![\w./'\"-]){known}(?![\w./'\"=-])"
            else:  # which may also be a word of the sentence
                pattern = rf"^{known}(?= is | must )"
            message = re.sub(pattern, flag, message)
    return message


def _flag(argument: Any) -> str:
    """The name of an argument as the help text shows it."""
    if argument.is_positional():
        return str(argument.lowered.metavar)
    return max(argument.lowered.name_or_flags, key=len)
