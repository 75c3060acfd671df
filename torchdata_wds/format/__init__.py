"""Byte streams to members to samples. Nothing here imports torch."""

from torchdata_wds.format.grouping import group_members
from torchdata_wds.format.members import Mark, ShardMember
from torchdata_wds.format.names import split_name
from torchdata_wds.format.tar import read_members

__all__ = ["Mark", "ShardMember", "group_members", "read_members", "split_name"]
