"""URL -> byte stream: where shards come from.

One backend per file, and one table (`opening.OPENERS`) from scheme to backend. Nothing here knows what is inside a
shard, and nothing here imports torch.
"""

from __future__ import annotations

from torchdata_wds.storage.command import kill_commands
from torchdata_wds.storage.listing import list_urls
from torchdata_wds.storage.opening import can_reopen, open_shard
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.streams import ByteStream, wrap_stream
from torchdata_wds.storage.urls import mask_url

__all__ = [
    "ByteStream",
    "StorageOptions",
    "can_reopen",
    "kill_commands",
    "list_urls",
    "mask_url",
    "open_shard",
    "wrap_stream",
]
