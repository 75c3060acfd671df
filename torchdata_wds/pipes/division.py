"""Whether the work of a running graph is divided among its consumers, and what to write where it is not.

A pipe does not know what follows it. But while it makes an item, everything that waits for that item is on the stack,
and torch wraps each pipe's iterator in a frame of its own. So the graph that runs is found from inside, whoever runs
it: torch's DataLoader, a dataset around the pipe, a reading service or a plain loop.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Sized
from types import FrameType
from typing import Any, Literal

import torch
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES, ShardingFilterIterDataPipe
from torch.utils.data.graph import DataPipeGraph, traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

from torchdata_wds.pipes import stock_workers
from torchdata_wds.pipes.place import Place, upstream, warn_once

__all__ = ["check_division", "running_pipes", "warn_about_workers", "warn_when_idle"]

_HOOK = "torch.utils.data.datapipes._hook_iterator"

#: Stages that yield what each of their sources yields, one way or the other.
_MERGERS = {"Concater", "Multiplexer", "MultiplexerLongest", "SampleMixer", "SampleMultiplexerDataPipe"}

#: Stages that pair the items of their sources by position.
_ZIPPERS = {"Zipper", "ZipperLongest"}

#: Stages that keep a single item single, whatever they do to it.
_KEEPERS = {"Mapper", "WdsMapper", "Cycler", "Repeater", "InMemoryCacheHolder"}

#: Stages that look things up in their further sources, by key or in a function: each consumer needs all of those.
_LOOKUPS = {"IterKeyZipper", "MapKeyZipper", "StageComposer"}

#: What the consumers of a pipe get: each a part of its items; all of them everything; the same single item; or what
#: each chooses or draws by itself.
_Share = Literal["part", "all", "constant", "own"]


class _Checked:
    """The graph that was looked at last.

    Attributes:
        pipes: The ids of its pipes.
        is_entered: Whether a reader that one of its stages made has been seen.
    """

    def __init__(self, root: Any, pipes: set[int]) -> None:
        self._root = weakref.ref(root)
        self.pipes = pipes
        self.is_entered = False

    def is_of(self, root: Any) -> bool:
        return self._root() is root


_checked: _Checked | None = None


def warn_about_workers(pipe: IterDataPipe[Any]) -> None:
    """Warns, once a process, where consumers do not divide the work, or where a stock worker may lose items.

    Of the workers of a loader only the first speaks.

    Args:
        pipe: A pipe that is about to read shards, in the process that runs it.
    """
    if stock_workers.in_stock_worker() and not stock_workers.is_joined():
        warn_once(
            "join",
            "shards are read in a worker of torchdata's MultiProcessingReadingService, which fails when its workers' "
            "streams differ in length: end the workers' part with .join_workers(), or use "
            "torchdata_wds.WorkersReadingService",
        )
    if not _speaks():
        return
    running = running_pipes() or [pipe]
    root = running[-1]
    checked = _checked if _checked is not None and _checked.is_of(root) else check_division(root)
    if checked is not None and id(pipe) not in checked.pipes and not checked.is_entered:
        checked.is_entered = True
        _check(root, next((outer for outer in running if id(outer) in checked.pipes), root))


def check_division(root: Any) -> _Checked | None:
    """Warns, once a process, where the consumers of a graph do not divide its work.

    Args:
        root: The graph's last pipe, in the process that is about to run it.
    """
    global _checked
    if not _speaks():
        return None
    _checked = _Checked(root, {id(root), *map(id, upstream(root))})
    _check(root)
    return _checked


def _check(root: Any, stage: Any = None) -> None:
    """Warns of the gravest fault of a graph.

    Args:
        root: Its last pipe.
        stage: A stage of it that has made a reader of its own.
    """
    try:
        graph = traverse_dps(root)
    except Exception:  # noqa: BLE001  (whatever pickling what pipes hold may raise; it cannot be divided either)
        graph = {id(root): (root, {})}
    pipes = get_all_graph_pipes(graph)
    reads = stage is not None or any(getattr(type(pipe), "reads_shards", False) for pipe in pipes)
    share, alone = _share(root, graph[id(root)][1])
    if _warn_of_untold(pipes):
        return
    for branch in alone:
        warn_once("branch", branch)
    if reads and share == "all" and not _divides_itself():
        warn_once(
            "sharding",
            "shards are read in several workers or ranks with no .sharding_filter() before .load_wds_shards(): every "
            "one of them reads every shard, so each sample comes several times (unless each was given shards of its "
            "own)",
        )
    elif share == "part" and any(_is_read_above(pipe, stage) for pipe in pipes if _is_filter(pipe)):
        warn_once(
            "late",
            "shards are read in several workers or ranks, and the .sharding_filter() stands after the stage that reads "
            "them: each sample comes once, but every worker reads every shard. Put the filter before "
            ".load_wds_shards(), as in .list_shards().shuffle().sharding_filter().load_wds_shards()",
        )


# ------------------------------------------------------------------------------------------------ who runs the graph


def running_pipes() -> list[Any]:
    """Returns the pipes that wait for an item of this thread, from the nearest to the last of the graph."""
    pipes: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _HOOK:
            found = frame.f_locals
            pipe = found["args"][0] if found.get("args") else getattr(found.get("self"), "datapipe", None)
            if isinstance(pipe, IterDataPipe) and not any(pipe is other for other in pipes):
                pipes.append(pipe)
        frame = frame.f_back
    worker = get_worker_info()
    dataset = getattr(worker, "dataset", None)
    dataset = vars(dataset).get("_datapipe", dataset) if isinstance(dataset, IterDataPipe) else None
    # torch's wrapper around the graph is part of none. A stage with a thread (prefetch) hides what follows it: the
    # worker knows.
    pipes = [pipe for pipe in pipes if type(pipe).__name__ != "_IterDataPipeSerializationWrapper"]
    if dataset is not None and pipes and pipes[-1] is not dataset:
        pipes += [dataset] if any(pipes[-1] is pipe for pipe in upstream(dataset)) else []
    return pipes


def _workers() -> Place:
    """Which of how many workers of one loader this process is."""
    worker = get_worker_info()
    if worker is not None:
        return Place(worker.num_workers, worker.id)
    return Place(*stock_workers.stock_place())


def _rank_count() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _speaks() -> bool:
    """Returns whether there are several consumers, and this process is the one of them that warns."""
    workers = _workers()
    return not workers.number and workers.consumers * _rank_count() > 1


def _divides_itself() -> bool:
    """Returns whether code of the user that runs now asks for the worker's number, to choose its shards by it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in ("torch", "torchdata", "torchdata_wds") and "get_worker_info" in frame.f_code.co_names:
            return True
        frame = frame.f_back
    return False


