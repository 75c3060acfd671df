"""The reading service that runs a graph in worker processes; the only file of the package that imports torchdata."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.graph import DataPipe

from torchdata_wds.checks import check_flags
from torchdata_wds.consumers import Ranks, checked_ranks
from torchdata_wds.pipes.seeds import Seeds
from torchdata_wds.process_place import Place
from torchdata_wds.workers import lightning
from torchdata_wds.workers.engine import Engine, PoolMaker
from torchdata_wds.workers.lengths import items_per_epoch
from torchdata_wds.workers.resume.checkpoints import Checkpoint
from torchdata_wds.workers.resume.stream import WorkerFunctions, checked_function
from torchdata_wds.workers.stats.front import Observed
from torchdata_wds.workers.stats.tracing.epoch_trace import EpochTrace
from torchdata_wds.workers.stats.wait_clock import MeasuredItems

__all__ = ["DataLoader2", "WorkersReadingService"]

try:
    import torchdata

    # The first import of a module below would warn, in eight lines and in every spawned worker, that DataPipes are
    # deprecated. Users of this package know that; torchdata itself sets this flag after its first warning.
    torchdata._warning_shown = True

    from torchdata.dataloader2 import DataLoader2  # also for the tools, which must not import torchdata
    from torchdata.dataloader2.random import SeedGenerator
    from torchdata.dataloader2.reading_service import CheckpointableReadingServiceInterface
    from torchdata.dataloader2.utils import WorkerInfo
except ImportError as error:
    raise ImportError(
        f"WorkersReadingService needs torchdata 0.9 with DataLoader2, which cannot be imported here: {error}. Its "
        "wheels exist for Python 3.9 to 3.12 on Linux x86_64, macOS arm64 and Windows, and its compiled part needs the "
        "system's libcurl.so.4 and libssl.so.3 (Debian and Ubuntu: apt install libcurl4 libssl3). "
        "WdsLoader(pipe, num_workers=n) does the same without it"
    ) from error

ResetFn = Callable[[DataPipe], DataPipe]
WorkerFn = Callable[..., DataPipe]


class WorkersReadingService(Observed, CheckpointableReadingServiceInterface):  # type: ignore[misc]  # without types
    """Runs a graph in worker processes, for DataLoader2.

    Each worker runs a copy of the graph up to ``.join_workers()``, or all of it without one, on its share of the items
    that reach ``.sharding_filter()``; the rest runs in the main process. Streams may differ in length, and may be
    empty. Several branches, each with its own ``.join_workers()``, get ``num_workers`` processes each. Items come from
    worker 0, 1, ... in turn, so their order depends only on seeds and the number of workers. Workers live until
    ``DataLoader2.shutdown()``; torch uses one thread in each.

    Small items are sent in groups; tensors and arrays of 64 KB or more travel in shared memory, where ``wds_collate``
    stacks them. That memory is reused once nothing in the main process, or forked from it, refers to it.

    Every epoch has a new order. A ``DataLoader2`` that was never seeded draws its seed from torch's global generator,
    as torch's DataLoader does, and so obeys ``torch.manual_seed``; after ``dl.seed(s)`` all epochs follow from ``s``.
    Pipes upstream of ``.sharding_filter()`` get the same seed in all workers and ranks, others their own. If a stage
    may draw from the global generators of ``random``, ``numpy`` and ``torch``, these are seeded from the epoch's seed,
    the worker and the item's number; with ``num_workers=0`` they are kept apart from the program's.

    ``DataLoader2.state_dict()`` and ``from_state`` resume in the middle of an epoch, with the remaining items and, if
    there is a seed, the same later epochs. Earlier items are skipped if ``group_by_key`` is followed only by batches,
    ``wds_shuffle``, ``wds_epoch`` and stages that yield one item for each; otherwise they are made again and dropped,
    and a warning says why. If the graph begins with ``load_in_order``, a state resumes on any number of workers and
    ranks.

    An exception in a worker is raised in the main process with its type and attributes, and the text of its traceback
    as its cause. If a worker dies, a RuntimeError names it. If the main process dies, so do the workers. Workers ignore
    Ctrl-C, which the main process handles; the loader can be iterated again afterwards.

    Args:
        num_workers, multiprocessing_context, timeout: As in `WdsLoader`.
        prefetch_factor: How many batches each worker makes ahead. Small items count in groups of up to 256 items or 32
            KB.
        distributed: Whether to divide the work among the ranks of ``torch.distributed`` too, and share the seed among
            them. Nothing is cut off: ranks may get different numbers of items. All ranks must begin each epoch. Leave
            it False after a ``DistributedReadingService`` in a ``SequentialReadingService``: that divides the work
            itself, and ends every rank's epoch with the shortest.
        seed: Makes every order depend only on this seed, the epoch's number, and the rank and worker; the seed of
            DataLoader2 is ignored.
        worker_init_fn: ``callable(datapipe, info) -> datapipe``, called once in each worker when its work is divided,
            with its graph and torchdata's ``WorkerInfo`` (``num_workers``, ``worker_id``).
        worker_reset_fn: ``callable(datapipe, info, seed_generator) -> datapipe``, called in each worker at the start of
            each epoch, after its pipes were seeded. With ``num_workers=0`` both functions see worker 0 of 1.
        ranks: The ranks that share the work, as in `WdsLoader`; in place of ``distributed``.
        stall_after, trace: As in `WdsLoader`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> from torchdata.dataloader2 import DataLoader2
        >>> from torchdata_wds import WorkersReadingService
        >>> pipe = IterableWrapper(range(6)).sharding_filter()
        >>> with DataLoader2(pipe, reading_service=WorkersReadingService(2)) as loader:
        ...     list(loader)
        [0, 1, 2, 3, 4, 5]
    """

    _pool: PoolMaker | None = None  # of a subclass whose workers are not processes

    def __init__(
        self,
        num_workers: int,
        *,
        prefetch_factor: int = 2,
        multiprocessing_context: str | None = None,
        timeout: float = 0,
        distributed: bool = False,
        seed: int | None = None,
        worker_init_fn: WorkerFn | None = None,
        worker_reset_fn: WorkerFn | None = None,
        ranks: Ranks | None = None,
        stall_after: float = 60.0,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        check_flags(distributed=distributed)
        if distributed and ranks is not None:
            raise ValueError("pass distributed=True or ranks=, not both: distributed=True is ranks='auto'")
        place: Place | str = "distributed" if distributed else "none"
        if ranks is not None:
            place = checked_ranks(ranks) or "auto"
        functions = WorkerFunctions(
            checked_function("worker_init_fn", worker_init_fn),
            checked_function("worker_reset_fn", worker_reset_fn),
            WorkerInfo,
            _generator,
        )
        self._new_engine = functools.partial(
            Engine,
            num_workers,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
            timeout=timeout,
            ranks=place,
            seed=seed,
            functions=functions,
            pool=self._pool,
            stall_after=stall_after,
            trace=EpochTrace.of(trace),
        )
        self._engine = self._new_engine()
        self._is_paused = False

    def __call__(self, *_: Any) -> NoReturn:
        """Raises a TypeError if the service was passed as an adapter, the second positional argument of DataLoader2."""
        raise TypeError(
            f"{type(self).__name__} was passed as the datapipe_adapter_fn of DataLoader2, its second argument; pass it "
            f"by name: DataLoader2(pipe, reading_service={type(self).__name__}(num_workers))"
        )

    def initialize(self, datapipe: IterDataPipe[Any]) -> IterDataPipe[Any]:
        """Divides the graph among ranks and workers; DataLoader2 calls it once, at its first epoch."""
        return self.restore(datapipe, b"")

    def restore(self, datapipe: IterDataPipe[Any], serialized_state: bytes) -> IterDataPipe[Any]:
        """Divides the graph and resumes from a state (a ValueError if it does not fit); replaces `initialize`."""
        self._engine.open(datapipe, Checkpoint.load(serialized_state) if serialized_state else None)
        return self._engine.graph.end  # type: ignore[no-any-return]

    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: ResetFn | None = None) -> ResetFn | None:
        """Seeds the graph and starts the workers; DataLoader2 calls it at each epoch's start."""
        if self._is_paused:  # by ``limit(n)``; DataLoader2 would end the new epoch at once
            raise RuntimeError(
                "the loader is paused, because the limit(n) of its last iterator was reached: call resume() of that "
                "iterator before another epoch begins"
            )
        self._engine.begin(functools.partial(_draw, seed_generator))
        return iter_reset_fn

    def finalize_iteration(self) -> None:
        """Notes the end of an epoch; DataLoader2 calls it then, and at other times."""
        if isinstance(sys.exc_info()[1], StopIteration):
            self._engine.end()

    # DataLoader2 calls these at limit(n) and resume() of its iterator; it counts the items itself.
    def _pause(self, pause_fn: Any = None) -> None:  # noqa: ARG002  (as torchdata calls it)
        self._is_paused = True
        self._engine.pause()

    def _resume(self, resume_fn: Any = None) -> None:  # noqa: ARG002
        self._is_paused = False
        self._engine.resume()

    def _limit(self, num_batches: int | None, limit_fn: Any = None) -> None:
        pass

    def finalize(self) -> None:
        """Ends the workers; DataLoader2 calls it at its shutdown."""
        self._engine.close()

    def forget(self) -> None:
        """Ends the workers, and forgets the graph: another one may be initialized or restored."""
        self._engine.close()
        self._engine, ended = self._new_engine(), self._engine
        self._engine.stats.follow(ended.stats)

    def items_per_epoch(self, datapipe: IterDataPipe[Any]) -> int:
        """Returns how many items an epoch of a graph has on this rank; a TypeError says why that is not known."""
        return items_per_epoch(datapipe, self._engine.ranks.find(datapipe), self._engine.num_workers)

    def checkpoint(self) -> bytes:
        """Returns the state for ``DataLoader2.state_dict()``; raises a RuntimeError if a stage may hold items back."""
        engine = self._engine
        if engine.graph is None:
            return b""
        return lightning.checkpoint_at(lightning.position(), engine, engine.graph.end._number_of_samples_yielded).dump()


