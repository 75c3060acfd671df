"""Samples as bytes, for ``cache_samples``: Python values, arrays, tensors and images, without pickling.

A value is a byte that says what it is, then its content. Numbers are little-endian; `size` is a u64 before that many
bytes, `count` a u64 before that many values, `name` a u8 before that many ASCII characters, `shape` a u8 before that
many u64. Version 1:

| byte | value | content |
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
size, pixels as ``tobytes()`` returns them, count of info entries, each a size, its UTF-8 name and a value |
| ``k`` | ShardMember, ShardSlice, DataChunk | its name, a tuple or a list |
| ``p`` | anything else | size, a pickle: only with ``allow_pickle=True`` |

Values read back equal and of the same type, with these exceptions: subclasses of str and bytes become str and bytes, an
image of any class becomes a ``PIL.Image.Image`` without the entries of its ``info`` that cannot be stored, an object
that is in a sample twice becomes two, and memory that is neither in C nor in Fortran order is written in C order.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from torchdata_wds.codecs.failures import describe_value
from torchdata_wds.codecs.stored.objects import (
    Cursor,
    Parts,
    RefusedError,
    data_chunk,
    is_image,
    is_known,
    is_tensor,
    read_array,
    read_image,
    read_npy,
    read_tensor,
    reason_of,
    write_array,
    write_image,
    write_tensor,
)
from torchdata_wds.environment import is_secure
from torchdata_wds.errors import UnsafeDataError
from torchdata_wds.format.index.slices import ShardSlice
from torchdata_wds.format.tar.members import ShardMember

__all__ = ["StoredValue", "decode_value", "encode_value"]
_MAX_DEPTH, _PICKLE_PROTOCOL = 100, 4
_I64, _F64, _COMPLEX = struct.Struct("<cq"), struct.Struct("<cd"), struct.Struct("<cdd")


class StoredValue(NamedTuple):
    """An encoded value.

    Attributes:
        data: Its bytes.
        has_pickles: Whether anything in it had to be pickled.
    """

    data: bytes
    has_pickles: bool


def encode_value(value: Any, *, allow_pickle: bool = False) -> StoredValue:
    r"""Encodes a sample, tuple, batch or anything else.

    Args:
        value: The value.
        allow_pickle: Whether to pickle those parts of it that cannot be stored otherwise.

    Raises:
        ValueError: if something in it cannot be stored, or it is nested too deeply; the message says where that is.
        UnsafeDataError: if it would be pickled, and ``WDS_SECURE=1`` refuses that.

    Example:
        >>> encode_value([True, 1]).data
        b'l\x02\x00\x00\x00\x00\x00\x00\x00Ti\x01\x00\x00\x00\x00\x00\x00\x00'
        >>> decode_value(encode_value({"cls": 1, "at": (0.5, None)}).data)
        {'cls': 1, 'at': (0.5, None)}
    """
    writer = _Writer(allow_pickle)
    try:
        writer.write(value)
    except RefusedError as refused:
        where = _find_value(value, refused.value) or ""
        what = f"its item at {where} is {describe_value(refused.value)}" if where else describe_value(value)
        raise ValueError(
            f"{what.removeprefix('of type ')}: {refused.reason}. Convert it before, place cache_samples before the "
            "stage that makes it, or pass allow_pickle=True"
        ) from refused.__cause__
    except RecursionError as error:
        raise _too_deep() from error
    return StoredValue(b"".join(writer.pieces), writer.has_pickles)


def decode_value(data: bytes, *, allow_pickle: bool = False) -> Any:
    """Decodes what `encode_value` returned.

    Args:
        data: The encoded value.
        allow_pickle: Whether to unpickle what was pickled, which runs code that the data chooses.

    Raises:
        ValueError: if the data is damaged, or unpickling fails.
        UnsafeDataError: if something in it was pickled, and that is not allowed.
    """
    reader = _Reader(data, allow_pickle)
    try:
        value = reader.read()
    except UnsafeDataError:
        raise
    except Exception as cause:  # damaged data, like unpickling, fails in any way
        raise ValueError(f"it cannot be read: {type(cause).__name__}: {cause}") from cause
    if reader.left:
        raise ValueError(f"it is damaged: {reader.left:,} bytes follow the value")
    return value


class _Writer(Parts):
    """Collects the encoding of a value."""

    def __init__(self, allow_pickle: bool) -> None:
        super().__init__()
        self.has_pickles = False
        self._allow_pickle = allow_pickle
        self._depth = 0

    def write(self, value: Any) -> None:
        """Writes a value; pickles it if it cannot be stored otherwise and that is allowed."""
        write = _WRITERS.get(type(value))
        if write is not None:
            write(self, value)
            return
        begin, depth = len(self.pieces), self._depth
        try:
            self._write_other(value)
        except RefusedError as refused:
            if not self._allow_pickle:
                raise
            # A part of the value may already be written: a DataChunk holds others.
            del self.pieces[begin:]
            self._depth = depth
            self._pickle(value, refused)

    def write_items(self, tag: bytes, values: Any) -> None:
        """Writes a list, tuple or set."""
        self.number(len(values), tag)
        self._write_all(values)

    def write_dict(self, value: dict[Any, Any]) -> None:
        """Writes a dict."""
        self.number(len(value), b"d")
        self._write_all(part for item in value.items() for part in item)

    def _write_all(self, values: Iterable[Any]) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _too_deep()
        for value in values:
            self.write(value)
        self._depth -= 1

    def write_int(self, value: int) -> None:
        """Writes a whole number."""
        if -(2**63) <= value < 2**63:
            self.add(_I64.pack(b"i", value))
        else:
            self.sized(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), b"I")

    def write_str(self, value: str) -> None:
        """Writes a text."""
        try:
            data = value.encode()
        except UnicodeEncodeError:
            data = value.encode("utf-8", "surrogatepass")
        self.sized(data, b"s")

    def _write_other(self, value: Any) -> None:
        if type(value) is np.ndarray or (isinstance(value, np.generic) and not isinstance(value, (str, bytes))):
            write_array(value, self)
        elif is_tensor(value):
            write_tensor(value, self)
        elif is_image(value):
            write_image(value, self, _entry)
        elif isinstance(value, str):
            self.write_str(value)
        elif isinstance(value, bytes):
            self.sized(value, b"b")
        elif is_known(type(value)):
            self.add(b"k")
            self.name(type(value).__name__)
            self.write(list(value) if isinstance(value, list) else tuple(value))
        else:
            raise RefusedError(value, reason_of(value))

    def _pickle(self, value: Any, refused: RefusedError) -> None:
        if is_secure():
            raise UnsafeDataError(
                f"{describe_value(value).removeprefix('of type ')} can only be pickled, and WDS_SECURE=1 refuses "
                "pickles even with allow_pickle=True"
            ) from refused
        try:
            data = pickle.dumps(value, _PICKLE_PROTOCOL)
        except Exception as cause:
            raise RefusedError(value, f"it cannot be pickled: {type(cause).__name__}: {cause}") from cause
        self.sized(data, b"p")
        self.has_pickles = True


_WRITERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): lambda writer, _: writer.add(b"N"),
    bool: lambda writer, value: writer.add(b"T" if value else b"F"),
    int: _Writer.write_int,
    float: lambda writer, value: writer.add(_F64.pack(b"f", value)),
    complex: lambda writer, value: writer.add(_COMPLEX.pack(b"c", value.real, value.imag)),
    str: _Writer.write_str,
    bytes: lambda writer, value: writer.sized(value, b"b"),
    bytearray: lambda writer, value: writer.sized(bytes(value), b"B"),
    dict: _Writer.write_dict,
    list: lambda writer, value: writer.write_items(b"l", value),
    tuple: lambda writer, value: writer.write_items(b"t", value),
    set: lambda writer, value: writer.write_items(b"e", value),
    frozenset: lambda writer, value: writer.write_items(b"E", value),
}


def _entry(value: Any) -> bytes | None:
    """Encodes an entry of an image's info; None if it cannot be stored."""
    writer = _Writer(allow_pickle=False)
    try:
        writer.write(value)
    except (RefusedError, ValueError):
        return None
    return b"".join(writer.pieces)


