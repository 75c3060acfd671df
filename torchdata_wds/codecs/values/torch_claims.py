"""Checks how much memory a torch field claims before it is loaded: a few bytes may claim gigabytes.

``torch.load(weights_only=True)`` runs no foreign code, but calls ``bytearray(n)``, ``torch.Tensor(n)`` and the like
with the field's numbers. The reader here follows these calls with stand-ins, and refuses a field that claims too much.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

#: The bytes that a field may claim: a constant, plus a multiple of its size.
_ROOM, _TIMES, _LARGEST_ITEM = 16 << 20, 8, 16
_HASH_MODULUS, _MOST_OF_A_HASH = sys.hash_info.modulus, 200

_ITEM_SIZES = {
    **dict.fromkeys(["Double", "Long", "ComplexFloat"], 8),
    **dict.fromkeys(["Float", "Int", "QInt32"], 4),
    **dict.fromkeys(["Half", "Short", "BFloat16"], 2),
    "ComplexDouble": 16,
}

_TEXT_ENCODINGS = ("latin1", "latin-1", "ascii", "utf-8")

# The opcodes that torch's own reader knows. No others may run here: BYTEARRAY8, for example, allocates memory.
_KNOWN_CODES = b"".join(
    (
        *(pickle.PROTO, pickle.STOP, pickle.GLOBAL, pickle.REDUCE, pickle.APPEND, pickle.APPENDS, pickle.MARK),
        *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.NONE, pickle.NEWFALSE, pickle.NEWTRUE),
        *(pickle.EMPTY_TUPLE, pickle.EMPTY_LIST, pickle.EMPTY_SET, pickle.BININT, pickle.BININT1, pickle.BININT2),
        *(pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINSTRING, pickle.BINPERSID, pickle.BINGET),
        *(pickle.LONG_BINGET, pickle.BINPUT, pickle.LONG_BINPUT, pickle.LONG1),
    )
)
_OLD_PARTS = 4  # of a field in the old format: a magic number, a version, facts of the machine, the value
_END, _END_64, _LOCATOR_64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_ENTRY_SIZE, _END_SIZE, _END_64_SIZE, _LOCATOR_64_SIZE = 30, 22, 56, 20


class ClaimError(ValueError):
    """A field claims too much."""


def check_claims(data: bytes, max_bytes: int) -> None:
    """Refuses a field that claims much more memory than its size (an archive: `max_bytes`), or is not torch's."""
    try:
        if data.startswith(b"PK\x03\x04"):
            _check_archive(data, max_bytes)
        else:
            reader = _Reader(data, len(data))
            for _ in range(_OLD_PARTS):
                reader.load()
    except (ClaimError, MemoryError):
        raise
    except Exception as error:  # Python's unpickler raises errors of many types for damaged data
        raise ValueError(
            "it is damaged, or holds more than the tensors and containers that torch.load(weights_only=True) takes "
            f"({type(error).__name__}: {error})"
        ) from error


def _check_archive(data: bytes, max_bytes: int) -> None:
    # zipfile searches for the directory, but torch trusts stored offsets: an archive with two directories could show
    # them different entries. So the directory must end exactly where the end record begins. In 1000 bytes that
    # record is at 1000 - 22 = 978; in the 64-bit form, with a locator at 978 - 20 = 958, it is at 958 - 56 = 902.
    end = start = len(data) - _END_SIZE
    size, offset = struct.unpack("<LL", data[end + 12 : end + 20])
    locator = end - _LOCATOR_64_SIZE
    if data[locator : locator + 4] == _LOCATOR_64:
        start = locator - _END_64_SIZE
        size, offset = struct.unpack("<QQ", data[start + 40 : start + 56])
        if data[start : start + 4] != _END_64 or struct.unpack("<Q", data[locator + 8 : locator + 16])[0] != start:
            raise ClaimError("its archive has two ends")
    if data[end : end + 4] != _END or offset + size != start:
        raise ClaimError("its archive does not end with its directory")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        sizes = {entry.filename: entry.file_size for entry in entries}
        size = sum([entry.file_size for entry in entries])
        if size > max(max_bytes, len(data)):
            raise ClaimError(f"it unpacks to {size:,} bytes, more than max_bytes={max_bytes:,}")
        if len(sizes) < len(entries):
            raise ClaimError("its archive has two entries of one name")
        folder = entries[0].filename.partition("/")[0] if entries else ""
        entry = archive.getinfo(f"{folder}/data.pkl")
        if entry.compress_type == zipfile.ZIP_STORED:
            # as torch.save writes it: for a small field, opening an entry takes as long as everything else
            begin = entry.header_offset + _ENTRY_SIZE
            begin += sum(struct.unpack("<HH", data[begin - 4 : begin]))
            content = data[begin : begin + entry.file_size]
        else:
            content = archive.read(entry)
    _Reader(content, size, {name.removeprefix(f"{folder}/data/"): size for name, size in sizes.items()}).load()


@dataclass(eq=False)
class _Standin:
    """Stands for an object by its sizes alone: the items that a copy takes and, for a storage, its elements."""

    size: int = 0
    storage: int | None = None


