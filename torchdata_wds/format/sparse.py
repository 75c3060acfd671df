"""Sparse members: rare, and described in four ways, so that the standard library's tarfile unpacks them."""

from __future__ import annotations

import io
import tarfile

from torchdata_wds.format.entries import TarEntries, TarEntry
from torchdata_wds.format.headers import padding

__all__ = ["LARGEST_SPARSE_MEMBER", "read_payload"]

#: A few bytes can claim to be a huge file of holes: members above this size, in bytes, are refused.
LARGEST_SPARSE_MEMBER = 4 << 30


def read_payload(entries: TarEntries, entry: TarEntry) -> bytes:
    """Reads an entry's content, with the holes of a sparse member filled with zeros.

    Raises:
        ShardFormatError: if the shard ends inside the member, or its sparse map is wrong or larger than
            `LARGEST_SPARSE_MEMBER`.
    """
    if entry.sparse_size is None:
        return entries.take(entry)
    if entry.sparse_size > LARGEST_SPARSE_MEMBER:
        what = f"holds a sparse member {entry.name} of {entry.sparse_size:,} bytes"
        raise entries.damaged(what, f"At most {LARGEST_SPARSE_MEMBER:,} are allowed.", member=entry.name)
    entries.check_size(entry, entry.sparse_size)
    head = b"".join(entries.raw)
    archive = head + entries.take(entry) + bytes(padding(entry.size) + 1024)
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            member = tar.next()
            content = tar.extractfile(member) if member is not None else None
            data = content.read() if content is not None else b""
    except (tarfile.TarError, ValueError, OSError, MemoryError) as error:
        what = f"holds a damaged sparse member {entry.name}: {error};"
        raise entries.damaged(what, "Write it again.", member=entry.name, at=entry.offset) from error
    if len(data) != entry.sparse_size:
        what = f"holds a sparse member {entry.name} of {len(data):,} bytes instead of {entry.sparse_size:,}"
        raise entries.damaged(what, "Write it again.", member=entry.name, at=entry.offset)
    return data