def _find_value(inside: Any, wanted: Any) -> str | None:
    """Returns where in a sample a value is, as ``['json']['a'][2]``."""
    if inside is wanted:
        return ""
    pairs: Iterable[tuple[Any, Any]] = ()
    if type(inside) is dict:
        if any(key is wanted for key in inside):
            return f", as a key of {len(inside):,}"
        pairs = inside.items()
    elif type(inside) in (list, tuple) or is_known(type(inside)):
        pairs = enumerate(inside)
    elif type(inside) in (set, frozenset):
        return ", in a set" if any(value is wanted for value in inside) else None
    for key, value in pairs:
        if (found := _find_value(value, wanted)) is not None:
            return f"[{key!r}]{found}"
    return None


class _Reader(Cursor):
    """Reads values one after another."""

    def __init__(self, data: bytes, allow_pickle: bool) -> None:
        super().__init__(data)
        self._allow_pickle = allow_pickle
        self._depth = 0

    def read(self) -> Any:
        """Reads a value."""
        tag = self.byte()
        read = _READERS.get(tag)
        if read is None:
            raise ValueError(f"byte {self.position - 1:,} is {bytes([tag])!r}, which is not the tag of a value")
        return read(self)

    def read_items(self, times: int = 1) -> list[Any]:
        """Reads the values of a container, after their number; `times` values each."""
        count = self.count()
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _too_deep()
        values = [self.read() for _ in range(times * count)]
        self._depth -= 1
        return values

    def read_dict(self) -> dict[Any, Any]:
        """Reads a dict."""
        values = iter(self.read_items(2))
        return dict(zip(values, values, strict=True))

    def read_known(self) -> Any:
        """Reads an object of one of the known classes."""
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


_READERS: dict[int, Callable[[_Reader], Any]] = {
    ord("N"): lambda _: None,
    ord("T"): lambda _: True,
    ord("F"): lambda _: False,
    ord("i"): lambda reader: int.from_bytes(reader.take(8), "little", signed=True),
    ord("I"): lambda reader: int.from_bytes(reader.sized(), "little", signed=True),
    ord("f"): lambda reader: struct.unpack("<d", reader.take(8))[0],
    ord("c"): lambda reader: complex(*struct.unpack("<dd", reader.take(16))),
    ord("s"): lambda reader: str(reader.sized(), "utf-8", "surrogatepass"),
    ord("b"): lambda reader: bytes(reader.sized()),
    ord("B"): lambda reader: bytearray(reader.sized()),
    ord("l"): _Reader.read_items,
    ord("t"): lambda reader: tuple(reader.read_items()),
    ord("e"): lambda reader: set(reader.read_items()),
    ord("E"): lambda reader: frozenset(reader.read_items()),
    ord("d"): _Reader.read_dict,
    ord("a"): read_array,
    ord("A"): read_npy,
    ord("x"): read_tensor,
    ord("m"): lambda reader: read_image(reader, reader.read),
    ord("k"): _Reader.read_known,
    ord("p"): _Reader.read_pickle,
}


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {_MAX_DEPTH} levels deep, or contains itself")
