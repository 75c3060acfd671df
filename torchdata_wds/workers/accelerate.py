"""Finds out from the calling frames whether Accelerate is saving a checkpoint."""

from __future__ import annotations

import sys
from types import FrameType

_SAVER = ("accelerate.checkpointing", "save_custom_state")
_FRAMES = 8  # how many are searched: the loader may be inside the registered object


def is_saving() -> bool:
    """Returns whether Accelerate is saving the calling loader's state: all ranks then call, and only rank 0 writes."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == _SAVER:
            return True
        frame = frame.f_back
    return False
