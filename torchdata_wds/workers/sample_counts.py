"""Counts the samples that the workers of a rank read from shards in each epoch, by the shards' indexes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data.datapipes import iter as native

from torchdata_wds.environment import pattern_variable
from torchdata_wds.format.index import IndexHeader, parse_index_header
from torchdata_wds.format.index.sidecars import local_index
from torchdata_wds.format.index.slices import ShardSlice, check_size
from torchdata_wds.option_types import KeyRule
from torchdata_wds.pipes.chain_text import form_name, sources_of
from torchdata_wds.pipes.resume_facts import said_by
from torchdata_wds.pipes.shards.list_shards import ShardResamplerIterDataPipe
from torchdata_wds.pipes.shards.split_shards import share_of, whole_shards
from torchdata_wds.process_place import Place
from torchdata_wds.storage.places import StorageOptions, resolve
from torchdata_wds.workers.resume.planner import COLLECTIONS

STATED = "pass the loader length=n, the number that all workers of a rank yield together"
COUNTED = f"write .split_shards(index=True) instead of .sharding_filter(), or {STATED}"
CURE = f"End the graph with .wds_epoch(n), or {STATED}"

#: Finds the places of the workers, among all consumers, as a sharding filter counts them.
Places = Callable[[Any], list[Place]]


def unknown_length(why: str, cure: str = CURE) -> TypeError:
    """Makes the error for a number of items that is not known, or not the same in every epoch."""
    return TypeError(f"the number of items in an epoch is not known: {why}. {cure[0].upper()}{cure[1:]}")


class SampleCounts(NamedTuple):
    """How many samples each worker reads in one epoch."""

    each: list[int]
    is_fixed: bool  # whether that is so in every epoch; otherwise only their sum is


class _Shards(NamedTuple):
    """Which shards, or patterns of shards, each worker reads in one epoch."""

    each: list[list[Any]]
    all: list[Any]  # before they were divided
    is_divided: bool = False
    is_ordered: bool = True  # whether they come in the same order in every epoch
    is_fixed: bool = True  # whether each worker has the same ones in every epoch
    is_whole: bool = True  # whether the workers of a rank together have all of them
    counts: list[int] | None = None  # the samples that each worker reads, where the division counts them


def samples_per_worker(grouper: Any, workers: int, places: Places) -> SampleCounts:
    """Returns how many samples a grouping yields in each worker; raises a TypeError where that is not known."""
    if (obstacle := grouper.obstacle()) is not None:
        raise unknown_length(f"{obstacle}, and may change the number of samples")
    loader = grouper.source_datapipe
    options = {"group_by_key(fields=)": grouper.fields, "load_wds_shards(select=)": loader.select}
    for option in (name for name, value in options.items() if value is not None):
        raise unknown_length(f"{option} may leave out whole samples")
    shards = _shards_of(loader.source_datapipe, workers, places)
    if shards.counts is not None:
        return SampleCounts(shards.counts, True)
    if loader.concatenated or loader.rename is not None:
        raise unknown_length("load_wds_shards(concatenated=, rename=) may make other samples than an index counts")
    needed = dict.fromkeys(map(_name_of, chain(*shards.each) if shards.is_fixed else shards.all))
    counts = {name: _samples_beside(name, grouper.keys, loader.storage_options) for name in needed}
    is_fixed = shards.is_fixed or len(set(counts.values())) == 1
    if not is_fixed and not shards.is_whole:
        raise unknown_length(
            f"the shards hold from {min(counts.values()):,} to {max(counts.values()):,} samples, and each rank reads "
            "different ones in each epoch",
            COUNTED,
        )
    return SampleCounts([sum(_samples_of(shard, counts) for shard in part) for part in shards.each], is_fixed)


def _shards_of(pipe: Any, workers: int, places: Places, *, may_ask: bool = False) -> _Shards:
    """Lists the shards that come from a stage, or patterns of them; `may_ask` a server."""
    if type(pipe) is native.IterableWrapper and isinstance(pipe.iterable, COLLECTIONS):
        items = list(pipe.iterable)
        return _Shards([items] * workers, items, is_ordered=not isinstance(pipe.iterable, (set, frozenset)))
    if said_by(pipe, "list_all") and (patterns := pipe.patterns()) is not None:  # of a dataset file
        _check_that_no_server_is_asked(patterns, pipe.storage_options)
        items = pipe.list_all()
        return _Shards([items] * workers, items)
    sources = sources_of(pipe)
    if len(sources) != 1 or type(pipe) is ShardResamplerIterDataPipe:
        raise unknown_length(f"which shards {form_name(pipe)} yields is not known")
    source = sources[0]
    if said_by(pipe, "count_samples"):
        may_ask = pipe.index is not None and not pipe.index.is_local
        (before,) = sources_of(source)
        found = _shards_of(before, workers, places, may_ask=may_ask)
        if pipe.index is None:
            return _divided(found, places(source), lambda shards, place: list(whole_shards(shards, place)))
        total = sum(pipe.index.of(list(map(_name_of, found.all)), pipe.storage_options))
        shares = [share_of(total, place, pipe.even) for place in places(source)]
        if not any(shares):  # an error as soon as the loader is iterated; a length of 0 would hide it
            why = f"split_shards has {total:,} samples, and this rank would get none of them"
            raise unknown_length(why, "use more shards, or fewer ranks or workers")
        return found._replace(counts=[sum(piece.stop - piece.start for piece in share) for share in shares])
    found = _shards_of(source, workers, places, may_ask=may_ask)
    if type(pipe) is native.ShardingFilter:
        return _divided(found, places(pipe), lambda shards, place: shards[place.number :: place.consumers])
    if type(pipe) is native.Shuffler:
        return found._replace(is_ordered=found.is_ordered and not pipe._enabled)
    if said_by(pipe, "list_again") and found.is_fixed:
        if not may_ask:
            _check_that_no_server_is_asked(found.all, pipe.storage_options)
        distinct = {id(patterns): patterns for patterns in (*found.each, found.all)}
        lists = {key: pipe.list_again(patterns) for key, patterns in distinct.items()}
        return found._replace(each=[lists[id(patterns)] for patterns in found.each], all=lists[id(found.all)])
    if said_by(pipe, "repeats_shards") and not said_by(pipe, "list_again"):
        return found
    raise unknown_length(f"which shards {form_name(pipe)} yields is not known")


def _divided(found: _Shards, places: list[Place], divide: Callable[[list[Any], Place], list[Any]]) -> _Shards:
    if found.is_divided:
        raise unknown_length("the shards are divided twice")
    return _Shards(
        [divide(found.all, place) for place in places],
        found.all,
        is_divided=True,
        is_ordered=found.is_ordered,
        is_fixed=found.is_ordered or places[0].consumers == 1,
        is_whole=len(set(places)) == places[0].consumers,
    )


def _name_of(shard: Any) -> str:
    name = os.fspath(shard.url if isinstance(shard, ShardSlice) else shard) if _is_named(shard) else None
    if not isinstance(name, str):
        raise unknown_length(f"load_wds_shards gets {type(shard).__name__}, not the name of a shard")
    return name


def _is_named(shard: Any) -> bool:
    return isinstance(shard, (str, os.PathLike, ShardSlice))


def _samples_of(shard: Any, counts: dict[str, int]) -> int:
    """Returns how many samples of a shard a worker reads: all, or those of a slice."""
    count = counts[_name_of(shard)]
    if not isinstance(shard, ShardSlice):
        return count
    return len(range(shard.start, count if shard.stop is None else min(shard.stop, count), shard.step))


def _samples_beside(shard: str, keys: KeyRule, options: StorageOptions) -> int:
    """Returns how many samples a local shard has by the index beside it, which must be that of its present bytes."""
    place = resolve(shard, options)
    if not place.is_local:
        raise unknown_length(f"the remote shard {place.shown} does not say how many samples it has", COUNTED)
    if (path := local_index(place.url)) is None:
        cure = f"make one with index_shard, or {STATED}"
        raise unknown_length(f"shard {place.shown} has no index beside it", cure)
    stat = os.stat(path)  # noqa: PTH116 - a str
    header = _read_header(path, stat.st_mtime_ns, stat.st_size)
    if header.keys != keys:
        raise unknown_length(f"the index beside shard {place.shown} is one of keys={header.keys!r}, not {keys!r}")
    check_size(header, place.url)
    return header.samples


@lru_cache(maxsize=1 << 16)
def _read_header(path: str, *_: int) -> IndexHeader:
    """Reads the first line of an index; again only if its time or size has changed, since len() is called often."""
    with Path(path).open("rb") as file:
        return parse_index_header(file.readline(1 << 20).rstrip(), path)


def _check_that_no_server_is_asked(patterns: Sequence[Any], options: StorageOptions) -> None:
    """Raises if a store would have to be searched for shards."""
    for pattern in patterns:
        if isinstance(pattern, (list, tuple)):
            _check_that_no_server_is_asked(pattern, options)
            continue
        for part in str(pattern).split("::"):
            full = re.sub(r"\$\{(\w+)\}", lambda found: pattern_variable(found[1]) or "", part)
            place = resolve(full, options)
            is_searched = not place.is_local and place.scheme not in ("http", "https", "pipe", "-")
            if is_searched and (full.endswith("/") or not set("*?[").isdisjoint(full)):
                raise unknown_length(f"only a server knows which shards {place.shown} matches", COUNTED)
