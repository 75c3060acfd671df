"""Objects that all copies of their owner in a process share, since DataLoader2 runs a copy of its reading service."""

from __future__ import annotations

import os
import uuid
import weakref
from typing import Any, Self

_known: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class SharedByCopies:
    """Base of objects of which a copy is the object itself, in the same process; elsewhere it is a new one."""

    def __init__(self) -> None:
        self._key = f"{os.getpid()}-{uuid.uuid4().hex}"
        _known[self._key] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _find, (type(self), self._key)

    def __deepcopy__(self, _: Any) -> Self:
        return self


def _find(kind: type[SharedByCopies], key: str) -> SharedByCopies:
    found = _known.get(key)
    return kind() if found is None else found