class _Reader(pickle._Unpickler):
    """Follows pickles, makes only stand-ins, text, numbers and plain containers, and adds up what they claim."""

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, size: int, records: Mapping[str, int] | None = None) -> None:
        # `size` is the field's, unpacked; `records` has the sizes of the archive's storages, None in the old format
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._left = _ROOM + _TIMES * size
        self._records = records
        self._storages: set[Any] = set()
        self._hashes: Counter[int] = Counter()

    def _take(self, size: int, what: str) -> None:
        self._left -= size
        if self._left < 0:
            raise ClaimError(f"it claims {size:,} bytes ({what}), out of all proportion to its size")

    def _take_copies(self, values: Iterable[Any], what: str) -> None:
        for value in values:
            self._take(_LARGEST_ITEM * _size_of(value), what)

    def find_class(self, module: str, name: str) -> Any:
        return partial(self.call, f"{module}.{name}")

    def persistent_load(self, identity: Any) -> _Standin:
        if not isinstance(identity, tuple) or len(identity) < 5:
            return _Standin()
        _, kind, key, _, count = identity[:5]
        name = kind.args[0] if isinstance(kind, partial) else str(kind)
        if not isinstance(count, int) or count < 0:
            raise ClaimError(f"a storage has {count!r} items")
        size = count * _ITEM_SIZES.get(name.rpartition(".")[2].removesuffix("Storage"), 1)
        if self._records is not None and size > (found := self._records.get(str(key), 0)):
            raise ClaimError(f"storage {key!r} has {found:,} bytes instead of {size:,}")
        if key not in self._storages:
            self._storages.add(key)
            self._take(size, "a storage")
        return _Standin(count, count)

    def call(self, function: str, *arguments: Any) -> _Standin:
        """Adds what a call would allocate to the claims; returns a stand-in for its result."""
        # A few bytes of pickle can call torch.Tensor(10**6, 10**6), which takes 8 * 10**12 bytes. Nothing is called
        # here: each branch adds the most that torch would allocate; by default, 16 bytes per item of the arguments.
        short = function.rpartition(".")[2]
        if short == "bytearray" or function == "_codecs.encode":
            content, *encoding = arguments or (0,)
            is_text = isinstance(content, str) and encoding and encoding[0] in _TEXT_ENCODINGS and not encoding[1:]
            if arguments and not is_text and function == "_codecs.encode":
                # hex of hex of hex ... doubles each time
                raise ClaimError(f"it calls {function} on something other than text")
            size = content if isinstance(content, int) else 2 * _size_of(content)
            self._take(size, function)
            return _Standin(size)
        if short == "_rebuild_from_type_v2" and isinstance(arguments[0], partial):
            return self.call(arguments[0].args[0], *arguments[2])
        if short.startswith("_rebuild_parameter"):
            return _Standin(_size_of(arguments[0]) if arguments else 0)
        if short.startswith("_rebuild_tensor"):
            return _view(arguments)
        if short == "_rebuild_qtensor":
            shown = _view(arguments)
            self._take(8 * shown.size, "a quantized tensor")
            self._take_copies(_find(_Standin, arguments[4]), "scales")
            return shown
        if short.startswith("_rebuild"):
            is_empty = short.startswith(("_rebuild_meta", "_rebuild_wrapper"))
            tensors = [] if is_empty else _find(_Standin, arguments)
            self._take_copies(tensors, function)
            return _Standin(sum(map(_size_of, tensors)))
        if short.endswith(("Tensor", "Storage")):
            lengths = _find(int, arguments)
            self._take(8 * math.prod(lengths) if lengths else 0, function)
        self._take_copies(arguments, function)
        for argument in arguments:
            if isinstance(argument, (list, tuple)):
                self._count_keys(argument)
                self._count_keys(item[0] for item in argument if isinstance(item, (list, tuple)) and item)
        return _Standin(sum(map(_size_of, arguments)))

    def _count_keys(self, keys: Iterable[Any]) -> None:
        """Counts dict keys and set items by hash: a great many with the same hash would take quadratic time."""
        for key in keys:
            if (type(key) is int and not -_HASH_MODULUS < key < _HASH_MODULUS) or type(key) is tuple:
                self._hashes[hash(key)] += 1
                if self._hashes[hash(key)] > _MOST_OF_A_HASH:
                    raise ClaimError(f"more than {_MOST_OF_A_HASH} keys of dicts and sets have the same hash")

    def load_empty_dict(self) -> None:
        self.append(_Standin())

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._count_keys(items[::2])
        self.stack[-1].size += len(items) // 2

    def load_setitem(self) -> None:
        self.stack.pop()
        self._count_keys((self.stack.pop(),))
        self.stack[-1].size += 1

    def load_build(self) -> None:
        state = self.stack.pop()
        if isinstance(state, tuple) and len(state) >= 4 and isinstance(state[0], _Standin):
            _view(state)
        self._take_copies((state,), "a state")

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        self.stack.append(self.stack.pop()(*arguments))

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{code: pickle._Unpickler.dispatch[code] for code in _KNOWN_CODES},
        **{pickle.EMPTY_DICT[0]: load_empty_dict, pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems},
        **{pickle.BUILD[0]: load_build, pickle.NEWOBJ[0]: load_newobj},
    }


def _view(arguments: tuple[Any, ...]) -> _Standin:
    """Returns a tensor that fits its storage, so claims nothing; torch would enlarge a storage that is too small."""
    # shape (3, 4) and strides (4, 1) at offset 2: the last item is 2 + 2 * 4 + 3 * 1 = 13, so 14 items are needed
    storage, offset, shape, strides = arguments[:4]
    count = math.prod(shape)
    if count and isinstance(storage, _Standin) and storage.storage is not None:
        last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        if last >= storage.storage:
            raise ClaimError(f"a tensor extends to item {last:,} of a storage of {storage.storage:,} items")
    return _Standin(count)


def _size_of(value: Any) -> int:
    if isinstance(value, _Standin):
        return value.size
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict, set)) else 0


def _find(kind: type[Any], value: Any) -> list[Any]:
    """Finds objects of a type in a value, up to two tuples or lists deep, as deep as torch's functions take them."""
    found: list[Any] = []
    for item in value if isinstance(value, (tuple, list)) else (value,):
        found += [each for each in (item if isinstance(item, (tuple, list)) else (item,)) if isinstance(each, kind)]
    return found
