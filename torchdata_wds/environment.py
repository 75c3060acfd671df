"""The environment variables that the package reads, all of them, each at the time it is needed.

| variable | effect |
|---|---|
| ``WDS_SECURE`` | ``1``: commands (``pipe:``) and pickles are refused everywhere |
| ``RANK``, ``WORLD_SIZE`` | the place of this process, as torchrun sets it, until torch.distributed is initialised |

A dataset file may name others as ``$NAME`` in its paths, which `load_dataset` puts in.
"""

from __future__ import annotations

import os

__all__ = ["is_secure", "launched_place"]


def is_secure() -> bool:
    """Tells whether ``WDS_SECURE`` is set to anything but ``""`` or ``"0"``."""
    return os.environ.get("WDS_SECURE", "") not in ("", "0")


def launched_place() -> tuple[int, int]:
    """The number of processes that a launcher such as torchrun has started, and which of them this is.

    Raises:
        ValueError: if the variables are no such numbers.
    """
    world, rank = (os.environ.get(name) or default for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if not (world.isdecimal() and rank.isdecimal() and int(rank) < int(world)):
        raise ValueError(f"RANK={rank!r} and WORLD_SIZE={world!r} in the environment name no rank: set or remove both")
    return int(world), int(rank)
