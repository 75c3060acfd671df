"""Runs one consumer's stream in its process, from the beginning or from the middle of an epoch."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import IterDataPipe
from torch.utils.data.graph import DataPipe

from torchdata_wds.consumers import upstream
from torchdata_wds.errors import ShardListError
from torchdata_wds.handlers import reraise_exception
from torchdata_wds.pipes.chain_text import short_name
from torchdata_wds.pipes.division import check_division
from torchdata_wds.pipes.order.ordered_pipe import OrderPoint
from torchdata_wds.pipes.order.permutation import mix
from torchdata_wds.pipes.resume_facts import Fact, Facts, SkipNotice, Wanted, Watch
from torchdata_wds.pipes.seeds import Seeds, seed_graph
from torchdata_wds.process_place import Place
from torchdata_wds.workers.resume.ordered import find_source, ordered_items
from torchdata_wds.workers.resume.planner import Chain, find_chain
from torchdata_wds.workers.stats.skips import SkipWatch


def seed_generators(*place: int | str) -> None:
    """Seeds the generators of ``random``, ``numpy`` and ``torch`` (on the CPU) from all arguments."""
    # This takes about 15 us; ``torch.manual_seed`` alone takes 20 times as long, because it looks for other devices.
    digest = hashlib.blake2b(repr(place).encode(), digest_size=20).digest()
    random.seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    torch.default_generator.manual_seed(int.from_bytes(digest[12:], "little"))


class _States(NamedTuple):
    """States of the global random generators."""

    python: Any
    torch: torch.Tensor
    bits: Any  # numpy's bit generator, which holds all of its state except a cached Gaussian number
    memory: bytes  # a copy of the bit generator's memory
    numpy: Any  # numpy's full state if a Gaussian number is cached; else None


_MEMORY = 4 * 625  # bytes of an MT19937: 624 words and a position


class OwnGenerators:
    """Keeps one stream's states of the global generators apart from the program's."""

    def __init__(self) -> None:
        states = random.getstate(), torch.default_generator.get_state()
        self._own = _States(*states, np.random.MT19937(0), b"", None)
        self._outside: _States | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Swaps the stream's states in, and the program's back at the end."""
        outside = self._outside = _get_states(self._outside)
        _set_states(self._own)
        try:
            yield
        finally:
            self._own = _get_states(self._own)
            _set_states(outside)


def _get_states(known: _States | None) -> _States:
    """Returns the current states; skips reading numpy's, which takes 100 us, if they are still the `known` ones."""
    # Every draw changes the MT19937's 2,500 bytes, so comparing those is enough, unless a Gaussian number was cached.
    bits = mtrand.get_bit_generator()
    memory = ctypes.string_at(bits.ctypes.state_address, _MEMORY) if type(bits) is np.random.MT19937 else b""
    is_known = known is not None and known.numpy is None and bits is known.bits and memory == known.memory != b""
    full: Any = None if is_known else np.random.get_state(legacy=False)
    numpy = full if full and full["has_gauss"] else None
    return _States(random.getstate(), torch.default_generator.get_state(), bits, memory, numpy)


def _set_states(states: _States) -> None:
    random.setstate(states.python)
    torch.default_generator.set_state(states.torch)
    mtrand.set_bit_generator(states.bits)
    if states.numpy is not None:
        np.random.set_state(states.numpy)


logger = logging.getLogger(__name__)

#: The global generators are seeded before every 64th item, unless a stage needs it more often.
_SEEDED_ITEMS = 64


class Point(NamedTuple):
    """Where a stream resumes."""

    item: int  # how many items of the epoch have been delivered
    stream_seeds: Seeds  # those of the epoch in which the stream began; ``wds_epoch`` derives its passes from them
    facts: Facts  # what was known about the stream
    skips: bool  # whether earlier items are skipped; otherwise they are made again and dropped


