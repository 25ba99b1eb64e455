"""Which documents the workers of an engine hold, within a number of bytes.

The scheduler decides, and the workers follow its orders. A document is loaded when a request that
names it is about to be scheduled. The ones that were not used for longest make room, but never one
that a running request reads: then the request waits.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvcat.errors import InputError
from kvcat.serving.documents import Document


@dataclass
class _Resident:
    """A document that the workers hold, or load.

    Args:
        num_bytes: in the memory of one worker.
        is_loaded: whether all workers hold it.
        users: requests that wait for it or read it.
    """

    num_bytes: int
    is_loaded: bool = False
    users: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Orders:
    """What the workers must do before the next step: drop documents, then load others.

    Args:
        drop: digests.
        load: documents.
    """

    drop: tuple[str, ...] = ()
    load: tuple[Document, ...] = ()


def check_size(num_bytes: int, most_bytes: int) -> None:
    """Raise an ``InputError`` for a document that is larger than the bound on all of them."""
    if num_bytes > most_bytes:
        raise InputError(
            f"the document needs {num_bytes / 1e6:.1f} MB, and cache_mb is {most_bytes / 1e6:g}"
        )


class Residents:
    """The documents in the memory of the workers.

    Args:
        most_bytes: bound on the bytes of all documents in the memory of one worker.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self.num_loads = 0
        self.num_drops = 0
        self._residents: OrderedDict[str, _Resident] = OrderedDict()  # the last used comes last
        self._used_by: dict[str, str] = {}  # digest, by request
        self._queue: deque[str] = deque()  # requests whose document has no room yet
        self._failures: dict[str, str] = {}  # messages, by request
        self._drop: list[str] = []
        self._load: list[Document] = []

    def __len__(self) -> int:
        return len(self._residents)

    def ask(self, request_id: str, document: Document, num_bytes: int) -> bool:
        """Whether all workers hold the document; from then on until ``release`` they keep it.

        Raises:
            InputError: it is larger than the bound, or a worker could not load it.
        """
        if request_id in self._failures:
            raise InputError(self._failures.pop(request_id))
        digest = document.digest
        if digest not in self._residents:
            check_size(num_bytes, self.most_bytes)
            if not self._make_room(request_id, num_bytes):
                return False
            self._residents[digest] = _Resident(num_bytes)
            self.num_bytes += num_bytes
            self._load.append(document)
        resident = self._residents[digest]
        self._residents.move_to_end(digest)
        resident.users.add(request_id)
        self._used_by[request_id] = digest
        self._leave_queue(request_id)
        return resident.is_loaded

    def release(self, request_id: str) -> None:
        """The request has ended."""
        self._failures.pop(request_id, None)
        self._leave_queue(request_id)
        digest = self._used_by.pop(request_id, None)
        if digest is not None and digest in self._residents:
            self._residents[digest].users.discard(request_id)

    def take_orders(self) -> Orders:
        """The orders since the last call."""
        orders = Orders(tuple(self._drop), tuple(self._load))
        self._drop = []
        self._load = []
        return orders

    def on_loaded(self, digest: str, num_bytes: int) -> None:
        """All workers hold a document, of at most so many bytes."""
        resident = self._residents[digest]
        self.num_bytes += num_bytes - resident.num_bytes
        resident.num_bytes = num_bytes
        resident.is_loaded = True
        self.num_loads += 1

    def on_failed(self, digest: str, message: str) -> None:
        """A worker could not load a document: its requests fail."""
        resident = self._residents.pop(digest)
        self.num_bytes -= resident.num_bytes
        self._drop.append(digest)  # other workers may hold it
        for request_id in resident.users:
            del self._used_by[request_id]
            self._failures[request_id] = message

    def _make_room(self, request_id: str, num_bytes: int) -> bool:
        """Drop what is not used until so many bytes are free; False: the request waits.

        Requests that wait get room in their order: otherwise small documents would keep a large one
        waiting for ever.
        """
        if request_id not in self._queue:
            self._queue.append(request_id)
        if self._queue[0] != request_id:
            return False
        # what is being loaded stays: the workers' reports of it are still to come
        unused = [
            digest for digest, held in self._residents.items() if held.is_loaded and not held.users
        ]
        unused_bytes = sum(self._residents[digest].num_bytes for digest in unused)
        if self.num_bytes - unused_bytes + num_bytes > self.most_bytes:
            return False
        for digest in unused:
            if self.num_bytes + num_bytes <= self.most_bytes:
                break
            self.num_bytes -= self._residents.pop(digest).num_bytes
            self._drop.append(digest)
            self.num_drops += 1
        return True

    def _leave_queue(self, request_id: str) -> None:
        if request_id in self._queue:
            self._queue.remove(request_id)
