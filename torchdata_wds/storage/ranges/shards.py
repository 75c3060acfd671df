"""What the backends of byte ranges have in common."""

from typing import Protocol

from torchdata_wds.errors import ChangedShardError
from torchdata_wds.storage.byte_streams import StoredVersion


class RangeReader(Protocol):
    """A shard whose bytes can be read from several threads, and in any order."""

    def read(self, start: int, stop: int, version: StoredVersion | None) -> bytes:
        """Reads the stored bytes from `start` up to `stop`; raises ChangedShardError if it is not this version."""

    def version(self) -> StoredVersion | None:
        """Returns the version that the store reports now; None if it reports no size."""


class StaleError(Exception):
    """The open file is no longer the shard, which must be opened again."""


def changed(shard: str, difference: str) -> ChangedShardError:
    """Returns the error for a shard that is not the expected version."""
    return ChangedShardError(
        f"shard {shard} is not the version that its index describes: it has {difference}. If the shard was replaced, "
        "make its index again; if it is incomplete, copy it again",
        shard=shard,
        kind="index",
    )


def ends_inside(shard: str, size: int, start: int, stop: int) -> ChangedShardError:
    """Returns the error for a shard that ends before a range does."""
    return ChangedShardError(
        f"shard {shard} ends at byte {size:,}, inside or before the requested bytes {start:,} to {stop:,}. It is cut "
        "off, or its index is of another version: copy the shard again, or make its index again",
        shard=shard,
        kind="index",
    )
