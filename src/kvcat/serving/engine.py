"""One model that answers the requests of many connections, from the caches of a store."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CompactCache, check_same_model, fingerprint
from kvcat.compress import compose
from kvcat.corpus import Store
from kvcat.errors import InputError, check_least, one_line
from kvcat.generate import (
    BATCH_ROWS,
    Answer,
    BatchQuestion,
    Sampling,
    answer_batch,
    answer_length,
    batch_size,
    stop_tokens,
)
from kvcat.models import positions_of
from kvcat.serving.recent import RecentlyUsed
from kvcat.serving.requests import chat_ids, prompt_ids


@dataclass(frozen=True)
class Question:
    """What a client asks.

    Args:
        documents: ids of documents in the store, one after the other.
        content: a prompt, which is one text, or the messages of a conversation.
        is_chat: whether the content is messages.
        sampling: how to decode.
        has_length: whether the client names the largest number of tokens in the answer. If not, it
            may end where the cache allows no longer text.
    """

    documents: tuple[str, ...]
    content: Any
    is_chat: bool
    sampling: Sampling
    has_length: bool = True


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
    """A queued question; the worker calls ``on_event`` with every event of its answer.

    Events are texts (pieces of the answer), then one (``Answer``, ``Usage``) or ``RequestError``.
    """

    question: Question
    on_event: Callable[[Any], None]
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    is_answered: bool = False

    def cancel(self) -> None:
        """End the answer, or leave the queue: nobody waits for it."""
        self.is_cancelled.set()


class RecentDocuments:
    """The caches of documents of a store; those that were used last stay in memory.

    Args:
        most_bytes: bytes of all caches in memory; a larger cache is used and not kept.
        model: the model of the store, on the device of the caches.
    """

    def __init__(self, store: Store, most_bytes: int, model: PreTrainedModel) -> None:
        self.store = store
        self.recent: RecentlyUsed[CompactCache] = RecentlyUsed(
            most_bytes, lambda cache: cache.nbytes
        )
        self.num_loads = 0
        self._model = model

    def find(self, ids: Sequence[str]) -> CompactCache:
        """The cache of a document, or of several documents one after the other.

        Raises:
            RequestError: no such document, a damaged file, a text that changed, or documents that
                cannot be composed.
        """
        documents = [(id, self._checksum(id)) for id in ids]
        if len(ids) > 1:
            try:
                self.store.check_joined()
            except InputError as error:
                raise RequestError(400, str(error)) from None
        return self._find(documents)

    def _find(self, documents: Sequence[tuple[str, str]]) -> CompactCache:
        """The cache of documents, each an id and the checksum of its text."""

        def load() -> CompactCache:
            if len(documents) == 1:
                return self._load(*documents[0])
            try:
                return compose(self._model, [self._find([document]) for document in documents])
            except InputError as error:
                raise RequestError(400, f"these documents cannot be joined: {error}") from None

        return self.recent.get(tuple(documents), load)

    def _checksum(self, id: str) -> str:
        """The checksum of a document's text."""
        try:
            row = self.store.row(id)
        except InputError:
            raise RequestError(404, f"no document {id[:80]!r}") from None
        if row.error is not None:
            raise RequestError(404, f"document {id[:80]!r} has no cache: {row.error}")
        return row.checksum

    def _load(self, id: str, checksum: str) -> CompactCache:
        """The cache of a document from the store."""
        try:
            cache = self.store[id].to(self._model.device)
        except InputError as error:
            self._checksum(id)  # the store has read its manifest again: there may be none any more
            # a client need not know where the store is
            reason = str(error).replace(self.store.address, "the store")
            raise RequestError(500, f"document {id[:80]!r}: {reason}") from None
        if cache.record.text_checksum != checksum:  # the store has read its manifest again
            raise RequestError(503, f"document {id[:80]!r} has just changed: ask again")
        self.num_loads += 1
        return cache


