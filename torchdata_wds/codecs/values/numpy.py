"""NumPy fields: npy, npz, and the tenbin of WebDataset and tensorcom; pickled objects are always refused."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions

_ZIP_END, _ZIP_END_SIZE = b"PK\x05\x06", 22

# The earliest time that a zip archive can store, and Unix: its bytes must not depend on the clock or the system.
_ZIP_TIME, _ZIP_UNIX = (1980, 1, 1, 0, 0, 0), 3
_MAX_NAME = 60_000
_MOST_WITHOUT_BYTES = 1 << 20

# A header of version 3 differs from version 2 only in its encoding, UTF-8, and NumPy has no public function for it.
_READ_HEADER: dict[tuple[int, int], Any] = {(1, 0): np.lib.format.read_array_header_1_0}
_READ_HEADER |= dict.fromkeys([(2, 0), (3, 0)], np.lib.format.read_array_header_2_0)

# The kinds of dtypes that their names describe completely; others may read back as another dtype.
_PLAIN_KINDS = "biufcmMSU"

# Tenbin: each array is two chunks, header and data. A chunk is the magic, the length of its payload as int64, the
# payload, and zero bytes that fill the payload up to a multiple of 64. A header's payload is int64 words: the type as
# eight ASCII bytes (f4), an info string of up to eight, the rank (below 10) and the dimensions. All little-endian.
_TENBIN_MAGIC = b"~TenBin~"
_TENBIN_PREFIX = struct.Struct("<8sq")
_TENBIN_DTYPES = frozenset(["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
_TENBIN_MAX_RANK = 9


def decode_npy(data: bytes, options: DecodeOptions) -> np.ndarray[Any, Any]:  # noqa: ARG001
    """Decodes an npy file into an array that owns its memory; refuses one that holds Python objects."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version not in _READ_HEADER:
        raise ValueError(f"npy files of version {version[0]}.{version[1]} are not known")
    shape, is_fortran, dtype = _READ_HEADER[version](stream)
    if dtype.hasobject:
        raise ValueError("Object arrays need pickle, which runs code of the shard; use arrays of a plain type")
    # NumPy's own reader allocates what the header claims before it finds that bytes are missing
    begin = stream.tell()
    rest = len(data) - begin - math.prod(shape) * dtype.itemsize
    if rest < 0:
        raise ValueError(f"cut off: an array of {dtype} and shape {shape} takes {-rest:,} more bytes")
    if rest:
        raise ValueError(f"{rest} bytes follow the array")
    # the size of the data does not limit items of no bytes, but NumPy allocates a byte for each, or visits all
    if not dtype.itemsize and math.prod(shape) > _MOST_WITHOUT_BYTES:
        raise ValueError(f"an array of {dtype} and shape {shape} claims too many values, of no bytes each")
    if version == (3, 0):
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return np.ndarray(shape, dtype, data, begin, order="F" if is_fortran else "C").copy(order="K")


def decode_npz(data: bytes, options: DecodeOptions) -> dict[str, Any]:
    """Decodes an npz archive into a dict of arrays, all read and checked; files that are not npy stay bytes."""
    values: dict[str, Any] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        end = len(data) - _ZIP_END_SIZE - len(archive.comment)
        if data[end : end + 4] != _ZIP_END:
            raise ValueError("bytes follow the archive's end")
        size = sum(entry.file_size for entry in archive.infolist())
        if size > options.max_bytes:
            raise ValueError(f"the archive unpacks to {size:,} bytes, more than max_bytes={options.max_bytes:,}")
        for name in archive.namelist():
            content = archive.read(name)
            values[name.removesuffix(".npy")] = decode_npy(content, options) if name.endswith(".npy") else content
    return values


