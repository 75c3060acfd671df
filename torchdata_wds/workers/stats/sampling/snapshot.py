"""What a worker knows about its work, as plain values, and the memory in which its loader finds them."""

from __future__ import annotations

import ctypes
import marshal
import zlib
from typing import Any, NamedTuple

from torchdata_wds.storage.meters import SourceTally

_SIZE = 1 << 16
_HEADER = 8  # the length and a checksum
_ATTEMPTS = 20


class Stage(NamedTuple):
    """A stage; a count is -1 if it is not known."""

    text: str
    items_in: int
    items_out: int
    seconds: float


class Snapshot(NamedTuple):
    """What one worker has done since it began."""

    run: str  # names the process and when it began, since a worker may be replaced
    active: float = 0.0  # seconds in which it had an order
    blocked: float = 0.0
    reading: float = 0.0
    sending: float = 0.0
    cpu: float = 0.0
    items: int = 0
    samples: int = 0
    stages: tuple[Stage, ...] = ()
    sources: dict[str, SourceTally] = {}  # noqa: RUF012  (never changed)
    at: tuple[str, str, int, float] | None = None

    def to_plain(self) -> tuple[Any, ...]:
        """Returns tuples, dicts, numbers and texts only."""
        plain = self._asdict()
        plain["stages"] = tuple(tuple(stage) for stage in self.stages)
        plain["sources"] = {name: tuple(tally) for name, tally in self.sources.items()}
        return tuple(plain.values())

    @classmethod
    def from_plain(cls, values: tuple[Any, ...]) -> Snapshot:
        """Returns the snapshot of which these are the plain values."""
        found = cls(*values)
        stages = tuple(Stage(*stage) for stage in found.stages)
        return found._replace(
            stages=stages, sources={name: SourceTally(*tally) for name, tally in found.sources.items()}
        )


class SnapshotMemory(ctypes.Structure):
    """Memory that a worker shares with its loader, for its last snapshot."""

    _fields_ = (("data", ctypes.c_ubyte * _SIZE),)

    def write(self, snapshot: Snapshot) -> None:
        """Replaces the snapshot; of one that is too large, stages and then sources are left out."""
        body = marshal.dumps(snapshot.to_plain())
        parts: tuple[dict[str, Any], ...] = ({"stages": ()}, {"sources": {}}, {"at": None})
        for part in parts:
            if len(body) > _SIZE - _HEADER:
                snapshot = snapshot._replace(**part)
                body = marshal.dumps(snapshot.to_plain())
        header = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little")
        ctypes.memmove(self.data, header + body, _HEADER + len(body))

    def read(self) -> Snapshot | None:
        """Returns the last snapshot; None before the first."""
        for _ in range(_ATTEMPTS):  # the worker may be writing
            data = bytes(self.data)
            length, checksum = int.from_bytes(data[:4], "little"), int.from_bytes(data[4:8], "little")
            body = data[_HEADER : _HEADER + length]
            if length and zlib.crc32(body) == checksum:
                return Snapshot.from_plain(marshal.loads(body))
        return None
