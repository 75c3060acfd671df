"""Seeds random pipes by epoch and place, and by pass within a stream, in orders that all consumers agree on."""

from __future__ import annotations

import functools
import inspect
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import ShardingFilter, Shuffler
from torch.utils.data.graph import DataPipe
from torch.utils.data.graph_settings import get_all_graph_pipes

from torchdata_wds.consumers import place_of, traverse, upstream
from torchdata_wds.pipes.chain_text import known_name
from torchdata_wds.pipes.order.permutation import mix
from torchdata_wds.process_place import Place

#: The seed that all consumers share, and one consumer's, or a set of workers', own.
Seeds = tuple[int, int]


def seed_graph(datapipe: DataPipe, seeds: Seeds, place: int, *, apart: Iterable[IterDataPipe[Any]] = ()) -> None:
    """Seeds the random pipes of a graph: alike in all consumers above a ``sharding_filter``, by `place` below it.

    Those of the graphs that end `apart` are left out, as if workers ran them.
    """
    pipes: list[Any] = get_all_graph_pipes(traverse(datapipe))
    agreed = above_filters(pipes)
    others = {id(found) for end in apart for found in upstream(end)}
    random = [pipe for pipe in pipes if inspect.ismethod(getattr(pipe, "set_seed", None)) and id(pipe) not in others]
    # Numbered from the sources: a stage that only one rank has below the filter leaves the common order as it is.
    numbers = itertools.count(), itertools.count()
    for pipe in reversed(random):
        is_own = id(pipe) not in agreed
        number = next(numbers[is_own])
        seed = mix(seeds[1], place, number) if is_own else mix(seeds[0], number)
        pipe.set_seed(seed)
        _seed_passes(pipe, seed)


def agree_on_passes(pipe: IterDataPipe[Any]) -> None:
    """Seeds the later passes of an epoch over the shuffles upstream of a pipe alike in all consumers."""
    for found in upstream(pipe):
        seed = vars(found).get("_seed")
        if isinstance(seed, int):  # it was set for this epoch, whose first pass is about to begin
            _seed_passes(found, seed)


def _seed_passes(pipe: Any, seed: int) -> None:
    # A native shuffle uses its seed for one pass. For those that a native ``cycle`` begins later it would draw from
    # torch's global generator, which differs between consumers: each would take its part of another order.
    if known_name(pipe) in ("Shuffler", "InBatchShuffler"):
        pipe.reset = functools.partial(_reset, pipe, seed, itertools.count())  # a copy or pickle does not include it


def _reset(pipe: Any, seed: int, passes: Iterator[int]) -> None:
    number = next(passes)
    if pipe._seed is None:
        pipe._seed = mix(seed, "pass", number)
    type(pipe).reset(pipe)


class Seed:
    """The random source of one pipe; without a seed it draws one from torch's global generator each epoch."""

    def __init__(self) -> None:
        self.seed: int | None = None
        self.epoch = 0  # the number of epochs begun since the seed was set

    def set(self, seed: int) -> None:
        """Sets the seed and counts epochs from here."""
        self.seed, self.epoch = seed, 0

    def begin_epoch(self, name: str, place: Place) -> random.Random:
        """Returns the generator of the next epoch, a function of the seed, epoch, name and place alone.

        Use only its ``random()`` and ``getrandbits()``: Python guarantees that their values stay the same.
        """
        seed = int(torch.empty((), dtype=torch.int64).random_().item()) if self.seed is None else self.seed
        rng = random.Random(f"{seed}/{self.epoch}/{name}/{place.consumers}/{place.number}")
        self.epoch += 1
        return rng


class Seeded:
    """A random pipe: each epoch's draws follow from its seed, the epoch's number and the consumer's place."""

    _seed: Seed

    def set_seed(self, seed: int) -> Self:
        """Sets the seed, as reading services do."""
        self._seed.set(seed)
        return self


class Passes:
    """Seeds the random pipes of a graph at the beginning of each pass over it.

    A service seeds pipes at each epoch, when every consumer is at a different place in the middle of a pass. So a
    stream keeps the seeds that it began with, and the orders of its pass p depend only on these and on p; upstream of
    ``sharding_filter`` they are the same in all consumers. Unseeded pipes draw from torch's global generator.
    """

    def __init__(self, pipe: IterDataPipe[Any]) -> None:
        self._pipe = pipe
        self._given: list[tuple[Any, int]] = []

    def begin_stream(self, agreed_seed: int | None = None) -> None:
        """Notes the current seeds of the random pipes; those that do not expose theirs get one that all agree on."""
        pipes = {id(found): found for found in upstream(self._pipe)}
        agreed = above_filters(pipes.values())
        random = [pipe for pipe in pipes.values() if inspect.ismethod(getattr(pipe, "set_seed", None))]
        told = [(pipe, _seed_of(pipe)) for pipe in random]
        # A pipe of another package does not expose its seed, so it gets one derived from a seed that all agree on.
        known = [] if agreed_seed is None else [agreed_seed]
        known += [seed for pipe, seed in told if id(pipe) in agreed and isinstance(seed, int)]
        place = place_of(self._pipe)
        self._given = []
        for number, (pipe, seed) in enumerate(told):
            if seed is _UNKNOWN:
                seed = mix(*known[:1], "unknown", number, *(Place() if id(pipe) in agreed else place))
            if seed is not None:
                self._given.append((pipe, seed))

    def begin_pass(self, number: int) -> None:
        """Seeds the random pipes for a pass; pass 0 has the seeds noted at the start."""
        for pipe, seed in self._given:
            pipe.set_seed(mix(seed, "pass", number) if number else seed)


_UNKNOWN: Any = object()  # the seed of a pipe that does not expose it; an unseeded pipe has None


def _seed_of(pipe: Any) -> Any:
    seed = vars(pipe).get("_seed", _UNKNOWN)
    if isinstance(seed, Seed):
        return seed.seed
    return seed if isinstance(pipe, Shuffler) or isinstance(seed, int) else _UNKNOWN


def above_filters(pipes: Iterable[Any]) -> set[int]:
    """Returns the ids of the pipes above a native ``sharding_filter``, and of the filters themselves."""
    filters = [pipe for pipe in pipes if isinstance(pipe, ShardingFilter)]
    return {id(found) for pipe in filters for found in upstream(pipe)}