class Engine:
    """A thread that owns the model and answers questions.

    Waiting questions on the same documents are answered in one batch, the others one after another.

    Args:
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
        check_least(0, cache_bytes=cache_bytes)
        check_least(1, most_waiting=most_waiting)
        known = str(store.settings.get("fingerprint"))
        check_same_model(f"store {store.address}", known, fingerprint(model))
        self.documents = RecentDocuments(store, cache_bytes, model)
        self.num_answers = 0
        self.num_batches = 0
        self.num_errors = 0
        self.num_prompt_tokens = 0
        self.num_answer_tokens = 0
        self.busy_seconds = 0.0
        self._model = model
        self._tokenizer = tokenizer
        self._waiting: deque[Ticket] = deque()
        self._changed = threading.Condition()  # guards what waits
        self._most_waiting = most_waiting
        self._is_closed = threading.Event()
        self._current: list[Ticket] = []
        self._thread = threading.Thread(target=self._work, name="kvcat-model", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Questions that wait for the model; those that were cancelled do not."""
        with self._changed:
            self._waiting = deque(
                ticket for ticket in self._waiting if not ticket.is_cancelled.is_set()
            )
            return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        """Whether questions are answered."""
        return self._thread.is_alive() and not self._is_closed.is_set()

    def submit(self, ticket: Ticket) -> None:
        """Let a question wait for the model.

        Raises:
            RequestError: too many questions wait, or the engine is closed.
        """
        with self._changed:
            if self._is_closed.is_set():
                raise RequestError(503, "the server is shutting down")
            num_waiting = self.num_waiting
            if num_waiting >= self._most_waiting:
                raise RequestError(
                    429, f"{num_waiting} requests wait already, the most that may: try again later"
                )
            self._waiting.append(ticket)
            self._changed.notify()

    def close(self) -> None:
        """Reject all that have no answer yet, and wait for the thread."""
        with self._changed:
            self._is_closed.set()
            for ticket in (*self._current, *self._waiting):
                ticket.on_event(RequestError(503, "the server is shutting down"))
                ticket.cancel()
            self._waiting.clear()
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.num_waiting or self._is_closed.is_set())
                if self._is_closed.is_set():
                    break
                self._current = self._next_tickets()
            start = time.monotonic()
            tickets = self._current
            with self._errors_of(tickets):  # whatever happens becomes an event of each
                cache = self.documents.find(tickets[0].question.documents)
                self._answer(tickets, cache)
            self.busy_seconds += time.monotonic() - start
            self._current = []

    def _next_tickets(self) -> list[Ticket]:
        """The question that waited longest, with others on the same documents."""
        first = self._waiting.popleft()
        others = [
            ticket
            for ticket in self._waiting
            if ticket.question.documents == first.question.documents
        ]
        tickets = [first, *others[: BATCH_ROWS - 1]]
        for ticket in tickets[1:]:
            self._waiting.remove(ticket)
        return tickets

    def _answer(self, tickets: Sequence[Ticket], cache: CompactCache) -> None:
        """Answer questions on the documents of a cache, as many at once as fit in a batch."""
        rows = []
        for ticket in tickets:
            if not ticket.is_cancelled.is_set():
                with self._errors_of([ticket]):
                    rows.append(self._row(ticket, cache))
        while rows:
            count = batch_size(self._model, cache, [row.question for row in rows])
            batch = rows[:count]
            rows = rows[count:]
            self.num_batches += 1
            with self._errors_of([row.ticket for row in batch]):
                questions = [row.question for row in batch]
                answer_batch(self._model, self._tokenizer, cache, questions)

    @contextmanager
    def _errors_of(self, tickets: Sequence[Ticket]) -> Iterator[None]:
        """A block whose errors become an event of every question that has no answer yet."""
        try:
            yield
            return
        except RequestError as error:
            result = error
        except InputError as error:
            result = RequestError(400, str(error))
        except Exception as error:  # the server must live on
            result = RequestError(500, f"the model failed: {one_line(error)}")
        for ticket in tickets:
            if not ticket.is_answered:
                self.num_errors += 1
                ticket.is_answered = True
                ticket.on_event(result)

    def _row(self, ticket: Ticket, cache: CompactCache) -> "_TicketRow":
        """A question as a row of a batch."""
        question = ticket.question
        make_ids = chat_ids if question.is_chat else prompt_ids
        new = make_ids(
            self._tokenizer,
            question.content,
            chat=bool(cache.record.chat),
            chat_template=cache.record.chat_template,
            positions=positions_of(self._model.config),
        )
        ids = torch.tensor([new], device=self._model.device)
        sampling = question.sampling
        stop_tokens(self._tokenizer, sampling.stop)
        wanted = sampling.max_new_tokens
        longest_text = cache.longest_text(self._model)
        if not question.has_length and longest_text is not None:
            wanted = max(1, min(wanted, longest_text - cache.num_tokens - len(new)))
        length = answer_length(self._model, cache, ids, wanted)
        cache.check_is_no_document(ids)  # here the error is this client's alone

        def on_answer(result: Answer) -> None:
            usage = Usage(cache.num_tokens, len(new), len(result.ids))
            self.num_answers += 1
            self.num_prompt_tokens += usage.prompt_tokens
            self.num_answer_tokens += usage.answer_tokens
            ticket.is_answered = True
            ticket.on_event((result, usage))

        row = BatchQuestion(
            new,
            replace(sampling, max_new_tokens=length),
            on_text=ticket.on_event,
            on_answer=on_answer,
            is_cancelled=ticket.is_cancelled.is_set,
        )
        return _TicketRow(ticket, row)


class _TicketRow(NamedTuple):
    """A question of a client as a row of a batch."""

    ticket: Ticket
    question: BatchQuestion
