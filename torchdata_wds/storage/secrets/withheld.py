"""Values that are kept out of pickles, and so out of checkpoints, except in pickles that start a process.

A pickle contains a mark instead of the value, which the process that made it and its forked children can resolve. Any
other process, such as one that resumes from a checkpoint, uses the value that its own program has for the same names.
"""

import multiprocessing.context
import uuid
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from torchdata_wds.errors import ShardOpenError

T = TypeVar("T")

#: The number of different values under the same names that are remembered.
_MOST = 8
_by_names: dict[Hashable, OrderedDict[str, Any]] = {}


class Withheld(Generic[T]):
    """A value (not None), or the mark of one that may be unknown to this process.

    `names` is the part that may be shown; another process finds its own value by it. `what` is for messages.
    """

    __slots__ = ("_mark", "_value", "_what", "names")

    def __init__(self, what: str, names: Hashable, value: T, *, is_secret: bool) -> None:
        self._what, self.names = what, names
        self._value: T | None = value
        self._mark = _mark_of((what, names), value) if is_secret else ""

    @property
    def value(self) -> T:
        """The value; raises ShardOpenError if it came in a pickle and this process has none or several of its names."""
        if self._value is not None:
            return self._value
        known = _by_names.get((self._what, self.names), OrderedDict())
        if len(known) == 1:
            value: T = next(iter(known.values()))
            return value
        found = f"{len(known)} different ones of the same names are known" if known else "none of that name is known"
        raise ShardOpenError(
            f"{self._what} {self.names} came from a pickle, such as a checkpoint, without its secrets, and in this "
            f"process {found}. Make one pipe with it in the program before reading begins"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # The secret itself is sent only to a process that multiprocessing is starting, by spawn or forkserver.
        is_sent = not self._mark or multiprocessing.context.get_spawning_popen() is not None
        return _restored, (self._what, self.names, self.value if is_sent else None, self._mark)


def _restored(what: str, names: Hashable, value: T | None, mark: str) -> Withheld[T]:
    if value is not None:
        return Withheld(what, names, value, is_secret=bool(mark))
    made = Withheld[T].__new__(Withheld)
    known = _by_names.get((what, names), OrderedDict())
    made._what, made.names, made._value, made._mark = what, names, known.get(mark), mark
    return made


def _mark_of(names: Hashable, value: object) -> str:
    """Remembers a value and returns its mark: the same for an equal value of the same names."""
    known = _by_names.setdefault(names, OrderedDict())
    mark = next((mark for mark, other in known.items() if other == value), "")
    if mark:
        known.move_to_end(mark)
        return mark
    mark = uuid.uuid4().hex
    known[mark] = value
    if len(known) > _MOST:
        known.popitem(last=False)
    return mark
