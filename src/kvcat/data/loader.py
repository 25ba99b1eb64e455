"""What a trainer reads: the next sequence of each of its streams, with a state to continue from."""

import atexit
import multiprocessing
import signal
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from kvcat.data.documents import Document, open_documents, open_source
from kvcat.data.packing import Encoder, TokenTable, excerpts, pack
from kvcat.data.prepared import is_prepared, open_prepared
from kvcat.data.split import split_of, training_splits
from kvcat.data.streams import TableStreams, TextStreams
from kvcat.errors import InputError
from kvcat.types import Int, Tensor

READ_AHEAD = 8  # steps that each worker prepares
POLL_SECONDS = 1.0
PATIENCE_SECONDS = 10.0  # how long a stopping reader waits for what is under way


class ReadingStopped(Exception):  # noqa: N818 - an end, not an error
    """Waiting for data ended because the caller's ``stop`` said so."""


class TokenLoader:
    """Reads the next sequence of each stream through torch's ``DataLoader``.

    Args:
        plan: what the streams read.
        streams: those that this process reads; None for all.
        workers: processes that read and tokenise ahead; 0 does it here, when a sequence is needed.
        stop: called while workers are waited for; ten seconds after it first returns True, reading
            ends.
    """

    def __init__(
        self,
        plan: TableStreams | TextStreams,
        *,
        streams: Iterable[int] | None = None,
        workers: int = 0,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        own = range(plan.num_streams) if streams is None else sorted(set(streams))
        if not all(0 <= stream < plan.num_streams for stream in own):
            raise ValueError(f"streams {list(own)} are out of range for {plan.num_streams}")
        self._plan, self._num_workers, self._stop = plan, min(workers, len(own)), stop
        self._positions: dict[int, tuple[int, ...]] = dict.fromkeys(own, plan.start)
        self._ready: dict[int, deque[tuple[np.ndarray, tuple[int, ...]]]] = {}
        self._steps: Any = None  # torch's iterator
        self._processes: list[BaseProcess] = []

    def read(self, streams: Sequence[int]) -> Int[Tensor, "streams tokens"]:
        """The next sequence of each of these streams, int64, in their order.

        All or nothing: after an exception every stream is where it was, and no worker runs.

        Raises:
            InputError: a file or the network cannot be read.
            ReadingStopped: ``stop`` returned True.
            RuntimeError: a worker died.
            ValueError: a stream that this process does not read, or one twice.
        """
        if not set(streams) <= self._positions.keys() or len(set(streams)) < len(streams):
            raise ValueError(f"streams {list(streams)} are not among {list(self._positions)}, each once")
        try:
            if self._steps is None:
                self._start()
            while not all(self._ready[stream] for stream in streams):
                for row, stream in enumerate((step := self._next()).streams):
                    self._ready[stream].append((step.tokens[row], step.positions[row]))
        except BaseException:
            self.close()
            raise
        taken = [self._ready[stream].popleft() for stream in streams]
        self._positions.update(zip(streams, (position for _, position in taken), strict=True))
        return torch.from_numpy(np.stack([tokens for tokens, _ in taken]).astype(np.int64))

    def state_dict(self) -> dict[str, Any]:
        """Where this process's streams are, as JSON; ``merge_states`` joins all processes."""
        return {**self._plan.identity, "streams": {str(s): list(place) for s, place in self._positions.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; a Hub data set is read at the commit that the state names.

        Raises:
            InputError: the state belongs to other data, another tokenizer, seed or number of
                streams.
            ValueError: it lacks a stream of this process.
        """
        plan, revision = self._plan, state.get("revision")
        if isinstance(plan, TextStreams) and plan.source.name.startswith("hub:") and revision != plan.source.revision:
            plan = replace(plan, source=open_source(plan.source.name, revision=revision))
        _check_identity(state, plan.identity)
        saved = state["streams"]
        if missing := [stream for stream in self._positions if str(stream) not in saved]:
            raise ValueError(f"the state has no stream {missing[0]}: merge the states of all processes")
        self.close()
        self._plan, self._positions = plan, {stream: tuple(saved[str(stream)]) for stream in self._positions}

    def close(self) -> None:
        """End the worker processes; a later ``read`` starts them again where the streams are."""
        if self._processes:
            self._steps._shutdown_workers()
        for process in self._processes:  # those that hang
            process.kill()
        self._steps, self._processes = None, []

    def _start(self) -> None:
        """Open the streams; a worker is a fresh interpreter, which holds no lock of this one."""
        workers: dict[str, Any] = {}
        if self._num_workers:
            workers = {"multiprocessing_context": "spawn", "prefetch_factor": READ_AHEAD, "timeout": POLL_SECONDS}
        loader = DataLoader(
            _StreamDataset(self._plan, self._positions),
            batch_size=None, collate_fn=_unchanged, num_workers=self._num_workers, worker_init_fn=_ignore_signals,
            generator=torch.Generator(), **workers,
        )  # fmt: skip
        others = multiprocessing.active_children()
        self._ready = {stream: deque() for stream in self._positions}
        self._steps = iter(loader)
        _OPEN.add(self)
        self._processes = [process for process in multiprocessing.active_children() if process not in others]

    def _next(self) -> "_Step":
        waited = 0.0
        while True:
            try:
                step = next(self._steps)
            except RuntimeError as error:
                if "timed out" not in str(error):
                    raise
                waited += POLL_SECONDS if self._stop is not None and self._stop() else 0.0
                if waited >= PATIENCE_SECONDS:
                    raise ReadingStopped("no data came while the run was asked to stop") from None
                continue
            if isinstance(step, InputError):
                raise step
            return step


_OPEN: "weakref.WeakSet[TokenLoader]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End workers before multiprocessing waits for them: they ignore its SIGTERM."""
    for loader in list(_OPEN):
        loader.close()


class _Step(NamedTuple):
    """The next sequence of each of some streams, and the positions after them."""

    streams: list[int]
    tokens: np.ndarray
    positions: list[tuple[int, ...]]


class _StreamDataset(IterableDataset[_Step | InputError]):
    """The steps of some streams; each worker process reads a part of the streams.

    A mistake in the data is the last item: raised in a worker it would come with the worker's
    traceback.
    """

    def __init__(self, plan: TableStreams | TextStreams, positions: Mapping[int, tuple[int, ...]]) -> None:
        self._plan, self._positions = plan, dict(positions)

    def __iter__(self) -> Iterator[_Step | InputError]:
        worker = get_worker_info()
        own = list(self._positions)[slice(None) if worker is None else slice(worker.id, None, worker.num_workers)]
        readers = [self._plan.sequences(stream, self._positions[stream]) for stream in own]
        try:
            while True:
                tokens, positions = zip(*map(next, readers), strict=True)
                yield _Step(own, np.stack(tokens), list(positions))
        except InputError as error:
            yield error


def _unchanged(step: Any) -> Any:
    return step


def _ignore_signals(_: int) -> None:
    """The signals that end a run reach its workers too, whose data the last step may still need."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of all streams from the states of the processes that read them, each stream by one.

    Raises:
        InputError: they belong to different runs.
        ValueError: two processes read the same stream.
    """
    first, *others = states
    identity = {name: value for name, value in first.items() if name != "streams"}
    streams = dict(first["streams"])
    for state in others:
        _check_identity(state, identity)
        if twice := streams.keys() & state["streams"].keys():
            raise ValueError(f"stream {min(twice)} was read by two processes")
        streams.update(state["streams"])
    return {**identity, "streams": streams}


def _check_identity(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if state.get(name) != value:
            raise InputError(
                f"the saved position belongs to other data: its {name} is {state.get(name)!r}, not {value!r}"
            )


@dataclass(frozen=True)
class TokenData:
    """What a run reads.

    Args:
        train: the sequences of each step.
        validation: sequences of documents that training never sees.
    """

    train: TokenLoader
    validation: TokenTable


def open_tokens(
    data: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    batch_size: int,
    max_steps: int,
    validation_sequences: int,
    seed: int,
    streams: Iterable[int] | None = None,
    workers: int = 0,
    stop: Callable[[], bool] | None = None,
    check: bool = True,
) -> TokenData:
    """Training and validation tokens, disjoint by document.

    A folder that ``prepare`` made is mapped; ``hub:NAME`` and ``stream:PATH`` are streamed; any
    other source is read whole, its documents in an order drawn by the seed. A run that is too short
    for all of them reads excerpts.

    Args:
        data: a prepared folder, or a source as in ``open_documents``.
        tokenizer: with a fast form and an EOS token.
        seq_len: tokens per sequence.
        batch_size: sequences per step, over all processes; the number of streams.
        max_steps: steps of the run.
        validation_sequences: sequences of validation, fewer where the text has fewer.
        seed: seed of the order.
        streams: those that this process reads; None for all.
        workers: processes that tokenise what is streamed.
        stop: see ``TokenLoader``.
        check: compare the checksums of a prepared folder; one process of a run is enough.

    Raises:
        InputError: no such data, too little text, or none that can be read.
    """
    encoder = Encoder.of(tokenizer)

    def packed(kind: str, documents: Iterable[Document], max_sequences: int) -> TokenTable:
        try:
            return pack(documents, encoder, seq_len, max_sequences=max_sequences)
        except InputError as error:
            raise InputError(f"{kind} documents of {data}: {error}") from None

    if data.startswith(("hub:", "stream:")):
        source = open_source(data)
        held_out = (document for document in open_documents(source) if split_of(document.id) == "validation")
        validation = packed("validation", held_out, validation_sequences)
        plan = TextStreams(source, encoder, seq_len, batch_size, seed)
        return TokenData(TokenLoader(plan, streams=streams, workers=workers, stop=stop), validation)
    if is_prepared(data):
        train, held_out = open_prepared(data, encoder, seq_len, check=check)
        validation = TokenTable(held_out.sequences[:validation_sequences], held_out.num_documents)
    else:
        documents, held_out = training_splits(data, seed)
        num_sequences = max_steps * batch_size
        train = packed("train", excerpts(documents, encoder, seq_len, num_sequences, seed), num_sequences)
        validation = packed("validation", held_out, validation_sequences)
    return TokenData(TokenLoader(TableStreams(train, batch_size, seed), streams=streams), validation)