# ---------------------------------------------------------------------------------------------- who gets which items


def _share(pipe: Any, sources: DataPipeGraph) -> tuple[_Share, list[str]]:
    """Returns what each consumer gets of a pipe, and warnings about branches that are not divided as others are."""
    if hasattr(type(pipe), "apply_sharding"):
        return "part", []
    if not sources:
        return _share_of_source(pipe), []
    name = _short_name(pipe)
    found = [(source, *_share(source, above)) for source, above in sources.values()]
    if name in _LOOKUPS:
        del found[1:]
    warnings = [warning for *_, inner in found for warning in inner]
    shares: list[_Share] = [share for _, share, _ in found]
    if "part" in shares:
        for number, (source, share, _) in enumerate(found):
            if _is_doubled(name, source, share):
                warnings.append(_describe_branch(pipe, number, source))
        return "part", warnings
    order: tuple[_Share, ...] = ("all", "constant", "own")
    share = next(share for share in order if share in shares)
    return ("all" if share == "constant" and name not in _KEEPERS else share), warnings


def _share_of_source(pipe: Any) -> _Share:
    """Returns what each consumer gets of a pipe that has no source."""
    if isinstance(place := vars(pipe).get("place"), Place):
        return "all" if place.consumers == 1 else "part"
    if isinstance(pipe, IterableWrapper):
        kind = type(pipe.iterable)
        if kind.__module__ not in ("builtins", "itertools", "torch", "numpy"):
            return "own"  # a dataset of the user's, which may heed the worker's number
        is_one = kind.__name__ == "repeat" or (isinstance(pipe.iterable, Sized) and len(pipe.iterable) == 1)
        return "constant" if is_one else "all"
    code = getattr(inspect.unwrap(type(pipe).__iter__), "__code__", None)
    heeds_worker = code is not None and "get_worker_info" in code.co_names
    return "own" if heeds_worker or inspect.ismethod(getattr(pipe, "set_seed", None)) else "all"


def _is_doubled(name: str, source: Any, share: _Share) -> bool:
    """Returns whether a source's items come once for each consumer although those of another source are divided."""
    if share not in ("all", "constant"):
        return False
    if name in _ZIPPERS:
        return share == "all"  # a constant meets whatever comes
    if name in _MERGERS:
        return True
    # A stage of somebody else may want all items of its second source; but shards are seldom read for that.
    return any(getattr(type(pipe), "reads_shards", False) for pipe in upstream(source))


