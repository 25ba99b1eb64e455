"""Sessions as files: one safetensors file with a checksum, locked by the process that uses it."""

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from transformers import PreTrainedModel

from kvcat.cache import CacheRecord, CompactCache, check_same_model, fingerprint
from kvcat.cache.files import (
    SESSION,
    checked_layers,
    read_tensors,
    write_tensors,
)
from kvcat.compress.query_set import QuerySet
from kvcat.compress.sessions.state import SessionState
from kvcat.errors import InputError, one_line
from kvcat.files import make_folder, remove_partial
from kvcat.models.rounded import Rounded
from kvcat.options import typed_fields
from kvcat.types import Tensor, at_least_float32

_CACHES = ("document", "compact")
_EXACT = ("keys", "values", "queries")
_MASSES = ("log_elsewhere", "log_mass")
_ROWS = ("states", "outputs")
_CONTENT = {
    "num_compactions": int,
    "scales": tuple[float, ...],
    "document": dict[str, str],
    "compact": dict[str, str],
    "place": int | None,
}
_SETTINGS = {
    "budget": int,
    "tail": int,
    "room": int,
    "num_kept": int,
    "piece": int,
    "method": str | None,
    "protect": tuple[tuple[int, int], ...],
}
_CONVERSATION = {
    "turns": tuple[tuple[str, str], ...],
    "is_answered": bool,
    "answer": str | None,
    "end": str,
    "template": str,
    "num_tokens": int,
}


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

    The operating system releases it when the process ends, for whatever reason. What a process that
    was killed had written of the file is removed.

    Raises:
        InputError: another session holds it, or the folder cannot be written to.
    """
    make_folder(path.parent)
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
        remove_partial(path.parent, path.name)
    except Timeout:
        raise InputError(
            f"session {path} is in use, in another process or in this one: close it there first"
        ) from None
    except OSError as error:
        lock.release()
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
    caches: dict[str, dict[str, str]] = {}
    for kind in _CACHES:
        cache: CompactCache | None = getattr(state, kind)
        caches[kind] = {} if cache is None else cache.entries()
        for number, layer in enumerate([] if cache is None else cache.layers):
            for name, tensor in layer.tensors().items():
                tensors[f"{kind}.layers.{number}.{name}"] = tensor
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
        **caches,
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
    typed_fields({"fingerprint": str, "content": str}, entries, path)
    theirs = entries["fingerprint"]
    ours = fingerprint(model)
    check_same_model(f"session {path}", theirs, ours)
    try:
        content = json.loads(entries["content"])
        saved = {name: content.pop(name) for name in ("settings", "conversation")}
        content = typed_fields(_CONTENT, content, path)
        settings = typed_fields(_SETTINGS, saved["settings"], path)
        conversation = typed_fields(_CONVERSATION, saved["conversation"], path)
        state = _state(content, tensors, model.device, str(path))
        _check_state(state, model)
    except InputError:
        raise
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
        OverflowError,
    ) as error:
        raise InputError(f"{path} is damaged: {one_line(error)}") from None
    return SavedSession(state, ours, settings, conversation, content["num_compactions"])


def _check_state(state: SessionState, model: PreTrainedModel) -> None:
    """Raise a ``ValueError`` for a state that no session of this model has."""
    ids = state.ids
    embeddings: Any = model.get_input_embeddings()
    vocab_size = embeddings.num_embeddings
    if ids.dtype != torch.long or ids.dim() != 1:
        raise ValueError(f"its token ids are {_described(ids)}")
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        raise ValueError(f"its token ids are not in 0..{vocab_size - 1}")
    # what a session of one token holds shows what every session of the model holds
    example, _ = SessionState.empty(model).run(model, ids.new_zeros(1))
    if state.document is not None:
        _check_compact(state.document, example)
    if not ids.numel():
        if state.compact is not None or state.keys:
            raise ValueError("it has a cache and no tokens")
        return
    if state.num_exact < 1:
        raise ValueError(f"it has {state.num_tokens} tokens, {state.past_len} in the compact cache")
    if list(state.scales) != list(example.scales):
        raise ValueError("its scales are not the model's")
    for name in _EXACT:
        _check_like(getattr(state, name), getattr(example, name), state.num_exact, name)
    if state.hidden is None or example.hidden is None:
        raise ValueError("it has no hidden states")
    hidden = state.hidden.unsqueeze(1)
    _check_like([hidden], [example.hidden.unsqueeze(1)], state.num_exact, "hidden states")
    _check_like(state.stream, example.stream, None, "stream")
    if state.compact is not None:
        _check_compact(state.compact, example)
    if state.past_queries is not None:
        _check_past_queries(state.past_queries, state, example)


def _check_like(
    tensors: Sequence[Tensor], expected: Sequence[Tensor], length: int | None, name: str
) -> None:
    """Raise a ``ValueError`` unless tensors are finite, with shapes and types as expected.

    Args:
        tensors: per layer.
        expected: likewise.
        length: size of the third dimension; None: as expected.
        name: of the tensors.
    """
    for number, (tensor, like) in enumerate(zip(tensors, expected, strict=True)):
        shape = list(like.shape)
        if length is not None:
            shape[2] = length
        if list(tensor.shape) != shape or tensor.dtype != like.dtype:
            raise ValueError(f"{name} of layer {number} are {_described(tensor)}, not of {shape}")
        if not tensor.isfinite().all():
            raise ValueError(f"{name} of layer {number} hold numbers that are not finite")


def _check_compact(compact: CompactCache, example: SessionState) -> None:
    """Raise a ``ValueError`` for a compact cache that does not fit the model's tokens."""
    if len(compact.layers) != len(example.keys):
        raise ValueError(f"its compact cache has {len(compact.layers)} layers")
    for name in ("keys", "values"):
        padded = [getattr(layer.padded(), name) for layer in compact.unpacked().layers]
        for number, (tensor, like) in enumerate(zip(padded, getattr(example, name), strict=True)):
            shape = list(tensor.shape)
            shape[2] = 1
            if shape != list(like.shape) or not tensor.is_floating_point():
                raise ValueError(f"compact {name} of layer {number} are {_described(tensor)}")
    last = 0
    for start, stop in compact.record.protected:
        if not last <= start < stop <= compact.num_tokens:
            raise ValueError(f"its protected ranges include {start}:{stop}")
        last = stop


