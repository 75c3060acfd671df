"""Reports running graphs whose work is not divided among their consumers, and says what to write instead.

Where it is certain that items come several times although the graph asks for division, that is an error, before the
first item; where a program may have divided the work in its own way, a warning.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sized
from typing import Any

from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper, ShardingFilter
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import DataPipeGraph
from torch.utils.data.graph_settings import get_all_graph_pipes

from torchdata_wds import consumers
from torchdata_wds.consumers import graph_of, in_stock_worker, stock_place, upstream
from torchdata_wds.errors import DivisionError
from torchdata_wds.handlers import warn_once
from torchdata_wds.pipes.chain_text import known_name, short_name
from torchdata_wds.pipes.foreign_loaders import find_dealer, heed_dealer
from torchdata_wds.pipes.lone_ranks import note_reader
from torchdata_wds.pipes.own_division import calls_for_place, divides_itself, flows_to_loader, is_held, may_divide
from torchdata_wds.pipes.pickling import Held
from torchdata_wds.pipes.running import note_root, running_pipes
from torchdata_wds.pipes.seeds import agree_on_passes
from torchdata_wds.process_place import Place, distributed_place

# Stages that yield the items of all their sources, and those that pair them by position.
_MERGERS = {"Concater", "Multiplexer", "MultiplexerLongest", "SampleMixer", "SampleMultiplexerDataPipe"}
_ZIPPERS = {"Zipper", "ZipperLongest"}
# Stages that keep a single item single, whatever they do to it.
_KEEPERS = {"Mapper", "WdsMapper", "Cycler", "Repeater", "InMemoryCacheHolder"}
# Stages that look up items of their other sources, by key or in a function: each consumer needs all of those items.
_LOOKUPS = {"IterKeyZipper", "MapKeyZipper", "StageComposer"}

_NO_FILTER = (
    "sharding",
    "shards are read in several workers or ranks with no .sharding_filter() before .load_wds_shards(): each of them "
    "reads every shard, so each sample comes several times (unless each has its own list of shards)",
)
_LATE_FILTER = (
    "late",
    "shards are read in several workers or ranks, and the .sharding_filter() comes after the stage that reads them: "
    "each sample comes once, but every worker reads every shard. Put the filter before .load_wds_shards(), as in "
    ".list_shards().shuffle().sharding_filter().load_wds_shards()",
)


class _Checked:
    """The graph checked last: its last pipe, the ids of all pipes, and whether one has created its own reader."""

    def __init__(self, root: Any, pipes: set[int]) -> None:
        self.root = weakref.ref(root)
        self.pipes, self.is_entered = pipes, False


_checked: _Checked | None = None


def check_workers(pipe: IterDataPipe[Any]) -> None:
    """Raises or warns, once per process, if the consumers of a pipe that is about to read shards divide it wrongly."""
    # Called at the first item, not at construction: only then has torch told each worker its place, and the graph that
    # runs is on the stack. A reader outside that graph was created by one of its stages, such as wds_compose(f): unless
    # that stage gets only a part of the items, all consumers may read the same shards through it.
    if in_stock_worker() and not consumers.is_joined() and not stock_place().number:
        warn_once(
            "join",
            "shards are read in a worker of torchdata's MultiProcessingReadingService, which fails when its workers' "
            "streams differ in length: end the workers' part with .join_workers(), or use "
            "torchdata_wds.WorkersReadingService",
        )
    heed_dealer(pipe)
    note_reader(pipe)
    if not _is_shared(pipe):
        return
    agree_on_passes(pipe)
    running = running_pipes() or [pipe]
    root = running[-1]
    checked = _checked
    if checked is None or checked.root() is not root:
        checked = check_division(root, for_reader=True)
    if checked is None or id(pipe) in checked.pipes or checked.is_entered:
        return
    checked.is_entered = True
    stage = next((outer for outer in running if id(outer) in checked.pipes), root)
    share = _share_at(stage)
    if share == "part" or divides_itself():
        return
    filters = [found for found in upstream(root) if isinstance(found, ShardingFilter)]
    if any(above is stage for found in filters for above in upstream(found)):
        _warn(*_LATE_FILTER)
    elif (
        not _report_untold(list(upstream(pipe)), root, is_certain=share == "all")
        and share == "all"
        and consumers.find_sharder(pipe) is None
    ):
        _warn(*_NO_FILTER)


def check_division(root: Any, *, workers: int | None = None, for_reader: bool = False) -> _Checked | None:
    """Raises or warns, once per process, if the consumers of the graph that ends in `root` divide it wrongly."""
    # A main process passes `workers` if it will tell them their places. Readers of shards issue their own warning.
    global _checked
    graph = graph_of(root) if _is_shared(root, workers) else None
    if graph is None:
        return None
    pipes: list[Any] = get_all_graph_pipes(graph)
    if not for_reader and workers is None and _runs_on_part(root):
        return None
    _checked = None  # an error is raised again in the next epoch
    note_root(root)
    share, warnings = _share_of(root, graph[id(root)][1])
    is_untold = workers is None and _report_untold(pipes, root)
    _checked = _Checked(root, set(map(id, pipes)))
    if is_untold:
        return _checked
    for warning in warnings:
        _warn(warning, warning)  # once for each branch
    if share == "all" and any(map(_reads_shards, pipes)):
        if not divides_itself():
            _warn(*_NO_FILTER)
    elif share == "all" and not for_reader and all(map(known_name, pipes)):
        _warn(
            "unfiltered",
            "this graph has no .sharding_filter(): each worker or rank yields all of its items, so they come several "
            "times. Put one after .shuffle(), before the stages that do the work",
        )
    elif any(isinstance(pipe, ShardingFilter) and any(map(_reads_shards, upstream(pipe))) for pipe in pipes):
        _warn(*_LATE_FILTER)
    return _checked


def _runs_on_part(root: Any) -> bool:
    """Returns whether a stage of another graph runs this one, and gets only a part of that graph's items."""
    outer = (stage for stage in running_pipes() if all(found is not root for found in upstream(stage)))
    return any(_share_at(stage) == "part" and not _is_untold_of_workers(stage) for stage in outer)


