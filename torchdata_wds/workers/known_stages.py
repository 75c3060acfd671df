"""The stages that resuming knows, by their classes: others of the same name, and subclasses, may do anything."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.data.datapipes.iter import (
    Collator,
    Concater,
    FileLister,
    Filter,
    IterableWrapper,
    Mapper,
    ShardingFilter,
    Shuffler,
)
from torch.utils.data.graph import DataPipe

from torchdata_wds.pipes.cache_shards import ShardCacherIterDataPipe
from torchdata_wds.pipes.dataset_entries import SpecShardsIterDataPipe
from torchdata_wds.pipes.list_shards import ShardListerIterDataPipe
from torchdata_wds.pipes.mapping import ItemMapper
from torchdata_wds.pipes.resample_shards import ShardResamplerIterDataPipe
from torchdata_wds.pipes.shuffle import SampleShufflerIterDataPipe
from torchdata_wds.pipes.split_shards import ShardSplitterIterDataPipe, _AgreedIterDataPipe

__all__ = ["gives_shards_again", "is_one_to_one", "is_torchdata"]

#: The stages of the border between processes; their module imports those that import this one.
_BORDER = ("JoinWorkersIterDataPipe", "_MarkedEndIterDataPipe")

#: Sources and stages that may stand before the loader: they give URLs, and cost nothing when they give them again.
_CHEAP = {
    *(IterableWrapper, Shuffler, ShardingFilter, Concater, FileLister, Filter, Mapper, SampleShufflerIterDataPipe),
    *(ShardListerIterDataPipe, SpecShardsIterDataPipe, ShardCacherIterDataPipe, ShardResamplerIterDataPipe),
    *(ShardSplitterIterDataPipe, _AgreedIterDataPipe),
}


def is_torchdata(pipe: DataPipe, *names: str) -> bool:
    """Returns whether a pipe is one of torchdata's, by their short names; never imports torchdata.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> is_torchdata(IterableWrapper([1]), "Cycler", "Header")
        False
    """
    torchdata = sys.modules.get("torchdata.datapipes.iter")  # loaded wherever there is such a pipe
    return any(type(pipe) is getattr(torchdata, name, None) for name in names)


def is_one_to_one(pipe: DataPipe) -> bool:
    """Returns whether a pipe gives one item for each that it takes, unless it counts what it leaves out."""
    if isinstance(pipe, ItemMapper):
        return _is_own(type(pipe))
    if type(pipe).__name__ in _BORDER:
        return _is_own(type(pipe))
    return type(pipe) in (Mapper, Collator) or is_torchdata(pipe, "LengthSetter")


def gives_shards_again(pipe: DataPipe) -> bool:
    """Returns whether a pipe that stands before the loader gives the same shards once more at no cost."""
    return type(pipe) in _CHEAP or is_torchdata(pipe, "Header", "LengthSetter", "Repeater")


def _is_own(kind: type[Any]) -> bool:
    module = sys.modules.get(kind.__module__) if kind.__module__.startswith("torchdata_wds.") else None
    return getattr(module, kind.__qualname__, None) is kind
