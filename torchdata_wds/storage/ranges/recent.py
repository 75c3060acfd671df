"""The most recently used of many objects, shared by threads."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """A mapping that forgets its least recently used value when it has more than `limit`.

    Values are dropped outside of the lock, since dropping the last reference to an open file closes it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._values: OrderedDict[str, V] = OrderedDict()

    def get(self, key: str) -> V | None:
        """Returns a value, now the most recently used one; None if there is none."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: str, value: V) -> None:
        """Adds or replaces a value."""
        dropped: list[V | None] = []
        with self._lock:
            dropped.append(self._values.pop(key, None))
            self._values[key] = value
            while len(self._values) > self.limit:
                dropped.append(self._values.popitem(last=False)[1])

    def drop(self, key: str) -> None:
        """Removes a value if it is there."""
        with self._lock:
            dropped = self._values.pop(key, None)
        del dropped

    def clear(self) -> None:
        """Removes all values."""
        with self._lock:
            dropped, self._values = self._values, OrderedDict()
        del dropped

    def __len__(self) -> int:
        return len(self._values)
