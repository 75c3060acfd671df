"""Describes what a state belongs to: the graph, the shards and the number of consumers, so that differences show.

Shards are recognized by name and by what is cheap to find out: the size and two blocks of local shards, and the
contents of an index next to them. A copy on another disk matches, a rewritten shard does not. Dates are ignored, since
copying changes them. No server is contacted: remote shards are compared when they are read.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import FileLister, IterableWrapper, ShardingFilter, Shuffler

from torchdata_wds.consumers import no_traversal, traverse, upstream
from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.index import parse_index_header
from torchdata_wds.format.index.sidecars import local_index
from torchdata_wds.pipes.base import Held
from torchdata_wds.pipes.chain_text import full_name, short_name
from torchdata_wds.pipes.resume_facts import said_by
from torchdata_wds.storage.urls import is_local, local_path, mask_url
from torchdata_wds.workers.resume.planner import COLLECTIONS, all_pipes

_MOST_SHARDS = 64  # how many shards are examined, spread evenly: keeps a state small, and quick to take
_BLOCK = 4096
_FEW_ITEMS = 1000


class ShardContent(NamedTuple):
    """What is known about a local shard."""

    number: int  # its place in the list
    size: int  # in bytes
    check: int  # a CRC-32 of its first block and a block from its middle
    samples: int | None = None  # the number in its index; None without an index
    digest: str = ""  # the first digits of the SHA-256 in its index; "" without one


def examined_of(shards: Sequence[Any]) -> dict[int, Any]:
    """Returns the shards of a list that are examined, by number."""
    return {number: shards[number] for number in range(0, len(shards), -(-len(shards) // _MOST_SHARDS) or 1)}


def contents_of(shards: Mapping[int, Any]) -> list[ShardContent]:
    """Examines the local ones of some numbered shards; leaves out those that cannot be read."""
    found = []
    for number, shard in shards.items():
        if not isinstance(shard, (str, os.PathLike)) or not is_local(os.fspath(shard)):
            continue
        path = Path(local_path(os.fspath(shard)))
        with suppress(OSError, ValueError):
            if path.is_file():  # opening a named pipe would wait for a writer
                with path.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    check = zlib.crc32(file.read(_BLOCK))
                    file.seek(size // 2)
                    check = zlib.crc32(file.read(_BLOCK), check)
                found.append(ShardContent(number, size, check, *_said_by_index(os.fspath(shard))))
    return found


def describe_changes(
    shards: Mapping[int, Any], then: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]
) -> list[str]:
    """Returns the differences between the contents of shards then and now, both as plain lists."""
    before = {old.number: old for old in (ShardContent(*content) for content in then)}
    changes = []
    for content in (ShardContent(*content) for content in now):
        old = before.get(content.number, content)
        shown = f"shard {mask_url(os.fspath(shards[content.number]))}"
        if old.size != content.size:
            changes.append(f"{shown}: {old.size:,} bytes then, {content.size:,} now")
        elif old.samples is not None and content.samples is not None and old.samples != content.samples:
            changes.append(f"{shown}: {old.samples:,} samples by its index then, {content.samples:,} now")
        elif old.check != content.check or (old.digest and content.digest and old.digest != content.digest):
            changes.append(f"{shown}: other contents then, of the same size")
    return changes


def _said_by_index(shard: str) -> tuple[int | None, str]:
    if (path := local_index(shard)) is None:
        return None, ""
    try:
        with Path(path).open("rb") as file:
            header = parse_index_header(file.readline(1 << 16), path)
    except (OSError, ValueError, ShardFormatError):
        return None, ""
    return header.samples, (header.sha256 or "")[:16]


#: Plain values only, except for the lists of shards, which are not saved.
Signature = dict[str, Any]

#: Attributes that do not affect which items a pipe yields, or that change while it runs.
_NO_ARGUMENTS = {
    *("datapipe", "source_datapipe", "datapipes", "others", "iterable"),
    *("storage_options", "rewrite", "read_ahead", "handler", "skipped", "counts"),
    *("groups", "num_of_instances", "instance_id", "reset"),
}

_MOST_CHANGES = 3  # how many changed shards a message names
_LISTS = "lists"  # the examined shards of each list, which are not saved in a state


def graph_signature(datapipe: IterDataPipe[Any]) -> list[list[Any]]:
    """Describes the stages of a graph: each one's name and a checksum of its arguments."""
    described = []
    for pipe in all_pipes(traverse(datapipe)):
        if (names := said_by(pipe, "state_arguments")) is None:
            names = [name for name in vars(pipe) if name[0] != "_" and name not in _NO_ARGUMENTS]
        arguments = [(name, list(_describe(vars(pipe)[name]))) for name in sorted(names)]
        text = f"{full_name(type(pipe))} {arguments!r}"
        described.append([short_name(pipe), zlib.crc32(text.encode("utf-8", "surrogateescape"))])
    return described


