"""Notices that one rank reads its part of the data and the other ranks read nothing.

Rank 0 cannot know at its first item whether the other ranks will read theirs. So each rank notes in the key-value store
of ``torch.distributed`` that it has begun, and rank 0 looks for the others' notes once it has read everything. Nothing
here waits for another rank, and failures of the store are ignored. Only main processes can do this: workers have no
connection of their own.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import get_worker_info

from torchdata_wds.consumers import in_stock_worker, place_of
from torchdata_wds.handlers import warn_once
from torchdata_wds.pipes.foreign_loaders import find_dealer
from torchdata_wds.process_place import distributed_place

_PATIENCE = 1.0  # in seconds: how long rank 0 looks for notes of ranks that begin later, once per process
_LONGEST = 1.0  # in seconds: how long the store may take to answer

_is_fork = False  # whether a rank has forked this process: it shares the rank's connection, and must not use it
_noted: weakref.ReferenceType[Any] | None = None  # the store with this rank's note
_is_done = False  # whether the other ranks have been looked for


def _note_fork() -> None:
    global _is_fork
    _is_fork = distributed_place() is not None


os.register_at_fork(after_in_child=_note_fork)


def note_reader(pipe: Any) -> None:
    """Notes for the other ranks that this one has begun to read, if ranks divide the pipe among them."""
    global _noted
    store = store_of(pipe)
    if store is None or (_noted is not None and _noted() is store):
        return
    _noted = weakref.ref(store)
    rank = torch.distributed.get_rank()
    in_time(lambda: store.set(_key(rank), "1"))


def warn_of_lone_reader(pipe: Any) -> None:
    """Warns, once per process, if rank 0 has read its part to the end before the other ranks have begun with theirs."""
    global _is_done
    store = None if _is_done else store_of(pipe)
    if store is None or torch.distributed.get_rank():
        return
    _is_done = True
    ranks = torch.distributed.get_world_size()
    until = time.monotonic() + _PATIENCE
    while missing := in_time(lambda: [rank for rank in range(1, ranks) if not store.check([_key(rank)])]):
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    if missing:
        named = f"rank {missing[0]} has" if len(missing) == 1 else f"{len(missing)} other ranks have"
        warn_once(
            "lone rank",
            f"rank 0 has read its part of the shards, 1 of {ranks}, to the end, and {named} not begun to read. If rank "
            "0 reads for all ranks, the other parts are never seen. Iterate over the loader in every rank; or divide "
            "nothing among ranks, with torchdata_wds.WdsLoader(pipe, num_workers, ranks=(0, 1), seed=0) in rank 0",
        )


def _key(rank: int) -> str:
    return f"torchdata_wds/reader/{rank}"


def store_of(pipe: Any) -> Any:
    """Returns the store, if this is the main process of one of several ranks, which divide the pipe among them."""
    place = distributed_place()
    if place is None or place.consumers == 1 or _is_fork or get_worker_info() is not None or in_stock_worker():
        return None
    if place_of(pipe) != place or find_dealer(pipe) is not None:
        return None
    with suppress(Exception):
        from torch.distributed.distributed_c10d import _get_default_store

        return _get_default_store()
    return None


def in_time(function: Callable[[], Any]) -> Any:
    """Returns what a function returns; None if it fails or takes long."""
    found: list[Any] = []

    def call() -> None:
        with suppress(Exception):
            found.append(function())

    thread = threading.Thread(target=call, name="torchdata_wds-ranks", daemon=True)
    thread.start()
    thread.join(_LONGEST)
    return found[0] if found else None
