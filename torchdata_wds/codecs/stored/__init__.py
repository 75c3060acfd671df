"""Samples as bytes, for ``cache_samples``: Python values, arrays, tensors and images, without pickling.

A value is a byte that says what it is, and what follows it. Numbers are little-endian; `size` is a u64 before so many
bytes, `count` a u64 before so many values, `name` a u8 before so many ASCII characters, `shape` a u8 before so many
u64. Version 1:

| byte | value | what follows |
|---|---|---|
| ``N`` ``T`` ``F`` | None, True, False | |
| ``i`` | int of 64 bits | i64 |
| ``I`` | int of any size | size, two's complement |
| ``f``, ``c`` | float, complex | one or two f64 |
| ``s`` | str | size, UTF-8; lone surrogates as if they were characters |
| ``b``, ``B`` | bytes, bytearray | size, bytes |
| ``l``, ``t``, ``e``, ``E`` | list, tuple, set, frozenset | count, values |
| ``d`` | dict | count, a key and a value each, in their order |
| ``a`` | NumPy array | u8 (1: Fortran order, 2: a scalar), name of the dtype, shape, size, items |
| ``A`` | NumPy array of a structured dtype | u8 as before, size, an npy file |
| ``x`` | torch tensor | name of the dtype, shape, size, items in C order |
| ``m`` | PIL image | name of the mode, u64 width, u64 height, name of the palette's mode, size, palette,
size, pixels as ``tobytes()`` gives them, count of info entries, each a size, its UTF-8 name and a value |
| ``k`` | ShardMember, ShardSlice, DataChunk | its name, a tuple or a list |
| ``p`` | what has no other form | size, a pickle: only with ``allow_pickle=True`` |

Values read back equal and of the same type, with these exceptions: subclasses of str and bytes become str and bytes, an
image of any class becomes a ``PIL.Image.Image`` without those entries of its ``info`` that have no form, an object that
is in a sample twice becomes two, and memory that is neither in C nor in Fortran order is written in C order.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from torchdata_wds.codecs.failures import describe_value
from torchdata_wds.codecs.stored.objects import Cursor, RefusedError, read_array, read_image, read_npy, read_tensor
from torchdata_wds.codecs.stored.writing import MAX_DEPTH, Writer, data_chunk, find_value, too_deep
from torchdata_wds.environment import is_secure
from torchdata_wds.errors import UnsafeDataError
from torchdata_wds.format.index.slices import ShardSlice
from torchdata_wds.format.tar.members import ShardMember

__all__ = ["StoredValue", "decode_value", "encode_value"]


_CURE = "Convert it before, place cache_samples before the stage that makes it, or pass allow_pickle=True"


class StoredValue(NamedTuple):
    """An encoded value.

    Attributes:
        data: Its bytes.
        has_pickles: Whether anything in it had to be pickled.
    """

    data: bytes
    has_pickles: bool


def encode_value(value: Any, *, allow_pickle: bool = False) -> StoredValue:
    r"""Encodes a value.

    Args:
        value: A sample, tuple, batch or anything else.
        allow_pickle: Whether what has no other form is pickled, by itself.

    Raises:
        ValueError: if something in it has no form, or it is nested too deeply; the message says where that is.
        UnsafeDataError: if it would be pickled, and ``WDS_SECURE=1`` refuses that.

    Example:
        >>> encode_value([True, 1]).data
        b'l\x02\x00\x00\x00\x00\x00\x00\x00Ti\x01\x00\x00\x00\x00\x00\x00\x00'
        >>> decode_value(encode_value({"cls": 1, "at": (0.5, None)}).data)
        {'cls': 1, 'at': (0.5, None)}
    """
    writer = Writer(allow_pickle)
    try:
        writer.write(value)
    except RefusedError as refused:
        where = find_value(value, refused.value) or ""
        what = f"its item at {where} is {describe_value(refused.value)}" if where else describe_value(value)
        raise ValueError(f"{what.removeprefix('of type ')}: {refused.reason}. {_CURE}") from refused.__cause__
    except RecursionError as error:
        raise too_deep() from error
    return StoredValue(b"".join(writer.parts.pieces), writer.has_pickles)


def decode_value(data: bytes, *, allow_pickle: bool = False) -> Any:
    """Decodes a value.

    Args:
        data: What `encode_value` gave.
        allow_pickle: Whether what was pickled is unpickled, which runs code that the data chooses.

    Raises:
        ValueError: if the data is damaged, or unpickling fails.
        UnsafeDataError: if something in it was pickled, and that is not allowed.
    """
    reader = _Reader(data, allow_pickle)
    try:
        value = reader.read()
    except UnsafeDataError:
        raise
    except Exception as cause:
        # damaged data has no end of ways to fail, and so has unpickling
        raise ValueError(f"it cannot be read: {type(cause).__name__}: {cause}") from cause
    if reader.left:
        raise ValueError(f"it is damaged: {reader.left:,} bytes follow the value")
    return value


class _Reader(Cursor):
    def __init__(self, data: bytes, allow_pickle: bool) -> None:
        super().__init__(data)
        self._allow_pickle = allow_pickle
        self._depth = 0

    def read(self) -> Any:
        """Reads a value."""
        tag = self.byte()
        read = _READERS.get(tag)
        if read is None:
            raise ValueError(f"byte {self.position - 1:,} is {bytes([tag])!r}, which begins no value")
        return read(self)

    def read_all(self) -> list[Any]:
        """Reads the values of a container, behind their number."""
        return self._inside(self.count())

    def read_dict(self) -> dict[Any, Any]:
        """Reads a dict."""
        values = iter(self._inside(2 * self.count()))
        return dict(zip(values, values, strict=True))

    def read_known(self) -> Any:
        """Reads what has a class of its own."""
        name, values = self.name(), self.read()
        if name == "DataChunk":
            return data_chunk()(values)
        return {"ShardMember": ShardMember, "ShardSlice": ShardSlice}[name](*values)

    def read_pickle(self) -> Any:
        """Unpickles a value, if that is allowed."""
        if not self._allow_pickle or is_secure():
            raise UnsafeDataError(
                "holds a pickle, which can run any code while it is loaded, and "
                + ("WDS_SECURE=1 refuses that" if self._allow_pickle else "allow_pickle=True was not given")
            )
        return pickle.loads(self.sized())

    def _inside(self, count: int) -> list[Any]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise too_deep()
        values = [self.read() for _ in range(count)]
        self._depth -= 1
        return values


_READERS: dict[int, Callable[[_Reader], Any]] = {
    tag[0]: read
    for tag, read in {
        b"N": lambda _: None,
        b"T": lambda _: True,
        b"F": lambda _: False,
        b"i": lambda reader: int.from_bytes(reader.take(8), "little", signed=True),
        b"I": lambda reader: int.from_bytes(reader.sized(), "little", signed=True),
        b"f": lambda reader: struct.unpack("<d", reader.take(8))[0],
        b"c": lambda reader: complex(*struct.unpack("<dd", reader.take(16))),
        b"s": lambda reader: str(reader.sized(), "utf-8", "surrogatepass"),
        b"b": lambda reader: bytes(reader.sized()),
        b"B": lambda reader: bytearray(reader.sized()),
        b"l": _Reader.read_all,
        b"t": lambda reader: tuple(reader.read_all()),
        b"e": lambda reader: set(reader.read_all()),
        b"E": lambda reader: frozenset(reader.read_all()),
        b"d": _Reader.read_dict,
        b"a": read_array,
        b"A": read_npy,
        b"x": read_tensor,
        b"m": lambda reader: read_image(reader, reader.read),
        b"k": _Reader.read_known,
        b"p": _Reader.read_pickle,
    }.items()
}
