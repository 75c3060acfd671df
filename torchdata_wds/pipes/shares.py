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

#: Stages that pair the items of their sources by position.
_ZIPPERS = {"Zipper", "ZipperLongest"}

#: Stages that keep a single item single, whatever they do to it.
_KEEPERS = {"Mapper", "WdsMapper", "Cycler", "Repeater", "InMemoryCacheHolder"}

#: Stages that look things up in their further sources, by key or in a function: each consumer needs all of those items.
_LOOKUPS = {"IterKeyZipper", "MapKeyZipper", "StageComposer"}

#: Functions that code which divides by the worker or the rank calls, WebDataset's own among them.
_PLACE_NAMES = {"get_worker_info", "pytorch_worker_info", "get_rank", "get_world_size"}

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
    found = [(source, *share_of(source, above)) for source, above in sources.values()]
    if name in _LOOKUPS:
        del found[1:]
    warnings = [warning for *_, inner in found for warning in inner]
    shares: list[Share] = [share for _, share, _ in found]
    if "part" in shares:
        warnings += [
            _describe_branch(pipe, number, source)
            for number, (source, share, _) in enumerate(found)
            if _is_doubled(name, source, share)
        ]
        return "part", warnings
    if _heeds_place(pipe):
        return "own", warnings
    # The most shared source decides: what is made of items that every consumer reads comes several times. One
    # constant item for all does not count as doubled, as long as only _KEEPERS handle it.
    order: tuple[Share, ...] = ("all", "constant", "own")
    share = next(share for share in order if share in shares)
    return ("all" if share == "constant" and name not in _KEEPERS else share), warnings


def _share_of_source(pipe: Any) -> Share:
    """Returns each consumer's share of a pipe that has no source."""
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
    if not known_name(pipe):
        method = getattr(type(pipe), "__iter__", None)  # a MapDataPipe has none
        held += [] if method is None else [inspect.unwrap(method)]
    codes = [getattr(getattr(value, "func", value), "__code__", None) for value in held]
    return any(code is not None and not _PLACE_NAMES.isdisjoint(code.co_names) for code in codes)


def _is_doubled(name: str, source: Any, share: Share) -> bool:
    """Returns whether every consumer gets all items of a source although those of another source are divided."""
    if share not in ("all", "constant"):
        return False
    if name in _ZIPPERS:
        return share == "all"  # a constant meets whatever comes
    if name in _MERGERS:
        return True
    # A stage of another package may need all items of its second source, but rarely reads shards for that.
    return any(map(reads_shards, upstream(source)))


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
