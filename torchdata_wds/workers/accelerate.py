"""What a state must know about Accelerate's checkpoints, which only the calling frames tell."""

from __future__ import annotations

import sys
from types import FrameType

_SAVER = ("accelerate.checkpointing", "save_custom_state")
_FRAMES = 8  # a loader's state may be part of that of a registered object


def is_saving() -> bool:
    """Returns whether Accelerate saves the state of the calling loader: all ranks take it, and rank 0 alone writes."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == _SAVER:
            return True
        frame = frame.f_back
    return False