def _is_untold_of_workers(stage: Any) -> bool:
    filters = (found for found in upstream(stage) if isinstance(found, ShardingFilter))
    return any(_untold(found.groups, _workers().consumers, 1) == "workers" for found in filters)


def _share_at(stage: Any) -> str:
    graph = graph_of(stage)
    return "part" if graph is None else _share_of(stage, graph[id(stage)][1])[0]


def _reads_shards(pipe: Any) -> bool:
    return bool(getattr(type(pipe), "reads_shards", False))


def _share_of(pipe: Any, sources: DataPipeGraph) -> tuple[str, list[str]]:
    """Returns each consumer's share of a pipe's items, and warnings about branches divided unlike others."""
    # Of 10 samples, 3 consumers get 4, 3 and 3 after a filter ("part"), or 10 each without one ("all"). A source may
    # also repeat a single item ("constant"), or divide in code of its own ("own"). Branches must match: if zip pairs
    # consumer 1's samples 1, 4 and 7 with all labels, sample 1 meets label 0, and sample 4 meets label 1.
    if hasattr(type(pipe), "apply_sharding"):
        return "part", []
    if not sources:
        return _share_of_source(pipe), []
    name = known_name(pipe)
    found: list[Any] = [(source, *_share_of(source, above)) for source, above in sources.values()]
    if name in _LOOKUPS:
        del found[1:]
    warnings = [warning for *_, inner in found for warning in inner]
    shares = [share for _, share, _ in found]
    if "part" in shares:
        for number, (source, share, _) in enumerate(found):
            # A constant may be zipped with anything. A stage of another package may need all items of its second
            # source, but rarely reads shards for that.
            is_doubled = share == "all" or (share == "constant" and name not in _ZIPPERS)
            if is_doubled and (name in _ZIPPERS | _MERGERS or any(map(_reads_shards, upstream(source)))):
                warnings.append(_describe_branch(pipe, number, source))
        return "part", warnings
    if _heeds_place(pipe):
        return "own", warnings
    # The most shared source decides, since what is made of items that every consumer reads comes several times. A
    # constant does not count as doubled while only _KEEPERS handle it.
    share = next(share for share in ("all", "constant", "own") if share in shares)
    return ("all" if share == "constant" and name not in _KEEPERS else share), warnings


def _share_of_source(pipe: Any) -> str:
    if isinstance(place := vars(pipe).get("place"), Place):
        return "all" if place.consumers == 1 else "part"
    if isinstance(pipe, IterableWrapper):
        kind = type(pipe.iterable)
        if kind.__module__ not in ("builtins", "collections", "itertools", "torch", "numpy"):
            return "own"  # a user's dataset, which may divide by the worker's number
        is_one = kind.__name__ == "repeat" or (isinstance(pipe.iterable, Sized) and len(pipe.iterable) == 1)
        return "constant" if is_one else "all"
    return "own" if _heeds_place(pipe) or inspect.ismethod(getattr(pipe, "set_seed", None)) else "all"


def _heeds_place(pipe: Any) -> bool:
    """Returns whether a pipe of another package, or a function in any pipe, looks up its worker's number or rank."""
    held = [value.value if isinstance(value, Held) else value for value in vars(pipe).values()]
    if not known_name(pipe):  # a MapDataPipe has no __iter__
        held.append(inspect.unwrap(getattr(type(pipe), "__iter__", lambda: None)))
    return any(calls_for_place(getattr(value, "func", value)) for value in held)


