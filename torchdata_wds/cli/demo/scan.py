"""What shards hold, found out by a plain scan: the standard library's tarfile, wherever that can read them."""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchdata_wds import storage
from torchdata_wds.format import read_members, split_name

__all__ = ["Contents", "scan_shard"]


SampleId = tuple[str, str]  # URL and key

_NOT_FOR_TARFILE = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError)


@dataclass
class Contents:
    """What was found.

    Attributes:
        samples: How often each sample comes, by URL and key.
        fields: How many members each field has.
        size: Bytes of all members.
    """

    samples: Counter[SampleId] = field(default_factory=Counter)
    fields: Counter[str] = field(default_factory=Counter)
    size: int = 0

    def add(self, url: str, members: list[tuple[str, int]]) -> None:
        """Adds a shard, given the names and sizes of its members in order."""
        last: str | None = None
        for name, size in members:
            parts = split_name(name)
            if parts is None:
                continue
            key, extension = parts
            if key != last:
                self.samples[url, key] += 1
                last = key
            self.fields[extension.lower()] += 1
            self.size += size


def scan_shard(url: str) -> list[tuple[str, int]]:
    """Lists the members of a shard.

    A local shard is read with tarfile. What tarfile cannot read (other places, zstd, damage) is read with this
    package's reader, whose errors say more.

    Returns:
        Name and size of each regular member, in order.

    Raises:
        WdsError: if the shard cannot be opened, or is cut or damaged.
    """
    if os.path.isfile(url):  # noqa: PTH113 - a name that is too long is no file
        try:
            return list(_members_by_tarfile(url))
        except _NOT_FOR_TARFILE:
            pass
    with storage.open_shard(url) as stream:
        return [(member.name, len(member.data)) for member in read_members(stream, url)]


def _members_by_tarfile(path: str) -> Iterator[tuple[str, int]]:
    with tarfile.open(path, "r|*", encoding="utf-8", errors="backslashreplace") as tar:
        for info in tar:
            if info.isreg() or info.islnk():
                yield info.name, info.size
