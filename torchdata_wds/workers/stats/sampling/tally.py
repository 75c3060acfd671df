"""What one stream does: where its time goes, and how many items its stages yield."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch.utils.data import IterDataPipe

from torchdata_wds.pipes.chain_text import known_name, sources_of, stage_text, written
from torchdata_wds.pipes.resume_facts import said_by
from torchdata_wds.storage import meters
from torchdata_wds.workers.stats.sampling import sampler
from torchdata_wds.workers.stats.sampling.sampler import Frames
from torchdata_wds.workers.stats.sampling.snapshot import Snapshot, Stage
from torchdata_wds.workers.stats.sampling.stage_finder import SENDING, Spot, StageFinder, stages_in_order
from torchdata_wds.workers.stats.tracing.track import INTERVAL, Track, most_events

logger = logging.getLogger(__name__)

_PUBLISH = 0.45  # seconds after which a snapshot is published
_FLUSH = 10  # after how many looks a trace is written
# Up to how many looks there are 20, 10 and 5 a second; then 2.5, as the shares of the time are about right.
_MANY, _SOME, _FEW = 20, 60, 110
_NEWS = 0.1  # seconds after which one is published if the worker is blocked
_SEARCH = 10  # after how many looks all threads are searched for stages, not only those that had some

#: Native stages that only wait for a thread of theirs, which runs the stages before them.
_WAITING = ("Prefetcher", "PinMemory", "FullSync")
_BATCHING = ("Batcher", "BucketBatcher", "MaxTokenBucketizer")
_numbers = count()


class Tally:
    """Notes what the stages of a graph do; `publish` is called with a snapshot about twice a second.

    `active` returns the seconds for which the stages have run; without it, they run between `begin` and `end`. All of
    that time is divided among the stages, unless `divides` is False, for stages that wait for workers.
    """

    def __init__(
        self,
        publish: Callable[[Snapshot], object] | None = None,
        active: Callable[[], float] | None = None,
        *,
        divides: bool = True,
    ) -> None:
        self.blocked = 0.0  # seconds in which the worker waited for room
        self._blocked_since = 0.0
        self.track: Track | None = None  # notes what each look sees
        self._run = f"{os.getpid()}-{time.time()}-{next(_numbers)}"
        self._publish, self._active_time, self._divides = publish, active, divides
        self._active = 0.0
        self._reading = self._waited_then = 0.0  # seconds of waiting for sources, up to the current order
        self._since: float | None = None  # when the current order began
        self._read_then: tuple[str, int] | None = None  # the shard read last before that, and the byte
        self._told_at = 0.0
        self._find_end: Callable[[], Any] = lambda: None
        self._end = 0  # the id of the last pipe
        self._without: Sequence[int] = ()
        self._telling = threading.RLock()
        self._has_failed = False
        self._note_graph([])

    def _note_graph(self, stages: list[IterDataPipe[Any]]) -> None:
        self._finder = StageFinder(stages)
        number = {id(stage): number for number, stage in enumerate(stages)}
        self._sources = [
            [number[id(source)] for source in written(sources_of(stage)) if id(source) in number] for stage in stages
        ]
        self._texts = [stage_text(stage, without=("handler",)) for stage in stages]
        self._batcher = next((n for n, stage in enumerate(stages) if known_name(stage) in _BATCHING), None)
        self._makes = [bool(said_by(stage, "makes_samples")) for stage in stages]
        self._waits = {n for n, stage in enumerate(stages) if known_name(stage) in _WAITING}
        last: list[tuple[int | None, int]] = [(None, 0)] * len(stages)  # the passes and counts of the last look
        found, out = [weakref.ref(stage) for stage in stages], [0] * len(stages)
        self._stages, self._last, self._out = found, last, out  # at once
        self._time: dict[int, float] = defaultdict(float)  # seconds by stage
        self._reads: dict[int, float] = defaultdict(float)  # those of them in which it read from a source
        self._threads: set[int] = set()
        self._looks = 0
        self._spot: Spot | None = None
        self._made, self._made_at = 0, time.perf_counter()

    def begin(self, find_end: Callable[[], Any], without: Sequence[int] = ()) -> None:
        """Begins an order, or an epoch.

        `find_end` returns the last pipe of the graph, which may be replaced; the pipes whose ids are in `without` are
        no stages. Nothing is kept alive.
        """
        meters.forget_slowest()
        self._find_end, self._without = find_end, without
        self._safely(self._find_graph)
        self._threads = set()
        self._since = self._made_at = time.perf_counter()
        self._waited_then = meters.waited()
        # In the main process it may be another loader's.
        self._read_then = meters.reading() if self._publish is None else None
        if self._stages:
            sampler.watch(self)

    def trace(self, folder: str | None, worker: int, workers: int) -> None:
        """Traces this process, one of the workers, in the folder of a running trace; None for no trace."""
        self.end_trace()
        if folder is not None:
            self.track = Track(most_events(workers), folder, worker)

    def end_trace(self) -> None:
        """Ends the trace, if there is one."""
        track, self.track = self.track, None
        if track is not None:
            track.flush(is_end=True)
            track.end()

    @property
    def interval(self) -> float:
        """The number of seconds between two looks."""
        if self.track is not None:
            return INTERVAL
        looks = self._looks
        return sampler.INTERVAL * (1 if looks < _MANY else 2 if looks < _SOME else 4 if looks < _FEW else 8)

    def _find_graph(self) -> None:
        end = self._find_end()
        if end is not None and id(end) != self._end:
            self._end = id(end)
            before = self._texts, self._out, self._time, self._reads, self._out[-1] if self._out else 0
            self._note_graph(stages_in_order(end, self._without))
            self._count_on(*before)

    def _count_on(
        self, texts: list[str], out: list[int], times: dict[int, float], reads: dict[int, float], items: int
    ) -> None:
        """Continues the counts of a graph that ``worker_reset_fn`` has replaced by one that begins with its stages."""
        if out and texts == self._texts[: len(texts)]:
            self._out[: len(out)] = out
            self._out[-1] = items
            self._time.update(times)
            self._reads.update(reads)

    def end(self) -> None:
        """Ends the order."""
        if self._since is not None:
            self._active += time.perf_counter() - self._since
            self._reading += meters.waited() - self._waited_then
            self._since = None
        self._safely(self._count)
        sampler.leave(self)
        self.end_trace()
        self._safely(self._tell)

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Notes that the worker waits for room."""
        if self._since is None:  # it has made all of its items
            yield
            return
        self._blocked_since = now = time.perf_counter()
        if now - self._told_at > _NEWS:  # what is ready can be told exactly now
            self._safely(self._count)
            self._safely(self._tell)
        yield
        now = time.perf_counter()
        self.blocked += now - self._blocked_since
        if self.track is not None:
            self.track.log.block(self._blocked_since, now)
        self._blocked_since = 0.0

    def tick(self, frames: Frames, seconds: float) -> None:
        """Charges the time since the last look to the stages in which threads are now."""
        self._count()
        self._looks += 1
        self._spot = None
        threads = frames if self._looks % _SEARCH == 1 or not self._threads else self._threads
        spots = {}
        for thread in threads:
            spot = self._finder.spot(frames.get(thread))
            # Another thread may send what this one has packed, or wait to do so.
            if spot is not None and (spot.stage != SENDING or thread in self._threads):
                spots[thread] = spot
        self._threads.update(spots)
        working = [spot for spot in spots.values() if spot.stage not in self._waits] or list(spots.values())
        if not self._blocked_since:
            for spot in working:
                self._time[spot.stage] += seconds
                self._reads[spot.stage] += seconds if spot.reads else 0.0
        if working:
            self._spot = working[0]
        if self.track is not None:
            self._note_look(self.track, seconds)

    def follow(self) -> None:
        """Publishes a snapshot, and writes the trace, from time to time."""
        track = self.track
        if track is not None and self._looks % _FLUSH == 0:
            track.flush()
        if time.perf_counter() - self._told_at >= _PUBLISH:
            self._tell()

    def _note_look(self, track: Track, seconds: float) -> None:
        spot, now = self._spot, time.perf_counter()
        if spot is not None and not self._blocked_since:
            stage = "sending items" if spot.stage == SENDING else self._texts[spot.stage]
            track.look(stage, now - seconds, now, reads=spot.reads)
        if not track.is_running:
            self.track = None

    def _safely(self, step: Callable[[], None]) -> None:
        """Takes a step in the thread that makes items, which no error of the figures may end."""
        try:
            step()
        except Exception:
            if not self._has_failed:
                logger.exception("the figures of a loader are not complete")
            self._has_failed = True

    def _tell(self) -> None:
        self._told_at = time.perf_counter()
        if self._publish is not None:
            with self._telling:  # or an older snapshot, of the other thread, could replace a newer one
                self._publish(self.snapshot())

    def _count(self) -> None:
        self._find_graph()
        stages, lasts, out = self._stages, self._last, self._out  # the other thread may find another graph
        for number, find in enumerate(stages):
            stage, last = find(), lasts[number]
            if stage is None:
                continue
            now, passing = stage._number_of_samples_yielded, stage._valid_iterator_id
            # Torch counts from 0 in each pass over the stage, and numbers the passes.
            out[number] += now - last[1] if passing == last[0] and now >= last[1] else now
            lasts[number] = passing, now
        made = self._out[-1] if self._out else 0
        if made != self._made:
            self._made, self._made_at = made, time.perf_counter()

    def snapshot(self) -> Snapshot:
        """Returns what is known up to now."""
        now = time.perf_counter()
        active = self._active if self._since is None else self._active + now - self._since
        if self._active_time is not None:
            active = self._active_time()
        blocked = self.blocked + (now - self._blocked_since if self._blocked_since else 0.0)
        sources = meters.snapshot()
        reading = self._reading if self._since is None else self._reading + meters.waited() - self._waited_then
        reading = min(reading, max(active - blocked, 0.0))
        seconds = self._seconds(max(active - blocked, 0.0) - reading) if self._divides else self._time
        return Snapshot(
            self._run,
            active,
            blocked,
            reading,
            seconds[SENDING],
            time.process_time(),
            self._out[-1] if self._out else 0,
            self._samples(),
            tuple(self._stage(number, seconds[number]) for number in range(len(self._stages))),
            sources,
            self._at(now),
        )

    def _samples(self) -> int:
        """Counts the samples: those of the stages that make them, else what is batched, else items."""
        if any(self._makes):
            return sum(out for out, makes in zip(self._out, self._makes, strict=True) if makes)
        if self._batcher is not None:
            return sum(self._out[source] for source in self._sources[self._batcher])
        return self._out[-1] if self._out else 0

    def _seconds(self, worked: float) -> dict[int, float]:
        """Divides the time of work among the stages, as the looks found them when they did not read."""
        # A thread that reads lets go of the interpreter, so that it is found there too often.
        # Copies, since the thread that looks adds to both.
        reads = self._reads.copy()
        works = {number: seconds - reads[number] for number, seconds in self._time.copy().items()}
        total = sum(works.values())
        if not total:
            works, total = self._time, sum(self._time.values())
        return defaultdict(float, {number: worked * seconds / total for number, seconds in works.items() if total})

    def _stage(self, number: int, seconds: float) -> Stage:
        out = self._out[number]
        taken = [self._out[source] for source in self._sources[number]]
        # Loading and grouping run as one loop, in which nothing counts what passes between them.
        is_inside = not out and any(self._out[other] for other in self._readers(number))
        items_in = -1 if out and not any(taken) else sum(taken)
        return Stage(self._texts[number], items_in, -1 if is_inside else out, seconds)

    def _readers(self, number: int) -> Iterable[int]:
        return (other for other, sources in enumerate(self._sources) if number in sources)

    def _at(self, now: float) -> tuple[str, str, int, float] | None:
        spot = self._spot
        if self._since is None or spot is None:
            return None
        found = meters.reading()
        shard, byte = ("", 0) if found is None or found == self._read_then else found
        stage = "" if spot.stage == SENDING else self._texts[spot.stage]
        return stage, shard, byte, now - self._made_at
