"""Finds the stages between the shards and the end of a stream, and whether items can be skipped without making them.

Each pipe describes itself (see `torchdata_wds.pipes.resume_facts`); this module works up from the end of the graph to
the grouping. There, the samples still needed are known by number, and no others are decoded.

For example, resuming `group_by_key().wds_decode().batch(4)` at item 10 takes samples 40 onward: ``batch`` takes 4 items
for each that it yields, ``wds_decode`` one.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes import iter as native
from torch.utils.data.graph import DataPipe, DataPipeGraph

from torchdata_wds.consumers import traverse
from torchdata_wds.pipes.chain_text import short_name
from torchdata_wds.pipes.pickling import parts_of
from torchdata_wds.pipes.resume_facts import Facts, Reached, Step, Wanted, Way, said_by

_ONE_TO_ONE = (native.Mapper, native.Collator)  # native pipes that yield one item for each
_BEFORE_LOADER = ("IterableWrapper", "Shuffler", "ShardingFilter", "Concater", "FileLister", "Filter", "Mapper")

#: Types that can be iterated repeatedly; a set's order differs between processes, which the checksum reveals.
COLLECTIONS = (list, tuple, range, dict, set, frozenset)


def is_torchdata(pipe: DataPipe, *names: str) -> bool:
    """Returns whether a pipe is one of torchdata's, by short name; never imports torchdata."""
    torchdata = sys.modules.get("torchdata.datapipes.iter")  # already loaded if such a pipe exists
    return any(type(pipe) is getattr(torchdata, name, None) for name in names)


def is_one_to_one(pipe: DataPipe) -> bool:
    """Returns whether a pipe yields one item for each that it takes, and counts any that it drops."""
    return bool(said_by(pipe, "one_to_one")) or type(pipe) in _ONE_TO_ONE or is_torchdata(pipe, "LengthSetter")


def gives_shards_again(pipe: DataPipe) -> bool:
    """Returns whether a pipe before the loader yields the same shards again at no cost."""
    is_native = any(type(pipe) is getattr(native, name) for name in _BEFORE_LOADER)
    is_known = is_native or is_torchdata(pipe, "Header", "LengthSetter", "Repeater")
    return is_known or bool(said_by(pipe, "repeats_shards"))


class _Batches(Step):
    """The native ``batch``: item i starts at source item i * size; the last batch may be smaller."""

    def __init__(self, pipe: Any) -> None:
        self.ratio = pipe.batch_size
        self._drop_last = pipe.drop_last

    def resume(self, wanted: Wanted, way: Way) -> tuple[Wanted, Way]:
        early = [item * self.ratio + place for item in wanted.early for place in range(self.ratio)]
        return Wanted(early, wanted.first * self.ratio), way

    def taken(self, item: int, way: Way) -> tuple[int, Way]:
        # The last batch may hold a single item: 10 batches of 4 prove only that 37 items were taken.
        return max(0, item - 1) * self.ratio + min(item, 1), way

    def length_of(self, source: int) -> int:
        return source // self.ratio if self._drop_last else -(-source // self.ratio)


_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_KNOWN_PACKAGES = ("torch", "torchdata", "torchdata_wds")
_TRUSTED = ("builtins", "_operator", "operator", "torch.utils.data", "torchdata_wds")


