"""Arrays, tensors and images as the sample cache stores them, and how bytes are put together and taken apart."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions
from torchdata_wds.codecs.values.numpy import decode_npy, encode_npy
from torchdata_wds.format.index.slices import ShardSlice
from torchdata_wds.format.tar.members import ShardMember

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

_U64 = struct.Struct("<Q")
_FORTRAN, _SCALAR = 1, 2


class RefusedError(Exception):
    """A value cannot be stored; caught by the encoder."""

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(reason)
        self.value = value
        self.reason = reason


def reason_of(value: Any) -> str:
    """Returns why a value of another type cannot be stored, and what to do."""
    if isinstance(value, np.ndarray):
        return "a subclass of numpy.ndarray would lose its type; make it a plain array with numpy.array()"
    if isinstance(value, tuple):
        return "a tuple with names would lose them; make it a plain one with tuple()"
    if isinstance(value, dict):
        return "a subclass of dict would lose its type; make it a plain one with dict()"
    if isinstance(value, (list, set, frozenset, int, float)):
        return "a subclass of a built-in type would lose its type; make it a plain value"
    return "a sample cache stores built-in values, NumPy arrays, tensors and PIL images only"


def is_known(kind: type) -> bool:
    """Returns whether a class is stored by its name. Only these are made again: a file cannot name others."""
    return kind in (ShardMember, ShardSlice) or (kind.__name__ == "DataChunk" and kind is data_chunk())


def data_chunk() -> type:
    """Returns the class of torch's batches, which is only imported when needed."""
    from torch.utils.data import DataChunk

    return DataChunk


class Parts:
    """Bytes that are being put together; large ones are copied once, at the end."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.add = self.pieces.append

    def number(self, value: int, tag: bytes = b"") -> None:
        """Adds a tag and a u64."""
        self.add(tag + _U64.pack(value))

    def sized(self, data: bytes | memoryview, tag: bytes = b"") -> None:
        """Adds a tag, the number of bytes as u64, and the bytes."""
        self.add(tag + _U64.pack(len(data)))
        self.add(data)

    def name(self, text: str) -> None:
        """Adds a short ASCII text after its length, as u8."""
        data = text.encode("ascii")
        self.add(bytes([len(data)]) + data)

    def shape(self, shape: tuple[int, ...]) -> None:
        """Adds the number of dimensions, as u8, and the dimensions."""
        self.add(struct.pack(f"<B{len(shape)}Q", len(shape), *shape))


class Cursor:
    """A position in encoded bytes; whatever is taken beyond their end raises an error."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._end = len(data)
        self.position = 0

    @property
    def left(self) -> int:
        """The number of remaining bytes."""
        return self._end - self.position

    def take(self, size: int) -> memoryview:
        """Takes `size` bytes."""
        begin = self.position
        end = begin + size
        if end > self._end:
            raise ValueError(f"it is cut off: expected {size:,} bytes at byte {begin:,}, found {self.left:,}")
        self.position = end
        return self._data[begin:end]

    def byte(self) -> int:
        """Takes one byte."""
        value = self._data[self.position]
        self.position += 1
        return value

    def number(self) -> int:
        """Takes a u64."""
        number: int = _U64.unpack_from(self._data, self.position)[0]
        self.position += 8
        return number

    def count(self) -> int:
        """Takes the number of values that follow, each of at least a byte."""
        count = self.number()
        if count > self.left:
            raise ValueError(f"it announces {count:,} values at byte {self.position:,}, {self.left:,} bytes are left")
        return count

    def sized(self) -> memoryview:
        """Takes the number of bytes, and the bytes."""
        return self.take(self.number())

    def name(self) -> str:
        """Takes a short ASCII text."""
        return str(self.take(self.byte()), "ascii")

    def shape(self) -> tuple[int, ...]:
        """Takes dimensions."""
        rank = self.byte()
        return struct.unpack(f"<{rank}Q", self.take(8 * rank))


def write_array(value: np.ndarray[Any, Any] | np.generic, parts: Parts) -> None:
    """Writes an array or scalar; one of a structured type as an npy file, since its dtype has no short name."""
    flags = _SCALAR if isinstance(value, np.generic) else 0
    array = np.asarray(value)
    if array.dtype.kind == "V" or array.dtype.hasobject or np.dtype(array.dtype.str) != array.dtype:
        try:
            data = encode_npy(array, EncodeOptions())
        except (TypeError, ValueError) as cause:
            raise RefusedError(value, str(cause)) from cause
        parts.add(b"A" + bytes([flags]))
        parts.sized(data)
        return
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        flags |= _FORTRAN
    parts.add(b"a" + bytes([flags]))
    parts.name(array.dtype.str)
    parts.shape(array.shape)
    flat = array.ravel("F" if flags & _FORTRAN else "C")
    parts.sized(flat.view(np.uint8).data if array.nbytes else b"")


