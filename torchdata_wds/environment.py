"""The environment variables that the package reads, all of them, each at the time it is needed.

| variable | effect |
|---|---|
| ``WDS_SECURE`` | ``1``: commands (``pipe:``) and pickles are refused everywhere |
"""

from __future__ import annotations

import os

__all__ = ["is_secure"]


def is_secure() -> bool:
    """Tells whether ``WDS_SECURE`` is set to anything but ``""`` or ``"0"``."""
    return os.environ.get("WDS_SECURE", "") not in ("", "0")
