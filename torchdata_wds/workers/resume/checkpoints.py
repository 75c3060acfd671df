"""Packs the positions of a loader's streams in the middle of an epoch into a small state, and unpacks them again.

The next turn, and the number of items that each worker has yielded, follow from the total taken: with 3 workers, after
7 items, worker 0 has yielded 3 and the others 2 each, and it is worker 1's turn.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Batcher
from torch.utils.data.graph import DataPipe

from torchdata_wds.consumers import traverse, upstream
from torchdata_wds.handlers import warn_once
from torchdata_wds.pipes.chain_text import short_name
from torchdata_wds.pipes.resume_facts import Facts, PassBegun
from torchdata_wds.pipes.seeds import Seeds
from torchdata_wds.workers.resume.packed_facts import pack_facts, unpack_facts
from torchdata_wds.workers.resume.planner import find_chain, has_functions, is_one_to_one, is_torchdata
from torchdata_wds.workers.resume.signatures import Signature
from torchdata_wds.workers.resume.stream import Point

logger = logging.getLogger(__name__)


class Turns:
    """The turns of workers that yield one item each in rotation, until all have ended."""

    # Later stages may have taken more items than were delivered, so `at` answers for an earlier moment.
    def __init__(self, counts: Sequence[int], order: Sequence[int]) -> None:
        self.counts = list(counts)  # how many items each worker had yielded before
        self.order = list(order)  # the workers that have not ended, next one first
        self._ends: list[tuple[int, int]] = []

    def note_end(self, taken: int, worker: int) -> None:
        """Notes that a worker had no item left at its turn, after `taken` items in total."""
        self._ends.append((taken, worker))

    def at(self, taken: int) -> tuple[list[int], list[int]]:
        """Returns each worker's count of items after `taken` in total, and the order of turns from there."""
        counts, order, done = list(self.counts), deque(self.order), 0
        ends = [(ended, worker) for ended, worker in self._ends if ended <= taken]
        # The rotation is even between two ends: 7 items of 3 workers are 2 rounds and one more turn, of the first.
        for ended, worker in [*ends, (taken, None)]:
            rounds, rest = divmod(ended - done, len(order) or 1)
            for place, other in enumerate(order):
                counts[other] += rounds + (place < rest)
            order.rotate(-rest)
            done = ended
            if worker is not None:
                order.remove(worker)
        return counts, list(order)


class Streams:
    """The streams of a set of workers in one epoch, as the main process knows them."""

    #: If set, the streams resume where `turns` and `facts` say: the seeds of the epoch in which they began, and whether
    #: the items before are skipped without making them.
    restart: tuple[Seeds, bool] | None = None
    epoch = 0  # its number, from 0

    def __init__(self, workers: int, facts: list[Facts] | None = None, *, continues: bool = False) -> None:
        self.turns = Turns([0] * workers, range(workers))  # whose turn it is, and what each had yielded before
        self.facts = [Facts([PassBegun(0, 0)]) for _ in range(workers)] if facts is None else facts
        self.taken = 0  # items taken from all workers since the epoch began or was resumed
        self._gaps: list[int] = []  # how many items had come before each item that was left out
        self.continues = continues  # whether streams run across epochs, cut by ``wds_epoch``

    def note_gap(self) -> None:
        """Notes that the item taken last was left out."""
        self._gaps.append(self.taken - 1 - len(self._gaps))

    def taken_for(self, items: int) -> int:
        """Returns how many items, with those left out, were taken when `items` had come."""
        return items + bisect_left(self._gaps, items)

    def points(self) -> list[Point | None]:
        """Returns where each worker's stream resumes; None for one that begins."""
        if self.restart is None:
            return [None] * len(self.facts)
        seeds, skips = self.restart
        return [Point(count, seeds, facts, skips) for count, facts in zip(self.turns.counts, self.facts, strict=True)]

    def next_epoch(self) -> Streams:
        """Returns where the next epoch begins; after an early break only the workers know, and will report it."""
        if not self.continues:
            return Streams(len(self.facts))
        for facts in self.facts:
            ended, facts.ended = facts.ended, None
            facts.passes = [] if ended is None else [PassBegun(ended.passing, -ended.taken)]
            facts.passes_cut, facts.skips = False, []
        return Streams(len(self.facts), list(self.facts), continues=True)


