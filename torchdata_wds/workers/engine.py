"""Runs a graph epoch after epoch, in worker processes or in this one, and resumes it: what all loaders hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.graph_settings import get_all_graph_pipes

from torchdata_wds.checks import checked_context, checked_int, checked_timeout
from torchdata_wds.consumers import traverse
from torchdata_wds.environment import usable_cpus
from torchdata_wds.pipes.order.permutation import mix
from torchdata_wds.pipes.seeds import Seeds, seed_graph
from torchdata_wds.process_place import Place
from torchdata_wds.workers import graphs
from torchdata_wds.workers.interrupts import interrupts_held
from torchdata_wds.workers.processes.pool import WorkerPool
from torchdata_wds.workers.processes.worker import WorkerGraph
from torchdata_wds.workers.ranks import RankDivision
from torchdata_wds.workers.resume import signatures
from torchdata_wds.workers.resume.checkpoints import Checkpoint, has_epoch, pack_runs, taken_by, unpack_streams
from torchdata_wds.workers.resume.job_order import UNSTARTED_ORDER, JobOrder, check_kind, find_order
from torchdata_wds.workers.resume.stream import WorkerFunctions
from torchdata_wds.workers.stats.collector import Collector
from torchdata_wds.workers.stats.graph_facts import graph_facts
from torchdata_wds.workers.stats.skips import EpochSkips
from torchdata_wds.workers.stats.stalls.main_watch import MainWatch
from torchdata_wds.workers.stats.tracing.epoch_trace import EpochTrace
from torchdata_wds.workers.stream_pool import PoolOptions, StreamPool

#: Draws the seeds of an epoch, or repeats the draw that its argument describes (None for a new one). Returns a
#: description in plain values, which a state keeps, and the seeds.
Draw = Callable[[Any], tuple[Any, Seeds]]
PoolMaker = Callable[[WorkerGraph, PoolOptions], StreamPool]


def draw_seeds(saved: Any) -> tuple[Any, Seeds]:
    """Draws the seeds of an epoch from torch's global generator, or returns those saved."""
    if saved is None:
        saved = torch.empty(2, dtype=torch.int64).random_().tolist()
    shared, local = saved
    return saved, (shared, local)