def _describe(value: Any, depth: int = 5) -> Iterator[str]:
    """Yields words that describe a value, the same in every process."""
    # A pickle, or the repr of a function, object or set, may change between processes (addresses, the order of a set),
    # and then a program would refuse its own state. So an unknown object contributes only its class.
    yield type(value).__qualname__
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, os.PathLike)):
        yield repr(value)
    elif isinstance(value, (np.ndarray, torch.Tensor)):
        data = np.ascontiguousarray(value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value)
        yield f"{data.dtype} {data.shape} {hashlib.sha256(data.tobytes()).hexdigest()}"
    elif isinstance(value, (type, IterDataPipe)) or not depth:
        yield getattr(value, "__qualname__", "")
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield from (*_describe(key, depth - 1), *_describe(inside, depth - 1))
    elif isinstance(value, (set, frozenset)):
        yield from sorted(" ".join(_describe(inside, depth - 1)) for inside in value)
    elif isinstance(value, Sequence):
        for inside in value:
            yield from _describe(inside, depth - 1)
    elif isinstance(value, Held):
        yield from _describe(value.value, depth - 1)
    elif isinstance(value, functools.partial):
        for inside in (value.func, value.args, value.keywords):
            yield from _describe(inside, depth - 1)
    else:  # functions by name, other objects by their class
        yield full_name(value)


class Listing(NamedTuple):
    """What is kept of the lists of shards that the sources of graphs gave at one moment."""

    shards: list[list[int]]  # the number of each list's shards, and a checksum of their names
    examined: list[dict[int, Any]]  # those of its shards whose contents are compared, by number
    sizes: str | None  # the sample counts that splitters use

    def describe(self) -> Signature:
        """Returns the signature of the shards, with their contents now."""
        contents = [[list(content) for content in contents_of(shards)] for shards in self.examined]
        described = {"shards": self.shards, "contents": contents, _LISTS: self.examined}
        return described if self.sizes is None else {**described, "index": self.sizes}


def describe_shards(*datapipes: Any) -> Signature:
    """Describes the shards that known sources of graphs list now: their number, a checksum of names, and contents."""
    return list_shards(*datapipes).describe()


def list_shards(*datapipes: Any) -> Listing:
    """Lists the shards of known sources of graphs now."""
    lists = [shards for datapipe in datapipes for shards in _listed(datapipe)]
    pipes = [pipe for datapipe in datapipes for pipe in upstream(datapipe)]
    reads = any(map(_reads_shards, pipes))
    # The sample counts that splitters use, as far as they are known without contacting a server.
    urls = [[os.fspath(url) for url in shards if isinstance(url, (str, os.PathLike))] for shards in lists]
    known = [pipe.known_counts(shards) for pipe in pipes if said_by(pipe, "known_counts") for shards in urls]
    counts = [count for found in known for count in found or ()]
    index = f"{sum(counts):,} samples (checksum {zlib.crc32(repr(counts).encode()):08x})" if counts else None
    return Listing(list(map(_digest, lists)), [examined_of(shards) if reads else {} for shards in lists], index)


