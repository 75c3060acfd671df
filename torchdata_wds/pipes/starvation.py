"""Finds consumers without a shard, and endless sources that yield nothing, from inside the running graph.

An endless source cannot see what happens to its items, and a stage that waits for one cannot see that none will come.
But while the source makes an item, every stage that waits for it is on the stack, and torch counts what each has
yielded. So once every shard has been drawn, ten times on average, the nearest stage that has yielded nothing in all
that time is the one that drops everything. Stages that may hold many items before the first (a shuffle, a batch) are
never blamed: the stages before them are checked, and those after them once they yield something. A user's stages and
generator functions may hold or drop items, and are blamed late.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import ShardingFilter

from torchdata_wds.consumers import place_of, upstream
from torchdata_wds.errors import ShardListError
from torchdata_wds.handlers import warn_once
from torchdata_wds.pipes.chain_text import known_name, short_name, sources_of
from torchdata_wds.pipes.running import running_pipes
from torchdata_wds.pipes.samples.map import ItemMapper

_EMPTY_PASSES = 10  # a source that yields nothing in this many passes never will
_MOST_EMPTY_PASSES = 100  # one of several consumers may have empty passes by chance, so it is allowed more of them
_DROPPED_ITEMS = 10_000  # a stage that drops items by their contents may drop many in a row
_HELD_ITEMS = 50_000  # an unknown stage may collect items before it yields, but not this many

#: Stages that make items from shards and hold none back, by short name.
_READERS = {
    *("ShardLoader", "KeyGrouper", "ShardCacher", "CborShardLoader", "MsgpackShardLoader"),
    *("FileOpener", "FSSpecFileOpener", "HttpReader", "OnlineReader", "TarArchiveLoader", "WebDataset"),
}

#: Stages that yield any number of items, or none, for each.
_DROPPERS = {"Filter", "FlatMapper", "Mapper", "UnBatcher", "SampleUnbatcher", "DocumentInterleaver"}


class _Yields:
    """The numbers of items yielded and taken by the stages that wait for an item."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, int]] = {}
        self._renew()

    def _renew(self) -> None:
        for pipe in running_pipes():
            if id(pipe) not in self._seen or self._seen[id(pipe)][0] != _count_of(pipe):
                self._seen[id(pipe)] = _count_of(pipe), _taken_by(pipe)

    def check(self, shards: int, what: str) -> None:
        """Raises, with `what`, if the nearest stage that yielded nothing since took too many items (`shards`)."""
        # It may hold items back from long ago: if it is not to blame, those that yielded are watched from now on.
        for pipe in running_pipes():
            count, taken = self._seen.get(id(pipe), (None, 0))
            if count == _count_of(pipe):
                most = _most_taken(pipe, shards)
                if most is not None and _taken_by(pipe) - taken >= most:
                    raise ShardListError(
                        f"{what}: {short_name(pipe)} has yielded nothing for the {_taken_by(pipe):,} items it took. "
                        f"{_advice(pipe)}"
                    )
                break
        self._renew()


def _most_taken(pipe: Any, shards: int) -> int | None:
    """Returns how many items a stage may take before it yields one (`shards` for a reader); None for no limit."""
    name = known_name(pipe)
    if name in _READERS:
        return shards
    if name in _DROPPERS or (isinstance(pipe, ItemMapper) and name):
        return _DROPPED_ITEMS
    return _HELD_ITEMS if name in ("", "StageComposer") else None


def most_empty_passes(consumers: int) -> int:
    """Returns how many passes in a row may yield nothing to one of n consumers: 10 for one, 40 for 4, at most 100."""
    return min(_EMPTY_PASSES * consumers, _MOST_EMPTY_PASSES)


