"""A loader for any training loop: runs a graph epoch after epoch and resumes it, without torchdata."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar

import torch
from torch.utils.data import IterDataPipe, MapDataPipe

from torchdata_wds.checks import check_flags, checked_int
from torchdata_wds.consumers import Ranks, checked_ranks
from torchdata_wds.workers import accelerate, graphs, lightning
from torchdata_wds.workers.engine import Engine, PoolMaker, draw_seeds
from torchdata_wds.workers.lengths import items_per_epoch
from torchdata_wds.workers.resume.checkpoints import Checkpoint, OrderState
from torchdata_wds.workers.resume.job_order import UNSTARTED_ORDER, find_order
from torchdata_wds.workers.resume.stream import WorkerFunctions
from torchdata_wds.workers.running_epoch import Epoch, LoaderIterator
from torchdata_wds.workers.stats.front import Observed
from torchdata_wds.workers.stats.tracing.epoch_trace import EpochTrace

logger = logging.getLogger(__name__)
T = TypeVar("T")


class WdsLoader(Observed, Generic[T]):
    """Runs a graph of DataPipes for a training loop: each sample once per epoch, resumable at any item.

    It yields what DataLoader2 with `WorkersReadingService` does, in the same order, but does not need torchdata. The
    manual says how workers run (``wds help workers``) and which items a resumed run skips (``wds help resume``). Pass
    the loader itself to Lightning and Accelerate; return it from a Trainer's ``get_train_dataloader``.

    Iterate over one loader epoch after epoch. It runs a copy of the graph, and has one iterator at a time: a new one
    ends the previous one. An iterator from which no item was taken does not count as an epoch.

    Args:
        pipe: The last pipe of the graph. ``.sharding_filter()``, ``.split_shards()`` or ``.load_in_order()`` divides
            its work among workers and ranks.
        num_workers: The number of workers; 0 runs everything in the main process, in the order of one worker.
        seed: Makes every order depend only on this seed, the epoch's number, and the rank and worker (except for
            ``.load_in_order()``). None draws a seed for each epoch from torch's global generator; all ranks share it,
            and must begin each epoch.
        ranks: The ranks that share the work: ``"auto"`` for those of ``torch.distributed`` if it is initialized before
            the first epoch, else those of the launcher (``RANK`` and ``WORLD_SIZE``), else this process alone;
            ``(rank, size)``; a ProcessGroup; or one dimension of a DeviceMesh, such as ``mesh["dp"]``. Ranks of one
            model replica (tensor, pipeline or context parallelism) must read the same data: pass their data-parallel
            group, and the same ``seed`` in all processes.
        prefetch_factor: How many batches, or groups of small items, each worker makes ahead.
        multiprocessing_context: How processes start: ``"fork"``, ``"spawn"``, ``"forkserver"``; None: Python's default.
        timeout: Seconds to wait for an item before raising an error; 0 waits forever.
        pin_memory: Whether to pin the memory of items, if there is a CUDA device. With workers, a thread does it.
        length: What ``len()`` returns: the number of items in an epoch on this rank, over all its workers. None derives
            it from the graph and the shards' indexes, where possible.
        worker_init_fn: ``callable(worker_id)``, called once in each worker, as by torch's DataLoader.
        pool: Where the workers run, if not in processes of this machine: a `RayPool`.
        stall_after: After how many seconds without an item a warning says what each worker is doing; 0: never.
        trace: A file for a trace of the first epoch, for Perfetto or ``chrome://tracing``; see ``wds help observe``.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> from torchdata_wds import WdsLoader
        >>> pipe = IterableWrapper(range(9)).shuffle().sharding_filter()
        >>> with WdsLoader(pipe, num_workers=2, seed=1) as loader, WdsLoader(pipe, num_workers=2, seed=1) as other:
        ...     items = iter(loader)
        ...     begun = [next(items) for _ in range(4)]
        ...     other.load_state_dict(loader.state_dict())
        ...     list(other) == list(items)
        True
    """

    def __init__(
        self,
        pipe: IterDataPipe[T],
        num_workers: int = 0,
        *,
        seed: int | None = None,
        ranks: Ranks = "auto",
        prefetch_factor: int = 2,
        multiprocessing_context: str | None = None,
        timeout: float = 0,
        pin_memory: bool = False,
        length: int | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        pool: PoolMaker | None = None,
        stall_after: float = 60.0,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(pipe, IterDataPipe):
            hint = ". Of a map-style one, data.shuffle().sharding_filter() makes one" * isinstance(pipe, MapDataPipe)
            raise TypeError(f"WdsLoader takes the last pipe of a graph, an IterDataPipe, not {pipe!r}{hint}")
        check_flags(pin_memory=pin_memory)
        self.pipe = pipe
        self.pin_memory = pin_memory
        self.length = None if length is None else checked_int("length", length, 0)
        self._new_engine = functools.partial(
            Engine,
            num_workers,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
            timeout=timeout,
            ranks=checked_ranks(ranks) or "auto",
            seed=seed,
            functions=WorkerFunctions.of_loader(worker_init_fn, num_workers),
            pool=pool,
            stall_after=stall_after,
            trace=EpochTrace.of(trace),
        )
        self._engine = self._new_engine()
        self._running: Epoch[T] | None = None  # the last one begun
        self._next_epoch: int | None = None  # as set_epoch says
        self._restored: Checkpoint | None = None  # where the next iteration resumes
        self._uncopied: Exception | None = None  # why the graph itself runs, not a copy
        self._is_paused = self._is_shut_down = False

    def __iter__(self) -> LoaderIterator[T]:
        if (state := lightning.skipped_state(self)) is not None:
            self.load_state_dict(state)
        elif self._running is not None and lightning.is_dropped(self, self._running.delivered):
            self.load_state_dict(self._checkpoint(lightning.Position(self._running.delivered)).to_plain())
        return self._begin(None)

    def prefetch_to_device(self, device: torch.device | str | int) -> LoaderIterator[T]:
        """Begins an epoch, as ``iter()`` does, and copies its items to a device.

        The next item is copied on a separate stream while the current one is used; with ``pin_memory=True``, without
        blocking. A state counts only delivered items.

        Example:
            >>> from torch.utils.data.datapipes.iter import IterableWrapper
            >>> from torchdata_wds import WdsLoader
            >>> list(WdsLoader(IterableWrapper(range(3))).prefetch_to_device("cpu"))
            [0, 1, 2]
        """
        return self._begin(torch.device(device))

    def _begin(self, device: torch.device | None) -> LoaderIterator[T]:
        self._check_open()
        if self._is_paused:
            raise RuntimeError(
                "the loader is paused, because the limit(n) of its last iterator was reached: call resume() of that "
                "iterator before another epoch begins"
            )
        running = self._running
        is_kept = running is not None and running.is_fresh and self._next_epoch in (None, self._engine.epoch - 1)
        if running is not None and is_kept:
            source = running.leave()
        else:
            self._leave()
            self._running = None
            source = self._start()
        self._next_epoch = None
        pins = self.pin_memory and torch.cuda.is_available()
        self._running = Epoch(source, self._engine.num_workers if pins else None, device, self._engine.stats.clock)
        return LoaderIterator(self, self._running)

    def _start(self) -> Iterator[T]:
        """Begins an epoch of the graph, and divides it first if it has not run yet."""
        engine, restored, epoch = self._engine, self._restored, self._next_epoch
        if engine.graph is None:
            position = None if restored is None or not restored.in_epoch else restored.epoch - 1
            is_left = position is not None and epoch not in (None, position)
            # A trainer that knows the length never asks for the end of an epoch, and may save a state there.
            is_next = position is not None and epoch == position + 1
            # Every epoch of a global order follows from the state's seed.
            is_kept = is_next or not is_left or (restored is not None and restored.order is not None)
            engine.open(self._copy(), restored if is_kept else None, length=self.length)
            if is_left and not (is_next and self._is_at_end()):
                logger.warning(
                    "set_epoch(%s) was called after a state in the middle of epoch %d was loaded: that position is "
                    "dropped, and epoch %s begins with its first item",
                    *(epoch, position, epoch),
                )
        engine.begin(draw_seeds, epoch)
        self._restored = None  # only now, since Ctrl-C may come earlier
        return iter(engine.graph.end)

    def _is_at_end(self) -> bool:
        """Begins the epoch of a loaded position, and returns whether it has no more items."""
        self._engine.begin(draw_seeds)
        for _ in self._engine.graph.end:
            return False
        self._engine.end()
        return True

    def _leave(self) -> None:
        """Ends the iterator of the running epoch."""
        if self._running is not None:
            self._running.leave()

    def _check_open(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("this loader was shut down: make another one")

    def _copy(self) -> IterDataPipe[T]:
        if self._uncopied is not None:
            raise RuntimeError(
                "a state can only be loaded before the first epoch of this loader, because its graph cannot be "
                f"copied: {self._uncopied}"
            )
        try:
            return graphs.copied(self.pipe)
        except Exception as error:  # noqa: BLE001  # a pipe may hold anything
            self._uncopied = error
            return self.pipe

    def __bool__(self) -> bool:
        return True  # also if the length is not known, or 0

    def __len__(self) -> int:
        if self.length is not None:
            return self.length
        return items_per_epoch(self.pipe, self._engine.ranks.find(self.pipe), self._engine.num_workers)

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch, counted from 0; with a seed, its order depends on that number.

        Later epochs follow from there. If a state in the middle of an epoch was loaded, that epoch is resumed if it has
        this number; otherwise the position is dropped, with a warning. A stream that ``wds_epoch`` cuts continues from
        where it is, whatever the number.
        """
        self._next_epoch = checked_int("epoch", epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Returns where the loader is: after the last item delivered, or between epochs.

        The state is a small dict of plain values, which ``torch.load``, JSON and torch.distributed.checkpoint take.
        Each rank saves its own; with ``load_in_order``, those of all ranks are equal. In checkpoints of Lightning and
        Accelerate, which only rank 0 writes, it holds those of all ranks; in Lightning's, the position is after the
        last batch trained on.

        Raises:
            RuntimeError: if a stage in the main process may hold items back, so that the position is unknown.
        """
        position = lightning.position()
        checkpoint = self._checkpoint(position)
        state = checkpoint.to_plain()
        if checkpoint.order is not None:
            return state  # the same on all ranks
        is_shared = position is not None or accelerate.is_saving()
        return lightning.gathered(state) if is_shared else state

    def _checkpoint(self, position: lightning.Position | None) -> Checkpoint:
        checkpoint = self._restored or self._reached(position)
        if checkpoint.in_epoch or self._next_epoch is None:
            return checkpoint
        return checkpoint._replace(epoch=self._next_epoch)

    def _reached(self, position: lightning.Position | None) -> Checkpoint:
        """Returns the state of the running or last epoch."""
        engine, running = self._engine, self._running
        if engine.graph is None:
            order = None if find_order(self.pipe) is None else UNSTARTED_ORDER
            return Checkpoint({}, 0, False, None, None, None, order)
        # Ctrl-C came when an epoch began; or the epoch before is over, and this one is the next.
        if running is None or running.is_fresh:
            return engine.checkpoint(0)
        if position is not None and position.is_over and not running.has_more():
            engine.end()
        return lightning.checkpoint_at(position, engine, running.delivered)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next iteration resume from a state, and ends the current iterator.

        That iteration raises a ValueError, which names the differences, if the state belongs to another graph, other
        shards, or another number of workers or ranks; with ``load_in_order`` these numbers may differ.

        Raises:
            ValueError: if this is not a state of a WdsLoader.
        """
        self._check_open()
        self._restore(restored := Checkpoint.from_plain(lightning.own_state(state_dict)))
        if restored.order is not None:
            position = restored.order.position if restored.in_epoch else None
            lightning.recount(self.pipe, self._engine.ranks, position)

    def _restore(self, restored: Checkpoint) -> None:
        self._leave()
        if self._engine.graph is not None:
            self._engine.close()
            self._engine, ended = self._new_engine(), self._engine
            self._engine.stats.follow(ended.stats)
        self._running, self._restored, self._next_epoch, self._is_paused = None, restored, None, False

    @property
    def position(self) -> int:
        """How many samples of the running epoch all ranks together have taken in a global order; 0 between epochs."""
        self._check_order("position")
        state = self._checkpoint(None)
        return state.order.position if state.order is not None and state.in_epoch else 0

    def seek(self, position: int) -> None:
        """Makes the next iteration begin at a position of a global order, and ends the current iterator.

        The position counts the samples of all ranks, from 0, in the running epoch; between epochs, in the next one; and
        after ``set_epoch(n)``, in epoch n. The seed stays. All ranks must seek the same position. If the epoch has
        fewer samples, the next iteration raises a ValueError.

        Raises:
            TypeError: if the graph does not begin with ``load_in_order`` or `IndexedMix`.
        """
        self._check_open()
        self._check_order("seek()")
        position = checked_int("position", position, 0)
        state = self._checkpoint(None)
        number = state.epoch - state.in_epoch if self._next_epoch is None else self._next_epoch
        seed = None if state.order is None else state.order.seed
        order = OrderState("", seed, position)
        self._restore(Checkpoint({}, number + bool(position), bool(position), None, None, None, order))

    def _check_order(self, what: str) -> None:
        if find_order(self.pipe) is None:
            raise TypeError(f"{what} needs a graph that begins with load_in_order or IndexedMix")

    def shutdown(self) -> None:
        """Ends the workers; the loader's state can still be taken, but it cannot be iterated again."""
        self._leave()
        self._engine.close()
        self._is_shut_down = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_engine": self._new_engine(), "_running": None, "_is_paused": False}  # begun nothing
