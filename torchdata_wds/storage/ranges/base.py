"""What the backends of byte ranges have in common."""

from typing import Protocol

from torchdata_wds.errors import Advice, ChangedShardError, ShardOpenError
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.meters import Meter


class RangeReader(Protocol):
    """A shard whose bytes can be read from several threads, and in any order."""

    is_copy: bool  # whether it is a copy in a cache folder
    meter: Meter

    def read(self, start: int, stop: int, version: StoredVersion | None) -> bytes:
        """Reads the stored bytes from `start` up to `stop`; raises ChangedShardError if it is not this version."""

    def version(self) -> StoredVersion | None:
        """Returns the version of the shard; None if its store reports no size."""


class StaleError(ShardOpenError):
    """The file that is open is no longer the shard, which must be opened again."""


def stale(shard: str) -> StaleError:
    """Returns the error for a shard that was removed or replaced while it was open; users see it if that repeats."""
    return StaleError(f"shard {shard} is replaced again and again while it is read", shard=shard)


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


#: What helps with a server that does not send parts of shards.
NEEDS_PARTS = Advice.of(
    "Use a server that supports range requests, or pass {} to copy each shard once.", "cache=", "--cache FOLDER"
)


def no_parts(shard: str) -> ShardOpenError:
    """Returns the error for a shard that a server sends only as a whole: that would be a download for each sample."""
    return ShardOpenError(
        f"shard {shard} cannot be read in parts: the server answers a request for a range of bytes with the whole "
        "shard.",
        shard=shard,
        advice=NEEDS_PARTS,
    )