def _check_past_queries(kept: QuerySet, state: SessionState, example: SessionState) -> None:
    """Raise a ``ValueError`` for kept queries that no compaction leaves."""
    count = len(kept.positions)
    for name in ("positions", "starts"):
        places = getattr(kept, name)
        if places is None:
            raise ValueError(f"kept queries have no {name}")
        if places.dtype != torch.long or places.shape != (count,):
            raise ValueError(f"{name} of kept queries are {_described(places)}")
    positions = [-1, *kept.positions.tolist(), state.past_len]
    if any(first >= second for first, second in pairwise(positions)):
        raise ValueError("positions of kept queries are not ascending ones of the compact cache")
    has_negative = kept.starts is not None and bool((kept.starts < 0).any())
    if not state.past_len <= kept.place < 1 << 31 or has_negative:
        raise ValueError(f"kept queries are moved to {kept.place}")
    masses = [at_least_float32(queries[..., 0]) for queries in example.queries]
    masses = [mass.expand(-1, -1, count) for mass in masses]
    for name in _MASSES:
        _check_like(getattr(kept, name), masses, None, name)
    heads = [queries.shape[1] for queries in example.queries]
    sizes = {
        "states": [queries.shape[3] for queries in example.queries],
        "outputs": [values.shape[3] for values in example.values],
    }
    for name in _ROWS:
        for number, rows in enumerate(getattr(kept, name)):
            shape = [1, heads[number], count]
            like = torch.zeros([*shape, sizes[name][number]], dtype=torch.int8)
            _check_like([rows.integers], [like.to(rows.integers.device)], None, name)
            _check_like([rows.scales], [masses[number].unsqueeze(-1)], None, name)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _state(
    content: dict[str, Any], tensors: dict[str, Tensor], device: torch.device, name: str
) -> SessionState:
    """The tokens, the cache and the queries of a file."""
    caches: dict[str, Any] = {}
    for kind in _CACHES:
        entries = content[kind]
        start = f"{kind}."
        of_cache = {
            key.removeprefix(start): tensor
            for key, tensor in tensors.items()
            if key.startswith(start)
        }
        caches[kind] = None
        if entries:
            layers, _ = checked_layers(entries, of_cache, name)
            record = CacheRecord.from_json(entries["record"], name)
            num_tokens = int(entries["num_tokens"])
            cache = CompactCache(layers, num_tokens, entries["fingerprint"], record)
            caches[kind] = cache.to(device)
    num_layers = len(content["scales"])
    exact: dict[str, Any] = {
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
        **caches,
        **exact,
        hidden=hidden,
        stream=stream,
        scales=content["scales"],
        past_queries=kept,
    )


def _tensors_of_queries(kept: QuerySet) -> dict[str, Tensor]:
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
) -> QuerySet:
    """The kept queries of a file.

    Args:
        tensors: of the file.
        place: as in ``QuerySet``.
        num_layers: of the model.
        device: of the model.
    """

    def of_layers(name: str) -> list[Tensor]:
        return [tensors[f"past.{name}.{number}"].to(device) for number in range(num_layers)]

    def rows(name: str) -> list[Rounded]:
        pairs = zip(of_layers(f"{name}.integers"), of_layers(f"{name}.scales"), strict=True)
        return [Rounded(integers, scales) for integers, scales in pairs]

    positions = tensors["past.positions"]
    return QuerySet(
        states=rows("states"),
        positions=positions,
        weights=torch.ones(len(positions)),
        log_elsewhere=of_layers("log_elsewhere"),
        starts=tensors["past.starts"],
        place=place,
        log_mass=of_layers("log_mass"),
        outputs=rows("outputs"),
    )
