"""Works out how many items a loader yields in each epoch, without iterating anything.

Frameworks request a loader's length once and stop after that many batches, so a number that is too small loses data.
The number is worked out from the sources of the graph to its end, for each worker: of 10 items, three workers have 4, 3
and 3 after ``sharding_filter``, and so make 2, 1 and 1 batches of 3: 4 batches. If two workers divide shuffled shards
of 5 and 3 samples, the share of each one changes between epochs, but together they always have 8.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import IterDataPipe, MapDataPipe, default_collate
from torch.utils.data.datapipes import iter as native
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from torchdata_wds.consumers import Grid, upstream
from torchdata_wds.errors import WdsError
from torchdata_wds.pipes.chain_text import form_name, known_name, sources_of, stages_of
from torchdata_wds.pipes.resume_facts import Step, said_by
from torchdata_wds.pipes.samples.collate import wds_collate
from torchdata_wds.pipes.streams.epoch import share_of
from torchdata_wds.process_place import Place
from torchdata_wds.workers.graphs import find_branches, is_one_part
from torchdata_wds.workers.resume.checkpoints import Checkpoint
from torchdata_wds.workers.resume.job_order import find_order
from torchdata_wds.workers.resume.planner import is_one_to_one, is_torchdata
from torchdata_wds.workers.sample_counts import COUNTED, STATED, samples_per_worker, unknown_length

# Native stages that yield what they take, unchanged, in some order or at another time.
_PASSING = ("Shuffler", "Prefetcher", "PinMemory", "Forker", "ChildDataPipe")
# Stages that join several streams: how many items they yield, given the numbers of these.
_JOINING: dict[str, Callable[[Sequence[int]], int]] = {
    "Concater": sum,
    "MultiplexerLongest": sum,
    "Multiplexer": lambda counts: min(counts) * len(counts),
    "SampleMixer": sum,
    "Zipper": min,
    "ZipperLongest": max,
}


class _Items(NamedTuple):
    """How many items a stage yields in one epoch."""

    total: int  # in all workers of the rank
    each: tuple[int, ...] | None  # in each of them; None if that is not known, or not the same in every epoch
    inside: _Items | None = None  # if the items are batches: how many items they hold; None if that is not known
    is_collated: bool = False  # whether the batches are columns


def items_per_epoch(datapipe: IterDataPipe[Any], ranks: Place, num_workers: int) -> int:
    """Returns how many items a loader with this many workers yields in each epoch on this rank.

    The graph must not have been divided or iterated; it, and all random states, stay as they are. Only an index that
    ``split_shards`` names is read from a server. The number is exact, and the same in every epoch, unless handlers,
    ``missing="skip"`` or functions that return None drop items: then it is an upper bound.

    Args:
        datapipe: The last pipe of the graph.
        ranks: The place of this rank among those that share the work.
        num_workers: The number of workers; 0 counts as one.

    Raises:
        TypeError: if the number is not known, or not the same in every epoch; says why, and what to write.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> pipe = IterableWrapper(range(10)).shuffle().sharding_filter().batch(3)
        >>> [items_per_epoch(pipe, Place(), num_workers) for num_workers in (0, 2, 3)]
        [4, 4, 4]
    """
    workers = max(num_workers, 1)
    # ``wds_epoch`` deals its items to the workers in turn, from epoch to epoch, so the shares repeat after at most
    # `workers` epochs. This matters only where such streams are zipped or mixed.
    stages = list(stages_of(datapipe))
    rotates = any(said_by(stage, "cuts_epochs") for stage in stages)
    has_border = any(hasattr(stage, "is_replicable") for stage in stages)
    # The search for branches pickles all that pipes hold, which may be a long list.
    branches = {id(branch) for branch in (find_branches(datapipe) if has_border else [datapipe])}
    totals = set()
    try:
        order = find_order(datapipe)
        if order is not None and not any(is_torchdata(stage, "LengthSetter") for stage in stages):
            return order.count_items(ranks)
        for epoch in range(workers if rotates else 1):
            in_workers = _Counter(ranks, workers, epoch)
            totals.add(_Counter(ranks, 1, epoch, branches, in_workers).count(datapipe).total)
    except (WdsError, OSError) as error:
        raise unknown_length(str(error), STATED) from error
    if (most := max(totals)) > sys.maxsize:
        raise unknown_length(f"{most:,} items are more than len() can tell")
    if len(totals) > 1:
        raise unknown_length(f"it changes from epoch to epoch, between {min(totals):,} and {max(totals):,} items")
    return totals.pop()


def items_before(datapipe: IterDataPipe[Any], ranks: Place, state: Checkpoint | None) -> int | None:
    """Returns how many items of its epoch a loader had delivered on this rank at a state; None if that is not known."""
    if state is None:
        return 0
    if state.order is not None and (order := find_order(datapipe)) is not None:
        return order.count_items(ranks) - order.count_items(ranks, state.order.position)
    if not is_one_part(datapipe):
        return None  # the state counts the items that the main process takes, and makes others of
    return sum(state.streams[0]) if state.streams else 0


class _Counter:
    """Counts the items of stages in the workers of one rank, or in its main process, which reads `branches` of them."""

    def __init__(
        self, ranks: Place, workers: int, epoch: int, branches: Collection[int] = (), inner: _Counter | None = None
    ) -> None:
        self.ranks, self.workers, self.epoch = ranks, workers, epoch
        self.branches, self.inner = branches, inner

    def count(self, pipe: Any, *, is_whole: bool = False) -> _Items:
        """Counts the items of a stage; with `is_whole`, all workers have the same, and a later stage divides them."""
        if self.inner is not None and id(pipe) in self.branches:
            return _joined(self.inner.count(pipe))
        if said_by(pipe, "cuts_epochs"):
            return self._cut(pipe)
        if said_by(pipe, "makes_samples"):
            return self._samples(pipe)
        if is_torchdata(pipe, "LengthSetter"):
            return self._same(pipe.length) if is_whole else self._total(pipe.length)
        name = known_name(pipe)
        if name == "IterableWrapper" or not (sources := sources_of(pipe)):
            return self._same(_length_of_source(pipe))
        found = [self.count(source, is_whole=is_whole or name == "ShardingFilter") for source in sources]
        if name in _JOINING and (name != "SampleMixer" or pipe.stop == "all"):
            return self._in_one(pipe, found, _JOINING[name])
        if len(found) > 1:
            raise _unknown_stage(pipe)
        return self._after(pipe, name, *found)

    def _after(self, pipe: Any, name: str, found: _Items) -> _Items:
        """Counts the items of a stage with one source, which yields those of `found`."""
        if name == "ShardingFilter":
            return self._filtered(pipe, found)
        if name in _PASSING or is_one_to_one(pipe) or (name == "SampleCacher" and pipe.file is None):
            is_collated = found.is_collated or name == "Collator"
            return found._replace(inside=found.inside if _keeps_batches(pipe) else None, is_collated=is_collated)
        if name == "Batcher":
            return self._batches(pipe, found)
        if isinstance(pipe, Step) and said_by(pipe, "length_of"):
            return found if pipe.reorders else self._each(pipe, found, pipe.length_of)
        level = {"SampleUnbatcher": 1, "UnBatcher": vars(pipe).get("unbatch_level")}.get(name)
        if level == 1 and found.inside is not None and found.is_collated == (name == "SampleUnbatcher"):
            return found.inside
        if name == "Header":
            return self._each(pipe, found, lambda count: count if pipe.limit is None else min(count, pipe.limit))
        if (times := {"Cycler": "count", "Repeater": "times"}.get(name)) and getattr(pipe, times) is not None:
            return _repeated(self._unrotated(pipe, found), getattr(pipe, times))
        if name == "InMemoryCacheHolder":  # it keeps what the first epoch gave, if that was anything
            return self._each(pipe, self._unrotated(pipe, found), lambda count: count)._replace(inside=found.inside)
        if _has_own_length(pipe):
            return self._each(pipe, found, partial(_own_length, pipe))
        raise _unknown_stage(pipe)

    def _same(self, count: int) -> _Items:
        return _items([count] * self.workers)

    def _total(self, count: int) -> _Items:
        return _Items(count, (count,) if self.workers == 1 else None)

    def _each(self, pipe: Any, found: _Items, function: Callable[[int], int]) -> _Items:
        return self._in_one(pipe, [found], lambda counts: function(*counts))

    def _in_one(self, pipe: Any, found: Sequence[_Items], function: Callable[[Sequence[int]], int]) -> _Items:
        """Counts the items of a stage that makes one stream of several."""
        each = [items.each for items in found if items.each is not None]
        if len(each) == len(found):
            counts = tuple(function(counts) for counts in zip(*each, strict=True)) if each else (0,) * self.workers
            return _items(counts)
        if function is sum:
            return _Items(sum(items.total for items in found), None)
        raise unknown_length(
            f"each of the {self.workers} workers has its own {form_name(pipe)}, and how many items each one gets is "
            "not known, or changes from epoch to epoch",
            f"put .join_workers() before {form_name(pipe)}, {COUNTED}",
        )

    def _unrotated(self, pipe: Any, found: _Items) -> _Items:
        """Drops the numbers of single workers after ``wds_epoch``, which change between its epochs."""
        is_cut = any(said_by(stage, "cuts_epochs") for stage in stages_of(pipe))
        return found._replace(each=None) if is_cut and self.workers > 1 else found

    def _filtered(self, pipe: Any, found: _Items) -> _Items:
        if found.each is None:
            raise unknown_length("sharding_filter divides what has been divided before, into parts that vary")
        places = self._places(pipe)
        each = [
            len(range(place.number, count, place.consumers)) for count, place in zip(found.each, places, strict=True)
        ]
        return _items(each)

    def _places(self, sharding_filter: Any) -> list[Place]:
        """Returns the places of the workers as a filter counts them, which may divide among ranks or workers only."""
        only = sharding_filter.sharding_group_filter
        ranks = self.ranks if only in (None, SHARDING_PRIORITIES.DISTRIBUTED) else Place()
        workers = self.workers if only in (None, SHARDING_PRIORITIES.MULTIPROCESSING) else 1
        return [
            Place(ranks.consumers * workers, ranks.number * workers + worker % workers)
            for worker in range(self.workers)
        ]

    def _batches(self, pipe: Any, found: _Items) -> _Items:
        size = pipe.batch_size
        if not pipe.drop_last:
            return self._each(pipe, found, lambda count: -(-count // size))._replace(inside=found)
        batches = self._each(pipe, found, lambda count: count // size)
        return batches._replace(inside=self._each(pipe, batches, lambda count: count * size))

    def _samples(self, grouper: Any) -> _Items:
        counts = samples_per_worker(grouper, self.workers, self._places)
        found = _items(counts.each)
        return found if counts.is_fixed else self._total(found.total)

    def _cut(self, pipe: Any) -> _Items:
        """Counts the items of ``wds_epoch``, which deals those of a rank to its workers in turn."""
        filters = [stage for stage in upstream(pipe) if isinstance(stage, native.ShardingFilter)]
        if any(found.sharding_group_filter is not None for found in filters):
            raise unknown_length("a sharding_filter before wds_epoch divides among ranks or workers only")
        if filters and pipe.n < self.ranks.consumers:
            why = f"wds_epoch({pipe.n}) cannot give each of {self.ranks.consumers} ranks an item"
            raise unknown_length(why, "use a larger n, at best a multiple of the number of ranks")
        grids = [Grid(*self.ranks, self.workers, worker) if filters else Grid() for worker in range(self.workers)]
        return _items(share_of(pipe.n, self.epoch, grid) for grid in grids)


def _unknown_stage(pipe: Any) -> TypeError:
    if (name := known_name(pipe)) == "Cycler":
        return unknown_length("cycle() without a count never ends")
    if name == "SampleMixer":
        return unknown_length(f"wds_mix(stop={pipe.stop!r}) ends when its draws decide; stop='all' yields all items")
    return unknown_length(f"{form_name(pipe)} may yield any number of items")


def _items(each: Iterable[int]) -> _Items:
    counts = tuple(each)
    return _Items(sum(counts), counts)


def _repeated(items: _Items, times: int) -> _Items:
    if items.each is None:
        return _Items(items.total * times, None)
    return _items(count * times for count in items.each)


def _joined(items: _Items) -> _Items:
    """Returns the numbers of the joined streams of all workers."""
    return _Items(items.total, (items.total,), items.inside and _joined(items.inside), items.is_collated)


def _keeps_batches(pipe: Any) -> bool:
    """Returns whether a stage that yields one item for each leaves batches as large as they are."""
    if "fn" in vars(pipe):
        return type(pipe) is native.Collator and any(pipe.fn is function for function in (wds_collate, default_collate))
    return bool(known_name(pipe)) and "skipped" not in vars(pipe)


def _length_of_source(pipe: Any) -> int:
    if type(pipe) is native.IterableWrapper:
        if isinstance(pipe.iterable, Sized) and not isinstance(pipe.iterable, MapDataPipe):
            return _told_length(pipe, pipe.iterable)
        raise unknown_length(f"IterableWrapper holds a {type(pipe.iterable).__name__}, whose length is not known")
    if _has_own_length(pipe):
        return _own_length(pipe)
    raise unknown_length(f"the length of the source {form_name(pipe)} is not known")


def _has_own_length(pipe: Any) -> bool:
    """Returns whether a pipe of the user's has a ``__len__`` of its own; those of native pipes may be wrong."""
    owner = next((cls for cls in type(pipe).__mro__ if "__len__" in vars(cls)), IterDataPipe)
    return owner.__module__.partition(".")[0] not in ("torch", "torchdata", "torchdata_wds")


def _own_length(pipe: Any, count: int | None = None) -> int:
    """Returns what a user's pipe says it yields, if its source yields `count` items."""
    if count is not None:
        pipe, above = copy.copy(pipe), vars(pipe).items()
        stand_in = native.IterableWrapper(range(count), deepcopy=False)
        replaced = {name: stand_in for name, value in above if isinstance(value, IterDataPipe)}
        if not replaced:
            raise _unknown_stage(pipe)
        vars(pipe).update(replaced)
    return _told_length(pipe, pipe)


def _told_length(pipe: Any, sized: Any) -> int:
    try:
        return len(sized)
    except Exception as error:  # runs the user's code, for `list(loader)` too, which takes a TypeError only
        raise unknown_length(f"len() of {form_name(pipe)} says: {error}") from error