class WorkerFunctions(NamedTuple):
    """The user's functions that each worker calls, at its start and before each epoch."""

    init: Callable[..., Any] | None  # (datapipe, info) -> datapipe
    reset: Callable[..., Any] | None  # (datapipe, info, seed_generator) -> datapipe
    info: Callable[[int, int], Any]  # (workers, worker) -> what they take as `info`
    generator: Callable[[int, int, int], Any]  # (shared seed, local seed, worker) -> what ``reset`` takes

    @classmethod
    def of_loader(cls, function: Callable[[int], object] | None, num_workers: int) -> WorkerFunctions:
        """Returns those of a loader whose ``worker_init_fn`` takes the worker's number, as with torch's DataLoader."""
        checked_function("worker_init_fn", function)
        first = None if function is None or not num_workers else partial(_initialize, function)
        return cls(first, None, Place, _no_generator)

    def initialized(self, datapipe: DataPipe, workers: int, worker: int) -> DataPipe:
        """Returns the graph that a worker runs."""
        if self.init is None:
            return datapipe
        return _checked_graph("worker_init_fn", self.init(datapipe, self.info(workers, worker)))

    def reset_for(self, datapipe: DataPipe, workers: int, worker: int, seeds: Seeds) -> DataPipe:
        """Returns the graph that a worker runs in an epoch; its pipes are already seeded."""
        if self.reset is None:
            return datapipe
        shared, local = seeds
        generator = self.generator(mix(shared, "reset"), mix(local, "reset"), worker)
        return _checked_graph("worker_reset_fn", self.reset(datapipe, self.info(workers, worker), generator))


def _initialize(function: Callable[[int], object], datapipe: DataPipe, place: Place) -> DataPipe:
    function(place.number)
    return datapipe


def _no_generator(*_: Any) -> NoReturn:
    raise AssertionError("a loader without a function for resetting needs no generator")


def checked_function(name: str, function: Any) -> Any:
    """Returns an argument that is callable or None; raises a TypeError otherwise."""
    if function is not None and not callable(function):
        raise TypeError(f"{name} must be a function or None, not {function!r}")
    return function


def _checked_graph(name: str, found: Any) -> DataPipe:
    if not isinstance(found, IterDataPipe):
        raise TypeError(f"{name} returned {found!r}; it must return a DataPipe, the one it received or another")
    return found


