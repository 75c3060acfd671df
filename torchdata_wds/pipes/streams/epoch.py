"""Epochs of a fixed number of items, cut from a stream that continues from each to the next."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter.sharding import ShardingFilterIterDataPipe

from torchdata_wds.checks import check_count
from torchdata_wds.consumers import Grid, grid_of, place_of, upstream
from torchdata_wds.handlers import warn_once
from torchdata_wds.pipes.base import Pipe, WdsPipe, register
from torchdata_wds.pipes.foreign_loaders import heed_dealer
from torchdata_wds.pipes.resume_facts import EpochEnded, PassBegun, Step, Wanted, Watch, Way
from torchdata_wds.pipes.seeds import Passes
from torchdata_wds.pipes.starvation import most_empty_passes
from torchdata_wds.process_place import Place, rank_place

T = TypeVar("T")


@dataclass(eq=False)
class _Stream:
    """Consecutive passes over a source, across epochs."""

    number: int = 0  # the current pass
    taken: int = 0  # how many of its items have been taken
    first: int = 0  # the first item of the epoch that the next iteration yields
    skipped: int = 0  # how many items of the pass the next iteration first takes and drops
    early: int = 0  # how many of the next items the interrupted run took earlier, in other random states
    empty: int = 0  # how many passes in a row have yielded nothing
    passes: Passes | None = None  # seeds the pipes upstream; None before the first iteration
    items: Iterator[Any] | None = None  # the pass's items; None before a pass
    is_told: bool = False  # whether the watch has recorded the pass
    epochs: int = 0  # how many epochs have begun

    def __reduce__(self) -> tuple[Any, ...]:
        return _Stream, ()  # a copy of a pipe starts its own stream

    def take(self, source: Pipe, item: int, watch: Watch | None) -> Any:
        """Takes the next item, number `item` of the epoch, from this pass or the next."""
        while True:
            items = self.items or self._begin(source, item, watch)
            if watch is not None and watch.reseed is not None and self.early <= 0:
                watch.reseed(self.number, self.taken)
            try:
                taken = next(items)
            except StopIteration:
                self.empty = 0 if self.taken else self.empty + 1
                self._end()
                # A consumer's only shard of a pass may be empty, so a single empty pass is not an error.
                if not self.empty % 10 and self.empty >= most_empty_passes(place_of(source).consumers):
                    raise self._empty_error(place_of(source)) from None
            except BaseException:
                self._end()
                raise
            else:
                self.taken += 1
                self.early -= 1
                return taken

    def _begin(self, source: Pipe, item: int, watch: Watch | None) -> Iterator[Any]:
        assert self.passes is not None
        self.passes.begin_pass(self.number)  # again if already begun: a new epoch may have reseeded the pipes
        if watch is not None:
            watch.passing = self.number
            if not self.is_told:
                watch.begin_pass(self.number, item)
        self.is_told = False
        self.items = iter(source)
        return self.items

    def _end(self) -> None:
        self.items, self.number, self.taken = None, self.number + 1, 0

    def _empty_error(self, place: Place) -> ValueError:
        message = f"the source of wds_epoch yielded no item in {self.empty} passes, so that no epoch can be filled"
        hint = (
            f" for consumer {place.number} of {place.consumers} (ranks x workers). There may be fewer shards than "
            "consumers: use fewer workers, or .split_shards() instead of .sharding_filter()"
        )
        self.empty = 0
        return ValueError(message + hint if place.consumers > 1 else message)


@register("wds_epoch")
class EpochCounterIterDataPipe(WdsPipe[T], Step):
    """Cuts a stream into epochs of n items over all ranks and workers together (functional name: ``wds_epoch``).

    In each epoch, each rank yields n // ranks items (samples, batches or whatever the source yields), shared among its
    workers as equally as n allows. The next epoch continues where the last one stopped, with the same shard still open.
    When the source ends, a new pass starts in a new order that all consumers agree on, so that each pass yields every
    item once, whatever n is. Workers must outlive the epoch, as those of ``WorkersReadingService`` do, and of torch's
    DataLoader with ``persistent_workers=True``. Leaving an epoch early drops the items that workers have prefetched. A
    ValueError is raised if several passes in a row yield nothing.

    Args:
        n: How many items all consumers together yield in an epoch: at least one per rank, ideally a multiple of them.

    Yields:
        The items of the source.

    Raises:
        ValueError: if n is less than 1 or than the number of ranks, or if the source yields nothing in several passes.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> pipe = IterableWrapper("abcde").wds_epoch(3)
        >>> list(pipe), list(pipe), list(pipe)
        (['a', 'b', 'c'], ['d', 'e', 'a'], ['b', 'c', 'd'])
    """

    cuts_epochs = True

    def __init__(self, source_datapipe: IterDataPipe[T], n: int) -> None:
        check_count("n", n, 1)
        self.source_datapipe = source_datapipe
        self.n = n
        self._stream = _Stream()
        self._watch: Watch | None = None

    def __iter__(self) -> Iterator[T]:
        heed_dealer(self)
        stream, source, watch = self._stream, self.source_datapipe, self._watch
        self._check(grid := grid_of(self))
        share = self._coming_share(grid)
        _warn_of_short_lives()
        stream.epochs += 1
        if stream.passes is None:
            self.begin_stream()
        if watch is not None and not stream.first:
            # Even if this epoch takes no item: the process that keeps the state waits for this record.
            watch.begin_pass(stream.number, -stream.taken - stream.skipped)
            stream.is_told = stream.items is None
        number = stream.number
        for taken in range(stream.skipped):
            stream.take(source, taken - stream.skipped, watch)
        if stream.number != number:
            raise ValueError(
                f"the source of wds_epoch has fewer than the {stream.skipped:,} items that had been taken from it when "
                "the state was made: the data is not the same"
            )
        first, stream.first, stream.skipped = stream.first, 0, 0
        for item in range(first, share):
            yield stream.take(source, item, watch)
        if watch is not None:
            watch.facts.append(EpochEnded(stream.number, stream.taken))

    def __len__(self) -> int:
        """Returns how many items this worker (or rank, before its work is divided) yields in the coming epoch."""
        grid = grid_of(self)
        if grid[::2] == (1, 1) and any(isinstance(pipe, ShardingFilterIterDataPipe) for pipe in upstream(self)):
            grid = Grid(*rank_place())
        return self._coming_share(grid)

    def _coming_share(self, grid: Grid) -> int:
        # After an epoch was left early, a busy worker may have begun fewer than others: the watch's number counts.
        epoch = None if self._watch is None else self._watch.epoch
        return share_of(self.n, self._stream.epochs if epoch is None else epoch, grid)

    def share(self, epoch: int) -> int:
        """Returns how many items this worker yields in an epoch, counted from 0."""
        return share_of(self.n, epoch, grid_of(self))

    @property
    def position(self) -> PassBegun:
        """The pass that the next epoch begins in, and where."""
        return PassBegun(self._stream.number, -self._stream.taken)

    def begin_anew(self) -> None:
        """Makes the next iteration begin a new stream."""
        self._stream = _Stream()

    def begin_stream(self) -> None:
        """Records the seeds of the pipes upstream, from which all passes derive theirs."""
        self._stream.passes = Passes(self.source_datapipe)
        self._stream.passes.begin_stream(None if self._watch is None else self._watch.agreed_seed)

    def restart(self, begun: PassBegun, wanted: Wanted | None) -> Wanted | None:
        """Seeds the pipes upstream, so that the next iteration begins in the pass `begun`, as in another process.

        It yields only the `wanted` items of the epoch, or all if None, after dropping those that the epoch before took
        from the pass. Returns which items of the pass the source must yield; None for all.
        """
        stream = self._stream
        assert stream.passes is not None
        stream.passes.begin_pass(begun.passing)
        stream.items, stream.is_told = None, True
        stream.number, stream.taken, stream.first, stream.skipped = begun.passing, 0, 0, -begun.item
        if wanted is None:
            return None
        stream.first = wanted.first - len(wanted.early)
        stream.taken, stream.skipped, stream.early = stream.first - begun.item, 0, len(wanted.early)
        return Wanted([item - begun.item for item in wanted.early], wanted.first - begun.item)

    def resume(self, wanted: Wanted, way: Way) -> tuple[Wanted, Way] | None:
        """Makes the next iteration begin in the middle; see `Step`."""
        # The epoch's last batch may be short: the items that a full batch would have had belong to the next epoch.
        wanted = Wanted([item for item in wanted.early if item < way.share], min(wanted.first, way.share))
        if (begun := way.facts.pass_of(wanted)) is None:
            return None
        return self.restart(begun, wanted) or wanted, way._replace(passing=begun.passing)

    def taken(self, item: int, way: Way) -> tuple[int, Way] | None:
        """Returns how many items of which pass had been taken; see `Step`."""
        begun = way.facts.pass_of(Wanted((), item))
        return None if begun is None else (item - begun.item, way._replace(passing=begun.passing))

    def _check(self, grid: Grid) -> None:
        each, left = divmod(self.n, grid.ranks)
        if not each:
            raise ValueError(
                f"wds_epoch({self.n}) cannot give each of {grid.ranks} ranks an item: use a larger n, at best a "
                "multiple of the number of ranks"
            )
        if left and not grid.rank and not grid.worker:
            warn_once(
                f"epoch {self.n}/{grid.ranks}",
                f"wds_epoch({self.n}) gives each of {grid.ranks} ranks {each:,} items, {each * grid.ranks:,} together: "
                f"all ranks get the same number, and {self.n} is not a multiple of {grid.ranks}",
            )


def share_of(n: int, epoch: int, grid: Grid) -> int:
    """Returns how many items a worker yields in an epoch, if its rank's items are dealt to workers in turn."""
    # Dealing continues across epochs: item i of the rank belongs to worker i % workers. With 5 items per epoch and 3
    # workers, worker 2 has one item of epoch 0 (number 2 of 0 to 4) and two of epoch 1 (numbers 5 and 8 of 5 to 9).
    # Before item e a worker has had (e + workers - 1 - worker) // workers items: for e = 5 that is 5 // 3 = 1.
    each = n // grid.ranks
    before, after = ((number * each + grid.workers - 1 - grid.worker) // grid.workers for number in (epoch, epoch + 1))
    return after - before


def _warn_of_short_lives() -> None:
    """Warns, in the first worker, if torch's DataLoader ends its workers, and so the stream, with each epoch."""
    worker = get_worker_info()
    frame = sys._getframe() if worker is not None and not worker.id else None
    while frame is not None:
        if frame.f_code.co_name == "_worker_loop" and frame.f_locals.get("persistent_workers") is False:
            warn_once(
                "short lives",
                "wds_epoch runs in workers that end with the epoch: each epoch starts the stream again and yields the "
                "first items only. Pass persistent_workers=True to the DataLoader, or use WorkersReadingService",
            )
        frame = frame.f_back