def encode_npy(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Encodes an array, or a NumPy scalar as an array of rank 0; refuses dtypes that need pickle."""
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError("expected a NumPy array; convert it with numpy.asarray(), a tensor with .numpy()")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask; convert it with .filled()")
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise ValueError("arrays of Python objects need pickle; give the array a type with .astype(), or name it .pkl")
    # the first version whose header can hold the dtype; left to choose, NumPy warns about all but 1.0
    for version in ((1, 0), (2, 0), (3, 0)):
        stream = io.BytesIO()
        try:
            np.lib.format.write_array(stream, array, version, allow_pickle=False)
            break
        except ValueError:
            if version == (3, 0):
                raise
    data = stream.getvalue()
    if array.dtype.kind not in _PLAIN_KINDS:
        found = decode_npy(data, DecodeOptions()).dtype
        if found != array.dtype:
            raise ValueError(f"its dtype would read back as {found}; convert it with .astype() or .view()")
    return data


def encode_npz(value: Any, options: EncodeOptions) -> bytes:
    """Encodes a dict of arrays as an npz archive, or one array, which is stored as ``arr_0``."""
    arrays = value if isinstance(value, Mapping) else {"arr_0": value}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            if not isinstance(name, str):
                raise TypeError(f"the names of arrays must be str, found {name!r}")
            # zipfile ends a name at a NUL, and on Windows turns a backslash into a slash
            if "\0" in name or "\\" in name:
                raise ValueError(f"the name {name!r} holds a NUL or a backslash, which no archive keeps; rename it")
            if len(name.encode("utf-8", "replace")) > _MAX_NAME:
                raise ValueError(f"the name {name[:20]!r}... is too long for an archive; rename the array")
            entry = zipfile.ZipInfo(f"{name}.npy", _ZIP_TIME)
            entry.create_system = _ZIP_UNIX
            try:
                content = encode_npy(array, options)
            except (TypeError, ValueError) as cause:
                raise type(cause)(f"array {name!r} of type {type(array).__name__}: {cause}") from cause
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def decode_tenbin(data: bytes, options: DecodeOptions) -> list[np.ndarray[Any, Any]]:  # noqa: ARG001
    """Decodes tenbin into a list of arrays that own their memory; info strings are dropped."""
    # A chunk of 24 bytes at byte 0 has its prefix at 0..16, its payload at 16..40 and zeros up to 16 + 64 = 80. Damaged
    # or hostile sizes may be negative or huge: each is checked against the data before anything is allocated for it.
    chunks: list[memoryview] = []
    offset = 0
    while offset < len(data):
        begin = offset + _TENBIN_PREFIX.size
        if begin > len(data):
            raise ValueError(f"cut off in a chunk's prefix at byte {offset:,}")
        magic, size = _TENBIN_PREFIX.unpack_from(data, offset)
        if magic != _TENBIN_MAGIC:
            raise ValueError(f"expected {_TENBIN_MAGIC!r} at byte {offset:,}, found {magic!r}")
        offset = begin + math.ceil(size / 64) * 64
        if size < 0 or offset > len(data):
            raise ValueError(f"the chunk at byte {begin:,} has {size:,} bytes, but only {len(data) - begin:,} are left")
        chunks.append(memoryview(data)[begin : begin + size])
    if len(chunks) % 2:
        raise ValueError("the last array has a header but no data")
    arrays: list[np.ndarray[Any, Any]] = []
    for header, payload in zip(chunks[::2], chunks[1::2], strict=True):
        if len(header) < 24 or len(header) % 8:
            raise ValueError(f"an array's header has {len(header)} bytes")
        _, _, rank, *shape = struct.unpack(f"<{len(header) // 8}q", header)
        code = bytes(header[:8]).rstrip(b"\0").decode("ascii", "backslashreplace")
        if code not in _TENBIN_DTYPES:
            raise ValueError(f"unknown array type {code!r}")
        if rank != len(shape) or rank > _TENBIN_MAX_RANK or min(shape, default=0) < 0:
            raise ValueError(f"an array's header declares rank {rank} and dimensions {shape}")
        dtype, size = np.dtype("<" + code), len(payload)
        expected = math.prod(shape) * dtype.itemsize
        if size != expected:
            raise ValueError(f"an array of {dtype.name} {tuple(shape)} takes {expected:,} bytes, found {size:,}")
        arrays.append(np.frombuffer(payload, dtype=dtype).reshape(shape).copy())
    return arrays


def encode_tenbin(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Encodes one array or a list to the bytes of ``webdataset.tenbin``; one array reads back as a list of one."""
    # webdataset itself has no uint32, and cannot read the arrays of rank 0 that it writes
    parts: list[bytes] = []
    for number, array in enumerate(value if isinstance(value, list | tuple) else [value]):
        if not isinstance(array, np.ndarray | np.generic) or isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                f"expected NumPy arrays, item {number} is a {type(array).__name__}; convert it with numpy.asarray(), a "
                "tensor with .numpy(), a masked array with .filled()"
            )
        code = f"{array.dtype.kind}{array.dtype.itemsize}"
        if code not in _TENBIN_DTYPES:
            raise ValueError(
                f"item {number} has dtype {array.dtype}, tenbin has only {' '.join(sorted(_TENBIN_DTYPES))}; convert "
                "it with .astype(), or name the field npy or npz"
            )
        if (rank := array.ndim) > _TENBIN_MAX_RANK:
            raise ValueError(f"item {number} has {rank} dimensions, tenbin has at most {_TENBIN_MAX_RANK}; reshape it")
        header = struct.pack(f"<8s8sq{rank}q", code.encode(), b"", rank, *array.shape)
        for payload in (header, array.astype("<" + code, copy=False).tobytes()):
            parts += [_TENBIN_PREFIX.pack(_TENBIN_MAGIC, len(payload)), payload, bytes(-len(payload) % 64)]
    return b"".join(parts)
