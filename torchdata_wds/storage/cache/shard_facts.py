"""The size and digest of a shard as its index states them, and whether a copy agrees with them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import NamedTuple

_MARK = "user.torchdata_wds.sha256"

#: Digests computed by this process, by device, inode, size and time of change.
_digests: dict[tuple[int, int, int, int], str] = {}
_MOST_DIGESTS = 100_000


class ShardFacts(NamedTuple):
    """The size in bytes of a stored shard, and its SHA-256 in hexadecimal digits; None if unknown."""

    bytes: int | None = None
    sha256: str | None = None

    def difference(self, file: int) -> str:
        """Returns how an open file differs, as ``10 bytes, and not 20``, or "". Its digest is computed only once."""
        size = os.fstat(file).st_size
        if self.bytes is not None and size != self.bytes:
            return f"{size:,} bytes, and not {self.bytes:,}"
        if self.sha256 is not None and (found := _digest_of(file)) != self.sha256.lower():
            _digests.pop(_key(file), None)  # another file may get its number
            return f"the SHA-256 {found}, and not {self.sha256}"
        return ""


def _key(file: int) -> tuple[int, int, int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _digest_of(file: int) -> str:
    key = _key(file)
    if key in _digests:
        return _digests[key]
    stamp = f"{key[2]} {key[3]}"
    found = _noted(file, stamp)
    if found is None:
        with open(os.dup(file), "rb", buffering=0) as copy:  # noqa: PTH123 - a descriptor
            copy.seek(0)
            found = hashlib.file_digest(copy, "sha256").hexdigest()
        with contextlib.suppress(OSError, AttributeError):
            os.setxattr(file, _MARK, f"{found} {stamp}".encode())
    if len(_digests) >= _MOST_DIGESTS:
        _digests.clear()
    _digests[key] = found
    return found


def _noted(file: int, stamp: str) -> str | None:
    """Returns the digest that an earlier process noted, if the file has not changed since."""
    with contextlib.suppress(OSError, AttributeError):
        digest, _, rest = os.getxattr(file, _MARK).decode(errors="replace").partition(" ")
        return digest if rest == stamp else None
    return None
