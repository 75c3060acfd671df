"""What is secret stays out of pickles, and so out of checkpoints, but for those that start a process.

A pickle has a mark in its place. In the process that made it, and in its forked children, the mark is enough. Another
process, which goes on from a checkpoint say, takes what its own program has given under the same names.
"""

from __future__ import annotations

import multiprocessing.context
import uuid
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from torchdata_wds.errors import ShardOpenError

__all__ = ["Withheld", "is_starting_a_process"]


T = TypeVar("T")

#: How many different things of the same names are remembered.
_MOST = 8


def is_starting_a_process() -> bool:
    """Whether what is pickled now goes to a process that multiprocessing starts, by spawn or forkserver."""
    return multiprocessing.context.get_spawning_popen() is not None


class Withheld(Generic[T]):
    """The secrets of one kind that this process knows.

    Args:
        what: What they are, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._by_mark: dict[str, T] = {}
        self._by_names: dict[Hashable, OrderedDict[str, T]] = {}

    def add(self, names: Hashable, secret: T) -> str:
        """Remembers a secret, and gives its mark: the same for an equal one of the same names."""
        known = self._by_names.setdefault(names, OrderedDict())
        for mark, other in known.items():
            if other == secret:
                known.move_to_end(mark)
                return mark
        mark = uuid.uuid4().hex
        known[mark] = self._by_mark[mark] = secret
        if len(known) > _MOST:
            oldest, _ = known.popitem(last=False)
            del self._by_mark[oldest]
        return mark

    def known(self, mark: str) -> T | None:
        """Gives the secret of a mark, if this process knows it."""
        return self._by_mark.get(mark)

    def find(self, mark: str, names: Hashable) -> T:
        """Gives the secret of a mark, or else the only one of its names.

        Raises:
            ShardOpenError: if there is none, or several.
        """
        if mark in self._by_mark:
            return self._by_mark[mark]
        known = self._by_names.get(names, OrderedDict())
        if len(known) == 1:
            return next(iter(known.values()))
        found = f"{len(known)} different ones of the same names are known" if known else "none of that name is known"
        raise ShardOpenError(
            f"{self._what} {names} came by a pickle, such as a checkpoint, without what is secret in it, and in this "
            f"process {found}. Make one pipe with it in the program before reading begins"
        )
