"""The content of members: as it is stored, or with the holes of a sparse member filled with zeros."""

from __future__ import annotations

from collections.abc import Callable

from torchdata_wds.format.entries import TarEntries, TarEntry
from torchdata_wds.format.headers import HeaderError
from torchdata_wds.format.sparse_maps import Segments, locate, unpack

__all__ = ["read_payload"]


def read_payload(entries: TarEntries, entry: TarEntry, *, look: Callable[[Segments, int], None] | None = None) -> bytes:
    """Reads an entry's content, with the holes of a sparse member filled with zeros.

    Args:
        entries: The archive, at the entry's content.
        entry: The entry.
        look: Called with the map and the full size of a sparse member whose map is right.

    Raises:
        ShardFormatError: if the shard ends inside the member, or it is larger than the archive's `max_member_bytes` or
            than the memory, or its sparse map is wrong.
    """
    if entry.sparse is None or entry.sparse_size is None:
        return entries.take(entry)
    entries.check_size(entry, entry.sparse_size)
    stored = entries.take(entry)
    try:
        segments, begin = locate(entry.sparse, stored)
        content = unpack(stored, begin, segments, entry.sparse_size)
    except MemoryError as error:
        raise entries.out_of_memory(entry, entry.sparse_size) from error
    except HeaderError as error:
        what = f"holds a damaged sparse member {entry.name}: {error};"
        raise entries.damaged(what, "Write it again.", member=entry.name, at=entry.offset) from None
    if look is not None:
        look(segments, entry.sparse_size)
    return content
