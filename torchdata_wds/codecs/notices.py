"""Warnings about data that is legal and probably a mistake: each is logged once in a process."""

from __future__ import annotations

import functools
import logging

__all__ = ["note_once"]

logger = logging.getLogger(__name__)


@functools.cache
def note_once(message: str) -> None:
    """Logs a warning, the first time that this message comes in this process."""
    logger.warning("%s", message)
