"""What is known cheaply of the shards of a graph, so that a state is not resumed with others of the same names.

Sizes and a few blocks of local shards, and what an index beside them says: a copy on another disk has the same, a shard
that was written anew has not. Dates say nothing (copying changes them), and no server is asked: what is read there is
compared where it is read.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.index import INDEX_SUFFIX, _parse_header
from torchdata_wds.storage.urls import local_path, mask_url, scheme_of

__all__ = ["ShardContent", "contents_of", "describe_changes"]

#: How many shards are looked at, evenly among all: a state stays small, and taking it quick.
_MOST_SHARDS = 64

_BLOCK = 4096


class ShardContent(NamedTuple):
    """What is known of a local shard.

    Attributes:
        number: Its place in the list.
        size: Its size in bytes.
        check: A CRC-32 of its first block and of the one in its middle.
        samples: How many samples the index beside it says it has; None without one.
        digest: The digest that the index has, or its beginning; "" without one.
    """

    number: int
    size: int
    check: int
    samples: int | None = None
    digest: str = ""


def contents_of(shards: Sequence[Any]) -> list[ShardContent]:
    """Looks at local shards among those of a list; what cannot be looked at is left out."""
    step = -(-len(shards) // _MOST_SHARDS) or 1
    found = [_content_of(number, shards[number]) for number in range(0, len(shards), step)]
    return [content for content in found if content is not None]


def describe_changes(
    shards: Sequence[Any], then: Sequence[tuple[Any, ...]], now: Sequence[tuple[Any, ...]]
) -> list[str]:
    """Says what has changed of shards that were looked at then and now.

    Args:
        shards: The shards.
        then: What was found then, as plain tuples.
        now: What is found now.
    """
    before = {old.number: old for old in (ShardContent(*content) for content in then)}
    changes = []
    for content in (ShardContent(*content) for content in now):
        old = before.get(content.number, content)
        shown = f"shard {mask_url(os.fspath(shards[content.number]))}"
        if old.size != content.size:
            changes.append(f"{shown}: {old.size:,} bytes then, {content.size:,} now")
        elif old.samples is not None and content.samples is not None and old.samples != content.samples:
            changes.append(f"{shown}: {old.samples:,} samples by its index then, {content.samples:,} now")
        elif old.check != content.check or (old.digest and content.digest and old.digest != content.digest):
            changes.append(f"{shown}: other contents then, of the same size")
    return changes


def _content_of(number: int, shard: Any) -> ShardContent | None:
    if not isinstance(shard, (str, os.PathLike)) or scheme_of(os.fspath(shard)) not in ("", "file"):
        return None
    path = Path(local_path(os.fspath(shard)))
    try:
        if not path.is_file():  # a pipe would wait for who writes to it
            return None
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            check = zlib.crc32(file.read(_BLOCK))
            file.seek(size // 2)
            check = zlib.crc32(file.read(_BLOCK), check)
    except (OSError, ValueError):
        return None
    return ShardContent(number, size, check, *_said_by_index(f"{path}{INDEX_SUFFIX}"))


def _said_by_index(path: str) -> tuple[int | None, str]:
    try:
        with Path(path).open("rb") as file:
            header = _parse_header(file.readline(1 << 16), path)
    except (OSError, ValueError, ShardFormatError):
        return None, ""
    return header.samples, (header.sha256 or "")[:16]
