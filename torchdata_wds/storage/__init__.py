"""URL -> byte stream: where shards come from, and where they go.

One backend per file, and a table from scheme to backend for each direction (`opening.OPENERS`, `targets.TARGETS`).
Nothing here knows what is inside a shard, and nothing here imports torch.
"""

from __future__ import annotations

from torchdata_wds.storage.byte_streams import ByteStream, is_decompressed, wrap_stream
from torchdata_wds.storage.compression import Compressor, compression_for, open_compressor
from torchdata_wds.storage.listing import list_urls
from torchdata_wds.storage.opening import can_reopen, open_shard
from torchdata_wds.storage.places import RewriteRules, StorageOptions
from torchdata_wds.storage.sources.command import kill_commands
from torchdata_wds.storage.targets.base import Target, Unique
from torchdata_wds.storage.targets.table import TARGETS, list_targets, open_target, remove_target
from torchdata_wds.storage.urls import mask_item, mask_url

__all__ = [
    "TARGETS",
    "ByteStream",
    "Compressor",
    "RewriteRules",
    "StorageOptions",
    "Target",
    "Unique",
    "can_reopen",
    "compression_for",
    "is_decompressed",
    "kill_commands",
    "list_targets",
    "list_urls",
    "mask_item",
    "mask_url",
    "open_compressor",
    "open_shard",
    "open_target",
    "remove_target",
    "wrap_stream",
]
