"""Byte streams to members to samples, and samples to shards. Nothing here imports torch."""

from __future__ import annotations

from torchdata_wds.format.index import ShardIndex, dali_index, wids_index
from torchdata_wds.format.index.scan import index_shard
from torchdata_wds.format.samples.grouping import group_members
from torchdata_wds.format.samples.names import split_name
from torchdata_wds.format.shards import ShardInfo
from torchdata_wds.format.tar import read_members
from torchdata_wds.format.tar.members import Mark, ShardMember

__all__ = [
    "Mark",
    "ShardIndex",
    "ShardInfo",
    "ShardMember",
    "dali_index",
    "group_members",
    "index_shard",
    "read_members",
    "split_name",
    "wids_index",
]
