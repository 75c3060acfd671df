"""What the tar reader yields: members, and the marks between them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["CutMember", "Mark", "ShardMember", "Unit"]


class ShardMember(NamedTuple):
    """One regular file of a shard, read whole.

    Attributes:
        url: The shard, as it was listed.
        name: The member's name in the archive. It is data: never write to it as a path.
        data: The member's content.
        visit: Counts the loader's openings: two readings of one shard differ in it.
    """

    url: str
    name: str
    data: bytes
    visit: int = 0


class CutMember(NamedTuple):
    """A member whose payload could not be read: its name tells whether the sample before it was complete."""

    name: str


class Mark(Enum):
    """What a reader says between members, for those who must know where samples may not go on."""

    END = "the archive's end marker: the sample before it is complete"
    BROKEN = "the shard failed: the sample before it is not complete"


#: What a reader gives to those who group: members and what lies between them.
Unit = ShardMember | CutMember | Mark
