"""What stands between the shards and the end of a stream, and so whether items can be skipped without making them.

A listed stage gives one item for each that it takes, or so many for so many, or an order that can be reckoned without
the items. Where only such stages stand behind the grouping, the samples that are needed to go on in the middle of a
stream are known by their numbers, and no other is decoded. Whatever else stands there sees all items again.

The stages that resuming knows, by their classes: others of the same name, and subclasses, may do anything.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import (
    Batcher,
    Collator,
    Concater,
    FileLister,
    Filter,
    IterableWrapper,
    Mapper,
    ShardingFilter,
    Shuffler,
)
from torch.utils.data.graph import DataPipe, DataPipeGraph, traverse_dps

from torchdata_wds.datasets.entries import SpecShardsIterDataPipe
from torchdata_wds.pipes.base import Held
from torchdata_wds.pipes.chain_text import short_name
from torchdata_wds.pipes.resume_facts import Facts, Reached, Wanted
from torchdata_wds.pipes.samples.group_by_key import KeyGrouperIterDataPipe
from torchdata_wds.pipes.samples.map import ItemMapper
from torchdata_wds.pipes.samples.shuffle import SampleShufflerIterDataPipe
from torchdata_wds.pipes.shards.cache_shards import ShardCacherIterDataPipe
from torchdata_wds.pipes.shards.list_shards import ShardListerIterDataPipe
from torchdata_wds.pipes.shards.load_shards import ShardLoaderIterDataPipe
from torchdata_wds.pipes.shards.resample_shards import ShardResamplerIterDataPipe
from torchdata_wds.pipes.shards.split_shards import ShardSplitterIterDataPipe, _AgreedIterDataPipe
from torchdata_wds.pipes.streams.epoch import EpochCounterIterDataPipe

__all__ = ["gives_shards_again", "is_one_to_one", "is_torchdata", "Chain", "find_chain", "has_functions"]


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


_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)

_TRUSTED = ("builtins", "_operator", "operator", "torch.utils.data", "torchdata_wds")


class Chain(NamedTuple):
    """The stages of a stream from its end up to the grouping of samples.

    Attributes:
        stages: The stages behind the grouping, last one first; as far as they could be followed.
        grouper: Where samples are made; None where the stages do not lead to one.
        epochs: All ``wds_epoch`` of the graph.
        obstacle: Why items cannot be skipped, for people; None where they can.
        draws: Whether a stage may draw from the global random generators.
        private: The stages with a function that has a random generator of its own, whose state nobody keeps.
    """

    stages: list[Any]
    grouper: KeyGrouperIterDataPipe | None
    epochs: list[EpochCounterIterDataPipe[Any]]
    obstacle: str | None
    draws: bool
    private: list[str]

    @property
    def counted(self) -> list[ItemMapper]:
        """The stages that give one item for each, as long as they leave none out."""
        return [stage for stage in self.stages if isinstance(stage, ItemMapper)]

    @property
    def has_ratio(self) -> bool:
        """Whether a stage makes batches."""
        return any(isinstance(stage, Batcher) for stage in self.stages)

    @property
    def follows_epoch(self) -> bool:
        """Whether each item is made when ``wds_epoch``, which seeds the generators too, gives one or more for it."""
        for stage in self.stages:
            if isinstance(stage, EpochCounterIterDataPipe):
                return True
            if isinstance(stage, SampleShufflerIterDataPipe):
                return False
        return False

    def restart(self, wanted: Wanted, facts: Facts, share: int) -> bool:
        """Lets all stages begin where only some items are still to come.

        Args:
            wanted: Which items of the last stage those are.
            facts: What is known of the stream.
            share: How many items ``wds_epoch`` gives in an epoch.

        Returns:
            Whether enough is known for that; if not, the stages must be seeded again and begin at their beginning.
        """
        passing = facts.passes[0].passing
        for number, stage in enumerate(self.stages):
            if isinstance(stage, Batcher):
                size = stage.batch_size
                wanted = Wanted(
                    [item * size + place for item in wanted.early for place in range(size)], wanted.first * size
                )
            elif isinstance(stage, SampleShufflerIterDataPipe):
                wanted = stage.restart(wanted, _length(self.stages[number + 1 :], facts.lengths.get(passing), share))
            elif isinstance(stage, EpochCounterIterDataPipe):
                # The epoch's last batch may be smaller: what a whole one would have more is of the next epoch.
                wanted = Wanted([item for item in wanted.early if item < share], min(wanted.first, share))
                begun = facts.pass_of(wanted)
                if begun is None:
                    for done in self.stages[:number]:
                        if isinstance(done, SampleShufflerIterDataPipe):
                            done.begin_anew()
                    return False
                passing = begun.passing
                wanted = stage.restart(begun, wanted) or wanted
        assert self.grouper is not None
        is_over = wanted.least >= facts.lengths.get(passing, wanted.least + 1)
        self.grouper.restart(wanted, *facts.shard_of(passing, wanted.least), is_over=is_over)
        return True

    def reached(self, item: int, facts: Facts) -> Reached | None:
        """Says how far the samples had come, at least, when so many items of an epoch had been taken."""
        if self.grouper is None or self.grouper.source_datapipe.interleave > 1 or self.obstacle is not None:
            return None
        passing = facts.passes[0].passing
        for stage in self.stages:
            if isinstance(stage, Batcher):
                item = max(0, item - 1) * stage.batch_size + min(item, 1)  # the last one may be smaller
            elif isinstance(stage, EpochCounterIterDataPipe):
                begun = facts.pass_of(Wanted((), item))
                if begun is None:
                    return None
                passing, item = begun.passing, item - begun.item
        shard, is_last = facts.shard_of(passing, item)
        return Reached(passing, shard.ordinal, item) if shard is not None and is_last else None


def _length(stages: list[Any], samples: int | None, share: int) -> int | None:
    """How many items stages give of so many samples, as far as that is known."""
    length = samples
    for stage in reversed(stages):
        if isinstance(stage, EpochCounterIterDataPipe):
            length = share
        elif isinstance(stage, Batcher) and length is not None:
            length = length // stage.batch_size if stage.drop_last else -(-length // stage.batch_size)
    return length


def find_chain(end: IterDataPipe[Any]) -> Chain:
    """Follows the stages of a graph from its end to where samples are made.

    Args:
        end: The last pipe of the graph.
    """
    graph = traverse_dps(end)
    pipes = list(_all_pipes(graph))
    epochs = [pipe for pipe in pipes if isinstance(pipe, EpochCounterIterDataPipe)]
    # In later passes of a native cycle, nobody has seeded the native shuffle: it draws from torch's global generator.
    draws = any(_is_foreign(pipe) or has_functions(pipe) or is_torchdata(pipe, "Cycler") for pipe in pipes)
    private = [short_name(pipe) for pipe in pipes if _has_generator(pipe)]
    stages: list[Any] = []
    shuffle: Any = None
    ((pipe, sources),) = graph.values()
    while type(pipe) is not KeyGrouperIterDataPipe:
        obstacle = _obstacle(pipe, sources, shuffle)
        if obstacle is not None:
            return Chain(stages, None, epochs, obstacle, draws, private)
        stages.append(pipe)
        if isinstance(pipe, SampleShufflerIterDataPipe):
            shuffle = pipe
        ((pipe, sources),) = sources.values()
    return Chain(stages, pipe, epochs, _obstacle_above(pipe, sources), draws, private)


def _obstacle(pipe: DataPipe, sources: DataPipeGraph, shuffle: DataPipe | None) -> str | None:
    name = short_name(pipe)
    if len(sources) > 1:
        return f"{name} joins several streams"
    if not sources:
        return f"the stream begins with {name}, which has no shards that could be left out"
    if type(pipe) is SampleShufflerIterDataPipe:
        return None if pipe.can_restart else f"{name} has max_bytes=, so that its order depends on the items"
    if type(pipe) in (EpochCounterIterDataPipe, Batcher):
        return None
    if not is_one_to_one(pipe):
        return f"{name} may give more or fewer items than it takes, or others"
    if shuffle is not None and has_functions(pipe):
        return f"a function in {name}, which may draw random numbers, stands before {short_name(shuffle)}"
    return None


def _obstacle_above(grouper: KeyGrouperIterDataPipe, sources: DataPipeGraph) -> str | None:
    """Says what stands above the grouping that does not give the same shards again at no cost."""
    ((loader, above),) = sources.values()
    if type(loader) is not ShardLoaderIterDataPipe:
        return f"{short_name(loader)} stands between load_wds_shards and group_by_key"
    for stage in (grouper, loader):
        if has_functions(stage):
            return f"a function in {short_name(stage)} may draw random numbers"
    for pipe in _all_pipes(above):
        if not gives_shards_again(pipe):
            return f"{short_name(pipe)} stands before load_wds_shards"
        if has_functions(pipe):
            return f"a function in {short_name(pipe)} may draw random numbers"
        if type(pipe) is IterableWrapper and not isinstance(pipe.iterable, (list, tuple, range, dict, set, frozenset)):
            return f"the shards come from an object of type {type(pipe.iterable).__name__}"
    return None


def _all_pipes(graph: DataPipeGraph) -> Iterator[DataPipe]:
    for pipe, sources in graph.values():
        yield pipe
        yield from _all_pipes(sources)


def _is_foreign(pipe: DataPipe) -> bool:
    return type(pipe).__module__.partition(".")[0] not in ("torch", "torchdata", "torchdata_wds")


def has_functions(pipe: DataPipe) -> bool:
    """Tells whether a pipe holds functions of somebody else."""
    return any(_is_function(value) for value in _arguments(pipe))


def _has_generator(pipe: DataPipe) -> bool:
    """Tells whether a function that a pipe holds has a random generator of its own, as far as that can be seen."""
    inside = [part for value in _arguments(pipe) if callable(value) for part in (value, *_contents(value))]
    return any(isinstance(part, _GENERATORS) for part in inside)


def _arguments(pipe: DataPipe) -> list[Any]:
    hidden = ("handler", "source_datapipe", "datapipe", "datapipes")
    return [value for name, value in vars(pipe).items() if name not in hidden]


def _is_function(value: Any, depth: int = 4) -> bool:
    inside: Iterable[Any] = ()
    if isinstance(value, IterDataPipe) or not depth:
        return False
    if isinstance(value, functools.partial):
        inside = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, Held):
        inside = (value.value,)
    elif isinstance(value, (list, tuple)):
        inside = value[:100]  # specs are short, lists of shards are not
    elif isinstance(value, dict):
        inside = list(value.values())[:100]
    elif callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        if not str(getattr(named, "__module__", None)).startswith(_TRUSTED):
            return True
        # an object of this package may hold a function that it was given
        inside = () if named is value else _contents(value)
    return any(_is_function(part, depth - 1) for part in inside)


def _contents(value: Any) -> list[Any]:
    slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, slot, None) for slot in slots)]
