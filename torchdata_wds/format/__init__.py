"""Byte streams to members to samples, and samples to shards. Nothing here imports torch."""

from torchdata_wds.format.grouping import group_members
from torchdata_wds.format.index import ShardIndex
from torchdata_wds.format.index_exports import dali_index, wids_index
from torchdata_wds.format.indexing import index_shard
from torchdata_wds.format.members import Mark, ShardMember
from torchdata_wds.format.names import split_name
from torchdata_wds.format.shard_file import ShardInfo
from torchdata_wds.format.tar import read_members

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