class Chain(NamedTuple):
    """The stages of a stream, from its end up to the grouping of samples."""

    counted: list[Any]  # stages that yield one item for each, and count in ``skipped`` what they drop
    steps: list[Step]  # stages that do not, last one first
    grouper: Any  # the stage that makes samples; None if the walk did not reach it
    epochs: list[Any]  # all ``wds_epoch`` of the graph
    obstacle: str | None  # why items cannot be skipped, for messages; None if they can
    draws: bool  # whether a stage may draw from the global random generators
    private: list[str]  # stages with a function that has its own random generator, whose state is not saved

    @property
    def ratios(self) -> tuple[int, int]:
        """Samples per item of ``wds_epoch``, and such items per item of the stream; without one, (samples, 1)."""
        # batch(4).wds_epoch(n).batch(8) has (4, 8), and batch(4).batch(8) without wds_epoch (32, 1).
        before = after = 1
        seen = not self.epochs
        for step in self.steps:
            seen = seen or step.cuts_epochs
            before, after = (before * step.ratio, after) if seen else (before, after * step.ratio)
        return before, after

    @property
    def follows_epoch(self) -> bool:
        """Whether ``wds_epoch`` seeds the generators for each item, because no stage after it reorders them."""
        return next((step.cuts_epochs for step in self.steps if step.cuts_epochs or step.reorders), False)

    def restart(self, wanted: Wanted, facts: Facts, share: int) -> bool:
        """Makes all stages yield only what the `wanted` items need; returns whether enough is known for that."""
        # From the end up: for item 334 onward, batch(4) needs 1,336 onward; for these, wds_shuffle(98) needs 1,433
        # onward and the 97 in its buffer. Once a pass has ended, each stage is also passed its source's length
        # (51,200 samples make 12,800 batches), which shows when a shuffle began to empty its buffer.
        way = Way(facts, facts.passes[0].passing, share)
        for number, step in enumerate(self.steps):
            length = facts.lengths.get(way.passing)
            for before in reversed(self.steps[number + 1 :]):
                length = share if before.cuts_epochs else None if length is None else before.length_of(length)
            found = step.resume(wanted, way._replace(length=length))
            if found is None:
                for done in self.steps[:number]:
                    done.undo()
                return False
            wanted, way = found
        is_over = wanted.least >= facts.lengths.get(way.passing, wanted.least + 1)
        self.grouper.restart(wanted, *facts.shard_of(way.passing, wanted.least), is_over=is_over)
        return True

    def reached(self, item: int, facts: Facts) -> Reached | None:
        """Returns how far the stream had read, at least, once `item` items of an epoch were taken; None if unknown."""
        # 10 batches of 4 prove that 37 samples were read. If the same shards end earlier now, they have changed, and
        # `Watch` raises. With interleave > 1 several shards are open at once, and no single one can be checked.
        if self.obstacle is not None or self.grouper.source_datapipe.interleave > 1:
            return None
        way = Way(facts, facts.passes[0].passing, 0)
        for step in self.steps:
            found = step.taken(item, way)
            if found is None:
                return None
            item, way = found
        shard, is_last = facts.shard_of(way.passing, item)
        return Reached(way.passing, shard.ordinal, item) if shard is not None and is_last else None


def find_chain(end: IterDataPipe[Any]) -> Chain:
    """Walks up a graph from its end to the stage that makes samples."""
    # In load_wds_shards().group_by_key().wds_shuffle(98).wds_map(f).batch(4), the steps are batch and wds_shuffle, and
    # wds_map is counted. The walk ends at the grouper or the first obstacle, such as a filter.
    graph = traverse(end)
    pipes = list(all_pipes(graph))
    epochs = [pipe for pipe in pipes if getattr(type(pipe), "cuts_epochs", False)]
    is_foreign = any(type(pipe).__module__.partition(".")[0] not in _KNOWN_PACKAGES for pipe in pipes)
    draws = is_foreign or any(map(has_functions, pipes))
    private = [short_name(pipe) for pipe in pipes if _has_generator(pipe)]
    counted: list[Any] = []
    steps: list[Step] = []
    reorders: Any = None
    ((pipe, sources),) = graph.values()
    while not said_by(pipe, "makes_samples"):
        step: Step | None = _Batches(pipe) if type(pipe) is native.Batcher else None
        if isinstance(pipe, Step) and said_by(pipe, "resume"):
            step = pipe
        obstacle = _obstacle(pipe, step, sources, reorders)
        if obstacle is not None:
            return Chain(counted, steps, None, epochs, obstacle, draws, private)
        if step is not None:
            steps.append(step)
            reorders = pipe if step.reorders else reorders
        elif "skipped" in vars(pipe):
            counted.append(pipe)
        ((pipe, sources),) = sources.values()
    if said_by(pipe, "is_ordered"):  # it resumes by position
        return Chain([*counted, pipe], steps, None, epochs, f"{short_name(pipe)} has no shards to skip", draws, private)
    return Chain(counted, steps, pipe, epochs, _obstacle_above(pipe, sources), draws, private)