def _describe_branch(pipe: Any, number: int, source: Any) -> str:
    name = _short_name(pipe)
    chain = " <- ".join(map(_short_name, upstream(source)))
    cost = "and meet the wrong items of the others" if name in _ZIPPERS else "several times together"
    cure = (
        f"Put one .sharding_filter() after the {name}, in place of those before it, or divide both branches alike"
        if name in _ZIPPERS
        else "Give it a .sharding_filter() of its own"
    )
    return (
        f"only some branches of {name} are divided among workers or ranks: source {number}, counted from 0, "
        f"({chain}) has no .sharding_filter(), so that its items come once in each of them, {cost}. {cure}"
    )


def _short_name(pipe: Any) -> str:
    return type(pipe).__name__.removeprefix("_").removesuffix("IterDataPipe")


def _is_filter(pipe: Any) -> bool:
    return isinstance(pipe, ShardingFilterIterDataPipe)


def _is_read_above(pipe: Any, stage: Any) -> bool:
    return any(getattr(type(found), "reads_shards", False) or found is stage for found in upstream(pipe))


# --------------------------------------------------------------------------------- filters that nobody told the place


def _warn_of_untold(pipes: list[Any]) -> bool:
    """Warns where the filters of a graph do not know its consumers; returns whether that is so."""
    counts = any(_short_name(pipe) == "EpochCounter" for pipe in pipes)
    # A resampler divides nothing: what it needs to know it finds out by itself. Counting epochs needs the filter.
    own = set() if counts else {id(pipe.source_datapipe) for pipe in pipes if _short_name(pipe) == "ShardResampler"}
    filters = [pipe for pipe in pipes if _is_filter(pipe) and id(pipe) not in own]
    workers, ranks = _workers().consumers, _rank_count()
    untold = {_untold(found.groups, workers, ranks) for found in filters}
    if "workers" in untold:
        warn_once(
            "wrapped",
            f"the .sharding_filter() (or .split_shards()) of this graph was never told of the {workers} workers that "
            f"run it: every worker reads everything, and each sample comes {workers} times. torch tells it only where "
            "the pipe itself is the DataLoader's dataset, not inside another dataset. Give the pipe itself to "
            "DataLoader, or use DataLoader2 with WorkersReadingService, or call torch.utils.data.graph_settings."
            "apply_sharding(pipe, num_workers, worker_id) in each worker before it iterates",
        )
    elif "ranks" in untold:
        warn_once(
            "ranks",
            f"each of the {ranks} ranks of torch.distributed reads everything, because the .sharding_filter() (or "
            ".split_shards()) of this graph was never told of them. Give the pipe itself to torch's DataLoader, or use "
            "DataLoader2 with WorkersReadingService(n, distributed=True), or call torch.utils.data.graph_settings."
            "apply_sharding(pipe, world_size, rank) before iterating",
        )
    return bool(untold - {None})


def _untold(groups: dict[Any, tuple[int, int]], workers: int, ranks: int) -> str | None:
    """Returns which consumers a filter does not know of, by the groups that it was told.

    torch's DataLoader tells workers and ranks in one number, services each by itself. A number of ranks that is told by
    hand may be less than that of torch.distributed: those of one model replica read the same.
    """
    default = groups.get(SHARDING_PRIORITIES.DEFAULT)
    if default is not None:
        count = default[0]
        if count % workers:
            return "workers"
        return "ranks" if count == workers and ranks > 1 else None
    if workers > 1 and groups.get(SHARDING_PRIORITIES.MULTIPROCESSING, (1, 0))[0] == 1:
        return "workers"
    return "ranks" if ranks > 1 and SHARDING_PRIORITIES.DISTRIBUTED not in groups else None


# --------------------------------------------------------------------------------------------------- nothing to read


def warn_when_idle(pipe: IterDataPipe[Any]) -> None:
    """Warns, once a process, where a pipe that has got no shard shares too few of them with other consumers.

    The last consumer speaks: where some have nothing, it is one of them.
    """
    sharder = next((found for found in upstream(pipe) if _is_filter(found)), None)
    if sharder is None or sharder.instance_id < sharder.num_of_instances - 1:
        return
    count, consumers = sharder.source_datapipe._number_of_samples_yielded, sharder.num_of_instances
    if 0 < count < consumers:
        warn_once(
            "idle",
            f"there are fewer shards than consumers (ranks x workers), {count} for {consumers}: {consumers - count} of "
            f"them have nothing to do. Use fewer workers, more shards, or .split_shards() in place of "
            ".sharding_filter(), which gives each a part of a shard",
        )
