"""Encodes samples as bytes for ``cache_samples``: Python values, arrays, tensors and images, without pickling.

A value is a byte for its type, then its content. Numbers are little-endian; `size` is a u64 followed by that many
bytes, `count` a u64 followed by that many values, `name` a u8 followed by that many ASCII characters, `shape` a u8
followed by that many u64. Version 1:

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
that occurs twice in a sample becomes two, and memory in neither C nor Fortran order is written in C order.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from torchdata_wds.codecs.options import EncodeOptions
from torchdata_wds.codecs.plans import describe_value
from torchdata_wds.codecs.stored.reading import FORTRAN, MAX_DEPTH, SCALAR, U64, class_named, decode_value, too_deep
from torchdata_wds.codecs.values.numpy import encode_npy
from torchdata_wds.environment import is_secure
from torchdata_wds.errors import UnsafeDataError

__all__ = ["StoredValue", "decode_value", "encode_value"]
_PICKLE_PROTOCOL = 4
_I64, _F64, _COMPLEX = struct.Struct("<cq"), struct.Struct("<cd"), struct.Struct("<cdd")

#: Types -> why their instances cannot be stored if no writer takes them, and what to do; the first match counts.
_REASONS: tuple[tuple[Any, str], ...] = (
    (np.ndarray, "a subclass of numpy.ndarray would lose its type; make it a plain array with numpy.array()"),
    (tuple, "a tuple with names would lose them; make it a plain one with tuple()"),
    (dict, "a subclass of dict would lose its type; make it a plain one with dict()"),
    ((list, set, frozenset, int, float), "a subclass of a built-in type would lose its type; make it a plain value"),
    (object, "a sample cache stores built-in values, NumPy arrays, tensors and PIL images only"),
)


class StoredValue(NamedTuple):
    """An encoded value, and whether any part of it had to be pickled."""

    data: bytes
    has_pickles: bool


class _RefusedError(Exception):
    """A value cannot be stored; the arguments are the value and the reason. Never leaves this module."""


def encode_value(value: Any, *, allow_pickle: bool = False) -> StoredValue:
    """Encodes a value; `allow_pickle` pickles what cannot be stored otherwise. Raises ValueError for what cannot be."""
    writer = _Writer(allow_pickle)
    try:
        writer.write(value)
    except _RefusedError as refused:
        part, reason = refused.args
        where = _find_value(value, part) or ""
        what = f"its item at {where} is {describe_value(part)}" if where else describe_value(value)
        raise ValueError(
            f"{what.removeprefix('of type ')}: {reason}. Convert it before, place cache_samples before the "
            "stage that makes it, or pass allow_pickle=True"
        ) from refused.__cause__
    except RecursionError as error:
        raise too_deep() from error
    return StoredValue(b"".join(writer.pieces), writer.has_pickles)


class _Writer:
    """Collects the encoding of values in pieces; large ones are copied once, when the pieces are joined."""

    def __init__(self, allow_pickle: bool) -> None:
        self.pieces: list[Any] = []
        self.add = self.pieces.append
        self.has_pickles = False
        self._allow_pickle = allow_pickle
        self._depth = 0

    def write(self, value: Any) -> None:
        """Writes a value; pickles it if that is allowed and it cannot be stored otherwise."""
        write = _WRITERS.get(type(value))
        if write is not None:
            write(self, value)
            return
        begin, depth = len(self.pieces), self._depth
        try:
            _write_other(value, self)
        except _RefusedError as refused:
            if not self._allow_pickle:
                raise
            # A part of the value may already be written: a DataChunk holds others.
            del self.pieces[begin:]
            self._depth = depth
            if is_secure():
                raise UnsafeDataError(
                    f"{describe_value(value).removeprefix('of type ')} can only be pickled, and WDS_SECURE=1 refuses "
                    "pickles even with allow_pickle=True"
                ) from refused
            try:
                data = pickle.dumps(value, _PICKLE_PROTOCOL)
            except Exception as cause:
                raise _RefusedError(value, f"it cannot be pickled: {type(cause).__name__}: {cause}") from cause
            self.sized(b"p", data)
            self.has_pickles = True

    def sized(self, tag: bytes, data: bytes | memoryview) -> None:
        self.add(tag + U64.pack(len(data)))
        self.add(data)

    def items(self, tag: bytes, count: int, values: Iterable[Any]) -> None:
        """Writes a container: its tag, the number of its values, and the values."""
        self.add(tag + U64.pack(count))
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise too_deep()
        for value in values:
            self.write(value)
        self._depth -= 1


def _name(text: str) -> bytes:
    return bytes([len(text)]) + text.encode("ascii")


def _shape(shape: tuple[int, ...]) -> bytes:
    return struct.pack(f"<B{len(shape)}Q", len(shape), *shape)


def _write_int(writer: _Writer, value: int) -> None:
    if -(2**63) <= value < 2**63:
        writer.add(_I64.pack(b"i", value))
    else:
        # with one bit for the sign: 2**63 has 64 bits and takes 9 bytes
        writer.sized(b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _write_str(writer: _Writer, value: str) -> None:
    try:
        data = value.encode()
    except UnicodeEncodeError:
        data = value.encode("utf-8", "surrogatepass")
    writer.sized(b"s", data)


_WRITERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): lambda writer, _: writer.add(b"N"),
    bool: lambda writer, value: writer.add(b"T" if value else b"F"),
    int: _write_int,
    float: lambda writer, value: writer.add(_F64.pack(b"f", value)),
    complex: lambda writer, value: writer.add(_COMPLEX.pack(b"c", value.real, value.imag)),
    str: _write_str,
    bytes: lambda writer, value: writer.sized(b"b", value),
    bytearray: lambda writer, value: writer.sized(b"B", bytes(value)),
    dict: lambda writer, value: writer.items(b"d", len(value), chain.from_iterable(value.items())),
    list: lambda writer, value: writer.items(b"l", len(value), value),
    tuple: lambda writer, value: writer.items(b"t", len(value), value),
    set: lambda writer, value: writer.items(b"e", len(value), value),
    frozenset: lambda writer, value: writer.items(b"E", len(value), value),
}


def _write_other(value: Any, writer: _Writer) -> None:
    """Writes a value of any other type; torch and Pillow are not imported to find out which it is."""
    kind = type(value)
    if kind is np.ndarray or (isinstance(value, np.generic) and not isinstance(value, (str, bytes))):
        _write_array(value, writer)
    elif (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        _write_tensor(value, writer)
    elif (pillow := sys.modules.get("PIL.Image")) is not None and isinstance(value, pillow.Image):
        _write_image(value, writer)
    elif isinstance(value, (str, bytes)):
        _WRITERS[str if isinstance(value, str) else bytes](writer, value)
    elif class_named(kind.__name__) is kind:
        writer.add(b"k" + _name(kind.__name__))
        writer.write(list(value) if isinstance(value, list) else tuple(value))
    else:
        raise _RefusedError(value, next(reason for types, reason in _REASONS if isinstance(value, types)))


def _write_array(value: Any, writer: _Writer) -> None:
    """Writes an array or scalar; one of a structured type as an npy file, since its dtype has no short name."""
    flags = SCALAR if isinstance(value, np.generic) else 0
    array = np.asarray(value)
    if array.dtype.kind == "V" or array.dtype.hasobject or np.dtype(array.dtype.str) != array.dtype:
        try:
            data = encode_npy(array, EncodeOptions())
        except (TypeError, ValueError) as cause:
            raise _RefusedError(value, str(cause)) from cause
        writer.sized(b"A" + bytes([flags]), data)
        return
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        flags |= FORTRAN
    flat = array.ravel("F" if flags & FORTRAN else "C")
    head = b"a" + bytes([flags]) + _name(array.dtype.str) + _shape(array.shape)
    writer.sized(head, flat.view(np.uint8).data if array.nbytes else b"")


def _write_tensor(value: Any, writer: _Writer) -> None:
    """Writes a plain dense CPU tensor; refuses all others."""
    import torch

    reason = ""
    if type(value) is not torch.Tensor:
        reason = "only plain tensors keep their type; make it one with .as_subclass(torch.Tensor) or .data"
    elif value.requires_grad:
        reason = "it has requires_grad=True, which would be lost; .detach() it"
    elif value.device.type != "cpu":
        reason = f"it is on the device {value.device}; move it with .cpu()"
    elif value.layout is not torch.strided or value.is_quantized or value.is_nested:
        reason = "it is sparse, quantized or nested; convert it with .to_dense(), .dequantize() or .to_padded_tensor()"
    elif vars(value):
        reason = "it has attributes of its own, which would be lost"
    if reason:
        raise _RefusedError(value, reason)
    dense = value.resolve_conj().resolve_neg().contiguous()
    head = b"x" + _name(str(value.dtype).removeprefix("torch.")) + _shape(tuple(value.shape))
    writer.sized(head, dense.view(-1).view(torch.uint8).numpy().data if dense.numel() else b"")


def _write_image(value: Any, writer: _Writer) -> None:
    """Writes the pixels, palette and info of an image (its current frame), without entries that cannot be stored."""
    try:
        pixels = value.tobytes()  # loads it
        mode = value.palette.mode if value.palette is not None and value.mode in ("P", "PA") else ""
        palette = bytes(value.getpalette(mode) or ()) if mode else b""
    except Exception as cause:
        raise _RefusedError(value, f"Pillow cannot read it: {type(cause).__name__}: {cause}") from cause
    kept = []
    for name, entry in value.info.items():
        part = _Writer(allow_pickle=False)
        with suppress(_RefusedError, ValueError):
            if isinstance(name, str):
                part.sized(b"", name.encode("utf-8", "surrogatepass"))
                part.write(entry)
                kept.append(part)
    writer.add(b"m" + _name(value.mode) + struct.pack("<QQ", value.width, value.height))
    writer.sized(_name(mode), palette)
    writer.sized(b"", pixels)
    writer.add(U64.pack(len(kept)))
    for part in kept:
        writer.pieces += part.pieces


def _find_value(inside: Any, wanted: Any) -> str | None:
    """Returns where in a sample a value is, as ``['json']['a'][2]``; None if it is not there."""
    if inside is wanted:
        return ""
    kind = type(inside)
    pairs: Iterable[tuple[Any, Any]] = ()
    if kind in (dict, set, frozenset) and any(value is wanted for value in inside):
        return f", as a key of {len(inside):,}" if kind is dict else ", in a set"
    if kind is dict:
        pairs = inside.items()
    elif kind in (list, tuple) or class_named(kind.__name__) is kind:
        pairs = enumerate(inside)
    for key, value in pairs:
        if (found := _find_value(value, wanted)) is not None:
            return f"[{key!r}]{found}"
    return None