def _obstacle(pipe: DataPipe, step: Step | None, sources: DataPipeGraph, reorders: DataPipe | None) -> str | None:
    name = short_name(pipe)
    if len(sources) > 1:
        return f"{name} joins several streams"
    if not sources:
        return f"the stream begins with {name}, which has no shards to skip"
    if step is not None:
        return step.obstacle()
    if not is_one_to_one(pipe):
        return f"{name} may yield more, fewer or other items than it takes"
    # A resumed wds_shuffle(98) takes the 97 items of its buffer at once, before its first output. A function before it
    # would then draw other numbers than in the first run, when each item came in for another output.
    if reorders is not None and has_functions(pipe):
        return f"a function in {name}, before {short_name(reorders)}, may draw random numbers"
    return None


def _obstacle_above(grouper: Any, sources: DataPipeGraph) -> str | None:
    """Returns why the stages above the grouping may not yield the same shards again at no cost; None if they do."""
    if (obstacle := grouper.obstacle()) is not None:
        return str(obstacle)
    ((loader, above),) = sources.values()
    for stage in (grouper, loader):
        if has_functions(stage):
            return f"a function in {short_name(stage)} may draw random numbers"
    for pipe in all_pipes(above):
        if not gives_shards_again(pipe):
            return f"{short_name(pipe)} comes before load_wds_shards"
        if has_functions(pipe):
            return f"a function in {short_name(pipe)} may draw random numbers"
        if type(pipe) is native.IterableWrapper and not isinstance(pipe.iterable, COLLECTIONS):
            return f"the shards come from an object of type {type(pipe.iterable).__name__}"
    return None


def all_pipes(graph: DataPipeGraph) -> Iterator[Any]:
    """Yields all pipes of a graph, last one first; a pipe with several readers comes once for each."""
    for pipe, sources in graph.values():
        yield pipe
        yield from all_pipes(sources)


def has_functions(pipe: DataPipe) -> bool:
    """Returns whether a pipe holds functions from outside this package and torch, or one that draws."""
    return any(_is_function(value) for value in _arguments(pipe))


def _has_generator(pipe: DataPipe) -> bool:
    """Returns whether a pipe holds a function that visibly has its own random generator."""
    inside = [part for value in _arguments(pipe) if callable(value) for part in (value, *_contents(value))]
    return any(isinstance(part, _GENERATORS) for part in inside)


def _arguments(pipe: DataPipe) -> list[Any]:
    hidden = ("handler", "source_datapipe", "datapipe", "datapipes")
    return [value for name, value in vars(pipe).items() if name not in hidden]


def _is_function(value: Any, depth: int = 4) -> bool:
    if isinstance(value, IterDataPipe) or not depth:
        return False
    inside = parts_of(value)
    if callable(value) and not isinstance(value, functools.partial):
        named = value if hasattr(value, "__qualname__") else type(value)
        owner = getattr(value, "__self__", value)  # of a method, such as that of a decoder of this package that draws
        if not str(getattr(named, "__module__", None)).startswith(_TRUSTED) or getattr(owner, "draws", False) is True:
            return True
        # an object of this package may hold a user's function
        inside = [] if named is value else _contents(value)
    return any(_is_function(part, depth - 1) for part in inside)


def _contents(value: Any) -> list[Any]:
    slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, slot, None) for slot in slots)]
