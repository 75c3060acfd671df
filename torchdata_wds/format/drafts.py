"""Members on their way to samples: their names are split, their samples not yet made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Draft", "KeyedRun"]


class Draft(NamedTuple):
    """Consecutive members of one reading of a shard that share a key.

    Attributes:
        key: The key.
        url: The shard's URL.
        visit: Which reading of the shard.
        parts: Field, member name, and data or why there is none.
    """

    key: str
    url: str
    visit: int
    parts: list[tuple[str, str, bytes | Exception]]

    def drafts(self) -> Iterator[Draft]:
        """Itself."""
        yield self


class KeyedRun(NamedTuple):
    """Consecutive members of one reading of a shard, in columns, not yet cut out of what was read.

    Attributes:
        url: The shard's URL.
        visit: Which reading of the shard.
        data: Bytes of the archive.
        keys: The members' keys.
        fields: Their fields.
        names: Their names.
        starts: Where in `data` each member's content begins.
        ends: Where it ends.
    """

    url: str
    visit: int
    data: bytes
    keys: Sequence[str]
    fields: Sequence[str]
    names: Sequence[str]
    starts: Sequence[int]
    ends: Sequence[int]

    def rows(self, first: int, last: int) -> KeyedRun:
        """The members from the first to the one before the last."""
        rows = slice(first, last)
        return self._replace(
            keys=self.keys[rows],
            fields=self.fields[rows],
            names=self.names[rows],
            starts=self.starts[rows],
            ends=self.ends[rows],
        )

    def end_of_first(self) -> int:
        """The number of members that share the first one's key."""
        key = self.keys[0]
        return next((row for row, other in enumerate(self.keys) if other != key), len(self.keys))

    def start_of_last(self) -> int:
        """The first of the members that share the last one's key."""
        row = len(self.keys) - 1
        while row and self.keys[row - 1] == self.keys[-1]:
            row -= 1
        return row

    def parts(self) -> Iterator[tuple[str, str, bytes]]:
        """Cuts the members out, as `Draft` has them."""
        for field, name, start, end in zip(self.fields, self.names, self.starts, self.ends, strict=True):
            yield field, name, self.data[start:end]

    def drafts(self) -> Iterator[Draft]:
        """One draft for the members of each key."""
        draft: Draft | None = None
        for key, part in zip(self.keys, self.parts(), strict=True):
            if draft is None or key != draft.key:
                if draft is not None:
                    yield draft
                draft = Draft(key, self.url, self.visit, [])
            draft.parts.append(part)
        if draft is not None:
            yield draft
