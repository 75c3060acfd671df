"""Fields that are open streams instead of bytes, as torchdata's own archive readers leave them."""

from __future__ import annotations

import io
from contextlib import closing
from typing import Any

from torchdata_wds.codecs.options import BYTES_TYPES

__all__ = ["as_data"]


def as_data(value: Any) -> bytes | None:
    """Returns a value as bytes where it is data of a field, and None where it was decoded before.

    Args:
        value: Anything but ``bytes``. A stream is read to its end and closed.

    Example:
        >>> as_data(bytearray(b"x")), as_data(io.BytesIO(b"y")), as_data("decoded")
        (b'x', b'y', None)
    """
    if isinstance(value, BYTES_TYPES):
        return bytes(value)
    # torch's wrapper of streams; its module is not imported for the sake of a name
    if isinstance(value, io.IOBase) or type(value).__name__ == "StreamWrapper":
        with closing(value):
            return bytes(value.read())
    return None
