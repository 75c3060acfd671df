"""Whole shards by URL, and what is in a folder."""

import os
from pathlib import Path
from typing import Any

from torchdata_wds.storage import open_shard, open_target

__all__ = ["names", "read", "write"]


def read(url: str | os.PathLike[str], offset: int = 0, **options: Any) -> bytes:
    """All bytes of a shard, as far as it is not too long."""
    with open_shard(url, offset=offset, **options) as stream:
        return stream.read(1 << 24)


def write(url: str | os.PathLike[str], *pieces: bytes, **options: Any) -> None:
    """Stores a shard."""
    target = open_target(url, **options)
    for piece in pieces:
        target.write(piece)
    target.commit()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
