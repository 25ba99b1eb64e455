"""Values that were used last, within a number of bytes."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class RecentlyUsed(Generic[Value]):
    """Holds values by key; those that were not used for the longest time are dropped.

    Args:
        most_bytes: bytes of all values; a larger value is used and not kept.
        size: bytes of a value.
    """

    def __init__(self, most_bytes: int, size: Callable[[Value], int]) -> None:
        self.num_bytes = 0
        self.num_hits = 0
        self._most_bytes = most_bytes
        self._size = size
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, load: Callable[[], Value]) -> Value:
        """The value of a key, which is loaded if it is not held."""
        if key in self._values:
            self.num_hits += 1
            self._values.move_to_end(key)
            return self._values[key]
        value = load()
        size = self._size(value)
        if size <= self._most_bytes:
            self._values[key] = value
            self.num_bytes += size
        while self.num_bytes > self._most_bytes:
            _, dropped = self._values.popitem(last=False)
            self.num_bytes -= self._size(dropped)
        return value

    def __len__(self) -> int:
        return len(self._values)
