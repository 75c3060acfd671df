"""Sends graphs and orders to actors, with the indexes of data sets apart: those are put once where all actors see them.

An index of ten million samples has 240 MB. It is pickled as the path of its file, if it has one, and as a number among
the references sent along. An actor that finds the same file at that path reads it; another one reads the copy in the
object store of its node, which all actors there share.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import ray

from torchdata_wds.consumers import no_traversal
from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.packed import PackedIndex
from torchdata_wds.format.index.stores import BytesStore, FileStore
from torchdata_wds.workers.processes.messages import PROTOCOL

_cloudpickle: Any = ray.cloudpickle  # without types


class Sent(NamedTuple):
    """A pickled object, and references to the indexes that it needs."""

    data: bytes
    indexes: list[Any]


class _Place(NamedTuple):
    """What stands for an index in a pickle."""

    path: str | None
    shown: str
    check: bytes
    given: dict[str, Any]  # the other arguments of the `DatasetIndex`
    number: int  # among the references


class IndexSender:
    """Pickles what an actor needs; `put` puts an object into the object store."""

    def __init__(self, put: Callable[[Any], Any]) -> None:
        self._put = put
        self._known: dict[bytes, Any] = {}  # the references, by the checks of the indexes
        self._used: set[bytes] = set()  # those packed since the last `drop_unused`

    def pack(self, value: Any) -> Sent:
        """Pickles an object, with lambdas and functions of ``__main__``."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        with no_traversal():
            pickler.dump(value)
        return Sent(file.getvalue(), [self._reference(index) for index in pickler.indexes.values()])

    def drop_unused(self) -> None:
        """Lets the object store drop indexes not packed since the last call: the list of shards may change."""
        self._known = {check: found for check, found in self._known.items() if check in self._used}
        self._used.clear()

    def clear(self) -> None:
        """Lets the object store drop all indexes."""
        self._known.clear()

    def _reference(self, index: PackedIndex) -> Any:
        self._used.add(index.check)
        if index.check not in self._known:
            view = memoryview(index.store.read(0, index.store.size))
            self._known[index.check] = self._put(pickle.PickleBuffer(view))
        return self._known[index.check]


class _Pickler(_cloudpickle.CloudPickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self.indexes: dict[bytes, PackedIndex] = {}

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if type(value) is not DatasetIndex:
            return None
        index, given = value.parts()
        self.indexes.setdefault(index.check, index)
        path = index.store.path if isinstance(index.store, FileStore) else None
        return tuple(_Place(path, index.store.shown, index.check, given, [*self.indexes].index(index.check)))


class IndexReceiver:
    """Unpickles what an actor is sent; keeps the indexes of the last two objects open."""

    def __init__(self) -> None:
        self._open: dict[bytes, PackedIndex] = {}
        self._before: dict[bytes, PackedIndex] = {}

    def unpack(self, sent: Sent) -> Any:
        """Reverses `IndexSender.pack`."""
        self._before, self._open = self._open, {}
        unpickler = _Unpickler(io.BytesIO(sent.data))
        unpickler.find = lambda place: DatasetIndex(self._index(place, sent.indexes), **place.given)
        return unpickler.load()

    def _index(self, place: _Place, references: Sequence[Any]) -> PackedIndex:
        found = self._open.get(place.check) or self._before.get(place.check) or _index_of_file(place)
        if found is None:
            view = memoryview(ray.get(references[place.number]))
            found = PackedIndex(BytesStore(view, place.shown))
        self._open[place.check] = found
        return found


class _Unpickler(pickle.Unpickler):
    find: Callable[[_Place], DatasetIndex]

    def persistent_load(self, identifier: Any) -> DatasetIndex:
        return self.find(_Place(*identifier))


def _index_of_file(place: _Place) -> PackedIndex | None:
    """Opens the file of an index, if this machine has the same one."""
    if place.path is None or not os.path.exists(place.path):  # noqa: PTH110
        return None
    with suppress(ShardOpenError, ShardFormatError):
        found = PackedIndex(FileStore(place.path, place.shown))
        if found.check == place.check:
            return found
    return None
