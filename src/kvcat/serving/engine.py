"""One model that answers the requests of many connections in turn, from the caches of a store."""

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CompactCache, are_comparable, fingerprint
from kvcat.compress import question_ids
from kvcat.corpus import Store
from kvcat.errors import InputError, one_line
from kvcat.serving.answers import Answer, Sampling, answer, answer_length
from kvcat.serving.requests import chat_ids


@dataclass(frozen=True)
class Question:
    """What a client asks.

    Args:
        document: id of a document in the store.
        content: a prompt, which is one text, or the messages of a conversation.
        is_chat: whether the content is messages.
        sampling: how to decode.
    """

    document: str
    content: Any
    is_chat: bool
    sampling: Sampling


@dataclass(frozen=True)
class Usage:
    """Tokens of a request.

    Args:
        document_tokens: those of the document, which the cache represents.
        prompt_tokens: those after the document, before the answer.
        answer_tokens: those of the answer.
    """

    document_tokens: int
    prompt_tokens: int
    answer_tokens: int


class RequestError(Exception):
    """A request that cannot be answered.

    Args:
        status: HTTP status.
        message: one line for the client, without paths of this machine.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass
class Ticket:
    """A question on its way; the worker calls ``on_event`` with every event of its answer.

    Events are texts (pieces of the answer), then one (``Answer``, ``Usage``) or ``RequestError``.
    """

    question: Question
    on_event: Callable[[Any], None]
    is_cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """End the answer: nobody waits for it."""
        self.is_cancelled.set()


class CacheMemory:
    """The caches of a store that were used last, within a number of bytes.

    Args:
        store: the caches.
        most_bytes: bytes of all caches in memory; a larger cache is used and not kept.
        device: of the caches.
    """

    def __init__(self, store: Store, most_bytes: int, device: torch.device) -> None:
        self.store = store
        self.num_bytes = 0
        self.num_hits = 0
        self.num_loads = 0
        self._most_bytes = most_bytes
        self._device = device
        self._caches: OrderedDict[tuple[str, str], CompactCache] = OrderedDict()

    def find(self, id: str) -> CompactCache:
        """The cache of a document.

        Raises:
            RequestError: no such document, or a damaged file.
        """
        try:
            row = self.store.row(id)
        except InputError:
            raise RequestError(404, f"no document {id[:80]!r}") from None
        if row.error is not None:
            raise RequestError(404, f"document {id[:80]!r} has no cache: {row.error}")
        key = (id, row.checksum)
        if key in self._caches:
            self.num_hits += 1
            self._caches.move_to_end(key)
            return self._caches[key]
        try:
            cache = self.store[id].to(self._device)
        except InputError as error:  # a client need not know where the store is
            reason = str(error).replace(self.store.address, "the store")
            raise RequestError(500, f"document {id[:80]!r}: {reason}") from None
        self.num_loads += 1
        self._keep(key, cache)
        return cache

    def _keep(self, key: tuple[str, str], cache: CompactCache) -> None:
        """Hold a cache, and drop those that were not used for the longest time."""
        if cache.nbytes > self._most_bytes:
            return
        self._caches[key] = cache
        self.num_bytes += cache.nbytes
        while self.num_bytes > self._most_bytes:
            _, dropped = self._caches.popitem(last=False)
            self.num_bytes -= dropped.nbytes


class Engine:
    """A thread that owns the model and answers one question after another.

    Args:
        model, tokenizer: those of the store.
        store: the caches.
        cache_bytes: bytes of caches in memory.
        most_waiting: questions that may wait; further ones are rejected.

    Raises:
        InputError: a store of another model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        store: Store,
        *,
        cache_bytes: int,
        most_waiting: int,
    ) -> None:
        known = str(store.settings.get("fingerprint"))
        mine = fingerprint(model)
        if not are_comparable(known, mine) or known != mine:
            raise InputError(
                f"store {store.address} belongs to another model: its fingerprint is {known[:12]}, "
                f"the model's {mine[:12]}"
            )
        self.memory = CacheMemory(store, cache_bytes, model.device)
        self.num_answers = 0
        self.num_errors = 0
        self.num_prompt_tokens = 0
        self.num_answer_tokens = 0
        self.busy_seconds = 0.0
        self._model = model
        self._tokenizer = tokenizer
        self._waiting: queue.Queue[Ticket | None] = queue.Queue()
        self._most_waiting = most_waiting
        self._is_closed = threading.Event()
        self._current: Ticket | None = None
        self._thread = threading.Thread(target=self._work, name="kvcat-model", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Questions that wait for the model."""
        return self._waiting.qsize()

    @property
    def is_alive(self) -> bool:
        """Whether questions are answered."""
        return self._thread.is_alive() and not self._is_closed.is_set()

    def submit(self, ticket: Ticket) -> None:
        """Let a question wait for the model.

        Raises:
            RequestError: too many questions wait, or the engine is closed.
        """
        if self._is_closed.is_set():
            raise RequestError(503, "the server is shutting down")
        if self.num_waiting >= self._most_waiting:
            raise RequestError(
                429, f"{self.num_waiting} requests wait already, the most that may: try again later"
            )
        self._waiting.put(ticket)

    def close(self) -> None:
        """End the current answer, reject all that wait, and wait for the thread."""
        self._is_closed.set()
        current = self._current
        if current is not None:
            current.cancel()
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            ticket = self._waiting.get()
            if ticket is None:
                return
            if self._is_closed.is_set():
                ticket.on_event(RequestError(503, "the server is shutting down"))
            elif not ticket.is_cancelled.is_set():
                self._serve(ticket)

    def _serve(self, ticket: Ticket) -> None:
        """Answer one question; whatever happens becomes an event."""
        start = time.monotonic()
        self._current = ticket
        try:
            result: Any = self._answer(ticket)
            self.num_answers += 1
        except RequestError as error:
            result = error
        except InputError as error:
            result = RequestError(400, str(error))
        except Exception as error:  # the server must live on
            result = RequestError(500, f"the model failed: {one_line(error)}")
        if isinstance(result, RequestError):
            self.num_errors += 1
        self._current = None
        self.busy_seconds += time.monotonic() - start
        ticket.on_event(result)

    def _answer(self, ticket: Ticket) -> tuple[Answer, Usage]:
        question = ticket.question
        cache = self.memory.find(question.document)
        if question.is_chat:
            is_chat = cache.metadata.get("chat") == "yes"
            ids = torch.tensor([chat_ids(self._tokenizer, question.content, chat=is_chat)])
        else:
            ids = question_ids(self._tokenizer, question.content, cache=cache)
        ids = ids.to(self._model.device)
        length = answer_length(self._model, cache, ids, question.sampling.max_new_tokens)
        result = answer(
            self._model,
            self._tokenizer,
            cache.inputs(self._model, ids),
            replace(question.sampling, max_new_tokens=length),
            on_text=ticket.on_event,
            is_cancelled=ticket.is_cancelled.is_set,
        )
        usage = Usage(cache.num_tokens, ids.shape[1], len(result.ids))
        self.num_prompt_tokens += usage.prompt_tokens
        self.num_answer_tokens += usage.answer_tokens
        return result, usage
