"""Wraps a graph as a dataset that torchdata's StatefulDataLoader can stop and resume in the middle of an epoch.

The loader's workers may end with each epoch and remember no earlier one, so epochs are numbered in shared memory.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from multiprocessing.context import get_spawning_popen
from types import FrameType
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import Batcher
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from torchdata_wds.checks import checked_int
from torchdata_wds.consumers import Grid, Ranks, checked_ranks, divide
from torchdata_wds.pipes.order.permutation import mix
from torchdata_wds.pipes.seeds import Seeds
from torchdata_wds.process_place import Place, rank_place
from torchdata_wds.workers.graphs import LocalIterDataPipe, find_branches
from torchdata_wds.workers.lengths import items_per_epoch
from torchdata_wds.workers.resume import signatures
from torchdata_wds.workers.resume.checkpoints import (
    UNSTARTED,
    Checkpoint,
    OrderState,
    Streams,
    pack_streams,
    unpack_streams,
)
from torchdata_wds.workers.resume.epoch_numbers import EpochNumbers, iteration_key
from torchdata_wds.workers.resume.job_order import UNSTARTED_ORDER, find_order
from torchdata_wds.workers.resume.planner import find_chain
from torchdata_wds.workers.resume.worker_order import WorkerOrder, count_items, states_in
from torchdata_wds.workers.sample_counts import unknown_length
from torchdata_wds.workers.stats.skips import log_skips


class _Asking(NamedTuple):
    """What is known of the loader that asks for a length."""

    num_workers: int = 0
    batch_size: int | None = None  # None if it makes no batches
    drop_last: bool = False


def _asking_loader(dataset: StatefulPipeline) -> _Asking:
    # ``DataLoader.__len__`` calls ``len(self.dataset)``, and a dataset does not know its loader otherwise.
    frame: FrameType | None = sys._getframe(2)
    for _ in range(3):
        loader = getattr(frame and frame.f_locals.get("self"), "__dict__", {})
        if loader.get("dataset") is dataset and "num_workers" in loader:
            return _Asking(*(loader[name] for name in _Asking._fields))
        frame = frame and frame.f_back
    worker = get_worker_info()
    return _Asking(worker.num_workers if worker else 0)


class StatefulPipeline(IterableDataset[Any]):
    """Runs a graph of DataPipes under a plain ``StatefulDataLoader``, and makes its states exact.

    ``StatefulDataLoader`` alone does not save the state of DataPipes: it repeats the beginning of the epoch, in another
    order. Here a state records each worker's position, and resuming yields the remaining items, as with
    ``WorkersReadingService``; see there for which items are skipped and which are made again.
    ``.sharding_filter()``, ``.split_shards()`` or ``.load_in_order()`` divides the work among workers and ranks.
    Everything is seeded here: the loader's own generator and shuffling have no effect.

    Every epoch has a new order, which depends on the seed, the epoch's number, and the rank and worker. Each copy of
    this object counts its epochs, over all workers forked or spawned with it; the orders are the same whether or not
    workers outlive an epoch (``persistent_workers=True``). After a state is loaded, counting continues from its epoch.

    With ``.load_in_order()`` or `IndexedMix`, the order is the same for any number of ranks and workers if the graph
    makes the batches, or ``block=`` of the order is the loader's ``batch_size``. A state is loaded with the same
    numbers; to go on with others, `seek` the position that `position_in` finds in it.

    ``len()`` of the loader works if it follows from ``wds_epoch``, an index or the source of the graph; otherwise it
    raises a TypeError that says why.

    A state is a flat dict of numbers and text: it passes through JSON, ``torch.load(weights_only=True)`` and
    ``torch.distributed.checkpoint``.

    Args:
        pipe: The last pipe of the graph.
        seed: Determines all orders.
        ranks: The ranks that share the work, as in `WdsLoader`; ``"auto"`` looks them up at the first iteration.
        length: How many items all workers of this rank yield together in an epoch, if the graph does not tell it.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `ranks` is not a place, or `length` is negative.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> from torchdata.stateful_dataloader import StatefulDataLoader
        >>> from torchdata_wds import StatefulPipeline
        >>> def load():
        ...     pipe = IterableWrapper(range(9)).shuffle().sharding_filter()
        ...     return StatefulDataLoader(StatefulPipeline(pipe, seed=1), batch_size=None)
        >>> first, again = load(), load()
        >>> items = iter(first)
        >>> begun = [next(items) for _ in range(4)]
        >>> again.load_state_dict(first.state_dict())
        >>> list(again) == list(items)
        True
    """

    def __init__(
        self, pipe: IterDataPipe[Any], *, seed: int = 0, ranks: Ranks = "auto", length: int | None = None
    ) -> None:
        if not isinstance(pipe, IterDataPipe):
            raise TypeError(f"StatefulPipeline takes the last pipe of a graph, not {pipe!r}")
        self.pipe = pipe
        self.seed = checked_int("seed", seed, -math.inf)
        self.ranks = checked_ranks(ranks)  # a place, which can be pickled; None for "auto"
        self.length = None if length is None else checked_int("length", length, 0)
        self._numbers = EpochNumbers()
        self._seen = 0
        self._restored: dict[str, Any] | None = None
        self._sought = (0, 0)  # an epoch's number, and the position at which it begins
        self._forget()

    def _forget(self) -> None:
        """Resets everything that is known about earlier epochs."""
        self._place: Grid | None = None
        self._run: LocalIterDataPipe | None = None
        self._order: WorkerOrder | None = None
        self._signature: signatures.Signature = {}
        self._epoch = -1
        self._stream_seeds: Seeds = (0, 0)  # those of the epoch in which the stream began that wds_epoch cuts
        self._is_over = False  # whether the epoch has ended; the run's streams are then those of the next
        self._packed: dict[tuple[Any, ...], dict[str, Any]] = {}  # the last state, by the facts known then

    def __getstate__(self) -> dict[str, Any]:
        copy = StatefulPipeline(self.pipe, seed=self.seed, length=self.length)  # one that starts from the beginning
        # A spawned worker is not in the group of ranks, and could not look them up.
        copy.ranks = self.ranks if get_spawning_popen() is None else self.ranks or rank_place()
        return {**vars(copy), "_numbers": self._numbers, "_restored": self._restored, "_sought": self._sought}

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the coming epoch; later ones count on from it."""
        self._numbers.set(epoch)

    def __len__(self) -> int:
        """Returns how many items all workers of this rank yield together; raises a TypeError if it is not known."""
        if self.length is not None:
            return self.length
        loader = _asking_loader(self)
        if loader.num_workers > 1 and find_branches(self.pipe) != [self.pipe]:
            raise unknown_length(
                "a DataLoader runs the stages after .join_workers() in each worker, on that worker's stream alone"
            )
        ranks = self.ranks or rank_place()
        order = find_order(self.pipe)
        if order is not None:
            return count_items(order, ranks, loader.num_workers, loader.batch_size, drop_last=loader.drop_last)
        if loader.batch_size is None:
            return items_per_epoch(self.pipe, ranks, loader.num_workers)
        # The loader divides this by the batch size; but each worker makes a last, shorter batch of its own.
        batches = Batcher(self.pipe, loader.batch_size, loader.drop_last)
        return loader.batch_size * items_per_epoch(batches, ranks, loader.num_workers)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator, since the state may be requested before the first item.
        restored, self._restored = self._restored, None
        worker = get_worker_info()
        place = Grid(*(self.ranks or rank_place()), worker.num_workers if worker else 0, worker.id if worker else 0)
        if place != self._place or restored is not None:  # another place than before: forked as a worker since
            self._forget()
        is_new = self._run is None
        run = self._run or self._start(place)
        self._packed.clear()
        if self._order is not None:
            return self._items_in_order(self._order, run, restored, is_new=is_new)
        if restored is not None:
            state = Checkpoint.from_plain(restored)
            signatures.check_signature(state.signature, self._signature)
            self._epoch = self._count(is_new, state.epoch - 1)
            self._stream_seeds, self._is_over = state.stream_seeds or self._stream_seeds, not state.in_epoch
            streams = [[restored["item"]], *state.streams[1:]]  # the rest may be of an earlier item
            run.streams = unpack_streams(self.pipe, streams, self._stream_seeds, self._epoch + 1)
            if self._is_over:
                return iter(())
        else:
            self._epoch = self._count(is_new)
            self._stream_seeds = self._seeds(self._epoch) if is_new else self._stream_seeds
            run.streams = run.streams if self._is_over else run.streams.next_epoch()
        self._is_over = False
        run.streams.epoch = self._epoch
        run.begin(self._seeds(self._epoch), run.streams)
        return self._items(run)

    def _items_in_order(
        self, order: WorkerOrder, run: LocalIterDataPipe, state: dict[str, Any] | None, *, is_new: bool
    ) -> Iterator[Any]:
        """Begins an epoch of a graph that follows a global order."""
        self._epoch = self._count(is_new, None if state is None else state.get("epoch"))
        if state is None and self._epoch == self._sought[0]:
            state = OrderState("", self.seed, self._sought[1]).to_plain(self._epoch)
        seeds, streams = order.begin(self._epoch, state, self.seed)
        self._is_over = False
        streams.epoch = self._epoch
        run.begin(seeds, streams)
        return self._items(run)

    def seek(self, position: int, *, epoch: int = 0) -> None:
        """Makes `epoch` the next epoch, and lets it begin at a position in its global order.

        The position counts the samples of all ranks, from 0. With what `position_in` returns for the state of another
        run, this one continues there, on any number of ranks and workers. Call it before iterating over the loader,
        with the same numbers on all ranks.
        """
        self._sought = checked_int("epoch", epoch, 0), checked_int("position", position, 0)
        self.set_epoch(epoch)

    @staticmethod
    def position_in(state: Any) -> tuple[int, int]:
        """Returns the epoch and the position, for `seek`, from the state of a loader whose graph has a global order.

        Raises:
            ValueError: if the state holds no position.
        """
        places = [(found["epoch"], found["position"]) for found in states_in(state)]
        if not places:
            raise ValueError("this is not the state of a loader whose graph begins with load_in_order")
        return min(places)

    def _count(self, is_new: bool, epoch: int | None = None) -> int:
        """Returns the number of the new epoch (`epoch`, if a state gives it), and notes it for later workers."""
        seen = self._seen
        given, self._seen = self._numbers.given
        worker = get_worker_info()
        if epoch is None and is_new and worker is not None:
            return self._numbers.begin(iteration_key())
        if epoch is None:
            epoch = given if self._seen != seen else self._epoch + 1
        if worker is not None:
            self._numbers.note(iteration_key(), epoch)
        return epoch

    def _items(self, run: LocalIterDataPipe) -> Iterator[Any]:
        yield from run
        run.wait_for_facts()
        log_skips(run.streams.facts[0].skips, self._epoch + 1)
        run.streams = run.streams.next_epoch()
        self._is_over = True
        self._packed.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the stream in this process; raises a RuntimeError if its position is unknown."""
        run = self._run
        if run is None:
            unstarted = UNSTARTED if find_order(self.pipe) is None else UNSTARTED_ORDER.to_plain(0)
            return unstarted.copy() if self._restored is None else self._restored
        if self._order is not None:
            return self._order.state(run.streams.taken, is_over=self._is_over)
        run.wait_for_facts()
        streams = run.streams
        facts = streams.facts[0]
        known = len(facts.shards), len(facts.passes), len(facts.lengths), len(facts.skipping), facts.ended
        if known not in self._packed:
            assert self._place is not None
            packed = pack_streams(self.pipe, streams, streams.taken, max(self._place.workers, 1))
            described = signatures.without_lists(self._signature)
            state = Checkpoint(described, self._epoch + 1, not self._is_over, None, self._stream_seeds, packed)
            self._packed = {known: state.to_plain()}
        counts, _ = streams.turns.at(streams.taken)
        return {**self._packed[known], "item": counts[0]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next iteration resume from a state; raises a ValueError if it is not one.

        The iteration raises a ValueError if the state belongs to another graph, rank or worker.
        """
        is_start = state_dict in ({}, UNSTARTED, UNSTARTED_ORDER.to_plain(0))
        if not is_start:
            Checkpoint.from_plain(state_dict)
        self._restored = None if is_start else state_dict

    def _start(self, place: Grid) -> LocalIterDataPipe:
        """Divides the work, and sets up the graph's run in this process."""
        ranks, rank, workers, worker = self._place = place
        order = find_order(self.pipe)
        self._order = None if order is None else WorkerOrder(order, place)
        if order is None:
            self._signature = self._describe(place)
        divide(self.pipe, Place(ranks, rank), SHARDING_PRIORITIES.DISTRIBUTED)
        divide(self.pipe, Place(max(workers, 1), worker), SHARDING_PRIORITIES.MULTIPROCESSING)
        epochs = find_chain(self.pipe).epochs
        for epoch in epochs:
            epoch.begin_anew()
        self._run = LocalIterDataPipe(self.pipe, worker=worker, keeps_apart=not workers)
        self._run.streams = Streams(1, continues=bool(epochs))
        return self._run

    def _describe(self, place: Grid) -> signatures.Signature:
        """Describes the graph and the shards, which a state must fit."""
        shards = signatures.describe_shards(self.pipe)
        # Workers keep a state each: all of them together describe as much as one would alone.
        shards["contents"] = [found[place.worker :: max(place.workers, 1)] for found in shards["contents"]]
        return {
            "num_workers": place.workers,
            "worker": place.worker,
            "ranks": place.ranks,
            "rank": place.rank,
            "seed": self.seed,
            "stages": signatures.graph_signature(self.pipe),
            **shards,
        }

    def _seeds(self, epoch: int) -> Seeds:
        assert self._place is not None
        return mix(self.seed, epoch), mix(self.seed, epoch, "rank", self._place.rank)
