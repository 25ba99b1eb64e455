"""The package kvpress: imported when needed, without its effect on transformers, and which of its presses fit."""

import importlib
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcat.errors import InputError

_OWN_SIZE = "its size follows from its own options, not from a keep ratio"
_DECODING = "it compresses while tokens are generated, not a prefix"
REFUSED = {
    "CAMPress": _DECODING,
    "CompressionRatioDecodingPress": _DECODING,
    "DecodingPress": _DECODING,
    "PrefillDecodingPress": _DECODING,
    "ComposedPress": _OWN_SIZE,
    "DMSPress": _OWN_SIZE,
    "PerLayerCompressionPress": _OWN_SIZE,
    "SimLayerKVPress": _OWN_SIZE,
    "FinchPress": "it wants a delimiter token between text and question",
    "ThinKPress": "it zeroes channels of the keys and removes no slots",
}
_ABSTRACT = ("BasePress", "ScorerPress")


@dataclass(frozen=True)
class Library:
    """What there is in the installed kvpress.

    Args:
        version: of the package.
        presses: every press it exports, by class name.
    """

    version: str
    presses: dict[str, type]

    def base(self, name: str) -> type:
        """One of the classes that presses derive from or wrap.

        Args:
            name: its class name.
        """
        return getattr(importlib.import_module("kvpress"), name)


def library() -> Library:
    """The installed kvpress; transformers' attention functions stay as they are.

    Raises:
        InputError: it is not installed, or cannot be imported beside the installed transformers.
    """
    try:
        with _attention_functions_restored():
            module = importlib.import_module("kvpress")
    except ImportError as error:
        raise InputError(f"kvpress cannot be imported ({error}): pip install 'kvcat[kvpress]'") from error
    exported = {name: getattr(module, name) for name in module.__all__}
    presses = {
        name: kind
        for name, kind in exported.items()
        if isinstance(kind, type) and issubclass(kind, module.BasePress) and name not in _ABSTRACT
    }
    return Library(importlib.metadata.version("kvpress"), presses)


def build(name: str, options: dict[str, Any]) -> Any:
    """A new press, which holds the state of one use.

    Args:
        name: its class name.
        options: its fields.

    Raises:
        InputError: an unknown press, one that cannot make a compact cache, or options that it does not take.
    """
    found = library()
    if name not in found.presses:
        raise InputError(f"kvpress {found.version} has no press {name!r}; there are {', '.join(sorted(found.presses))}")
    if name in REFUSED:
        raise InputError(f"{name} cannot make a compact cache: {REFUSED[name]}")
    for option in options:
        if option.endswith("compression_ratio"):
            raise InputError(f"{name}: {option} follows from the keep ratio; give keep_ratio or num_slots to the call")
    try:
        return found.presses[name](**options)
    except (TypeError, AssertionError, ValueError) as error:
        raise InputError(f"{name}: {error}") from error


@contextmanager
def _attention_functions_restored() -> Iterator[None]:
    before = dict(ALL_ATTENTION_FUNCTIONS)
    try:
        yield
    finally:
        for name, function in before.items():
            if ALL_ATTENTION_FUNCTIONS[name] is not function:
                # kvpress writes an override of this one mapping; most functions had none
                del ALL_ATTENTION_FUNCTIONS[name]
                if ALL_ATTENTION_FUNCTIONS.get(name) is not function:
                    ALL_ATTENTION_FUNCTIONS[name] = function
