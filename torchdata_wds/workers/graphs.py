"""Divides a graph into the parts that workers run, runs those parts, and checks the graph's length."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, TypeVar

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import DataPipe, DataPipeGraph

from torchdata_wds.consumers import divide, no_traversal, traverse, upstream
from torchdata_wds.handlers import warn_once
from torchdata_wds.pipes.base import WdsPipe
from torchdata_wds.pipes.chain_text import short_name
from torchdata_wds.pipes.division import check_division
from torchdata_wds.pipes.notes import note_source_failure
from torchdata_wds.pipes.order.permutation import mix
from torchdata_wds.pipes.seeds import Seeds, seed_graph
from torchdata_wds.pipes.streams.join_workers import JoinWorkersIterDataPipe
from torchdata_wds.process_place import Place
from torchdata_wds.workers.interrupts import interrupts_held
from torchdata_wds.workers.processes.worker import WorkerGraph
from torchdata_wds.workers.ranks import ranks_of
from torchdata_wds.workers.resume.checkpoints import Streams
from torchdata_wds.workers.resume.ordered import Gap
from torchdata_wds.workers.resume.planner import find_chain, is_torchdata
from torchdata_wds.workers.resume.stream import Stream, WorkerFunctions
from torchdata_wds.workers.stats.skips import SkipWatch
from torchdata_wds.workers.stream_pool import StreamPool

logger = logging.getLogger(__name__)
T = TypeVar("T")


def copied(datapipe: IterDataPipe[T]) -> IterDataPipe[T]:
    """Returns a copy of a graph, which shares only the lists and data sets it wraps; any pipe may raise."""
    shared = {id(pipe.iterable): pipe.iterable for pipe in upstream(datapipe) if type(pipe) is IterableWrapper}
    with interrupts_held(), no_traversal():  # torch's shuffle prints an error if it is left half copied
        return copy.deepcopy(datapipe, shared)


def find_branches(datapipe: IterDataPipe[Any]) -> list[DataPipe]:
    """Returns the last pipe of each part of a graph that may run in workers."""
    # That is the whole graph, unless some pipes must stay in the main process (``is_replicable()`` is False, as for
    # ``join_workers``, ``fullsync`` and ``pin_memory``): then it is what comes directly before those. Pipes that join
    # the stream only later, such as labels zipped to it, stay in the main process too.
    sources = traverse(datapipe)[id(datapipe)][1]
    is_one = _is_replicable(datapipe, sources)
    return [datapipe] if is_one else list({id(found): found for found in _branches(datapipe, sources)}.values())


def _branches(datapipe: DataPipe, sources: DataPipeGraph) -> Iterator[DataPipe]:
    for source, further in sources.values():
        if not _is_replicable(source, further):
            yield from _branches(source, further)
        elif not _is_replicable(datapipe, {}):
            yield source


def _is_replicable(datapipe: DataPipe, sources: DataPipeGraph) -> bool:
    """Returns whether a pipe, and all of its sources, may run in workers."""
    may = not hasattr(datapipe, "is_replicable") or bool(datapipe.is_replicable())
    return may and all(_is_replicable(*entry) for entry in sources.values())


def is_one_part(datapipe: IterDataPipe[Any]) -> bool:
    """Returns whether no stage of a graph follows the part that workers run."""
    # Then an item of the workers is an item of the graph. With .join_workers().batch(2), item 3 of one worker, which is
    # what a state counts, is in batch 1, which is what a state with num_workers=0 counts.
    (part, *others) = find_branches(datapipe)
    is_border = type(datapipe) is JoinWorkersIterDataPipe and datapipe.source_datapipe is part
    return not others and (part is datapipe or is_border)


def runs_once(datapipe: IterDataPipe[Any]) -> bool:
    """Returns whether a graph must run in one process only, and warns if so."""
    # torchdata's own service runs the part before the dispatcher in an extra process, which deals items to the workers.
    found = any(is_torchdata(pipe, "ShardingRoundRobinDispatcher") for pipe in upstream(datapipe))
    if found:
        logger.warning(
            "the stages before sharding_round_robin_dispatch must run only once, so the whole graph runs in the main "
            "process, without workers. If each worker can read its own part, write .sharding_filter() instead"
        )
    return found


def promised_length(datapipe: IterDataPipe[Any]) -> int | None:
    """Returns the length set by ``.set_length(n)`` for a graph that workers do not run yet; None without one."""
    if not any(is_torchdata(pipe, "LengthSetter") for pipe in upstream(datapipe)):
        return None
    try:
        return len(datapipe)
    except TypeError:  # a later stage has no length
        return None


def warn_of_more(count: int, promised: int | None, num_workers: int) -> None:
    """Warns, once per process, if an epoch yielded more items than its length promised."""
    if promised is None or count <= promised:
        return
    cure = (
        f"each of the {num_workers} workers makes a last, shorter batch of its own, so n is the sum over all of them. "
        "Or batch and set the length after .join_workers(), or count with .wds_epoch(n), whose length is exact"
        if num_workers > 1
        else "pass the real number of items to .set_length(n)"
    )
    warn_once(
        "length",
        f"an epoch yielded {count:,} items, but its length is set to {promised:,} by .set_length(n), and code that "
        f"stops there loses the rest: {cure}",
    )


class LocalIterDataPipe(WdsPipe[Any]):
    """Runs the stages before it as the stream of one worker in this process; `options` are those of `Stream`."""

    #: So `.join_workers()` does not mistake this for a stage that follows it.
    runs_others = True
    has_cycled = False  # as in `StreamPool`; here such a stage is part of the stream

    def __init__(self, source_datapipe: IterDataPipe[Any], *, worker: int = 0, **options: Any) -> None:
        self.source_datapipe = source_datapipe
        self.streams = Streams(1)
        self.was_interrupted = False
        self._worker = worker
        self._stream = Stream(source_datapipe, **options)
        self._seeds: Seeds = (0, 0)
        self._has_begun = False
        self._first: tuple[Streams, tuple[Any, ...]] | None = None  # the first epoch, while the stream has not begun

    def begin(self, seeds: Seeds, streams: Streams) -> None:
        """Sets the epoch's seeds and where the next iteration begins."""
        if streams.continues and not self._has_begun and self._first is None:
            self._first = streams, copy.deepcopy((seeds, self._worker, *streams.points(), streams.epoch))
        self._seeds = seeds
        self.streams = streams
        self.was_interrupted = False
        told = self._stream.facts()  # in an epoch that was left early
        if streams.continues and streams.points() == [None]:
            streams.facts[0].add(told)
            streams.facts[0].passes = [epoch.position for epoch in self._stream.chain.epochs]

    def __iter__(self) -> Iterator[Any]:
        streams = self.streams
        (point,) = streams.points()
        first, self._first, self._has_begun = self._first, None, True
        if first is not None and first[0] is not streams:  # the stream begins there all the same, as in a worker
            with closing(self._stream.items(*first[1])) as begun:
                next(begun, None)
        with closing(self._stream.items(self._seeds, self._worker, point, streams.epoch)) as items:
            try:
                for item in items:
                    streams.taken += 1
                    if type(item) is not Gap:
                        yield item
                    else:
                        streams.note_gap()
            except KeyboardInterrupt:
                self.was_interrupted = True
                raise
            except Exception as error:
                note_source_failure(error)
                raise
        streams.turns.note_end(streams.taken, 0)

    def wait_for_facts(self) -> None:
        """Notes what the stages have reported."""
        self.streams.facts[0].add(self._stream.facts())

    def close(self) -> None:
        """Does nothing: there is nothing to end."""


