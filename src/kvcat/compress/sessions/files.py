"""Sessions as files: one safetensors file with a checksum, locked by the process that uses it."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from transformers import PreTrainedModel

from kvcat.cache import CompactCache, QuantizedLayer, fingerprint
from kvcat.cache.files import (
    SESSION,
    checked_layers,
    parse_metadata,
    quantized_entries,
    read_tensors,
    write_tensors,
)
from kvcat.compress.rows import Rows
from kvcat.compress.sessions.state import SessionState
from kvcat.compress.trace import PastQueries
from kvcat.errors import InputError
from kvcat.files import make_folder
from kvcat.types import Tensor

_COMPACT = "compact."
_EXACT = ("keys", "values", "queries")
_MASSES = ("log_later_mass", "log_mass")
_ROWS = ("states", "outputs")


@dataclass(frozen=True)
class SavedSession:
    """The content of a session's file.

    Args:
        state: tokens, cache and queries.
        fingerprint: of the model.
        settings: arguments of ``Session``.
        conversation: turns in the chat template.
        num_compactions: so far.
    """

    state: SessionState
    fingerprint: str
    settings: dict[str, Any]
    conversation: dict[str, Any]
    num_compactions: int


def session_lock(path: Path) -> AbstractContextManager[None]:
    """A lock on a session's file, held until its block ends; it is taken by this call.

    The operating system releases it when the process ends, for whatever reason.

    Raises:
        InputError: another session holds it, or the folder cannot be written to.
    """
    make_folder(path.parent)
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise InputError(
            f"session {path} is in use, in another process or in this one: close it there first"
        ) from None
    except OSError as error:
        raise InputError(f"cannot lock session {path}: {error.strerror}") from None
    return _released(lock)


@contextmanager
def _released(lock: FileLock) -> Iterator[None]:
    try:
        yield
    finally:
        lock.release()


def write_session(path: Path, saved: SavedSession) -> None:
    """Write a session's file; at any time the path holds the old file or the whole new one.

    Raises:
        InputError: the file cannot be written.
    """
    state = saved.state
    tensors: dict[str, Tensor] = {"ids": state.ids}
    compact: dict[str, str] = {}
    if state.compact is not None:
        compact = {
            "num_layers": str(len(state.compact.layers)),
            "num_tokens": str(state.compact.num_tokens),
            "fingerprint": state.compact.fingerprint,
            "metadata": json.dumps(state.compact.metadata, sort_keys=True),
        }
        first = state.compact.layers[0]
        if isinstance(first, QuantizedLayer):
            compact |= quantized_entries(first)
        for number, layer in enumerate(state.compact.layers):
            for name, tensor in layer.tensors().items():
                tensors[f"{_COMPACT}layers.{number}.{name}"] = tensor
    for name in _EXACT:
        for number, tensor in enumerate(getattr(state, name)):
            tensors[f"{name}.{number}"] = tensor
    if state.hidden is not None:
        tensors["hidden"] = state.hidden
        tensors["stream"] = torch.stack(list(state.stream))
    kept = state.past_queries
    if kept is not None:
        tensors |= _tensors_of_queries(kept)
    content = {
        "settings": saved.settings,
        "conversation": saved.conversation,
        "num_compactions": saved.num_compactions,
        "scales": list(state.scales),
        "compact": compact,
        "place": None if kept is None else kept.place,
    }
    entries = {"fingerprint": saved.fingerprint, "content": json.dumps(content, sort_keys=True)}
    # a tensor may be a view of a larger one
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    write_tensors(path, copies, entries, SESSION)


def read_session(path: Path, model: PreTrainedModel) -> SavedSession:
    """The content of a session's file, on the model's device.

    Raises:
        InputError: the file is missing, damaged, or of another model.
    """
    entries, tensors, _ = read_tensors(path, SESSION)
    try:
        theirs = entries["fingerprint"]
        ours = fingerprint(model)
        if ours != theirs:
            raise InputError(
                f"session {path} belongs to another model: its fingerprint is {theirs[:12]}, the "
                f"model's {ours[:12]}"
            )
        content = json.loads(entries["content"])
        state = _state(content, tensors, model.device, str(path))
        return SavedSession(
            state, ours, content["settings"], content["conversation"], content["num_compactions"]
        )
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is damaged: it lacks {error}") from None


def _state(
    content: dict[str, Any], tensors: dict[str, Tensor], device: torch.device, name: str
) -> SessionState:
    """The tokens, the cache and the queries of a file."""
    compact = None
    entries = content["compact"]
    if entries:
        of_cache = {
            key.removeprefix(_COMPACT): tensor
            for key, tensor in tensors.items()
            if key.startswith(_COMPACT)
        }
        layers, _ = checked_layers(entries, of_cache, name)
        metadata = parse_metadata(entries["metadata"], name)
        num_tokens = int(entries["num_tokens"])
        compact = CompactCache(layers, num_tokens, entries["fingerprint"], metadata).to(device)
    num_layers = len(content["scales"])
    exact = {
        each: [tensors[f"{each}.{number}"].to(device) for number in range(num_layers)]
        for each in _EXACT
    }
    kept = None
    if "past.positions" in tensors:
        kept = _queries_of_tensors(tensors, int(content["place"]), num_layers, device)
    hidden = tensors["hidden"].to(device) if num_layers else None
    stream = list(tensors["stream"].to(device)) if num_layers else []
    return SessionState(
        ids=tensors["ids"].to(device),
        compact=compact,
        **exact,
        hidden=hidden,
        stream=stream,
        scales=content["scales"],
        past_queries=kept,
    )


def _tensors_of_queries(kept: PastQueries) -> dict[str, Tensor]:
    """The tensors of kept queries by their name in a file."""
    tensors = {"past.positions": kept.positions, "past.starts": kept.starts}
    for name in _MASSES:
        for number, tensor in enumerate(getattr(kept, name)):
            tensors[f"past.{name}.{number}"] = tensor
    for name in _ROWS:
        for number, rows in enumerate(getattr(kept, name)):
            tensors[f"past.{name}.integers.{number}"] = rows.integers
            tensors[f"past.{name}.scales.{number}"] = rows.scales
    return tensors


def _queries_of_tensors(
    tensors: dict[str, Tensor], place: int, num_layers: int, device: torch.device
) -> PastQueries:
    """The kept queries of a file.

    Args:
        tensors: of the file.
        place: as in ``PastQueries``.
        num_layers: of the model.
        device: of the model.
    """

    def of_layers(name: str) -> list[Tensor]:
        return [tensors[f"past.{name}.{number}"].to(device) for number in range(num_layers)]

    def rows(name: str) -> list[Rows]:
        pairs = zip(of_layers(f"{name}.integers"), of_layers(f"{name}.scales"), strict=True)
        return [Rows(integers, scales) for integers, scales in pairs]

    return PastQueries(
        positions=tensors["past.positions"],
        starts=tensors["past.starts"],
        states=rows("states"),
        log_later_mass=of_layers("log_later_mass"),
        place=place,
        log_mass=of_layers("log_mass"),
        outputs=rows("outputs"),
    )
