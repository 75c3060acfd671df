"""NumPy fields: npy and npz, never with pickled objects in them."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchdata_wds.codecs.options import DecodeOptions, EncodeOptions

_ZIP_END, _ZIP_END_SIZE = b"PK\x05\x06", 22

# The first moment that a zip archive can name: its bytes must not depend on the time of day.
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
_ZIP_UNIX = 3
_MAX_NAME = 60_000
_MOST_WITHOUT_BYTES = 1 << 20

# The header of version 3 is that of version 2 with other names of fields in it, and NumPy has no function for it.
_READ_HEADER: dict[tuple[int, int], Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,
}

# Kinds of types whose names say all about them; what else NumPy writes may read back as another type.
_PLAIN_KINDS = "biufcmMSU"


def decode_npy(data: bytes, options: DecodeOptions) -> np.ndarray[Any, Any]:  # noqa: ARG001
    """Decodes an npy file into an array that owns its memory; refuses one that holds Python objects."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version not in _READ_HEADER:
        raise ValueError(f"npy files of version {version[0]}.{version[1]} are not known")
    shape, is_fortran, dtype = _READ_HEADER[version](stream)
    if dtype.hasobject:
        raise ValueError("Object arrays need pickle, which runs code of the shard; use arrays of a plain type")
    # NumPy's own reader takes the memory that the header claims before it looks for the bytes
    begin = stream.tell()
    rest = len(data) - begin - math.prod(shape) * dtype.itemsize
    if rest < 0:
        raise ValueError(f"cut off: an array of {dtype} and shape {shape} takes {-rest:,} more bytes")
    if rest:
        raise ValueError(f"{rest} bytes follow the array")
    # no bytes bound these, and NumPy takes a byte for each, or looks at all of them
    if not dtype.itemsize and math.prod(shape) > _MOST_WITHOUT_BYTES:
        raise ValueError(f"an array of {dtype} and shape {shape} claims too many values, of no bytes each")
    if version == (3, 0):
        array: np.ndarray[Any, Any] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        return array
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
            is_array = name.endswith(".npy")
            values[name.removesuffix(".npy")] = decode_npy(content, options) if is_array else content
    return values


def encode_npy(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Encodes an array, or a NumPy scalar as an array without dimensions; refuses types that need pickle."""
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError("expected a NumPy array; convert it with numpy.asarray(), a tensor with .numpy()")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask; convert it with .filled()")
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise ValueError("arrays of Python objects need pickle; give the array a type with .astype(), or name it .pkl")
    # the shortest header that takes the type: with the choice left to it, NumPy warns about every one but the first
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
            _check_name(name)
            entry = zipfile.ZipInfo(f"{name}.npy", _ZIP_TIME)
            entry.create_system = _ZIP_UNIX
            entry.compress_type = zipfile.ZIP_DEFLATED
            try:
                content = encode_npy(array, options)
            except (TypeError, ValueError) as cause:
                raise type(cause)(f"array {name!r} of type {type(array).__name__}: {cause}") from cause
            archive.writestr(entry, content)
    return out.getvalue()


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the names of arrays must be str, found {name!r}")
    # the archive would end the first at the NUL, and read the second as a path on Windows
    if "\0" in name or "\\" in name:
        raise ValueError(f"the name {name!r} holds a NUL or a backslash, which no archive keeps; rename the array")
    if len(name.encode("utf-8", "replace")) > _MAX_NAME:
        raise ValueError(f"the name {name[:20]!r}... is too long for an archive; rename the array")