# Frameworks such as Lightning call iter() before they load a state; and if a loader has no length, they have taken one
# batch more than they have trained on when they save one. DataLoader2, whose last release is 0.9, allows neither.
_load_state_dict = DataLoader2.load_state_dict


def _load_after_iter(self: Any, state_dict: dict[str, Any]) -> None:
    """Loads a state; also after ``iter()``, if nothing was taken from the iterator and the service is ours."""
    service = self.reading_service
    if isinstance(service, WorkersReadingService) and self._datapipe_iter is not None and not self._reset_iter:
        service.forget()
        self._datapipe_iter, self._reset_iter, self._adapted, self.valid_iterator_id = None, True, False, None
    _load_state_dict(self, state_dict)


def _length(self: Any) -> int:
    """Returns the number of items in an epoch, if the service is ours and knows it."""
    service = self.reading_service
    if not isinstance(service, WorkersReadingService):
        raise TypeError("object of type 'DataLoader2' has no len()")
    return service.items_per_epoch(self._datapipe_before_reading_service_adapt)


_iter = DataLoader2.__iter__


def _measured_iter(self: Any) -> Any:
    """Begins an epoch; if the service is ours, how long the training loop waits is measured."""
    found = _iter(self)
    services = getattr(self.reading_service, "reading_services", [self.reading_service])
    ours = next((service for service in services if isinstance(service, WorkersReadingService)), None)
    if ours is not None:
        self._datapipe_iter = MeasuredItems(self._datapipe_iter, ours._engine.stats.clock)
    return found


