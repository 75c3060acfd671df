"""What the tar reader yields: members, and the marks between them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["FailedMember", "Mark", "PassedMember", "ShardMember", "Unit"]


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


class PassedMember(NamedTuple):
    """A member that is not delivered, chosen away or cut: its name still tells where the sample before it ended."""

    name: str


class FailedMember(NamedTuple):
    """A member of a sample whose content could not be read: the sample is wrong, the stream goes on."""

    url: str
    name: str
    error: Exception


class Mark(Enum):
    """What a reader says between members, for those who must know where samples may not go on."""

    END = "the archive's end marker: the sample before it is complete"
    BROKEN = "the shard failed: the sample before it is not complete"


#: What a reader gives to those who group: members and what lies between them.
Unit = ShardMember | PassedMember | FailedMember | Mark