def _describe_branch(pipe: Any, number: int, source: Any) -> str:
    name = short_name(pipe)
    chain = " <- ".join(map(short_name, upstream(source)))
    cure = "several times in total. Give it its own .sharding_filter()"
    if known_name(pipe) in _ZIPPERS:
        cure = (
            f"and are paired with the wrong items of the others. Put one .sharding_filter() after the {name}, in place "
            "of those before it, or divide both branches alike"
        )
    return (
        f"only some branches of {name} are divided among workers or ranks: source {number}, counted from 0, "
        f"({chain}) has no .sharding_filter(), so that its items come once in each of them, {cure}"
    )


def _workers() -> Place:
    """Returns the place of this process among the workers of its loader."""
    worker = get_worker_info()
    return stock_place() if worker is None else Place(worker.num_workers, worker.id)


def _ranks(pipe: Any) -> int:
    """Returns among how many ranks a pipe's work must be divided: not if a foreign loader deals out its items."""
    return 1 if find_dealer(pipe) else (distributed_place() or Place()).consumers


def _is_shared(pipe: Any, workers: int | None = None) -> bool:
    """Returns whether several consumers run a pipe; `workers` is their number if this is not one of them."""
    return (_workers().consumers if workers is None else workers) * _ranks(pipe) > 1


def _warn(kind: str, message: str) -> None:
    """Warns in one of the workers only."""
    if not _workers().number:
        warn_once(kind, message)


def _report_untold(pipes: list[Any], root: Any, *, is_certain: bool = True) -> bool:
    """Raises or warns if the filters of a graph do not know its consumers; returns whether they do not."""
    counts = any(short_name(pipe) == "EpochCounter" for pipe in pipes)
    # A resampler divides nothing and finds its own place. Counting epochs needs the filter.
    resamplers = [pipe for pipe in pipes if known_name(pipe) == "ShardResampler"]
    own = set() if counts else {id(pipe.source_datapipe) for pipe in resamplers}
    filters = [pipe for pipe in pipes if isinstance(pipe, ShardingFilter) and id(pipe) not in own]
    workers, ranks = _workers().consumers, _ranks(root)
    untold = {_untold(found.groups, workers, ranks) for found in filters}
    if "workers" in untold:
        asks = divides_itself()
        if asks and not is_held(root, getattr(get_worker_info(), "dataset", None)):
            return True  # each worker has made a graph for its own shards
        message = (
            f"the .sharding_filter() (or .split_shards()) of this graph was never told of the {workers} workers that "
            f"run it: every worker reads everything, and each sample comes {workers} times"
        )
        cure = (
            "torch tells it only if the pipe itself is the DataLoader's dataset, not inside another dataset. Pass the "
            "pipe itself to DataLoader, or use torchdata_wds.WdsLoader, or DataLoader2 with WorkersReadingService, or "
            "call torch.utils.data.graph_settings.apply_sharding(pipe, num_workers, worker_id) in each worker before "
            "it iterates"
        )
        if is_certain and not resamplers and not asks and flows_to_loader() and not may_divide():
            raise DivisionError(f"{message}.", advice=cure)
        _warn(
            "wrapped", f"{message}, unless the program divides them itself or needs all of them in each worker. {cure}"
        )
    elif "ranks" in untold:
        _warn(
            "ranks",
            f"each of the {ranks} ranks of torch.distributed reads everything (unless each has its own list of "
            "shards), because the .sharding_filter() or .split_shards() of this graph was never told of them. Pass the "
            "pipe itself to torch's DataLoader, or use torchdata_wds.WdsLoader, or DataLoader2 with "
            "WorkersReadingService(n, distributed=True), or "
            "call torch.utils.data.graph_settings.apply_sharding(pipe, world_size, rank) before iterating",
        )
    return bool(untold - {None})


def _untold(groups: dict[Any, tuple[int, int]], workers: int, ranks: int) -> str | None:
    """Returns which consumers a filter does not know, judging by its groups."""
    # torch's DataLoader sets workers and ranks as one number (2 workers on 2 ranks are a DEFAULT of 4), services as
    # two. A user may set fewer ranks than torch.distributed has: ranks of one model replica read the same data.
    default = groups.get(SHARDING_PRIORITIES.DEFAULT)
    if default is not None:
        count = default[0]
        return "workers" if count % workers else "ranks" if count == workers and ranks > 1 else None
    if workers > 1 and groups.get(SHARDING_PRIORITIES.MULTIPROCESSING, (1, 0))[0] == 1:
        return "workers"
    return "ranks" if ranks > 1 and SHARDING_PRIORITIES.DISTRIBUTED not in groups else None
