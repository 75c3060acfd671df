"""Makes the memory of Ray's object store writable, where that is possible without a copy."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import numpy as np

_read = ctypes.CDLL(None, use_errno=True).read
_read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_read.restype = ctypes.c_ssize_t
_views: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # ctypes' arrays are not hashable


def writable(piece: Any) -> Any:
    """Returns a read-only buffer of Ray as one that can be written: the same memory, else a copy.

    A tensor over read-only memory does not know that it must not be written. Nothing but the stream that a message
    belongs to refers to it, so that writing to it changes nothing else.
    """
    view = np.frombuffer(piece, np.uint8)
    start = view.ctypes.data
    if not (view.size and _is_writable(start) and _is_writable(start + view.size - 1)):
        return bytearray(view)
    memory: Any = (ctypes.c_ubyte * view.size).from_address(start)
    memory.owner = view  # keeps the object in the store
    _views[id(memory)] = memory
    return memory


def views_are_held() -> bool:
    """Returns whether anything still refers to memory of the store that `writable` returned."""
    return bool(_views)


def _is_writable(address: int) -> bool:
    """Returns whether the byte at an address can be written, by letting the system write the same byte there."""
    # The system reports an error where Python would crash.
    receiver, sender = os.pipe()
    try:
        os.write(sender, ctypes.string_at(address, 1))
        return bool(_read(receiver, address, 1) == 1)
    finally:
        os.close(receiver)
        os.close(sender)