def read_array(cursor: Cursor) -> Any:
    """Reads an array that owns its memory, or a scalar."""
    flags = cursor.byte()
    dtype = np.dtype(cursor.name())
    shape = cursor.shape()
    data = cursor.sized()
    _check_size(dtype.itemsize, shape, data)
    if not data:
        array: np.ndarray[Any, Any] = np.empty(shape, dtype)
    else:
        order = "F" if flags & _FORTRAN else "C"
        array = np.frombuffer(data, dtype).reshape(shape, order=order).copy(order)  # type: ignore[call-overload]
    return array[()] if flags & _SCALAR else array


def read_npy(cursor: Cursor) -> Any:
    """Reads an array of a structured type, or a scalar."""
    flags = cursor.byte()
    array = decode_npy(bytes(cursor.sized()), DecodeOptions())
    return array[()] if flags & _SCALAR else array


def _check_size(item: int, shape: tuple[int, ...], data: memoryview) -> None:
    expected = math.prod(shape) * item
    if len(data) != expected:
        raise ValueError(f"shape {shape} of {item} bytes each takes {expected:,} bytes, found {len(data):,}")


def is_tensor(value: object) -> bool:
    """Returns whether a value is a tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def write_tensor(value: torch.Tensor, parts: Parts) -> None:
    """Writes a plain dense CPU tensor; refuses all others."""
    import torch

    reason = _refusal(value)
    if reason:
        raise RefusedError(value, reason)
    dense = value.resolve_conj().resolve_neg().contiguous()
    data = dense.view(-1).view(torch.uint8).numpy().data if dense.numel() else b""
    parts.add(b"x")
    parts.name(str(value.dtype).removeprefix("torch."))
    parts.shape(tuple(value.shape))
    parts.sized(data)


def _refusal(value: torch.Tensor) -> str:
    import torch

    if type(value) is not torch.Tensor:
        return "only plain tensors keep their type; make it one with .as_subclass(torch.Tensor) or .data"
    if value.requires_grad:
        return "it has requires_grad=True, which would be lost; .detach() it"
    if value.device.type != "cpu":
        return f"it is on the device {value.device}; move it with .cpu()"
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        return "it is sparse, quantized or nested; make it dense with .to_dense(), .dequantize() or .to_padded_tensor()"
    return "it has attributes of its own, which would be lost" if vars(value) else ""


def read_tensor(cursor: Cursor) -> torch.Tensor:
    """Reads a tensor that owns its memory."""
    import torch

    name = cursor.name()
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this version of torch has no type {name!r}")  # noqa: TRY004 - the data is wrong
    shape = cursor.shape()
    data = cursor.sized()
    _check_size(dtype.itemsize, shape, data)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def is_image(value: object) -> bool:
    """Returns whether a value is a PIL image, without importing Pillow."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def write_image(value: Image, parts: Parts, write_entry: Callable[[Any], bytes | None]) -> None:
    """Writes the pixels, palette and info of an image (its current frame).

    `write_entry` encodes an entry of ``image.info``; None leaves it out.
    """
    try:
        pixels = value.tobytes()  # loads it
        mode = value.palette.mode if value.palette is not None and value.mode in ("P", "PA") else ""
        palette = bytes(value.getpalette(mode) or ()) if mode else b""
    except Exception as cause:
        raise RefusedError(value, f"Pillow cannot read it: {type(cause).__name__}: {cause}") from cause
    entries = [(name, write_entry(entry)) for name, entry in value.info.items() if isinstance(name, str)]
    kept = [(name.encode("utf-8", "surrogatepass"), data) for name, data in entries if data is not None]
    parts.add(b"m")
    parts.name(value.mode)
    parts.number(value.width)
    parts.number(value.height)
    parts.name(mode)
    parts.sized(palette)
    parts.sized(pixels)
    parts.number(len(kept))
    for name, data in kept:
        parts.sized(name)
        parts.add(data)


def read_image(cursor: Cursor, read_entry: Callable[[], Any]) -> Image:
    """Reads an image."""
    from PIL import Image

    mode, width, height = cursor.name(), cursor.number(), cursor.number()
    palette_mode, palette, pixels = cursor.name(), cursor.sized(), cursor.sized()
    if width * height > 8 * len(pixels):
        raise ValueError(f"an image of {width:,} x {height:,} pixels cannot be in {len(pixels):,} bytes")
    image = Image.frombytes(mode, (width, height), bytes(pixels))
    if palette_mode:
        image.putpalette(bytes(palette), palette_mode)
    for _ in range(cursor.count()):
        name = str(cursor.sized(), "utf-8", "surrogatepass")
        image.info[name] = read_entry()
    return image
