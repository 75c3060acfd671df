"""What `wds bench` measures: the pipe that a user's function returns, or the usual one over shards."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds.cli.command import UsageError, usage_checked
from torchdata_wds.cli.inputs import list_all_inputs
from torchdata_wds.cli.map import load_function
from torchdata_wds.handlers import reraise_exception, warn_and_continue
from torchdata_wds.pipes.samples.collate import wds_collate
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.urls import STDIN

_BATCH = 64


class Subject(NamedTuple):
    """A pipe to measure."""

    name: str  # without secrets
    pipe: IterDataPipe[Any]
    workers: int = 0  # those of a loader that the function has returned
    step: Callable[[Any], Any] | None = None  # a training step


@contextmanager
def find_subject(arguments: argparse.Namespace, *, is_function: bool) -> Iterator[Subject]:
    """Finds what to measure; modules are searched for in the current folder too, inside the context."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)  # also for workers that are started
    try:
        subject = _pipe_of_function(arguments.shards[0]) if is_function else _pipe_of_shards(arguments)
        step: Any = None if arguments.step is None else load_function(arguments.step)
        yield subject._replace(step=step)
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)


def _pipe_of_function(name: str) -> Subject:
    from torchdata_wds.workers.loader import WdsLoader

    function: Any = load_function(name)
    made = function()
    if isinstance(made, WdsLoader):
        made.shutdown()
        return Subject(name, made.pipe, made._engine.num_workers)
    if not isinstance(made, IterDataPipe):
        raise UsageError(f"{name} has returned {made!r:.60}: it must return a pipe or a WdsLoader")
    return Subject(name, made)


def _pipe_of_shards(arguments: argparse.Namespace) -> Subject:
    urls = list_all_inputs(arguments)
    if STDIN in urls:
        raise UsageError("the shards are read several times, and standard input ('-') can be read only once")
    handler = warn_and_continue if arguments.errors == "skip" else reraise_exception
    pipe: Any = IterableWrapper(urls, deepcopy=False).shuffle().sharding_filter()
    pipe = pipe.load_wds_shards(handler=handler).group_by_key(handler=handler)
    if arguments.decode is not None:
        with usage_checked():
            pipe = pipe.wds_decode(arguments.decode, handler=handler)
    pipe = pipe.batch(arguments.batch or _BATCH)
    if arguments.decode is not None:
        pipe = pipe.collate(collate_if_alike)
    return Subject(", ".join(map(mask_url, arguments.shards)), pipe)


def collate_if_alike(samples: list[dict[str, Any]]) -> Any:
    """Collates samples that have the same fields, and returns others as they are."""
    return wds_collate(samples) if len({frozenset(sample) for sample in samples}) == 1 else samples