class DrawnShards:
    """Watches an endless source of `count` shards: once all have been drawn, something must have been yielded."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._yields = _Yields()
        self._begin_round()

    def _begin_round(self) -> None:
        self._drawn = 0
        self._seen = bytearray(self._count)
        self._unseen = self._count

    def note(self, number: int) -> None:
        """Notes that a shard has been drawn and the next is wanted; raises if all of them have yielded nothing."""
        self._drawn += 1
        if not self._seen[number]:
            self._seen[number] = 1
            self._unseen -= 1
        # With replacement, in 1 round of 20, 10,000 draws miss some of 1,000 shards, perhaps the only good ones.
        if self._unseen or self._drawn < _EMPTY_PASSES * self._count:
            return
        shards = f"each of {self._count:,} shards" if self._count > 1 else "its only shard"
        what = f"resample_shards has drawn {shards}, {self._drawn:,} draws in all, and nothing came of them"
        self._yields.check(self._drawn, what)
        self._begin_round()


class CycledPasses:
    """Counts empty passes in a row that a native ``cycle`` downstream begins."""

    def __init__(self) -> None:
        self._key: Any = None
        self._passes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return CycledPasses, ()  # a copy of a pipe has made no pass yet

    def begin(self, pipe: Any) -> None:
        """Notes that a pass begins; raises if too many before it yielded nothing."""
        cycler = next((found for found in running_pipes() if known_name(found) == "Cycler"), None)
        key = None if cycler is None else (id(cycler), _count_of(cycler))
        self._passes = self._passes + 1 if key is not None and key == self._key else 0
        self._key = key
        if self._passes >= _EMPTY_PASSES and self._passes >= most_empty_passes(place_of(pipe).consumers):
            self._key = None
            raise ShardListError(
                f"nothing came of {self._passes} passes in a row that cycle began over the same shards. "
                f"{_advice(cycler)}"
            )


class CycledShards:
    """Watches shards that a native ``cycle`` yields again and again, for the loader that follows it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._cyclers: list[Any] = []
        self._yields: _Yields | None = None
        self._read = self._read_then = self._passes_then = 0
        self._next = 100

    def note(self) -> None:
        """Notes that a shard has been read; raises if several passes have yielded nothing."""
        self._read += 1
        if self._read < self._next:  # a check walks graph and stack, so only after 100 shards, 200, 400, ...
            return
        self._next *= 2
        if self._yields is None:
            self._yields = _Yields()
            self._cyclers = [found for found in upstream(self._loader) if known_name(found) == "Cycler"]
        elif self._passes() - self._passes_then < _EMPTY_PASSES:
            return
        else:
            self._yields.check(self._read - self._read_then, f"nothing came of {self._read:,} shards from cycle")
        self._read_then, self._passes_then = self._read, self._passes()

    def _passes(self) -> int:
        return sum(cycler.source_datapipe._valid_iterator_id or 0 for cycler in self._cyclers)


def warn_when_idle(pipe: IterDataPipe[Any]) -> None:
    """Warns in the last consumer, once per process, if it got no shard because there are more consumers than shards."""
    sharder = next((found for found in upstream(pipe) if isinstance(found, ShardingFilter)), None)
    if sharder is None or sharder.instance_id < sharder.num_of_instances - 1:
        return
    count, consumers = sharder.source_datapipe._number_of_samples_yielded, sharder.num_of_instances
    if 0 < count < consumers:
        warn_once(
            "idle",
            f"there are fewer shards than consumers (ranks x workers), {count} for {consumers}: {consumers - count} of "
            f"them have nothing to do. Use fewer workers, more shards, or .split_shards() in place of "
            ".sharding_filter(), which assigns parts of shards",
        )


def _count_of(pipe: Any) -> tuple[Any, int]:
    # Samples that a grouping passed over to reach the position of a resumed stream count as yielded.
    return pipe._valid_iterator_id, pipe._number_of_samples_yielded + getattr(pipe, "_passed_over", 0)


def _taken_by(pipe: Any) -> int:
    """Returns how many items a stage has taken; for a reader that counts them, how many shards it has read."""
    if (read := getattr(pipe, "_shards_read", None)) is not None:
        return int(read)
    source = getattr(pipe, "source_datapipe", getattr(pipe, "datapipe", None))
    sources = sources_of(pipe) if source is None else [source]
    return max((getattr(source, "_number_of_samples_yielded", 0) for source in sources), default=0)


def _advice(pipe: Any) -> str:
    skipped = [
        f"{short_name(found)} {count:,} x {reason}"
        for found in upstream(pipe)
        for reason, count in getattr(found, "skipped", {}).items()
    ]
    advice = "Check that the shards have samples, what select=, fields= and filters leave, and what handlers skip"
    return f"Skipped so far: {', '.join(skipped)}. {advice}" if skipped else advice