def is_quickly_listed(*datapipes: Any) -> bool:
    """Returns whether graphs read shards, and listing them asks no store and takes little time."""
    pipes = [pipe for datapipe in datapipes for pipe in upstream(datapipe)]
    wrapped = [pipe.iterable for pipe in pipes if type(pipe) is IterableWrapper]
    return any(map(_reads_shards, pipes)) and all(
        isinstance(items, (list, tuple))
        and (len(items) <= _FEW_ITEMS or set(map(type, items)) == {str})
        and not any(map(_is_searched_for, items))
        for items in wrapped
    )


def _is_searched_for(item: Any) -> bool:
    """Returns whether an item may be a pattern or folder of a store."""
    if isinstance(item, (list, tuple)):
        return any(map(_is_searched_for, item))
    return isinstance(item, str) and "://" in item and ("*" in item or "[" in item or item.endswith("/"))


def _reads_shards(pipe: Any) -> bool:
    return bool(getattr(type(pipe), "reads_shards", False))


def _listed(datapipe: IterDataPipe[Any]) -> list[Sequence[Any]]:
    lists: list[Sequence[Any]] = []
    listed: set[int] = set()
    for pipe in {id(found): found for found in upstream(datapipe)}.values():
        if said_by(pipe, "list_again"):
            # These stages change only the order and the number of the patterns.
            order_only = (Shuffler, ShardingFilter)
            above = [found for found in upstream(pipe.source_datapipe) if type(found) not in order_only]
            if all(type(found) is IterableWrapper and isinstance(found.iterable, COLLECTIONS) for found in above):
                listed.update(map(id, above))
                lists.append(pipe.list_again([item for found in above for item in found.iterable]))
        elif type(pipe) is FileLister:
            listed.update(map(id, upstream(pipe)))
            with no_traversal():
                copied = copy.deepcopy(pipe)
            lists.append(list(copied))
        elif type(pipe) is IterableWrapper and id(pipe) not in listed and isinstance(pipe.iterable, COLLECTIONS):
            lists.append(pipe.iterable if isinstance(pipe.iterable, (list, tuple, range)) else list(pipe.iterable))
    return lists


def _digest(items: Sequence[Any]) -> list[int]:
    digest = 0
    for start in range(0, len(items), _FEW_ITEMS):
        some = items[start : start + _FEW_ITEMS]
        text = "".join(item if isinstance(item, str) else " ".join(_describe(item, 2)) for item in some)
        digest = zlib.crc32(text.encode("utf-8", "surrogateescape"), digest)
    return [len(items), digest]


def check_signature(then: Signature, now: Signature, reasons: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raises a ValueError that names each difference between a saved signature and that of the present graph.

    `reasons` say, by the name of a value, why a difference matters.
    """
    lists = now.get(_LISTS, ())
    then, now = (json.loads(json.dumps(without_lists(signature))) for signature in (then, now))
    differences = [
        f"{name}: {_shown(then.get(name))} then, {_shown(now.get(name))} now"
        + (f" ({reasons[name]})" if name in reasons else "")
        for name in {**then, **now}
        if name not in ("stages", "contents") and then.get(name) != now.get(name)
    ]
    if then.get("shards") == now.get("shards"):
        described = zip(lists, then.get("contents", ()), now.get("contents", ()), strict=False)
        changes = [change for found in described for change in describe_changes(*found)]
        differences += changes[:_MOST_CHANGES]
        if len(changes) > _MOST_CHANGES:
            differences.append(f"and {len(changes) - _MOST_CHANGES:,} more shards")
    old, new = then.get("stages", []), now["stages"]
    names_then, names_now = [name for name, _ in old], [name for name, _ in new]
    if names_then != names_now:
        differences.append(f"the graph: {' <- '.join(names_then)} then, {' <- '.join(names_now)} now")
    else:
        changed = [name for (name, before), (_, after) in zip(old, new, strict=True) if before != after]
        differences.extend(f"the arguments of {name}" for name in changed)
    if differences:
        raise ValueError(
            "the state belongs to a different run and cannot be resumed here. Differences: " + "; ".join(differences)
        )


def without_lists(signature: Signature) -> Signature:
    """Returns the part of a signature that is saved in a state."""
    return {name: value for name, value in signature.items() if name != _LISTS}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " + ".join(f"{count:,} shards (checksum {digest:08x})" for count, digest in value) or "no shards"
    return repr(value)
