"""NumPy fields: npy and npz, never with pickled objects in them."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np

from torchdata_wds.codecs.options import DecodeOptions

__all__ = ["decode_npy", "decode_npz"]

_ZIP_END = b"PK\x05\x06"
_ZIP_END_SIZE = 22


def decode_npy(data: bytes, options: DecodeOptions) -> np.ndarray[Any, Any]:  # noqa: ARG001
    """Decodes an npy file into an array that owns its memory.

    Raises:
        ValueError: if it is cut, has bytes behind the array, or holds Python objects.
    """
    stream = io.BytesIO(data)
    array: np.ndarray[Any, Any] = np.lib.format.read_array(stream, allow_pickle=False)
    rest = len(data) - stream.tell()
    if rest:
        raise ValueError(f"{rest} bytes follow behind the array")
    return array


def decode_npz(data: bytes, options: DecodeOptions) -> dict[str, Any]:
    """Decodes an npz archive into a dict of arrays, all read and checked.

    Raises:
        ValueError: if an array is damaged, bytes follow the archive, or it unpacks to more than the limit.
        zipfile.BadZipFile: if the archive is damaged.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        _check_archive(archive, data, options.max_bytes)
        return dict(_decode_entry(archive, name, options) for name in archive.namelist())


def _check_archive(archive: zipfile.ZipFile, data: bytes, max_bytes: int) -> None:
    end = len(data) - _ZIP_END_SIZE - len(archive.comment)
    if data[end : end + 4] != _ZIP_END:
        raise ValueError("bytes follow behind the archive's end")
    size = sum(entry.file_size for entry in archive.infolist())
    if size > max_bytes:
        raise ValueError(f"the archive unpacks to {size:,} bytes, more than max_bytes={max_bytes:,}")


def _decode_entry(archive: zipfile.ZipFile, name: str, options: DecodeOptions) -> tuple[str, Any]:
    data = archive.read(name)
    if not name.endswith(".npy"):
        return name, data
    return name.removesuffix(".npy"), decode_npy(data, options)
