"""The tenbin format of WebDataset and tensorcom: a list of arrays, without pickling.

Each array is two chunks, header and data. A chunk is the magic ``~TenBin~``, the length of its payload as int64, the
payload, and zero bytes that fill the payload up to a multiple of 64. A header's payload is int64 words: the type as
eight ASCII bytes (``f4``), an info string of up to eight, the rank (below 10) and the dimensions. All little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions

_MAGIC = b"~TenBin~"
_PREFIX = struct.Struct("<8sq")
_DTYPES = frozenset(["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
_MAX_RANK = 9


def decode_tenbin(data: bytes, options: DecodeOptions) -> list[np.ndarray[Any, Any]]:  # noqa: ARG001
    """Decodes tenbin into a list of arrays that own their memory; info strings are dropped."""
    chunks = list(_split_chunks(memoryview(data)))
    if len(chunks) % 2:
        raise ValueError("the last array has a header but no data")
    return [_build_array(header, payload) for header, payload in zip(chunks[::2], chunks[1::2], strict=True)]


def _split_chunks(data: memoryview) -> Iterator[memoryview]:
    offset = 0
    while offset < len(data):
        begin = offset + _PREFIX.size
        if begin > len(data):
            raise ValueError(f"cut off in a chunk's prefix at byte {offset:,}")
        magic, size = _PREFIX.unpack(data[offset:begin])
        if magic != _MAGIC:
            raise ValueError(f"expected {_MAGIC!r} at byte {offset:,}, found {magic!r}")
        offset = begin + math.ceil(size / 64) * 64
        if size < 0 or offset > len(data):
            raise ValueError(f"the chunk at byte {begin:,} has {size:,} bytes, but only {len(data) - begin:,} are left")
        yield data[begin : begin + size]


def _build_array(header: memoryview, payload: memoryview) -> np.ndarray[Any, Any]:
    if len(header) < 24 or len(header) % 8:
        raise ValueError(f"an array's header has {len(header)} bytes")
    _, _, rank, *shape = struct.unpack(f"<{len(header) // 8}q", header)
    code = bytes(header[:8]).rstrip(b"\0").decode("ascii", "backslashreplace")
    if code not in _DTYPES:
        raise ValueError(f"unknown array type {code!r}")
    if rank != len(shape) or rank > _MAX_RANK or min(shape, default=0) < 0:
        raise ValueError(f"an array's header declares rank {rank} and dimensions {shape}")
    dtype = np.dtype("<" + code)
    expected = math.prod(shape) * dtype.itemsize
    if len(payload) != expected:
        raise ValueError(f"an array of {dtype.name} {tuple(shape)} takes {expected:,} bytes, found {len(payload):,}")
    return np.frombuffer(payload, dtype=dtype).reshape(shape).copy()


def encode_tenbin(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Encodes a list or tuple of arrays, or one array, which reads back as a list of one.

    The bytes are those of ``webdataset.tenbin``, where that can do the arrays: it has no uint32, and writes arrays
    without dimensions but cannot read them.
    """
    arrays = list(value) if isinstance(value, list | tuple) else [value]
    return b"".join(_pack_array(array, number) for number, array in enumerate(arrays))


def _pack_array(array: Any, number: int) -> bytes:
    if not isinstance(array, np.ndarray | np.generic) or isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"expected NumPy arrays, item {number} is a {type(array).__name__}; convert it with numpy.asarray(), a "
            "tensor with .numpy(), a masked array with .filled()"
        )
    code = f"{array.dtype.kind}{array.dtype.itemsize}"
    if code not in _DTYPES:
        raise ValueError(
            f"item {number} has dtype {array.dtype}, tenbin has only {' '.join(sorted(_DTYPES))}; convert it with "
            ".astype(), or name the field npy or npz"
        )
    if array.ndim > _MAX_RANK:
        raise ValueError(f"item {number} has {array.ndim} dimensions, tenbin has at most {_MAX_RANK}; reshape it")
    header = struct.pack(f"<8s8sq{array.ndim}q", code.encode(), b"", array.ndim, *array.shape)
    return _pack_chunk(header) + _pack_chunk(array.astype("<" + code, copy=False).tobytes())


def _pack_chunk(payload: bytes) -> bytes:
    return _PREFIX.pack(_MAGIC, len(payload)) + payload + bytes(-len(payload) % 64)
