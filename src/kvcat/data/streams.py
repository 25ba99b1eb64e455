"""Training data of any size, streamed: every sequence of a step reads documents of its own."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvcat.data.encoding import Encoder
from kvcat.data.reading import Position, StreamPlan, StreamServer
from kvcat.data.shards import Shards, open_shards
from kvcat.data.source import check_identity, check_streams, saved_streams, to_tensor
from kvcat.data.split import Split
from kvcat.data.workers import ReadingStopped, Worker, make_worker
from kvcat.types import Int, Tensor

__all__ = ["ReadingStopped", "TokenStreams"]

READ_AHEAD = 8


class TokenStreams:
    """Packed sequences of a Hub data set or of local files, without holding them.

    Stream s of a step reads files (or stripes of files, where there are fewer files than streams) dealt out anew each
    epoch, skips the documents of other splits, puts EOS after each document and cuts sequences. There is no shuffle
    buffer. The position of a stream is five numbers; a stream that continues from them gives the identical tokens, in
    whatever process.

    Args:
        shards: the files, from ``open_shards``.
        tokenizer: with a fast form and an EOS token.
        seq_len: tokens a sequence.
        num_streams: sequences a step, over all processes.
        seed: seed of the order of the files.
        streams: those that this process reads; None for all.
        split: documents to read.
        workers: processes that read and tokenise; 0 does it here, when a sequence is asked for.
        read_ahead: sequences of each stream that workers prepare before they are asked for.
        stop: asked while data is waited for; ten seconds after it first says so, ``ReadingStopped`` is raised. Without
            workers it is not asked.

    Raises:
        InputError: the tokenizer has no EOS token or no fast form.
        ValueError: counts or streams out of range.
    """

    def __init__(
        self,
        shards: Shards,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seq_len: int,
        num_streams: int,
        seed: int,
        streams: Iterable[int] | None = None,
        split: Split = "train",
        workers: int = 0,
        read_ahead: int = READ_AHEAD,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        own = range(num_streams) if streams is None else sorted(set(streams))
        if min(seq_len, num_streams, read_ahead, workers + 1) < 1 or not all(0 <= s < num_streams for s in own):
            raise ValueError(f"seq_len, num_streams or read_ahead below 1, or streams {list(own)} out of range")
        self._plan = StreamPlan(shards, Encoder.of(tokenizer), seq_len, num_streams, seed, split)
        self._num_workers, self._read_ahead = min(workers, len(own)), read_ahead if workers else 1
        self._stop = stop
        self._positions = {stream: Position() for stream in own}
        self._workers: list[Worker] = []
        self._reader: dict[int, Worker] = {}
        self._ready: dict[int, deque[tuple[np.ndarray, Position]]] = {}

    def read(self, streams: Sequence[int]) -> Int[Tensor, "streams tokens"]:
        """The next sequence of each of these streams, int64; with workers, usually waiting for nothing.

        All or nothing: after an exception every stream is where it was, and no worker runs.

        Raises:
            InputError: a file that cannot be read, a network that stays away.
            ReadingStopped: ``stop`` said so.
            RuntimeError: a worker died.
        """
        check_streams(streams, self._positions)
        try:
            if not self._workers:
                self._start()
            for stream in streams:
                while not self._ready[stream]:
                    for other, tokens, position in self._reader[stream].receive():
                        self._ready[other].append((tokens, position))
            self._ask(dict.fromkeys(streams))
        except BaseException:
            self.close()
            raise
        rows = []
        for stream in streams:
            tokens, self._positions[stream] = self._ready[stream].popleft()
            rows.append(tokens)
        return to_tensor(np.stack(rows))

    def state_dict(self) -> dict[str, Any]:
        """The position of each stream after what was read; what workers hold ahead does not count."""
        return {**self._identity(), "streams": {str(s): list(position) for s, position in self._positions.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state says; a Hub data set is read at the commit that the state names.

        Raises:
            InputError: the state belongs to other data, another tokenizer, seed or number of streams.
            ValueError: it lacks a stream of this process.
        """
        shards = self._plan.shards
        if shards.source.startswith("hub:") and state.get("revision") not in (None, shards.revision):
            shards = open_shards(shards.source, revision=state["revision"])
        check_identity(state, {**self._identity(), "revision": shards.revision})
        positions = {stream: Position(*saved) for stream, saved in saved_streams(state, self._positions).items()}
        self.close()
        self._plan = replace(self._plan, shards=shards)
        self._positions = positions

    def close(self) -> None:
        """End the worker processes; a later ``read`` starts them again where the streams are."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def __enter__(self) -> "TokenStreams":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _identity(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "kind": "streams",
            "source": plan.shards.source,
            "revision": plan.shards.revision,
            "tokenizer": plan.encoder.fingerprint,
            "num_streams": plan.num_streams,
            "seed": plan.seed,
            "split": plan.split,
        }

    def _start(self) -> None:
        """Start the workers and ask for the first sequences, those of every stream before the second of any."""
        count = max(self._num_workers, 1)
        outside = self._num_workers > 0
        self._workers = [make_worker(StreamServer(self._plan), process=outside, stop=self._stop) for _ in range(count)]
        self._reader = {stream: self._workers[i % count] for i, stream in enumerate(self._positions)}
        self._ready = {stream: deque() for stream in self._positions}
        for ahead in range(self._read_ahead):
            self._ask({stream: None if ahead else position for stream, position in self._positions.items()})

    def _ask(self, positions: Mapping[int, Position | None]) -> None:
        """Ask for the next sequence of each of these streams, with one request to each worker."""
        for worker in self._workers:
            if wanted := [(s, position) for s, position in positions.items() if self._reader[s] is worker]:
                worker.send(wanted)