#: The state of a loader that has not begun an epoch; it has the keys of every other state.
UNSTARTED: dict[str, Any] = {"version": 2, "epoch": 0, "in_epoch": False, "item": 0, "state": ""}

_OTHER_VERSION = (
    "the state was made by another version of torchdata_wds, and cannot be resumed by this one: resume with that "
    "version, or begin a new epoch"
)


class OrderState(NamedTuple):
    """Where a job is in its global order; the same on all ranks."""

    digest: str  # the digest of what the order follows from; "" if that is not to be compared
    seed: int | None  # None if it is the loader's
    position: int  # how many samples of the epoch are done, over all ranks

    @classmethod
    def checked(cls, values: Any) -> OrderState:
        """Returns the state in a list of its values; raises a ValueError if they are not such."""
        digest, seed, position = values if isinstance(values, list) and len(values) == 3 else (values, None, None)
        if not isinstance(digest, str):
            raise _no_state(f"'index' is {digest!r}")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 2**64):
            raise _no_state(f"'seed' is {seed!r}")
        if type(position) is not int or position < 0:
            raise _no_state(f"'position' is {position!r}")
        return cls(digest, seed, position)

    def to_plain(self, epoch: int) -> dict[str, Any]:
        """Returns the state as a flat dict; `epoch` is the number of its epoch, from 0."""
        place = {"epoch": epoch, "position": self.position}
        return {"version": UNSTARTED["version"], "index": self.digest, "seed": self.seed, **place}


class Checkpoint(NamedTuple):
    """The state of a loader, in plain values only, so that it stays the same through JSON and ``torch.load``."""

    signature: Signature  # what it belongs to
    epoch: int  # how many epochs had begun
    in_epoch: bool  # whether the last one is still running
    generator: Any  # the loader's own source of seeds at the start of that epoch
    stream_seeds: Seeds | None  # those of the epoch in which the streams began; None before the first
    streams: Any  # their positions; None if the next epoch starts them anew
    order: OrderState | None = None  # in place of the three before, if the graph follows a global order

    def to_plain(self) -> dict[str, Any]:
        """Returns the state as a flat dict with constant keys."""
        if self.order is not None:
            order = self.order if self.in_epoch else self.order._replace(position=0)
            return order.to_plain(self.epoch - self.in_epoch)
        # Outside of "state" is what people want to read. "item" counts those delivered in the epoch, over all workers.
        inside = {name: value for name, value in self._asdict().items() if name not in UNSTARTED}
        return {
            **UNSTARTED,
            "epoch": self.epoch,
            "in_epoch": self.in_epoch,
            "item": sum(self.streams[0]) if self.streams else 0,
            "state": base64.b64encode(_compressed(inside)).decode(),
        }

    @classmethod
    def from_plain(cls, plain: Any) -> Checkpoint:
        """Reverses `to_plain`; ignores further keys, and raises a ValueError if the values are not such a state."""
        if not isinstance(plain, Mapping):
            raise _no_state(f"expected a dict, got {type(plain).__name__}")
        _check_version({"version": "older"} if "version" not in plain and "signature" in plain else plain)
        if "index" in plain or "position" in plain:
            return cls._in_order(plain)
        for name, example in UNSTARTED.items():
            if name not in plain:
                raise _no_state(f"it has no {name!r}")
            if type(plain[name]) is not type(example):
                expected = type(example).__name__
                raise _no_state(f"{name!r} must be of type {expected}, not {type(plain[name]).__name__}")
        if plain["item"] < 0:
            raise _no_state(f"'item' must not be negative, and is {plain['item']}")
        try:
            data = base64.b64decode(plain["state"], validate=True)
        except ValueError as error:
            raise _no_state(f"its text is damaged ({error})") from error
        return cls._checked({**_uncompressed(data), **{name: plain[name] for name in UNSTARTED}})

    @classmethod
    def _in_order(cls, plain: Mapping[str, Any]) -> Checkpoint:
        for name in ("index", "seed", "epoch", "position"):
            if name not in plain:
                raise _no_state(f"it has no {name!r}")
        epoch = plain["epoch"]
        if type(epoch) is not int or epoch < 0:
            raise _no_state(f"'epoch' is {epoch!r}")
        order = OrderState.checked([plain["index"], plain["seed"], plain["position"]])
        return cls({}, epoch + bool(order.position), bool(order.position), None, None, None, order)

    def dump(self) -> bytes:
        """Returns the state as bytes."""
        return _compressed({"version": UNSTARTED["version"], **self._asdict()})

    @classmethod
    def load(cls, state: bytes) -> Checkpoint:
        """Reverses `dump`; raises a ValueError if the bytes are not such a state."""
        return cls._checked(_uncompressed(state))

    @classmethod
    def _checked(cls, values: Mapping[str, Any]) -> Checkpoint:
        found: list[Any] = [values.get(name) for name in cls._fields]
        state = cls(*found)
        if state.order is not None:
            state = state._replace(order=OrderState.checked(state.order))
        seeds, streams = state.stream_seeds, state.streams
        is_state = isinstance(state.signature, dict) and type(state.epoch) is int and type(state.in_epoch) is bool
        is_state = is_state and state.epoch >= state.in_epoch
        is_state = is_state and (seeds is None or (isinstance(seeds, list) and len(seeds) == 2))
        if not is_state or not (streams is None or (isinstance(streams, list) and len(streams) == 3)):
            raise _no_state("it holds other values than a state does")
        return state._replace(stream_seeds=None if seeds is None else (seeds[0], seeds[1]))


