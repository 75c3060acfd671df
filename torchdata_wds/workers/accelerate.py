"""What a state must know about Accelerate's checkpoints, which only the calling frame tells."""

from __future__ import annotations

import sys

_SAVER = ("accelerate.checkpointing", "save_custom_state")


def is_saving() -> bool:
    """Returns whether Accelerate saves the state of the calling loader: all ranks take it, and rank 0 alone writes."""
    frame = sys._getframe(2)
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) == _SAVER
