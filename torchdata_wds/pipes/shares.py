"""Which of a pipe's items each of several consumers gets: a part, or all of them as every other does."""

from __future__ import annotations

import inspect
from collections.abc import Sized
from typing import Any, Literal

from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph import DataPipeGraph

from torchdata_wds.consumers import Place, upstream
from torchdata_wds.pipes.base import Held
from torchdata_wds.pipes.chain_text import known_name, short_name

#: Stages that yield the items of all their sources.
_MERGERS = {"Concater", "Multiplexer", "MultiplexerLongest", "SampleMixer", "SampleMultiplexerDataPipe"}
_ZIPPERS = {"Zipper", "ZipperLongest"}  # stages that pair the items of their sources by position

#: Stages that keep a single item single, whatever they do to it.
_KEEPERS = {"Mapper", "WdsMapper", "Cycler", "Repeater", "InMemoryCacheHolder"}

#: Stages that look things up in their further sources, by key or in a function: each consumer needs all of those items.
_LOOKUPS = {"IterKeyZipper", "MapKeyZipper", "StageComposer"}

#: What code calls that divides by the worker's number, or also by the rank; WebDataset's own has the second name.
WORKER_NAMES = {"get_worker_info", "pytorch_worker_info"}
_PLACE_NAMES = {*WORKER_NAMES, "get_rank", "get_world_size"}

#: What each consumer of a pipe gets: a part of its items; all of them; the same single item; or what it chooses itself.
Share = Literal["part", "all", "constant", "own"]


def reads_shards(pipe: Any) -> bool:
    """Returns whether a pipe is a reader of shards: its class says so."""
    return bool(getattr(type(pipe), "reads_shards", False))


def share_of(pipe: Any, sources: DataPipeGraph) -> tuple[Share, list[str]]:
    """Returns each consumer's share of a pipe's items, and warnings about branches that are not divided as others."""
    if hasattr(type(pipe), "apply_sharding"):
        return "part", []
    if not sources:
        return _share_of_source(pipe), []
    name = known_name(pipe)
    found: list[Any] = [(source, *share_of(source, above)) for source, above in sources.values()]
    if name in _LOOKUPS:
        del found[1:]
    warnings = [warning for *_, inner in found for warning in inner]
    shares: list[Share] = [share for _, share, _ in found]
    if "part" in shares:
        for number, (source, share, _) in enumerate(found):
            # A constant may meet whatever comes. A stage of another package may need all items of its second source,
            # but rarely reads shards for that.
            is_doubled = share == "all" or (share == "constant" and name not in _ZIPPERS)
            if is_doubled and (name in _ZIPPERS | _MERGERS or any(map(reads_shards, upstream(source)))):
                warnings.append(_describe_branch(pipe, number, source))
        return "part", warnings
    if _heeds_place(pipe):
        return "own", warnings
    # The most shared source decides: what is made of items that every consumer reads comes several times. One
    # constant item for all does not count as doubled, as long as only _KEEPERS handle it.
    order: tuple[Share, ...] = ("all", "constant", "own")
    share = next(share for share in order if share in shares)
    return ("all" if share == "constant" and name not in _KEEPERS else share), warnings


def _share_of_source(pipe: Any) -> Share:
    if isinstance(place := vars(pipe).get("place"), Place):
        return "all" if place.consumers == 1 else "part"
    if isinstance(pipe, IterableWrapper):
        kind = type(pipe.iterable)
        if kind.__module__ not in ("builtins", "collections", "itertools", "torch", "numpy"):
            return "own"  # a dataset of the user's, which may divide by the worker's number
        is_one = kind.__name__ == "repeat" or (isinstance(pipe.iterable, Sized) and len(pipe.iterable) == 1)
        return "constant" if is_one else "all"
    return "own" if _heeds_place(pipe) or inspect.ismethod(getattr(pipe, "set_seed", None)) else "all"


def _heeds_place(pipe: Any) -> bool:
    """Returns whether a pipe of another package, or a function in any pipe, calls for its worker's number or rank."""
    held = [value.value if isinstance(value, Held) else value for value in vars(pipe).values()]
    if not known_name(pipe):  # a MapDataPipe has no __iter__
        held.append(inspect.unwrap(getattr(type(pipe), "__iter__", lambda: None)))
    return any(calls(_PLACE_NAMES, getattr(value, "func", value)) for value in held)


def calls(names: set[str], function: Any) -> bool:
    """Returns whether a function has code in Python that uses one of the names."""
    code = getattr(function, "__code__", None)
    return code is not None and not names.isdisjoint(code.co_names)


def _describe_branch(pipe: Any, number: int, source: Any) -> str:
    name = short_name(pipe)
    chain = " <- ".join(map(short_name, upstream(source)))
    cost, cure = "several times together", "Give it a .sharding_filter() of its own"
    if known_name(pipe) in _ZIPPERS:
        cost = "and meet the wrong items of the others"
        cure = (
            f"Put one .sharding_filter() after the {name}, in place of those before it, or divide both branches alike"
        )
    return (
        f"only some branches of {name} are divided among workers or ranks: source {number}, counted from 0, "
        f"({chain}) has no .sharding_filter(), so that its items come once in each of them, {cost}. {cure}"
    )
