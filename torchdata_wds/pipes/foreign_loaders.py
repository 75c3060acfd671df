"""Divides a pipe so that nothing is lost under loaders of other packages that deal out its items among ranks.

Hugging Face's Accelerate, and transformers' Trainer with it, wraps every torch DataLoader over an IterableDataset. If
one process reads for all (``DataLoaderDispatcher``, the default) while torch's DataLoader has divided the pipe among
ranks, only a part of the data is ever read. If each process reads (``IterableDatasetShard``), all must read the same
items in the same order, and each keeps every n-th batch; but torch divides nothing then, not even among workers.
Both are on the stack while a pipe makes its first item, so it can still be divided as they need it.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from multiprocessing import context
from types import FrameType
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info
from torch.utils.data.datapipes.iter import ShardingFilter, Shuffler
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import get_all_graph_pipes

from torchdata_wds.consumers import graph_of, upstream
from torchdata_wds.errors import DivisionError
from torchdata_wds.handlers import warn_once
from torchdata_wds.pipes.chain_text import short_name
from torchdata_wds.pipes.order.permutation import mix
from torchdata_wds.pipes.running import all_frames, frames_of_threads, is_border, pipes_on, running_pipes
from torchdata_wds.pipes.seeds import Seed, above_filters
from torchdata_wds.process_place import Place, rank_place

_CURE = (
    "Pass the loader itself instead: torchdata_wds.WdsLoader(pipe, num_workers) divides the work among ranks and "
    "workers, Accelerate leaves it alone, and a Trainer takes it from get_train_dataloader() (see the topic frameworks)"
)


class Dealer(NamedTuple):
    """A foreign loader that deals out the items of a pipe."""

    ranks: int = 1
    is_only_reader: bool = True  # whether this process reads for all ranks, rather than each for itself
    epoch: int = 0


class _Pass(NamedTuple):
    """A pass of a graph that has been divided for a dealer."""

    iterator: Any  # the number of the iterator of the graph's last pipe
    earlier: int  # how many passes there were before


_passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()

#: The dealer for which the process that spawned this one reads; a forked process finds it on its stack.
_inherited: Dealer | None = None


class SpawnNote:
    """Part of a pipe; when it is unpickled in a spawned process, it notes which dealer the parent reads for."""

    def __reduce__(self) -> tuple[Any, ...]:
        is_spawning = context.get_spawning_popen() is not None
        return _note_dealer, (dealer_on(sys._getframe(1)) if is_spawning else None,)


def _note_dealer(dealer: Dealer | None) -> SpawnNote:
    global _inherited
    _inherited = dealer or _inherited
    return SpawnNote()


def find_dealer(pipe: Any) -> Dealer | None:
    """Returns the foreign loader that deals out the items of a running pipe among several ranks, if there is one."""
    found = dealer_on(sys._getframe(1))
    if found is None and threading.current_thread() is not threading.main_thread():
        # The main thread waits for the first item of a graph that runs in threads, but perhaps for that of another.
        with frames_of_threads() as frames:
            main = frames.get(threading.main_thread().ident or 0)
            outer, dealer = pipes_on(main)[-1:], dealer_on(main)
        if any(above is pipe for root in outer for above in upstream(root)):
            found = dealer
    return found or _inherited


def dealer_on(frame: FrameType | None) -> Dealer | None:
    """Returns the innermost foreign loader on a stack that deals out items among several ranks, if there is one."""
    # One that reads for all is also looked for in the processes that forked this one, since its workers read for it.
    is_own = True
    for outer in all_frames(frame):
        is_own &= not is_border(outer)
        if outer.f_code.co_name not in ("__init__", "__iter__", "_fetch_batches"):
            continue
        loader = outer.f_locals.get("self")
        kind = type(loader).__name__
        if kind == "DataLoaderDispatcher":
            # Around a StatefulDataLoader it starts the workers while it is made, before it knows its ranks.
            ranks = getattr(getattr(loader, "state", None), "num_processes", rank_place().consumers)
        elif kind == "IterableDatasetShard" and is_own:
            ranks = getattr(loader, "num_processes", 1)
        else:
            continue
        return Dealer(ranks, kind != "IterableDatasetShard", getattr(loader, "epoch", 0)) if ranks > 1 else None
    return None


def heed_dealer(pipe: Any) -> None:
    """Divides the graph of a pipe that is about to begin as the foreign loader around it needs, if there is one.

    Raises:
        DivisionError: if it is too late, or if the graph cannot be divided so.
    """
    dealer = find_dealer(pipe)
    if dealer is None:
        return
    root = (running_pipes() or [pipe])[-1]
    last = _passes.get(root)
    iterator = getattr(root, "_valid_iterator_id", None)
    graph = graph_of(root)
    if graph is None or (last is not None and last.iterator == iterator):
        return
    pipes: list[Any] = get_all_graph_pipes(graph)
    worker = get_worker_info()
    workers = Place() if worker is None else Place(worker.num_workers, worker.id)
    earlier = 0 if last is None else last.earlier
    tell = _undo_ranks if dealer.is_only_reader else _tell_workers
    for found in pipes:
        if hasattr(type(found), "apply_sharding") and not isinstance(found, ShardingFilter):
            raise DivisionError(
                f"{short_name(found)} divides the items of this pipe, which Accelerate divides among {dealer.ranks} "
                f"ranks again: items would be lost. {_CURE}"
            )
    changed = [found for found in pipes if isinstance(found, ShardingFilter) and tell(found, dealer, workers)]
    if last is None:
        _check_unread(changed, pipe, root, dealer, workers)
    if not dealer.is_only_reader:
        _agree(pipes, f"{dealer.epoch}/{earlier}", workers)
    _passes[root] = _Pass(iterator, earlier + 1)
    if not workers.number and (changed or not dealer.is_only_reader):
        _warn_of(dealer)


def _undo_ranks(found: Any, dealer: Dealer, workers: Place) -> bool:
    """Undoes a filter's division among ranks; returns whether there was one."""
    # torch's DataLoader sets workers and ranks as one number, StatefulPipeline and services as two.
    group, place = SHARDING_PRIORITIES.DISTRIBUTED, Place()
    wrong = dealer.ranks
    if SHARDING_PRIORITIES.DEFAULT in found.groups:
        group, place, wrong = SHARDING_PRIORITIES.DEFAULT, workers, dealer.ranks * workers.consumers
    if found.groups.get(group, (1, 0))[0] != wrong:
        return False
    found.apply_sharding(*place, group)
    return True


