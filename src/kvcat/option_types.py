"""Types of command-line options; tyro creates the options and their help texts from them."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from kvcat.options import NUM_FIRST, DocumentSupervision
from kvcat.options import Bos as BosChoice

T = TypeVar("T")


def _number(
    kind: type, metavar: str, is_valid: Callable[[Any], bool]
) -> PrimitiveConstructorSpec[Any]:
    """A tyro type for numbers that rejects values for which ``is_valid`` is false."""

    def read(words: list[str]) -> Any:
        value = kind(words[0])
        if not is_valid(value):
            raise ValueError(repr(words[0]))
        return value

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


def _group(value: Any, metavar: str = "") -> PrimitiveConstructorSpec[Any]:
    """A tyro type for the values after a list option, of which there is at least one.

    Without a value (``--keep $KEEP`` with an empty variable) the option would have no effect.

    Args:
        value: type of a value, with a tyro type or without.
        metavar: name of a value, unless its tyro type has one.
    """
    kind, *specs = get_args(value) or (value,)
    read_one = specs[0].instance_from_str if specs else lambda words: kind(words[0])
    name = specs[0].metavar if specs else metavar

    def read(words: list[str]) -> tuple[Any, ...]:
        if not words:
            raise ValueError("no value")
        return tuple(read_one([word]) for word in words)

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{name} [{name} ...]]",
        instance_from_str=read,
        is_instance=lambda values: isinstance(values, tuple),
        str_from_instance=lambda values: [str(each) for each in values],
    )


Unset = Annotated[T | None, tyro.conf.arg(help_behavior_hint="")]
"""``Unset[T]``: an option without a default value; its help says what happens without it."""
Several = Annotated[tuple[T, ...], tyro.conf.arg(help_behavior_hint="(required)")]
"""``Several[T]``: positional arguments, at least one of which is needed."""
Count = Annotated[int, _number(int, "INT>=1", lambda value: 1 <= value < 2**63)]
Port = Annotated[int, _number(int, "1<=PORT<=65535", lambda value: 1 <= value <= 65535)]
Fraction = Annotated[float, _number(float, "0<FRACTION<=1", lambda value: 0 < value <= 1)]
Nats = Annotated[float, _number(float, "NATS>=0", lambda value: 0 <= value < math.inf)]
Megabytes = Annotated[float, _number(float, "MB>0", lambda value: 0 < value < 1e12)]
Protect = Literal["system"]
CacheBits = Literal["auto", "16", "8", "4"]
Seed = Annotated[
    int,
    _number(int, "INT>=0", lambda value: 0 <= value < 2**63),
    tyro.conf.arg(help="Seed of all random draws."),
]
Strings = tyro.conf.UseAppendAction[tuple[Annotated[tuple[str, ...], _group(str, "STR")], ...]]
Files = tyro.conf.UseAppendAction[tuple[Annotated[tuple[Path, ...], _group(Path, "PATH")], ...]]
SeamTokens = Annotated[
    int,
    _number(int, f"0<=INT<={NUM_FIRST}", lambda value: 0 <= value <= NUM_FIRST),
    tyro.conf.arg(
        help="With several caches: first tokens of every later document that are encoded again "
        "after the documents before it, 0 to 16."
    ),
]
Fractions = tyro.conf.UseAppendAction[tuple[Annotated[tuple[Fraction, ...], _group(Fraction)], ...]]
Counts = tyro.conf.UseAppendAction[tuple[Annotated[tuple[Count, ...], _group(Count)], ...]]
Seeds = tyro.conf.UseAppendAction[tuple[Annotated[tuple[Seed, ...], _group(Seed)], ...]]
Stop = Annotated[
    Strings,
    tyro.conf.arg(help="Text at which an answer ends, without it; may be given several times."),
]
Temperature = Annotated[
    float, tyro.conf.arg(help="0 for greedy decoding; 0.001 to 1000 for sampling.")
]
TopP = Annotated[
    Fraction,
    tyro.conf.arg(help="Sample from the most likely tokens with this total probability."),
]
StoreOfCache = Annotated[
    str | None,
    tyro.conf.arg(
        help="Instead of --cache: a store of `kvcat corpus`, with --id.", help_behavior_hint=""
    ),
]
DocumentId = Annotated[
    str | None, tyro.conf.arg(help="Id of the document in the store.", help_behavior_hint="")
]
TextColumn = Annotated[str, tyro.conf.arg(help="Column of a table that holds the texts.")]
IdColumn = Annotated[
    str, tyro.conf.arg(help="Column of a table that holds the ids of the documents.")
]
Output = Annotated[Path, tyro.conf.arg(aliases=["-o"])]
OutputAddress = Annotated[str, tyro.conf.arg(aliases=["-o"])]
Model = Annotated[
    str,
    tyro.conf.arg(
        help="Folder, .gguf file or Hub name of a decoder-only causal LM; or smollm2-135m (after "
        "`kvcat get smollm2-135m`) or kvcat-base (a small model of Python sources, built in)."
    ),
]
Models = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        help="Models to compare, one or several: FOLDER, Hub name or LABEL=FOLDER.",
        help_behavior_hint="(required)",
    ),
]
Device = Annotated[str, tyro.conf.arg(help="Torch device: cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"],
    tyro.conf.arg(help="Data type of the weights and of the forward pass."),
]
Overwrite = Annotated[bool, tyro.conf.arg(help="Replace an existing file.")]
Supervision = Annotated[
    DocumentSupervision,
    tyro.conf.arg(
        help="Queries that caches are fitted to: those of the text repeated after an instruction "
        "(reconstruction), or those of the text itself (self)."
    ),
]
Bos = Annotated[
    BosChoice,
    tyro.conf.arg(
        help="Tokens at the start of a text: those that the tokenizer adds (auto), at least BOS "
        "(always), or none (never)."
    ),
]
Split = Annotated[
    Literal["all", "test", "validation", "train"],
    tyro.conf.arg(
        help="Split of the documents to use. Test and validation documents are chosen by a hash of "
        "the document's name."
    ),
]


def flat(values: Iterable[Iterable[T]]) -> list[T]:
    """The values of a list option, in one list.

    ``--keep 0.05 0.1`` and ``--keep 0.05 --keep 0.1`` have the same values.
    """
    return [value for group in values for value in group]