def _check_version(values: Mapping[str, Any]) -> None:
    if values.get("version", UNSTARTED["version"]) != UNSTARTED["version"]:
        raise ValueError(_OTHER_VERSION)


def _compressed(values: dict[str, Any]) -> bytes:
    return zlib.compress(json.dumps(values, separators=(",", ":")).encode())


def _uncompressed(data: bytes) -> dict[str, Any]:
    try:
        text = zlib.decompress(data)
        is_pickle = text.startswith(b"\x80")  # it could run any code
        values = {"version": "older"} if is_pickle else json.loads(text)
    except (TypeError, ValueError, RecursionError, zlib.error) as error:
        raise _no_state(f"it is damaged, or something else ({error})") from error
    if not isinstance(values, dict):
        raise _no_state(f"expected a dict, got {type(values).__name__}")
    _check_version(values)
    return values


def _no_state(reason: str) -> ValueError:
    return ValueError(f"not a state of torchdata_wds: {reason}")


def pack_runs(end: DataPipe, runs: Sequence[Any], graph: Any, *, in_epoch: bool, delivered: int | None = None) -> Any:
    """Packs the positions of a graph's `runs` after `delivered` items; None if the next epoch starts anew."""
    continues = any(run.streams.continues for run in runs)
    if (in_epoch or continues) and len(runs) > 1:
        raise RuntimeError(
            f"a state cannot be taken of {len(runs)} sets of workers that are joined in the main process: join their "
            "streams in the workers, with one .join_workers() after all of them"
        )
    if any(has_epoch(end, run) for run in runs):
        raise RuntimeError(
            "a state cannot be taken with .wds_epoch() after .join_workers(): put it before, where it still counts the "
            "items of all workers"
        )
    if any(run.has_cycled for run in runs):
        raise RuntimeError(
            "a state cannot be taken of .wds_epoch() before .join_workers() if a stage of the main process, such as "
            ".cycle(), iterates over it several times in an epoch. Count all items of these passes with .wds_epoch(n)"
        )
    if not in_epoch and not continues:
        return None
    taken = taken_by(end, runs[0], delivered) if in_epoch else 0
    runs[0].wait_for_facts()
    return pack_streams(graph, runs[0].streams, taken)