functools.update_wrapper(_load_after_iter, _load_state_dict)
functools.update_wrapper(_measured_iter, _iter)
DataLoader2.load_state_dict = _load_after_iter
DataLoader2.__iter__ = _measured_iter
DataLoader2.__len__ = _length
DataLoader2.__bool__ = lambda self: True  # noqa: ARG005  (else bool() of a loader of unknown length raises)


def _draw(seed_generator: Any, saved: Any) -> tuple[Any, Seeds]:
    """Draws the seeds of an epoch from DataLoader2's generator, in the `saved` state if there is one."""
    if saved is not None:
        _restore_generator(seed_generator, saved)
    state = _generator_values(seed_generator)
    seeds = seed_generator.generate_shared_seed(), seed_generator.generate_seed()
    # An unseeded DataLoader2 takes its seed from torch's global generator without advancing it, and would find the
    # same seed next time. torch's own DataLoader also draws once an epoch.
    torch.empty((), dtype=torch.int64).random_()
    return state, seeds


def _generator(shared: int, local: int, place: int) -> Any:
    """Returns a seed generator whose shared seeds are the same in all places; its others belong to this place."""
    alike, own = SeedGenerator(shared), SeedGenerator(local).spawn(place)
    return SeedGenerator(_rngs=(alike._shared_rng, own._worker_rng))


#: The attributes of torchdata's ``PhiloxEngine``, two of which make a ``SeedGenerator``.
_ENGINE = ("_seed", "_ctr", "_generated_seeds", "_spawn_seed")


def _generator_values(seed_generator: Any) -> list[Any]:
    """Returns the state of a seed generator as plain values."""
    values = [[getattr(engine, name) for name in _ENGINE] for engine in seed_generator.__getstate__()]
    return [[value if value is None else list(value) for value in engine] for engine in values]


def _restore_generator(seed_generator: Any, values: list[Any]) -> None:
    """Sets a seed generator to a state."""
    for engine, (seed, counter, generated, spawn_seed) in zip(seed_generator.__getstate__(), values, strict=True):
        engine._seed, engine._spawn_seed = tuple(seed), tuple(spawn_seed)
        engine._ctr, engine._generated_seeds = list(counter), generated and list(generated)