class Engine:
    """Divides, seeds, runs and resumes one graph; its front decides when an epoch begins and ends.

    `ranks` is the place among the ranks, or one of the words of `RankDivision`; `pool` makes the pools of workers, by
    default of processes; the other arguments are those of `WorkersReadingService`. Raises TypeErrors and ValueErrors
    for wrong arguments.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        functions: WorkerFunctions,
        prefetch_factor: int = 2,
        multiprocessing_context: str | None = None,
        timeout: float = 0,
        ranks: Place | str = "auto",
        seed: int | None = None,
        pool: PoolMaker | None = None,
        stall_after: float = 60.0,
        trace: EpochTrace | None = None,
    ) -> None:
        self.num_workers = checked_int("num_workers", num_workers, 0)
        self.prefetch_factor = checked_int("prefetch_factor", prefetch_factor, 1)
        context = checked_context(multiprocessing_context)
        if pool is not None and not callable(pool):
            raise TypeError(f"pool must be a RayPool or None, not {pool!r}")
        if pool is not None and (context is not None or not self.num_workers):
            what = "num_workers must be at least 1" if context is None else "multiprocessing_context must be None"
            raise ValueError(f"{what} with pool=, whose workers are not processes of this machine")
        self.timeout = checked_timeout(timeout)
        self.stall_after = checked_timeout(stall_after, "stall_after", zero="never warn")
        self.trace = trace
        self._make_pool = pool or functools.partial(WorkerPool, context=context)
        self.seed = None if seed is None else checked_int("seed", seed, 0, 2**64 - 1)
        self.ranks = RankDivision(ranks)
        self.epoch = 0  # how many epochs have begun
        self._begun = 0  # the same, without one in whose `begin` Ctrl-C came or a worker was found dead
        self.in_epoch = False
        self.skips = EpochSkips()
        self.stats = Collector(self.skips, trace=self.trace)
        self._main_watch: Any = None  # a `MainWatch` of the stages in the main process, once the work is divided
        self.order: JobOrder | None = None  # the global order that the graph follows, if it does
        self.graph: Any = None  # a RunningGraph, once the work is divided
        self._functions = functions
        self._promised: int | None = None
        self._signature: signatures.Signature = {}
        self._listing: signatures.Listing | None = None  # the shards, as listed at the beginning of this epoch
        self._shards: signatures.Signature | None = None  # their description, once a state was taken in this epoch
        self._drawn: Any = None  # how the running epoch's seeds were drawn
        self._stream_seeds: Seeds | None = None
        self._restored: Checkpoint | None = None
        self.resumed: Checkpoint | None = None  # the state in whose epoch the running one is

    def open(
        self, datapipe: IterDataPipe[Any], restored: Checkpoint | None = None, *, length: int | None = None
    ) -> None:
        """Divides a graph among ranks and workers, once; a state must fit, or a ValueError names the differences.

        `length` is how many items an epoch should have.
        """
        self.order = find_order(datapipe)
        check_kind(restored, self.order)
        self._signature = self._describe(datapipe) if self.order is None else {}  # it may hold an index of millions
        if restored is not None and restored.signature:  # without one, no epoch had begun
            self._check(restored.signature, datapipe)
        self._restored = restored
        self._promised = graphs.promised_length(datapipe) if length is None else length
        self.ranks.divide(
            datapipe, is_seeded=self.seed is not None or (self.order is not None and self.order.is_seeded)
        )
        facts = graph_facts(graphs.find_branches(datapipe))
        with interrupts_held():  # a partly divided graph could not be divided again
            graph = graphs.RunningGraph(datapipe, self._functions)
            if self.num_workers and not graphs.runs_once(datapipe):
                graph.move_to_workers(self.num_workers, self._pool)
            else:
                graph.keep_here()
            self.stats.open(graph, self.ranks.place.number, {**self._facts(), **facts})
            if self.trace is not None:
                self.trace.open(graph.workers, self.ranks.place.number, self.ranks.place.consumers)
            self._main_watch = MainWatch(self.ranks.place, self.stall_after, self.stats.main_at)
            self.graph = graph  # only now: a graph that could not be divided must not run

    def _pool(self, graph: WorkerGraph, place: Place) -> StreamPool:
        known = (place, self.num_workers, self.prefetch_factor, self.timeout, self.stall_after)
        options = PoolOptions(*known, self.trace)
        return self._make_pool(graph, options)

    def _facts(self) -> dict[str, int]:
        """Returns what the advice in a report depends on."""
        known = {"num_workers": self.num_workers, "prefetch_factor": self.prefetch_factor, "cpus": usable_cpus()}
        return {**known, "pool": int(not isinstance(self._make_pool, functools.partial))}

    def begin(self, draw: Draw, epoch: int | None = None) -> None:
        """Begins an epoch, the next one or number `epoch` from 0: seeds the graph, and starts the workers."""
        restored = self._restored
        before = self._begun
        if restored is not None:
            before = restored.epoch - restored.in_epoch
            self._stream_seeds = restored.stream_seeds
        self.epoch = self._begun = before if epoch is None else epoch
        if self.order is not None:
            seeds = self.order.begin(self.epoch, restored, self.seed, lambda: self._agree(draw(None)[1])[0])
        elif self.seed is None:
            self._drawn, drawn = draw(restored.generator if restored is not None and restored.in_epoch else None)
            seeds = self._agree(drawn)
        else:
            seeds = mix(self.seed, self.epoch), mix(self.seed, self.epoch, "rank", self.ranks.place.number)
        self.epoch += 1
        is_resumed = restored is not None and restored.in_epoch and restored.epoch == self.epoch
        self.resumed = restored if is_resumed else None
        was_left_early, self.in_epoch = self.in_epoch, True
        self._shards = None
        graph = self.graph
        self.skips.begin(graph)
        self.stats.begin(self.epoch - 1)
        self._main_watch.begin(graph)
        self._stream_seeds = seeds if self.order is not None else self._stream_seeds or seeds
        graph.end._number_of_samples_yielded = 0
        # A number that no worker has, so that random stages after .join_workers() have an order of their own.
        seed_graph(graph.end, seeds, max(graph.workers, 1))
        for number, run in enumerate(graph.runs):
            if self.epoch > 1 and restored is None and has_epoch(graph.end, run):
                continue  # wds_epoch in the main process takes more of the workers' running stream
            streams = run.streams.next_epoch() if was_left_early else run.streams
            if self.order is not None:
                streams = self.order.streams(max(graph.workers, 1))
            elif restored is not None and restored.streams is not None:
                streams = unpack_streams(graph.part(), restored.streams, self._stream_seeds, self.epoch)
            streams.epoch = self.epoch - 1
            run.begin(graph.seeds_of(number, seeds), streams)
        self._restored, self._begun = None, self.epoch  # only now, since Ctrl-C may come earlier
        self.stats.begun()
        if self.order is None:
            self._list_shards()

    def _list_shards(self) -> None:
        """Lists the epoch's shards for its states, while the workers list them for themselves."""
        branches = self.graph.branches
        listing, self._listing = self._listing, None
        if self.resumed is not None and listing is not None:
            self._listing = listing  # of the moment when the state was checked
        elif signatures.is_quickly_listed(*branches):
            with suppress(Exception):  # whatever is wrong, the graph itself or a later state tells it
                self._listing = signatures.list_shards(*branches)

    def end(self) -> None:
        """Ends an epoch whose items were all taken; raises a RuntimeError if Ctrl-C has ended it."""
        if not self.in_epoch:
            return
        if any(run.was_interrupted for run in self.graph.runs):
            raise RuntimeError(
                "this iterator was ended by Ctrl-C in the middle of the epoch: begin another epoch by iterating "
                "over the loader again"
            )
        for run in self.graph.runs:
            run.wait_for_facts()
        self.in_epoch = False
        graphs.warn_of_more(self.graph.end._number_of_samples_yielded, self._promised, self.num_workers)
        self._main_watch.stop()
        self.stats.end()
        self.skips.end(self.epoch)
        for run in self.graph.runs:
            run.streams = run.streams.next_epoch()

    # Workers are never far ahead; only threads of the main process, such as those of ``prefetch``, need to stop.
    def pause(self) -> None:
        """Stops the threads of the main process until `resume`."""
        for pipe in self._pipes_with("pause"):
            pipe.pause()

    def resume(self) -> None:
        """Restarts the threads that `pause` stopped."""
        for pipe in reversed(self._pipes_with("resume")):
            pipe.resume()

    def _pipes_with(self, method: str) -> list[Any]:
        pipes = get_all_graph_pipes(traverse(self.graph.end))
        # a stage of ours may have a `resume` that means something else: only what can be paused is resumed
        return [pipe for pipe in pipes if all(callable(getattr(type(pipe), name, None)) for name in ("pause", method))]

    def checkpoint(self, delivered: int | None = None) -> Checkpoint:
        """Returns the state after `delivered` items since `begin`; None for all that the graph has yielded.

        Raises:
            RuntimeError: if a stage may hold items back, so that the position is unknown.
        """
        if self._restored is not None:
            return self._restored
        if self.order is not None:
            return self._order_checkpoint(self.order, delivered)
        if self._shards is None:
            listing = self._listing or signatures.list_shards(*self.graph.branches)
            self._shards = signatures.without_lists(listing.describe())
        graph = self.graph
        signature = {**self._signature, **self._shards}
        if self._begun != self.epoch:
            if self._begun and any(run.streams.continues for run in graph.runs):
                raise RuntimeError(
                    "a state cannot be taken now: the beginning of an epoch was interrupted, and where its wds_epoch "
                    "continues is known only once it has begun. Iterate over the loader again, and take the state then"
                )
            return Checkpoint(signature, self._begun, False, None, self._stream_seeds, None)
        return Checkpoint(
            signature,
            self.epoch,
            self.in_epoch,
            self._drawn,
            self._stream_seeds,
            pack_runs(graph.end, graph.runs, graph.part(), in_epoch=self.in_epoch, delivered=delivered),
        )

    def _order_checkpoint(self, order: JobOrder, delivered: int | None) -> Checkpoint:
        if order.seed is None:  # no epoch has begun
            return Checkpoint({}, self._begun, False, None, None, None, UNSTARTED_ORDER)
        if self._begun != self.epoch or not self.in_epoch:
            return order.checkpoint(self._begun, 0)
        run = self.graph.runs[0]
        return order.checkpoint_after(run.streams.taken_for(taken_by(self.graph.end, run, delivered)))

    def close(self) -> None:
        """Ends the workers; idempotent."""
        if self._main_watch is not None:
            self._main_watch.stop()
        self.stats.stop()
        self.skips.stop()
        for run in self.graph.runs if self.graph else ():
            run.close()

    def _check(self, then: signatures.Signature, datapipe: IterDataPipe[Any]) -> None:
        """Raises a ValueError if a state, whose signature is `then`, does not fit the graph and the workers here."""
        self._listing = signatures.list_shards(*graphs.find_branches(datapipe))
        now = {**self._signature, **self._listing.describe()}
        reasons = {}
        if {then.get("num_workers"), self.num_workers} == {0, 1}:  # one stream either way, in the same order
            if graphs.is_one_part(datapipe):
                then = {**then, "num_workers": self.num_workers}
            else:
                reasons["num_workers"] = "which only fit each other if no stage follows .join_workers()"
        signatures.check_signature(then, now, reasons)

    def _describe(self, datapipe: IterDataPipe[Any]) -> signatures.Signature:
        ranks, rank = self.ranks.find(datapipe)
        known = {"num_workers": self.num_workers, "ranks": ranks, "rank": rank, "seed": self.seed}
        return {**known, "stages": signatures.graph_signature(datapipe)}

    def _agree(self, drawn: Seeds) -> Seeds:
        """Returns the epoch's seeds: one that all ranks share, and this rank's own."""
        if self.ranks.option == "none":
            return drawn
        shared = self.ranks.share(drawn[0])
        return shared, mix(shared, "rank", self.ranks.place.number)
