"""Seeds of commands that shuffle."""

from __future__ import annotations

import secrets

from torchdata_wds.tools.messages import say

__all__ = ["chosen_seed"]

_BITS = 32


def chosen_seed(seed: int | None) -> int:
    """Gives the seed that is asked for, or else a new one, and says which, so that the order can be had again."""
    if seed is not None:
        return seed
    seed = secrets.randbits(_BITS)
    say(f"shuffling with --seed {seed}")
    return seed