class Stream:
    """Runs a graph for one consumer; with `keeps_apart`, its draws do not advance the program's generators."""

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        *,
        seed: Callable[[DataPipe, Seeds, int], object] = seed_graph,
        keeps_apart: bool = False,
        reset: Callable[[DataPipe, Seeds, int], DataPipe] | None = None,
    ) -> None:
        self._datapipe: Any = datapipe
        self._seed_graph = seed
        self._keeps_apart = keeps_apart
        self._reset = reset  # called at the start of each epoch, after seeding; returns the epoch's graph
        self._watch = Watch()
        self._chain: Chain | None = None
        self._stream_seeds: Seeds | None = None
        self._skipped: dict[int, int] = {}
        self._skips: SkipWatch | None = None
        self._worker = 0
        self._is_checked = False  # whether the division of its work was checked

    @property
    def datapipe(self) -> Any:
        """The last pipe of the graph, which ``worker_reset_fn`` may replace."""
        return self._datapipe

    @property
    def chain(self) -> Chain:
        """The stages of the graph, as resuming sees them."""
        if self._chain is None:
            self._chain = find_chain(self._datapipe)
            self._skipped = {id(stage): stage.skipped.total() for stage in self._chain.counted}
            self._skips = SkipWatch(self._datapipe)
            for pipe in (*self._chain.epochs, self._chain.grouper):
                if pipe is not None:
                    pipe._watch = self._watch
        return self._chain

    def facts(self) -> list[Fact]:
        """Returns what the pipes have reported since the last call."""
        for stage in self.chain.counted:
            skipped = stage.skipped.total()
            if skipped != self._skipped[id(stage)]:
                self._skipped[id(stage)] = skipped
                self._watch.facts.append(SkipNotice(short_name(stage)))
        if self._skips is not None:
            self._watch.facts.extend(self._skips.news(is_first=self._worker == 0))
        return self._watch.take()

    def items(
        self, seeds: Seeds, worker: int, point: Point | OrderPoint | None, epoch: int
    ) -> Generator[Any, None, None]:
        """Yields the items of an epoch, from `point` onward if given; `seeds` are the shared one and its own."""
        chain = self.chain
        if not self._is_checked:
            self._is_checked = True
            check_division(self._datapipe)
        self._watch.epoch = epoch
        self._worker = worker
        if isinstance(point, OrderPoint):
            yield from self._ordered(seeds, worker, point)
            return
        if not chain.epochs:
            self.facts()  # drops those of an earlier epoch
        own = OwnGenerators() if self._keeps_apart and chain.draws else None
        with own.in_use() if own else nullcontext():
            first = self._begin(seeds, worker, point, epoch)
            iterator = iter(self._datapipe)
        every = self._seeded_items()
        if not every and own is None and point is None:
            yield from iterator
            return
        taken = 0 if point is None else point.item
        with ExitStack() as stack:
            stack.callback(getattr(iterator, "close", list))  # closes the files of a generator now
            # One item at a time: the stream's generator states are swapped in only while an item is made, since the
            # program draws its own numbers between two items.
            for number in count(first):
                with own.in_use() if own else nullcontext():
                    # Seeding by number makes an augmentation of item 128 the same wherever the stream started.
                    if every and number % every == 0:
                        seed_generators(seeds[1], worker, "item", number)
                    found = list(islice(iterator, 1))
                if not found:
                    if number < taken:
                        self._tell_of_fewer(number, taken)
                    return
                if number >= taken:  # earlier ones are made again and dropped
                    yield found.pop()

    def _ordered(self, seeds: Seeds, worker: int, point: OrderPoint) -> Iterator[Any]:
        """Yields the items of an epoch that follows a global order."""
        self.facts()  # drops those of an earlier epoch
        self._seed_and_reset(seeds, worker)
        chain = self.chain
        own = OwnGenerators() if self._keeps_apart and chain.draws else None
        # By position, so that an augmentation draws the same for a sample on every grid.
        reseed = partial(seed_generators, point.seed, "epoch", point.epoch, "position") if chain.draws else None
        apart = own.in_use if own else nullcontext
        with closing(ordered_items(self._datapipe, find_source(self._datapipe), point, reseed, apart)) as items:
            yield from items

    def _seed_and_reset(self, seeds: Seeds, worker: int) -> None:
        self._seed_graph(self._datapipe, seeds, worker)
        if self._reset is not None:
            found = self._reset(self._datapipe, seeds, worker)
            if found is not self._datapipe:
                self._datapipe, self._chain = found, None

    def _tell_of_fewer(self, made: int, taken: int) -> None:
        """Raises if an epoch ends before the item it was to resume at; only warns if chance may explain that."""
        message = (
            f"only {made:,} of the {taken:,} items delivered before the state was made could be reproduced: the data "
            "or the functions are not those of that run"
        )
        handlers = [getattr(pipe, "handler", reraise_exception) for pipe in upstream(self._datapipe)]
        if not self.chain.private and all(handler is reraise_exception for handler in handlers):
            raise ShardListError(f"{message}. Resume with those, or begin a new epoch")
        logger.warning("%s", message)

    def _begin(self, seeds: Seeds, worker: int, point: Point | None, epoch: int) -> int:
        """Seeds the graph and sets its start; returns the number of the first item that it will make."""
        chain = self.chain
        self._stream_seeds = self._stream_seeds or (seeds if point is None else point.stream_seeds)
        self._watch.agreed_seed = self._stream_seeds[0]
        shards = [] if point is None else point.facts.shards
        self._watch.known = {(shard.passing, shard.ordinal): shard for shard in shards}
        self._watch.known_versions = {} if point is None else dict(point.facts.versions)
        self._watch.reached = None if point is None else chain.reached(point.item, point.facts)
        # The passes of wds_epoch follow from the seeds of the epoch in which the stream began, perhaps long ago. The
        # counters note those first; then all pipes get the seeds of this epoch.
        if point is not None and chain.epochs:
            self._seed_graph(self._datapipe, point.stream_seeds, worker)
            for counter in chain.epochs:
                counter.begin_stream()
        self._seed_and_reset(seeds, worker)
        chain = self.chain
        if chain.draws and chain.epochs:
            stream_seed = self._stream_seeds[1]
            self._watch.reseed = lambda passing, item: seed_generators(stream_seed, worker, "pass", passing, item)
        if point is None:
            return 0
        if point.skips and chain.obstacle is None:  # checked again: worker_reset_fn may have replaced the graph
            # Back to an item before which the generators are seeded: to resume at 100, items 64 to 99 are made and
            # dropped, so that 100 finds the generators as it did in the first run.
            first = point.item - point.item % (self._seeded_items() or 1)
            share = chain.epochs[0].share(epoch) if chain.epochs else 0
            if chain.restart(Wanted((), first), point.facts, share):
                return first
            logger.warning("worker %d makes %d items again: where their pass began is not known", worker, first)
            self._seed_graph(self._datapipe, seeds, worker)
        for counter in chain.epochs:
            counter.restart(point.facts.passes[0], None)
        return 0

    def _seeded_items(self) -> int:
        """Returns n if the generators are seeded before every n-th item; 0 if they never are."""
        chain = self.chain
        if not chain.draws or chain.follows_epoch:
            return 0
        return 1 if chain.epochs or chain.ratios != (1, 1) else _SEEDED_ITEMS