def _tell_workers(found: Any, dealer: Dealer, workers: Place) -> bool:
    """Divides a filter's work among workers alone; returns whether it was not."""
    if found.groups.get(SHARDING_PRIORITIES.DISTRIBUTED, (1, 0))[0] > 1:
        raise DivisionError(
            "each rank reads its own part of the data here, and Accelerate's IterableDatasetShard "
            f"(dispatch_batches=False) keeps 1 item of {dealer.ranks} of that: the others would be lost. {_CURE}. Or "
            "make all ranks read the same, with ranks=(0, 1) for StatefulPipeline"
        )
    group = SHARDING_PRIORITIES.MULTIPROCESSING
    group = SHARDING_PRIORITIES.DEFAULT if SHARDING_PRIORITIES.DEFAULT in found.groups else group
    if found.groups.get(group, (1, 0)) == workers:
        return False
    found.apply_sharding(*workers, group)
    return True


def _check_unread(filters: list[Any], pipe: Any, root: Any, dealer: Dealer, workers: Place) -> None:
    """Raises if a filter has chosen among items by the division that was wrong."""
    # Filters above this pipe have not begun. Others may have numbers from an earlier pass, in which each pipe made one
    # iterator too. The first item belongs to the first worker by any division.
    above = {id(found) for found in upstream(pipe)}
    passing = root._valid_iterator_id or 0
    for found in filters:
        has_begun = found._valid_iterator_id is not None and found._valid_iterator_id >= passing
        read = getattr(found.source_datapipe, "_number_of_samples_yielded", 0)
        if id(found) not in above and has_begun and read > (0 if workers.number else 1):
            raise DivisionError(
                f"Accelerate divides the items of this pipe among {dealer.ranks} ranks again, and a .sharding_filter() "
                f"had already begun to divide them before {short_name(pipe)} could undo that: items would be lost. "
                f"{_CURE}"
            )


def _agree(pipes: list[Any], epoch: str, workers: Place) -> None:
    """Gives random pipes that have no seed the same one in all ranks."""
    running = running_pipes()
    if any(getattr(stage, "runs_others", False) for stage in running):
        return  # it has seeded them
    agreed = above_filters(pipes)
    for number, found in enumerate(pipes):
        held = vars(found).get("_seed")
        held = held.seed if isinstance(held, Seed) else held
        if held is not None or not inspect.ismethod(getattr(found, "set_seed", None)):
            continue
        place = Place() if id(found) in agreed else workers
        found.set_seed(mix("agreed", epoch, number, *place))
        if isinstance(found, Shuffler) and any(found is stage for stage in running):
            found.reset()  # it has drawn its seed when its iterator was made, but holds no item yet


def _warn_of(dealer: Dealer) -> None:
    if dealer.is_only_reader:
        warn_once(
            "dispatched",
            f"rank 0 reads for all {dealer.ranks} ranks, because Accelerate's prepare() deals out the batches of a "
            "DataLoader over a pipe; torch's division among ranks was undone, so that nothing is lost by it. But rank "
            "0 does all of the work, and Accelerate drops samples where batches of different sizes meet, such as the "
            f"workers' last ones. {_CURE}",
        )
    else:
        warn_once(
            "sliced",
            f"each of {dealer.ranks} ranks reads all shards and keeps 1 batch of {dealer.ranks}, because Accelerate's "
            "prepare() with dispatch_batches=False puts an IterableDatasetShard around the pipe; the work was divided "
            "among workers only, with the same seeds in all ranks, so that nothing is lost by it, if the functions of "
            f"the graph drop no items at random. {_CURE}",
        )