class RunningGraph:
    """A graph whose branches run in workers, or all of it as one stream in this process."""

    def __init__(self, datapipe: Any, functions: WorkerFunctions) -> None:
        self.end: IterDataPipe[Any] = datapipe  # the last pipe in the main process
        self.branches: list[Any] = find_branches(datapipe)
        self._numbers = _numbers_of(self.branches)
        self.runs: list[Any] = []  # a `StreamPool` for each, or one `LocalIterDataPipe` for all
        self.watch: SkipWatch | None = None  # of the stages in the main process, if there are workers
        self.workers = 0
        self._functions = functions

    def move_to_workers(self, num_workers: int, make_pool: Callable[[WorkerGraph, Place], StreamPool]) -> None:
        """Runs each branch in a pool of its own, made from that part of the graph and this rank's place."""
        self.workers = num_workers
        for branch in self.branches:
            check_division(branch, workers=num_workers)
            self._run(make_pool(WorkerGraph(branch, self._functions), ranks_of(branch) or Place()), branch)
        self.watch = SkipWatch(self.end)

    def keep_here(self) -> None:
        """Runs all of the graph as one stream in this process, except a fullsync at its end."""
        for number, branch in enumerate(self.branches):
            divide(branch, Place(), SHARDING_PRIORITIES.MULTIPROCESSING)
            self.branches[number] = self._functions.initialized(branch, 1, 0)
            self._put(self.branches[number], branch)
        last: Any = self.end
        while is_torchdata(last, "FullSync"):
            last = last.datapipe
        self._run(LocalIterDataPipe(last, seed=self._seed_here, keeps_apart=True, reset=self._reset_here), last)

    def seeds_of(self, number: int, seeds: Seeds) -> Seeds:
        """Returns the seeds of a branch; the first has the epoch's own, since one branch is the normal case."""
        number, (shared, local) = self._numbers[number], seeds
        return (mix(shared, number), mix(local, number)) if number else seeds

    def part(self) -> Any:
        """Returns the last pipe of the part that each stream of the first run runs."""
        return self.branches[0] if self.workers else self.runs[0].source_datapipe

    def _run(self, run: Any, part: Any) -> None:
        self._put(run, part)
        self.runs.append(run)
        run.streams = Streams(max(self.workers, 1), continues=bool(find_chain(part).epochs))

    def _put(self, pipe: Any, replaced: Any) -> None:
        if replaced is self.end:
            self.end = pipe
        elif pipe is not replaced:
            replace_pipe(self.end, replaced, pipe)

    def _seed_here(self, datapipe: DataPipe, seeds: Seeds, place: int) -> None:
        seed_graph(datapipe, seeds, place + 1, apart=self.branches)
        for number, branch in enumerate(self.branches):
            seed_graph(branch, self.seeds_of(number, seeds), place)

    def _reset_here(self, datapipe: DataPipe, seeds: Seeds, place: int) -> DataPipe:
        for number, branch in enumerate(self.branches):
            found = self._functions.reset_for(branch, 1, place, self.seeds_of(number, seeds))
            if branch is datapipe:
                datapipe = self.runs[0].source_datapipe = found
            elif found is not branch:
                replace_pipe(datapipe, branch, found)
            self.branches[number] = found
        return datapipe


