"""The reading service that runs a graph in worker processes.

This is the only file of the package that imports torchdata.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import DataPipe, traverse_dps
from torch.utils.data.graph_settings import apply_sharding

from torchdata_wds.checks import check_flags, checked_context, checked_int, checked_timeout
from torchdata_wds.consumers import Place
from torchdata_wds.pipes.division import check_division
from torchdata_wds.pipes.seeds import mix
from torchdata_wds.workers.graphs import current_ranks, find_branches, ranks_of, runs_once, shard_by_rank
from torchdata_wds.workers.interrupts import interrupts_held
from torchdata_wds.workers.lengths import promised_length, warn_of_more
from torchdata_wds.workers.local import LocalIterDataPipe
from torchdata_wds.workers.pauses import Pausable
from torchdata_wds.workers.processes.pool import PooledIterDataPipe, WorkerPool
from torchdata_wds.workers.resume.checkpoints import Checkpoint, Run, has_epoch, pack_runs, unpack_streams
from torchdata_wds.workers.resume.planner import find_chain, is_torchdata
from torchdata_wds.workers.resume.signatures import (
    Signature,
    check_signature,
    describe_shards,
    graph_signature,
    without_lists,
)
from torchdata_wds.workers.resume.states import Streams
from torchdata_wds.workers.resume.stream import Seeds
from torchdata_wds.workers.skip_reports import EpochSkips
from torchdata_wds.workers.worker_functions import WorkerFunctions, checked_function

__all__ = ["DataLoader2", "WorkersReadingService"]

try:
    import torchdata

    # torchdata announces the end of DataPipes, in eight lines and in every spawned worker, when a module below is
    # first imported. Users of this package know; the flag is the one that torchdata itself sets after the first time.
    torchdata._warning_shown = True

    from torchdata.dataloader2 import DataLoader2  # also for the tools, which import no torchdata of their own
    from torchdata.dataloader2.graph import replace_dp, set_graph_random_seed
    from torchdata.dataloader2.random import SeedGenerator, dist_share_seed
    from torchdata.dataloader2.reading_service import CheckpointableReadingServiceInterface
    from torchdata.dataloader2.utils import WorkerInfo
except ImportError as error:
    raise ImportError(
        f"WorkersReadingService needs torchdata 0.9 with DataLoader2, which cannot be imported here: {error}. Its "
        "wheels exist for Python 3.9 to 3.12 on Linux x86_64, macOS arm64 and Windows, and its compiled part needs the "
        "system's libcurl.so.4 and libssl.so.3 (Debian and Ubuntu: apt install libcurl4 libssl3). Without it the same "
        "pipes run under torch.utils.data.DataLoader"
    ) from error

ResetFn = Callable[[DataPipe], DataPipe]
WorkerFn = Callable[..., DataPipe]
_SEED_LIMIT = 2**64


class WorkersReadingService(Pausable, CheckpointableReadingServiceInterface):  # type: ignore[misc]  # torchdata has no types
    """Runs a graph in worker processes, for DataLoader2.

    Each worker runs a copy of the graph up to ``.join_workers()``, or all of it without one, over its part of what
    passes ``.sharding_filter()``; the rest runs in the main process. Streams may differ in length, and may be empty.
    Several branches, each with its own ``.join_workers()``, get ``num_workers`` processes each. Items come in turns
    from worker 0, 1, ..., so their order depends only on seeds and the number of workers. Workers live until
    ``DataLoader2.shutdown()``; torch uses one thread in each.

    Small items are sent several at once, but wait for one another only milliseconds. Tensors and arrays of 64 KB and
    more cross in shared memory, which is reused once nothing in the main process, or in a process forked from it,
    refers to them. What ``wds_collate`` stacks in a worker is stacked there.

    Every epoch has a new order. A ``DataLoader2`` that was never seeded draws from torch's global generator, as torch's
    DataLoader does, and so obeys ``torch.manual_seed``; after ``dl.seed(s)`` all epochs follow from ``s``. Pipes
    upstream of ``.sharding_filter()`` get one seed in all workers and ranks, others their own. Where a stage may draw
    from the global generators of ``random``, ``numpy`` and ``torch``, these are seeded by the epoch's seed, the worker
    and the number of the item; with ``num_workers=0`` they are kept apart from the program's.

    ``DataLoader2.state_dict()`` and ``from_state`` resume in the middle of an epoch, with the remaining items and,
    where there is a seed, the same later epochs. Earlier items are skipped if ``group_by_key`` is followed only by
    stages that give one item for each, batches, ``wds_shuffle`` or ``wds_epoch``; otherwise they are made again and
    dropped, and a warning says why.

    An exception in a worker is raised in the main process with its type and attributes, and the text of its traceback
    as its cause. A worker that dies is a RuntimeError that names it. If the main process dies, so do the workers.
    Workers leave Ctrl-C to the main process, and the loader can be iterated again after it.

    Args:
        num_workers: The number of worker processes; 0 runs everything in the main process, in the order of one worker.
        prefetch_factor: How many batches each worker makes ahead. Small items count in groups of up to 256 items or 32
            KB.
        multiprocessing_context: How workers are started: ``"fork"``, ``"spawn"``, ``"forkserver"``, or None for
            Python's default.
        timeout: How many seconds to wait for an item before that is an error; 0 waits for ever.
        distributed: Whether to divide the work among the ranks of ``torch.distributed`` too, and share the seed among
            them. Nothing is cut off: ranks may get different numbers of items. All ranks must begin each epoch. Leave
            it False after a ``DistributedReadingService`` in a ``SequentialReadingService``, which divides the work
            itself and ends every rank's epoch with the shortest.
        seed: Makes every order depend only on this seed, the epoch's number and the place (rank and worker), whatever
            seed DataLoader2 has.
        worker_init_fn: ``callable(datapipe, info) -> datapipe``, called once in each worker when its work is divided,
            with its graph and torchdata's ``WorkerInfo`` (``num_workers``, ``worker_id``).
        worker_reset_fn: ``callable(datapipe, info, seed_generator) -> datapipe``, called in each worker at the start of
            each epoch, when its pipes have their seeds. With ``num_workers=0`` both see worker 0 of 1.

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
    ) -> None:
        self.num_workers = checked_int("num_workers", num_workers, 0)
        self.prefetch_factor = checked_int("prefetch_factor", prefetch_factor, 1)
        self.multiprocessing_context = checked_context(multiprocessing_context)
        self.timeout = checked_timeout(timeout)
        check_flags(distributed=distributed)
        self.distributed = distributed
        self.seed = None if seed is None else checked_int("seed", seed, 0, _SEED_LIMIT - 1)
        self.worker_init_fn = checked_function("worker_init_fn", worker_init_fn)
        self.worker_reset_fn = checked_function("worker_reset_fn", worker_reset_fn)
        self._functions = WorkerFunctions(worker_init_fn, worker_reset_fn, WorkerInfo, _generator)
        self._skips = EpochSkips()
        self._workers = self.num_workers  # that the graph allows
        self._epoch = 0
        self._in_epoch = False
        self._promised: int | None = None
        self._end: Any = None  # the adapted graph's last pipe
        self._branches: list[Any] = []
        self._fronts: list[Any] = []  # what stands for each branch in the main process
        self._runs: list[Run] = []
        self._signature: Signature = {}
        self._shards: Signature | None = None  # as listed in this epoch
        self._generator = b""  # as the epoch found it
        self._stream_seeds: Seeds | None = None
        self._restored: Checkpoint | None = None
        self._group: Any = None

    def __call__(self, *_: Any) -> NoReturn:
        """Refuses to be used as an adapter, the second positional argument of DataLoader2."""
        raise TypeError(
            "WorkersReadingService was given as the datapipe_adapter_fn of DataLoader2, its second argument; pass it "
            "by name: DataLoader2(pipe, reading_service=WorkersReadingService(num_workers))"
        )

    def initialize(self, datapipe: IterDataPipe[Any]) -> IterDataPipe[Any]:
        """Divides the graph among ranks and workers; DataLoader2 calls it once, at its first epoch."""
        self._signature = self._describe(datapipe)
        self._promised = promised_length(datapipe)
        self._group = shard_by_rank(datapipe, self.distributed)
        with interrupts_held():  # a graph that is divided in part could not be divided again
            self._end = datapipe
            self._branches = find_branches(datapipe)
            self._workers = 0 if runs_once(datapipe, self.num_workers) else self.num_workers
            if self._workers == 0:
                self._keep_here()
            else:
                for branch in self._branches:
                    check_division(branch, workers=self._workers)
                    self._move_to_workers(branch)
            for number, run in enumerate(self._runs):
                run.streams = Streams(max(self._workers, 1), continues=bool(find_chain(self._graph(number)).epochs))
        self._skips.watch(self._runs, self._end if self._workers else None)
        end: IterDataPipe[Any] = self._end
        return end

    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: ResetFn | None = None) -> ResetFn | None:
        """Seeds the graph and starts the workers; DataLoader2 calls it at each epoch's start.

        Raises:
            RuntimeError: if the epoch before was paused by ``limit(n)``: the new one would give no items.
        """
        self.check_not_paused()
        restored = self._restored
        if restored is not None:
            self._epoch = restored.epoch - restored.in_epoch
            self._stream_seeds = restored.stream_seeds
            if restored.in_epoch:
                seed_generator.__setstate__(pickle.loads(restored.generator).__getstate__())
        self._generator = pickle.dumps(seed_generator)
        shared, local = self._draw(seed_generator)
        self._epoch += 1
        was_left_early, self._in_epoch = self._in_epoch, True
        self._shards = None
        self._skips.begin()
        self._stream_seeds = self._stream_seeds or (shared, local)
        self._end._number_of_samples_yielded = 0
        # A number that no worker has: random stages after .join_workers() have an order of their own.
        _seed_graph(self._end, (shared, local), max(self._workers, 1))
        for number, (run, front) in enumerate(zip(self._runs, self._fronts, strict=True)):
            if self._epoch > 1 and restored is None and has_epoch(self._end, front):
                continue  # wds_epoch in the main process takes what the workers go on making
            streams = run.streams.next_epoch() if was_left_early else run.streams
            if restored is not None and restored.streams is not None:
                streams = unpack_streams(self._graph(), restored.streams, self._stream_seeds, self._epoch)
            streams.epoch = self._epoch - 1
            run.begin(_seeds_of(number, (shared, local)), streams)
        self._restored = None  # only now: Ctrl-C may come before
        return iter_reset_fn

    def finalize_iteration(self) -> None:
        """Notes the end of an epoch; DataLoader2 calls it then, and on other occasions.

        Raises:
            RuntimeError: if it is not the end of the epoch, but of an iterator that Ctrl-C ended earlier.
        """
        if self._in_epoch and isinstance(sys.exc_info()[1], StopIteration):
            if any(run.was_interrupted for run in self._runs):
                raise RuntimeError(
                    "this iterator was ended by Ctrl-C in the middle of the epoch: begin another epoch by iterating "
                    "over the loader again"
                )
            for run in self._runs:
                run.wait_for_facts()
            self._in_epoch = False
            warn_of_more(self._end._number_of_samples_yielded, self._promised, self.num_workers)
            self._skips.end(self._epoch)
            for run in self._runs:
                run.streams = run.streams.next_epoch()

    def finalize(self) -> None:
        """Ends the workers; DataLoader2 calls it at its shutdown."""
        self._skips.stop()
        for run in self._runs:
            run.close()
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    def skipped(self, *, by_rule: bool = False) -> dict[str, dict[str, int]]:
        """Counts what the stages skipped in the running or last epoch, in all workers of this rank.

        A warning at the end of the epoch says the same. DataLoader2 runs a copy of the service; each answers for both.

        Args:
            by_rule: Whether to include what a rule left out and is not lost: hidden files and folders in shards,
                samples for which a function returned None.

        Returns:
            The counts by stage, written as in the chain, and exception type or reason.

        Example:
            >>> from torch.utils.data.datapipes.iter import IterableWrapper
            >>> from torchdata.dataloader2 import DataLoader2
            >>> from torchdata_wds import WorkersReadingService, ignore_and_continue
            >>> pipe = IterableWrapper(["1", "x"]).wds_map(int, handler=ignore_and_continue)
            >>> service = WorkersReadingService(0)
            >>> with DataLoader2(pipe, reading_service=service) as loader:
            ...     list(loader)
            [1]
            >>> service.skipped()
            {'wds_map(int)': {'ValueError': 1}}
        """
        return self._skips.counts(by_rule=by_rule)

    def checkpoint(self) -> bytes:
        """Returns the state for ``DataLoader2.state_dict()``, in the middle of an epoch or between two.

        Raises:
            RuntimeError: if a stage of the main process may hold items in the middle of an epoch.
        """
        if self._end is None:
            return b""
        if self._shards is None:
            self._shards = without_lists(describe_shards(*self._branches))
        return Checkpoint(
            {**self._signature, **self._shards},
            self._epoch,
            self._in_epoch,
            self._generator,
            self._stream_seeds,
            pack_runs(self._end, self._runs, self._fronts, self._graph(), in_epoch=self._in_epoch),
        ).dump()

    def restore(self, datapipe: IterDataPipe[Any], serialized_state: bytes) -> IterDataPipe[Any]:
        """Divides the graph, and goes on from a state at the next epoch; DataLoader2 calls it instead of `initialize`.

        Raises:
            ValueError: if the state has another graph, other shards or another number of workers or ranks; it names the
                differences.
        """
        if serialized_state:
            restored = Checkpoint.load(serialized_state)
            now = {**self._describe(datapipe), **describe_shards(*find_branches(datapipe))}
            check_signature(restored.signature, now)
            self._restored = restored
        return self.initialize(datapipe)

    def _describe(self, datapipe: IterDataPipe[Any]) -> Signature:
        world, rank = current_ranks()
        return {
            "num_workers": self.num_workers,
            "ranks": world,
            "rank": rank,
            "distributed": self.distributed,
            "seed": self.seed,
            "stages": graph_signature(datapipe),
        }

    def _graph(self, number: int = 0) -> Any:
        """Returns the last pipe of what each stream of a run runs."""
        return self._branches[number] if self._workers else self._fronts[number].source_datapipe

    def _keep_here(self) -> None:
        """Runs all of the graph as one stream in this process, except a fullsync at its end."""
        for number, branch in enumerate(self._branches):
            apply_sharding(branch, 1, 0, SHARDING_PRIORITIES.MULTIPROCESSING)
            self._branches[number] = self._functions.initialized(branch, 1, 0)
            self._put(self._branches[number], branch)
        last = self._end
        while is_torchdata(last, "FullSync"):
            last = last.datapipe
        front = LocalIterDataPipe(last, self._seed_here, reset=self._reset_here)
        self._put(front, last)
        self._fronts.append(front)
        self._runs.append(front)

    def _seed_here(self, datapipe: DataPipe, seeds: Seeds, place: int) -> None:
        _seed_graph(datapipe, seeds, place + 1)
        for number, branch in enumerate(self._branches):
            _seed_graph(branch, _seeds_of(number, seeds), place)

    def _reset_here(self, datapipe: DataPipe, seeds: Seeds, place: int) -> DataPipe:
        for number, branch in enumerate(self._branches):
            found = self._functions.reset_for(branch, 1, place, _seeds_of(number, seeds))
            if branch is datapipe:
                datapipe = self._fronts[0].source_datapipe = found
            elif found is not branch:
                replace_dp(traverse_dps(datapipe), branch, found)
            self._branches[number] = found
        return datapipe

    def _put(self, front: DataPipe, branch: DataPipe) -> None:
        if branch is self._end:
            self._end = front
        elif front is not branch:
            replace_dp(traverse_dps(self._end), branch, front)

    def _move_to_workers(self, branch: DataPipe) -> None:
        pool = WorkerPool(
            branch,
            _seed_graph,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            multiprocessing_context=self.multiprocessing_context,
            timeout=self.timeout,
            functions=self._functions,
        )
        front = PooledIterDataPipe(pool, ranks_of(branch) or Place())
        self._put(front, branch)
        self._fronts.append(front)
        self._runs.append(pool)

    def _draw(self, seed_generator: Any) -> tuple[int, int]:
        """Returns the epoch's two seeds: one shared by all ranks, and this rank's own."""
        rank = current_ranks()[1]
        if self.seed is not None:
            return mix(self.seed, self._epoch), mix(self.seed, self._epoch, "rank", rank)
        shared, local = seed_generator.generate_shared_seed(), seed_generator.generate_seed()
        # An unseeded DataLoader2 takes its seed from torch's global generator without moving it on: left alone, it
        # would find the same seed next time. One draw an epoch is also what torch's own DataLoader takes.
        torch.empty((), dtype=torch.int64).random_()
        if self.distributed:
            shared = dist_share_seed(shared, self._group)
            local = mix(shared, "rank", rank)
        return shared, local


def _seeds_of(number: int, seeds: Seeds) -> Seeds:
    """Returns the seeds of a branch; the first has the epoch's own, since one branch is the normal case."""
    shared, local = seeds
    return (mix(shared, number), mix(local, number)) if number else seeds


def _seed_graph(datapipe: DataPipe, seeds: tuple[int, int], place: int) -> None:
    """Seeds the pipes upstream of a native sharding filter alike in all places, and the others apart."""
    set_graph_random_seed(datapipe, _generator(*seeds, place))


def _generator(shared: int, local: int, place: int) -> Any:
    """Returns a seed generator whose shared seeds are the same in all places, and whose others belong to this place."""
    alike, own = SeedGenerator(shared), SeedGenerator(local).spawn(place)
    return SeedGenerator(_rngs=(alike._shared_rng, own._worker_rng))
