"""What a trainer reads: the next sequence of each of its streams, and a state to continue from."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from kvcat.data.packing import TokenTable
from kvcat.errors import InputError
from kvcat.types import Int, Tensor


@runtime_checkable
class TokenSource(Protocol):
    """Logical streams, one for each sequence of a step.

    A stream's t-th sequence is a function of seed, stream and t alone: neither the number of processes or workers nor
    the way a step is cut into micro-batches changes it.
    """

    def read(self, streams: Sequence[int]) -> Int[Tensor, "streams tokens"]:
        """The next sequence of each of these streams, int64, in their order."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the streams of this process are, as JSON can hold it; ``merge_states`` joins those of all processes."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state says; it may hold more streams than this process reads."""
        ...

    def close(self) -> None:
        """End worker processes, if there are any."""
        ...


class TableSource:
    """The sequences of a table, in a permutation of its own each epoch.

    Args:
        table: sequences in memory or in a memory map.
        num_streams: sequences a step.
        seed: seed of the permutations.
        streams: those that this process reads; None for all.
    """

    def __init__(self, table: TokenTable, num_streams: int, seed: int, *, streams: Iterable[int] | None = None) -> None:
        self._table, self._num_streams, self._seed = table, num_streams, seed
        self._steps = dict.fromkeys(range(num_streams) if streams is None else streams, 0)

    def read(self, streams: Sequence[int]) -> Int[Tensor, "streams tokens"]:
        """The next sequence of each of these streams, int64; the pages of those after it are asked for."""
        check_streams(streams, self._steps)
        places = [self._steps[stream] * self._num_streams + stream for stream in streams]
        tokens = self._table.take(self._table.rows(places, self._seed))
        self._table.will_need(self._table.rows([place + self._num_streams for place in places], self._seed))
        for stream in streams:
            self._steps[stream] += 1
        return tokens

    def state_dict(self) -> dict[str, Any]:
        """The number of sequences read of each stream."""
        return {**self._identity(), "streams": {str(stream): [step] for stream, step in self._steps.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state says.

        Raises:
            InputError: the state belongs to another table, seed or number of streams.
            ValueError: it lacks a stream of this process.
        """
        check_identity(state, self._identity())
        self._steps = {stream: step for stream, (step,) in saved_streams(state, self._steps).items()}

    def close(self) -> None:
        """Nothing to end."""

    def _identity(self) -> dict[str, Any]:
        return {
            "kind": "table",
            "num_sequences": len(self._table),
            "num_streams": self._num_streams,
            "seed": self._seed,
        }


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
        check_identity(state, identity)
        if twice := streams.keys() & state["streams"].keys():
            raise ValueError(f"stream {min(twice)} was read by two processes")
        streams.update(state["streams"])
    return {**identity, "streams": streams}


def check_streams(streams: Sequence[int], own: Mapping[int, object]) -> None:
    """Refuse streams that this process does not read, and one asked for twice.

    Raises:
        ValueError: the streams asked for and those there are.
    """
    if not set(streams) <= own.keys() or len(set(streams)) < len(streams):
        raise ValueError(f"streams {list(streams)} are not among {list(own)}, each once")


def saved_streams(state: Mapping[str, Any], own: Iterable[int]) -> dict[int, list[int]]:
    """What a state says of each of the streams that this process reads.

    Raises:
        ValueError: it says nothing of one.
    """
    saved = state["streams"]
    if missing := [stream for stream in own if str(stream) not in saved]:
        raise ValueError(f"the state has no stream {missing[0]}: merge the states of all processes")
    return {stream: saved[str(stream)] for stream in own}


def check_identity(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse a state of other data.

    Raises:
        InputError: the first value that differs.
    """
    for name, value in expected.items():
        if state.get(name) != value:
            raise InputError(
                f"the saved position belongs to other data: its {name} is {state.get(name)!r}, not {value!r}"
            )


def to_tensor(rows: Any) -> Int[Tensor, "streams tokens"]:
    """Token ids as torch's int64."""
    return torch.from_numpy(rows.astype("int64"))
