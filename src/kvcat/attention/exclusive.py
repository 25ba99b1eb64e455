"""One thread at a time on a model whose hooks, attention or configuration are changed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_MAKING = threading.Lock()


@contextmanager
def exclusive(model: nn.Module) -> Iterator[None]:
    """A block that no other thread enters for the same model; the thread itself may enter again.

    Hooks, the attention function, buffers and settings belong to a model, not to a thread: without
    this a forward in one thread would run the hooks of another.

    Args:
        model: a model or its ``base_model``, which have the same lock.
    """
    base = getattr(model, "base_model", model)
    with _MAKING:
        lock = _LOCKS.setdefault(base, threading.RLock())
    with lock:
        yield