def replace_pipe(end: DataPipe, old: DataPipe, new: DataPipe) -> None:
    """Replaces a pipe by another one, as the source of all pipes of a graph that read from it."""
    for pipe in _readers_of(old, traverse(end)):
        found = {name: _with_pipe(value, old, new) for name, value in vars(pipe).items()}
        if all(found[name] is value for name, value in vars(pipe).items()):
            raise RuntimeError(
                f"cannot run {short_name(old)} in workers: {short_name(pipe)}, the stage after it, holds it where it "
                "cannot be replaced. A stage must keep its sources in attributes, or in lists, tuples and dicts there"
            )
        vars(pipe).update(found)


def _readers_of(source: DataPipe, graph: DataPipeGraph) -> list[Any]:
    found: list[Any] = []
    for pipe, sources in graph.values():
        found += [*([pipe] if id(source) in sources else []), *_readers_of(source, sources)]
    return list({id(pipe): pipe for pipe in found}.values())


def _with_pipe(value: Any, old: DataPipe, new: DataPipe) -> Any:
    """Returns a value with one pipe replaced by another, at any depth of collections; the value itself without it."""
    if value is old:
        return new
    if type(value) is dict:
        found: Any = {key: _with_pipe(inside, old, new) for key, inside in value.items()}
        return value if all(found[key] is inside for key, inside in value.items()) else found
    if isinstance(value, (list, tuple)):
        parts = [_with_pipe(inside, old, new) for inside in value]
        if all(part is inside for part, inside in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _numbers_of(branches: list[Any]) -> list[int]:
    """Returns a number for each branch: the same if they have a stage in common, since their items belong together."""
    # Each branch after a ``fork`` is run by workers of its own, which run the stages before it too.
    pipes = [set(map(id, upstream(branch))) for branch in branches]
    return [next(first for first, found in enumerate(pipes) if found & own) for own in pipes]
