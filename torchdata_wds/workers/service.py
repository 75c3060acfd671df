"""The reading service that runs a graph in worker processes; the only file of the package that imports torchdata."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe
from torch.utils.data.graph import DataPipe, traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

from torchdata_wds.checks import check_flags, checked_context, checked_int, checked_timeout
from torchdata_wds.consumers import Place, distributed_place
from torchdata_wds.pipes.seeds import mix
from torchdata_wds.workers import graphs
from torchdata_wds.workers.interrupts import interrupts_held
from torchdata_wds.workers.resume import signatures
from torchdata_wds.workers.resume.checkpoints import Checkpoint, has_epoch, pack_runs, unpack_streams
from torchdata_wds.workers.resume.stream import Seeds, WorkerFunctions, checked_function
from torchdata_wds.workers.skips import EpochSkips

__all__ = ["DataLoader2", "WorkersReadingService"]

try:
    import torchdata

    # The first import of a module below would warn, in eight lines and in every spawned worker, that DataPipes are
    # deprecated. Users of this package know that; torchdata itself sets this flag after its first warning.
    torchdata._warning_shown = True

    from torchdata.dataloader2 import DataLoader2  # also for the tools, which must not import torchdata
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


class WorkersReadingService(CheckpointableReadingServiceInterface):  # type: ignore[misc]  # torchdata has no types
    """Runs a graph in worker processes, for DataLoader2.

    Each worker runs a copy of the graph up to ``.join_workers()``, or all of it without one, on its share of the items
    that reach ``.sharding_filter()``; the rest runs in the main process. Streams may differ in length, and may be
    empty. Several branches, each with its own ``.join_workers()``, get ``num_workers`` processes each. Items come from
    worker 0, 1, ... in turn, so their order depends only on seeds and the number of workers. Workers live until
    ``DataLoader2.shutdown()``; torch uses one thread in each.

    Small items are sent in groups; tensors and arrays of 64 KB or more travel in shared memory, where ``wds_collate``
    stacks them. That memory is used again once nothing in the main process, or forked from it, refers to it.

    Every epoch has a new order. A ``DataLoader2`` that was never seeded draws its seed from torch's global generator,
    as torch's DataLoader does, and so obeys ``torch.manual_seed``; after ``dl.seed(s)`` all epochs follow from ``s``.
    Pipes upstream of ``.sharding_filter()`` get the same seed in all workers and ranks, others their own. If a stage
    may draw from the global generators of ``random``, ``numpy`` and ``torch``, these are seeded from the epoch's seed,
    the worker and the item's number; with ``num_workers=0`` they are kept apart from the program's.

    ``DataLoader2.state_dict()`` and ``from_state`` resume in the middle of an epoch, with the remaining items and, if
    there is a seed, the same later epochs. Earlier items are skipped if ``group_by_key`` is followed only by batches,
    ``wds_shuffle``, ``wds_epoch`` and stages that yield one item for each; otherwise they are made again and dropped,
    and a warning says why.

    An exception in a worker is raised in the main process with its type and attributes, and the text of its traceback
    as its cause. If a worker dies, a RuntimeError names it. If the main process dies, so do the workers. Workers ignore
    Ctrl-C, which the main process handles; the loader can be iterated again afterwards.

    Args:
        num_workers: The number of worker processes; 0 runs everything in the main process, in the order of one worker.
        prefetch_factor: How many batches each worker makes ahead. Small items count in groups of up to 256 items or 32
            KB.
        multiprocessing_context: How workers are started: ``"fork"``, ``"spawn"``, ``"forkserver"``, or None for
            Python's default.
        timeout: Seconds to wait for an item before raising an error; 0 waits forever.
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
        self.seed = None if seed is None else checked_int("seed", seed, 0, 2**64 - 1)
        self.worker_init_fn = checked_function("worker_init_fn", worker_init_fn)
        self.worker_reset_fn = checked_function("worker_reset_fn", worker_reset_fn)
        self._functions = WorkerFunctions(worker_init_fn, worker_reset_fn, WorkerInfo, _generator)
        self._skips = EpochSkips()
        self._epoch = 0
        self._in_epoch = self._is_paused = False
        self._promised: int | None = None
        self._graph: Any = None  # a RunningGraph
        self._signature: signatures.Signature = {}
        self._shards: signatures.Signature | None = None  # as listed in this epoch
        self._generator: list[Any] = []  # its values at the start of the epoch
        self._stream_seeds: Seeds | None = None
        self._restored: Checkpoint | None = None
        self._group: Any = None

    def __call__(self, *_: Any) -> NoReturn:
        """Raises a TypeError if the service was passed as an adapter, the second positional argument of DataLoader2."""
        raise TypeError(
            "WorkersReadingService was passed as the datapipe_adapter_fn of DataLoader2, its second argument; pass it "
            "by name: DataLoader2(pipe, reading_service=WorkersReadingService(num_workers))"
        )

    def initialize(self, datapipe: IterDataPipe[Any]) -> IterDataPipe[Any]:
        """Divides the graph among ranks and workers; DataLoader2 calls it once, at its first epoch."""
        self._signature = self._describe(datapipe)
        self._promised = graphs.promised_length(datapipe)
        self._group = graphs.shard_by_rank(datapipe, self.distributed)
        with interrupts_held():  # a partly divided graph could not be divided again
            graph = self._graph = graphs.RunningGraph(datapipe, self._functions, _seed_graph, replace_dp)
            if self.num_workers and not graphs.runs_once(datapipe):
                options = self.prefetch_factor, self.multiprocessing_context, self.timeout
                graph.move_to_workers(self.num_workers, *options)
            else:
                graph.keep_here()
        return graph.end

    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: ResetFn | None = None) -> ResetFn | None:
        """Seeds the graph and starts the workers; DataLoader2 calls it at each epoch's start."""
        if self._is_paused:  # by ``limit(n)``; DataLoader2 would end the new epoch at once
            raise RuntimeError(
                "the loader is paused, because the limit(n) of its last iterator was reached: call resume() of that "
                "iterator before another epoch begins"
            )
        restored = self._restored
        if restored is not None:
            self._epoch = restored.epoch - restored.in_epoch
            self._stream_seeds = restored.stream_seeds
            if restored.in_epoch:
                _restore_generator(seed_generator, restored.generator)
        self._generator = _generator_values(seed_generator)
        seeds = self._draw(seed_generator)
        self._epoch += 1
        was_left_early, self._in_epoch = self._in_epoch, True
        self._shards = None
        graph = self._graph
        self._skips.begin(graph)
        self._stream_seeds = self._stream_seeds or seeds
        graph.end._number_of_samples_yielded = 0
        # A number that no worker has, so that random stages after .join_workers() have an order of their own.
        _seed_graph(graph.end, seeds, max(graph.workers, 1))
        for number, run in enumerate(graph.runs):
            if self._epoch > 1 and restored is None and has_epoch(graph.end, run):
                continue  # wds_epoch in the main process takes more of the workers' running stream
            streams = run.streams.next_epoch() if was_left_early else run.streams
            if restored is not None and restored.streams is not None:
                streams = unpack_streams(graph.part(), restored.streams, self._stream_seeds, self._epoch)
            streams.epoch = self._epoch - 1
            run.begin(graphs.seeds_of(number, seeds), streams)
        self._restored = None  # only now, since Ctrl-C may come earlier
        return iter_reset_fn

    def finalize_iteration(self) -> None:
        """Notes the end of an epoch; DataLoader2 calls it then, and at other times."""
        if not (self._in_epoch and isinstance(sys.exc_info()[1], StopIteration)):
            return
        if any(run.was_interrupted for run in self._graph.runs):
            raise RuntimeError(
                "this iterator was ended by Ctrl-C in the middle of the epoch: begin another epoch by iterating "
                "over the loader again"
            )
        for run in self._graph.runs:
            run.wait_for_facts()
        self._in_epoch = False
        graphs.warn_of_more(self._graph.end._number_of_samples_yielded, self._promised, self.num_workers)
        self._skips.end(self._epoch)
        for run in self._graph.runs:
            run.streams = run.streams.next_epoch()

    # DataLoader2 calls these at limit(n) and resume() of its iterator. It counts the items itself, and workers are
    # never far ahead; only threads of the main process, such as those of ``prefetch``, need to stop.
    def _pause(self, pause_fn: Any = None) -> None:  # noqa: ARG002  (as torchdata calls it)
        self._is_paused = True
        for pipe in self._pipes_with("pause"):
            pipe.pause()

    def _resume(self, resume_fn: Any = None) -> None:  # noqa: ARG002
        self._is_paused = False
        for pipe in reversed(self._pipes_with("resume")):
            pipe.resume()

    def _limit(self, num_batches: int | None, limit_fn: Any = None) -> None:
        pass

    def _pipes_with(self, method: str) -> list[Any]:
        pipes = get_all_graph_pipes(traverse_dps(self._graph.end))
        # a stage of ours may have a `resume` of its own, of another meaning: only what can be paused is resumed
        return [pipe for pipe in pipes if all(callable(getattr(type(pipe), name, None)) for name in ("pause", method))]

    def finalize(self) -> None:
        """Ends the workers; DataLoader2 calls it at its shutdown."""
        self._skips.stop()
        for run in self._graph.runs if self._graph else ():
            run.close()
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    def skipped(self, *, by_rule: bool = False) -> dict[str, dict[str, int]]:
        """Counts what the stages skipped in the running or last epoch, in all workers of this rank.

        The counts are by stage, written as in the chain, and by exception type or reason. A warning at the end of the
        epoch reports the same. DataLoader2 runs a copy of the service; either can be called.

        Args:
            by_rule: Whether to include what a rule left out on purpose: hidden files and folders in shards, samples for
                which a function returned None.

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
        """Returns the state for ``DataLoader2.state_dict()``; raises a RuntimeError if a stage may hold items back."""
        if self._graph is None:
            return b""
        if self._shards is None:
            self._shards = signatures.without_lists(signatures.describe_shards(*self._graph.branches))
        return Checkpoint(
            {**self._signature, **self._shards},
            self._epoch,
            self._in_epoch,
            self._generator,
            self._stream_seeds,
            pack_runs(self._graph.end, self._graph.runs, self._graph.part(), in_epoch=self._in_epoch),
        ).dump()

    def restore(self, datapipe: IterDataPipe[Any], serialized_state: bytes) -> IterDataPipe[Any]:
        """Divides the graph and resumes from a state (a ValueError if it does not fit); replaces `initialize`."""
        if serialized_state:
            restored = Checkpoint.load(serialized_state)
            now = {**self._describe(datapipe), **signatures.describe_shards(*graphs.find_branches(datapipe))}
            signatures.check_signature(restored.signature, now)
            self._restored = restored
        return self.initialize(datapipe)

    def _describe(self, datapipe: IterDataPipe[Any]) -> signatures.Signature:
        ranks, rank = distributed_place() or Place()
        known = {"num_workers": self.num_workers, "ranks": ranks, "rank": rank, "distributed": self.distributed}
        return {**known, "seed": self.seed, "stages": signatures.graph_signature(datapipe)}

    def _draw(self, seed_generator: Any) -> Seeds:
        """Returns the epoch's two seeds: one shared by all ranks, and this rank's own."""
        rank = (distributed_place() or Place()).number
        if self.seed is not None:
            return mix(self.seed, self._epoch), mix(self.seed, self._epoch, "rank", rank)
        shared, local = seed_generator.generate_shared_seed(), seed_generator.generate_seed()
        # An unseeded DataLoader2 takes its seed from torch's global generator without advancing it, and would find the
        # same seed next time. torch's own DataLoader also draws once an epoch.
        torch.empty((), dtype=torch.int64).random_()
        if self.distributed:
            shared = dist_share_seed(shared, self._group)
            local = mix(shared, "rank", rank)
        return shared, local


def _seed_graph(datapipe: DataPipe, seeds: Seeds, place: int) -> None:
    """Seeds the pipes upstream of a native sharding filter alike in all places, and the others separately."""
    set_graph_random_seed(datapipe, _generator(*seeds, place))


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