def pack_streams(branch: IterDataPipe[Any], streams: Streams, taken: int, workers: int | None = None) -> list[Any]:
    """Packs the positions of streams after `taken` items of the epoch; raises a RuntimeError if they are unknown.

    The packed facts are small enough for a state of so many `workers`, by default one for each stream.
    """
    chain = find_chain(branch)
    if len(chain.epochs) > 1:
        raise RuntimeError("a state cannot be taken of a graph with several .wds_epoch(). Use one")
    if not all(facts.passes for facts in streams.facts):
        raise RuntimeError(
            "a state between epochs cannot be taken: a stage after .wds_epoch() did not take all items of the epoch, "
            "and how many it took is unknown. Put .wds_epoch() after that stage"
        )
    counts, order = streams.turns.at(taken)
    before, behind = chain.ratios
    told = zip(streams.facts, counts, strict=True)
    return [counts, order, [pack_facts(facts, count * behind, before, workers or len(counts)) for facts, count in told]]


def unpack_streams(branch: IterDataPipe[Any], packed: Any, stream_seeds: Seeds, epoch: int) -> Streams:
    """Reverses `pack_streams`, and logs whether items will be made again; `epoch` is the number to log."""
    counts, order, facts = packed
    chain = find_chain(branch)
    facts = [unpack_facts(one) for one in facts]
    skipping = sorted(set().union(*(one.skipping for one in facts)))
    obstacle = chain.obstacle
    if obstacle is None and skipping:
        obstacle = f"{' and '.join(skipping)} dropped items"
    if chain.private:
        logger.warning(
            "functions of %s have random generators of their own, whose states are not kept: their results may differ "
            "from here on. Draw from the global generators of random, numpy or torch instead",
            " and ".join(chain.private),
        )
    place = f"resuming at item {sum(counts):,} of epoch {epoch}"
    if obstacle is None:
        logger.info("%s: the items before it are skipped", place)
    elif any(counts):
        logger.warning("%s: the items before it are made again and dropped, because %s", place, obstacle)
    streams = Streams(len(counts), facts, continues=bool(chain.epochs))
    # Workers that had ended get a turn too, for their streams to end here as well: wds_epoch goes on from there.
    order = [*order, *(worker for worker in range(len(counts)) if worker not in order)]
    streams.turns, streams.restart = Turns(counts, order), (stream_seeds, obstacle is None)
    return streams


def taken_by(end: DataPipe, front: DataPipe, delivered: int | None = None) -> int:
    """Returns how many items of `front` went into those delivered, by default all of `end`; RuntimeError if unknown."""
    taken: int = end._number_of_samples_yielded if delivered is None else delivered
    if end is front:
        return taken
    ((pipe, sources),) = traverse(end).values()
    while pipe is not front:
        known = is_one_to_one(pipe) or is_torchdata(pipe, "FullSync")
        if type(pipe) is Batcher:
            taken *= pipe.batch_size
        elif len(sources) != 1 or vars(pipe).get("skipped") or not known:
            raise RuntimeError(
                f"a state in the middle of an epoch cannot be taken: {short_name(pipe)}, which runs in the main "
                "process, may hold items that it has not delivered, or drop some. Run it in the workers (before "
                ".join_workers()), or take the state between epochs"
            )
        elif has_functions(pipe):
            warn_once(
                f"main {short_name(pipe)}",
                f"a function of {short_name(pipe)} runs in the main process: states of the loader do not cover its "
                "random draws. Run it in the workers, before .join_workers()",
            )
        ((pipe, sources),) = sources.values()
    return taken


def has_epoch(end: Any, front: Any) -> bool:
    """Returns whether a ``wds_epoch`` follows the workers, in the main process."""
    if end is front:
        return False
    above = set(map(id, upstream(front)))
    return any(getattr(type(pipe), "cuts_epochs", False) and id(pipe) not in above for pipe in upstream(end))
