"""What each of several consumers gets of the items of a pipe: a part of them, or all, as others do."""

from __future__ import annotations

import inspect
from collections.abc import Sized
from typing import Any, Literal

from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph import DataPipeGraph

from torchdata_wds.consumers import Place, upstream
from torchdata_wds.pipes.base import Held
from torchdata_wds.pipes.chain_text import short_name

__all__ = ["Share", "is_known", "reads_shards", "share_of"]


#: Stages that yield what each of their sources yields, one way or the other.
_MERGERS = {"Concater", "Multiplexer", "MultiplexerLongest", "SampleMixer", "SampleMultiplexerDataPipe"}

#: Stages that pair the items of their sources by position.
_ZIPPERS = {"Zipper", "ZipperLongest"}

#: Stages that keep a single item single, whatever they do to it.
_KEEPERS = {"Mapper", "WdsMapper", "Cycler", "Repeater", "InMemoryCacheHolder"}

#: Stages that look things up in their further sources, by key or in a function: each consumer needs all of those.
_LOOKUPS = {"IterKeyZipper", "MapKeyZipper", "StageComposer"}

#: What a function calls that divides by the worker or the rank, WebDataset's own among them.
_PLACE_NAMES = {"get_worker_info", "pytorch_worker_info", "get_rank", "get_world_size"}

#: What the consumers of a pipe get: each a part of its items; all of them everything; the same single item; or what
#: each chooses or draws by itself.
Share = Literal["part", "all", "constant", "own"]


def reads_shards(pipe: Any) -> bool:
    """Returns whether a pipe is a reader of shards: its class says so."""
    return bool(getattr(type(pipe), "reads_shards", False))


def is_known(pipe: Any) -> bool:
    """Returns whether a stage is torch's, torchdata's or ours."""
    return type(pipe).__module__.partition(".")[0] in ("torch", "torchdata", "torchdata_wds")


def _known_name(pipe: Any) -> str:
    """Returns the name of a stage whose behaviour is known; "" for one of somebody else."""
    return short_name(pipe) if is_known(pipe) else ""


def share_of(pipe: Any, sources: DataPipeGraph) -> tuple[Share, list[str]]:
    """Returns what each consumer gets of a pipe, and warnings about branches that are not divided as others are."""
    if hasattr(type(pipe), "apply_sharding"):
        return "part", []
    if not sources:
        return _share_of_source(pipe), []
    name = _known_name(pipe)
    found = [(source, *share_of(source, above)) for source, above in sources.values()]
    if name in _LOOKUPS:
        del found[1:]
    warnings = [warning for *_, inner in found for warning in inner]
    shares: list[Share] = [share for _, share, _ in found]
    if "part" in shares:
        for number, (source, share, _) in enumerate(found):
            if _is_doubled(name, source, share):
                warnings.append(_describe_branch(pipe, number, source))
        return "part", warnings
    if _heeds_place(pipe):
        return "own", warnings
    order: tuple[Share, ...] = ("all", "constant", "own")
    share = next(share for share in order if share in shares)
    return ("all" if share == "constant" and name not in _KEEPERS else share), warnings


def _share_of_source(pipe: Any) -> Share:
    """Returns what each consumer gets of a pipe that has no source."""
    if isinstance(place := vars(pipe).get("place"), Place):
        return "all" if place.consumers == 1 else "part"
    if isinstance(pipe, IterableWrapper):
        kind = type(pipe.iterable)
        if kind.__module__ not in ("builtins", "collections", "itertools", "torch", "numpy"):
            return "own"  # a dataset of the user's, which may heed the worker's number
        is_one = kind.__name__ == "repeat" or (isinstance(pipe.iterable, Sized) and len(pipe.iterable) == 1)
        return "constant" if is_one else "all"
    return "own" if _heeds_place(pipe) or inspect.ismethod(getattr(pipe, "set_seed", None)) else "all"


def _heeds_place(pipe: Any) -> bool:
    """Returns whether a pipe of somebody else, or a function in it, asks for the worker or rank that it runs in."""
    held = [value.value if isinstance(value, Held) else value for value in vars(pipe).values()]
    if not is_known(pipe):
        method = getattr(type(pipe), "__iter__", None)  # a MapDataPipe has none
        held += [] if method is None else [inspect.unwrap(method)]
    codes = [getattr(getattr(value, "func", value), "__code__", None) for value in held]
    return any(code is not None and not _PLACE_NAMES.isdisjoint(code.co_names) for code in codes)


def _is_doubled(name: str, source: Any, share: Share) -> bool:
    """Returns whether a source's items come once for each consumer although those of another source are divided."""
    if share not in ("all", "constant"):
        return False
    if name in _ZIPPERS:
        return share == "all"  # a constant meets whatever comes
    if name in _MERGERS:
        return True
    # A stage of somebody else may want all items of its second source; but shards are seldom read for that.
    return any(map(reads_shards, upstream(source)))


def _describe_branch(pipe: Any, number: int, source: Any) -> str:
    name, known = short_name(pipe), _known_name(pipe)
    chain = " <- ".join(map(short_name, upstream(source)))
    cost = "and meet the wrong items of the others" if known in _ZIPPERS else "several times together"
    cure = (
        f"Put one .sharding_filter() after the {name}, in place of those before it, or divide both branches alike"
        if known in _ZIPPERS
        else "Give it a .sharding_filter() of its own"
    )
    return (
        f"only some branches of {name} are divided among workers or ranks: source {number}, counted from 0, "
        f"({chain}) has no .sharding_filter(), so that its items come once in each of them, {cost}. {cure}"
    )
