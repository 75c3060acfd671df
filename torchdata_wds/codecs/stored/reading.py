"""Decodes stored samples; the package's docstring describes the format."""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from torchdata_wds.codecs.options import DecodeOptions
from torchdata_wds.codecs.values.numpy import decode_npy
from torchdata_wds.environment import is_secure
from torchdata_wds.errors import UnsafeDataError
from torchdata_wds.format.index.slices import ShardSlice
from torchdata_wds.format.tar.members import ShardMember

MAX_DEPTH = 100
FORTRAN, SCALAR = 1, 2
U64 = struct.Struct("<Q")


def too_deep() -> ValueError:
    """Returns the exception for a value that is nested too deeply."""
    return ValueError(f"it is nested more than {MAX_DEPTH} levels deep, or contains itself")


def class_named(name: str) -> Any:
    """Returns a class that is stored by name, or None: a file cannot name any other class."""
    if name == "DataChunk":  # torch's batches; torch is imported only when needed
        from torch.utils.data import DataChunk

        return DataChunk
    return {"ShardMember": ShardMember, "ShardSlice": ShardSlice}.get(name)


def decode_value(data: bytes, *, allow_pickle: bool = False) -> Any:
    """Decodes what `encode_value` returned; with `allow_pickle` also pickles, which run code from the data."""
    reader = _Reader(data, allow_pickle)
    try:
        value = reader.read()
    except UnsafeDataError:
        raise
    except Exception as cause:  # damaged data and unpickling raise errors of any type
        raise ValueError(f"it cannot be read: {type(cause).__name__}: {cause}") from cause
    if reader.left:
        raise ValueError(f"it is damaged: {reader.left:,} bytes follow the value")
    return value


class _Reader:
    """Reads values one after another; reading past the end of the bytes raises an error."""

    def __init__(self, data: bytes, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle
        self._data = memoryview(data)
        self._position = 0
        self._depth = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._position

    def read(self) -> Any:
        tag = self.byte()
        read = _READERS.get(tag)
        if read is None:
            raise ValueError(f"byte {self._position - 1:,} is {bytes([tag])!r}, which is not the tag of a value")
        return read(self)

    def read_items(self, times: int = 1) -> list[Any]:
        """Reads a container: the number of its items, then their values, `times` for each."""
        count = self.count()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise too_deep()
        values = [self.read() for _ in range(times * count)]
        self._depth -= 1
        return values

    def take(self, size: int) -> memoryview:
        begin = self._position
        end = begin + size
        if end > len(self._data):
            raise ValueError(f"it is cut off: expected {size:,} bytes at byte {begin:,}, found {self.left:,}")
        self._position = end
        return self._data[begin:end]

    def byte(self) -> int:
        value = self._data[self._position]
        self._position += 1
        return value

    def number(self) -> int:
        number: int = U64.unpack_from(self._data, self._position)[0]
        self._position += 8
        return number

    def count(self) -> int:
        """Takes the number of values that follow; each has at least a byte, which bounds it."""
        count = self.number()
        if count > self.left:
            raise ValueError(f"it announces {count:,} values at byte {self._position:,}, {self.left:,} bytes are left")
        return count

    def sized(self) -> memoryview:
        return self.take(self.number())

    def name(self) -> str:
        return str(self.take(self.byte()), "ascii")

    def shaped(self, item_size: int) -> tuple[tuple[int, ...], memoryview]:
        """Takes a shape, and the bytes of its items."""
        rank = self.byte()
        shape = struct.unpack(f"<{rank}Q", self.take(8 * rank))
        data = self.sized()
        expected = math.prod(shape) * item_size
        if len(data) != expected:
            raise ValueError(f"shape {shape} of {item_size} bytes each takes {expected:,} bytes, found {len(data):,}")
        return shape, data


def _read_dict(reader: _Reader) -> dict[Any, Any]:
    values = iter(reader.read_items(2))
    return dict(zip(values, values, strict=True))


def _read_array(reader: _Reader) -> Any:
    """Reads an array that owns its memory, or a scalar."""
    flags, dtype = reader.byte(), np.dtype(reader.name())
    shape, data = reader.shaped(dtype.itemsize)
    order: Literal["F", "C"] = "F" if flags & FORTRAN else "C"
    array = np.frombuffer(data, dtype).reshape(shape, order=order).copy(order) if data else np.empty(shape, dtype)
    return array[()] if flags & SCALAR else array


def _read_npy(reader: _Reader) -> Any:
    flags, array = reader.byte(), decode_npy(bytes(reader.sized()), DecodeOptions())
    return array[()] if flags & SCALAR else array


def _read_tensor(reader: _Reader) -> Any:
    """Reads a tensor that owns its memory."""
    import torch

    name = reader.name()
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this version of torch has no type {name!r}")  # noqa: TRY004 - the data is wrong
    shape, data = reader.shaped(dtype.itemsize)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def _read_image(reader: _Reader) -> Any:
    from PIL import Image

    mode, width, height = reader.name(), reader.number(), reader.number()
    palette_mode, palette, pixels = reader.name(), reader.sized(), reader.sized()
    if width * height > 8 * len(pixels):  # mode 1 has eight pixels per byte
        raise ValueError(f"an image of {width:,} x {height:,} pixels cannot be in {len(pixels):,} bytes")
    image = Image.frombytes(mode, (width, height), bytes(pixels))
    if palette_mode:
        image.putpalette(bytes(palette), palette_mode)
    for _ in range(reader.count()):
        name = str(reader.sized(), "utf-8", "surrogatepass")
        image.info[name] = reader.read()
    return image


def _read_known(reader: _Reader) -> Any:
    name, values = reader.name(), reader.read()
    if (known := class_named(name)) is None:
        raise ValueError(f"objects of the class {name!r} are not stored by name")
    return known(*values) if issubclass(known, tuple) else known(values)


def _read_pickle(reader: _Reader) -> Any:
    if not reader.allow_pickle or is_secure():
        raise UnsafeDataError(
            "holds a pickle, which can run any code while it is loaded, and "
            + ("WDS_SECURE=1 refuses that" if reader.allow_pickle else "allow_pickle=True was not given")
        )
    return pickle.loads(reader.sized())


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
    ord("d"): _read_dict,
    ord("a"): _read_array,
    ord("A"): _read_npy,
    ord("x"): _read_tensor,
    ord("m"): _read_image,
    ord("k"): _read_known,
    ord("p"): _read_pickle,
}
