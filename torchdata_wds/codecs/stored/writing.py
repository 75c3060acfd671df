"""What writes the encoding of `stored_values`."""

from __future__ import annotations

import functools
import pickle
import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from torchdata_wds.codecs.failures import describe_value
from torchdata_wds.codecs.stored.objects import (
    Parts,
    RefusedError,
    is_image,
    is_tensor,
    write_array,
    write_image,
    write_tensor,
)
from torchdata_wds.environment import is_secure
from torchdata_wds.errors import UnsafeDataError
from torchdata_wds.format.index.slices import ShardSlice
from torchdata_wds.format.tar.members import ShardMember

__all__ = ["MAX_DEPTH", "Writer", "data_chunk", "find_value", "known_name", "too_deep"]


#: How many containers may be in one another.
MAX_DEPTH = 100

_I64, _F64, _COMPLEX = struct.Struct("<cq"), struct.Struct("<cd"), struct.Struct("<cdd")

_PICKLE_PROTOCOL = 4


def too_deep() -> ValueError:
    """Makes the error for containers in containers without end."""
    return ValueError(f"it is nested more than {MAX_DEPTH} levels deep, or contains itself")


class Writer:
    """Puts the encoding of a value together.

    Args:
        allow_pickle: Whether what has no other form is pickled.

    Attributes:
        parts: What is written.
        has_pickles: Whether anything had to be pickled.
    """

    def __init__(self, allow_pickle: bool) -> None:
        self.parts = Parts()
        self.has_pickles = False
        self._allow_pickle = allow_pickle
        self._depth = 0

    def write(self, value: Any) -> None:
        """Writes a value, or pickles it where it has no form and that is allowed."""
        write = _WRITERS.get(type(value))
        if write is not None:
            write(self, value)
            return
        begin, depth = len(self.parts.pieces), self._depth
        try:
            self._write_other(value)
        except RefusedError as refused:
            if not self._allow_pickle:
                raise
            del self.parts.pieces[begin:]
            self._depth = depth
            self._pickle(value, refused)

    def write_all(self, values: Iterable[Any]) -> None:
        """Writes the values of a container."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise too_deep()
        for value in values:
            self.write(value)
        self._depth -= 1

    def _write_other(self, value: Any) -> None:
        if type(value) is np.ndarray or (isinstance(value, np.generic) and not isinstance(value, (str, bytes))):
            write_array(value, self.parts)
        elif is_tensor(value):
            write_tensor(value, self.parts)
        elif is_image(value):
            write_image(value, self.parts, _write_entry)
        elif isinstance(value, str):
            _write_str(self, value)
        elif isinstance(value, bytes):
            _write_bytes(self, value)
        elif (known := known_name(type(value))) is not None:
            self.parts.add(b"k")
            self.parts.name(known)
            self.write(list(value) if isinstance(value, list) else tuple(value))
        else:
            raise RefusedError(value, _reason(value))

    def _pickle(self, value: Any, refused: RefusedError) -> None:
        if is_secure():
            raise UnsafeDataError(
                f"{describe_value(value).removeprefix('of type ')} can only be pickled, and WDS_SECURE=1 refuses "
                "pickles also where allow_pickle=True"
            ) from refused
        try:
            data = pickle.dumps(value, _PICKLE_PROTOCOL)
        except Exception as cause:
            raise RefusedError(value, f"it cannot be pickled: {type(cause).__name__}: {cause}") from cause
        self.parts.sized(data, b"p")
        self.has_pickles = True


def _reason(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "a subclass of numpy.ndarray would lose its type; make it a plain array with numpy.array()"
    if isinstance(value, tuple):
        return "a tuple with names would lose them; make it a plain one with tuple()"
    if isinstance(value, dict):
        return "a subclass of dict would lose its type; make it a plain one with dict()"
    if isinstance(value, (list, set, frozenset, int, float)):
        return "a subclass of a built-in type would lose its type; make it a plain value"
    return "a sample cache stores built-in values, NumPy arrays, tensors and PIL images only"


def _write_str(writer: Writer, value: str) -> None:
    try:
        data = value.encode()
    except UnicodeEncodeError:
        data = value.encode("utf-8", "surrogatepass")
    writer.parts.sized(data, b"s")


def _write_int(writer: Writer, value: int) -> None:
    if -(2**63) <= value < 2**63:
        writer.parts.add(_I64.pack(b"i", value))
        return
    writer.parts.sized(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), b"I")


def _write_bytes(writer: Writer, value: bytes | bytearray) -> None:
    if isinstance(value, bytearray):
        writer.parts.sized(bytes(value), b"B")
    else:
        writer.parts.sized(value, b"b")


def _write_dict(writer: Writer, value: dict[Any, Any]) -> None:
    writer.parts.number(len(value), b"d")
    writer.write_all(part for item in value.items() for part in item)


def _write_items(tag: bytes, writer: Writer, value: Any) -> None:
    writer.parts.number(len(value), tag)
    writer.write_all(value)


def _write_entry(value: Any) -> bytes | None:
    """Encodes an entry of an image's info, or gives None where it has no form."""
    writer = Writer(allow_pickle=False)
    try:
        writer.write(value)
    except (RefusedError, ValueError):
        return None
    return b"".join(writer.parts.pieces)


_WRITERS: dict[type, Callable[[Writer, Any], None]] = {
    type(None): lambda writer, _: writer.parts.add(b"N"),
    bool: lambda writer, value: writer.parts.add(b"T" if value else b"F"),
    int: _write_int,
    float: lambda writer, value: writer.parts.add(_F64.pack(b"f", value)),
    complex: lambda writer, value: writer.parts.add(_COMPLEX.pack(b"c", value.real, value.imag)),
    str: _write_str,
    bytes: _write_bytes,
    bytearray: _write_bytes,
    dict: _write_dict,
    **{
        kind: functools.partial(_write_items, tag)
        for kind, tag in ((list, b"l"), (tuple, b"t"), (set, b"e"), (frozenset, b"E"))
    },
}


def known_name(kind: type) -> str | None:
    """Names a class that has a form of its own. Only these are made again: a name in a file chooses nothing else."""
    if kind in (ShardMember, ShardSlice):
        return kind.__name__
    return "DataChunk" if kind.__name__ == "DataChunk" and kind is data_chunk() else None


def data_chunk() -> type:
    """The class of torch's batches."""
    from torch.utils.data import DataChunk

    return DataChunk


def find_value(inside: Any, wanted: Any) -> str | None:
    """Says where in a sample a value is: ``['json']['a'][2]``."""
    if inside is wanted:
        return ""
    pairs: Iterable[tuple[Any, Any]] = ()
    if type(inside) is dict:
        if any(key is wanted for key in inside):
            return f", as a key of {len(inside):,}"
        pairs = inside.items()
    elif type(inside) in (list, tuple) or known_name(type(inside)):
        pairs = enumerate(inside)
    elif type(inside) in (set, frozenset):
        return ", in a set" if any(value is wanted for value in inside) else None
    for key, value in pairs:
        if (found := find_value(value, wanted)) is not None:
            return f"[{key!r}]{found}"
    return None
