"""A graph that runs in the main process, in the order and with the states of one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.graph import DataPipe

from torchdata_wds.pipes.base import WdsPipe
from torchdata_wds.pipes.notes import note_source_failure
from torchdata_wds.workers.resume.checkpoints import Streams
from torchdata_wds.workers.resume.stream import SeedGraph, Seeds, Stream


class LocalIterDataPipe(WdsPipe[Any]):
    """Runs the stages before it as the only stream; the arguments are those of `Stream`."""

    #: `.join_workers()` must not take this for a stage that follows it.
    runs_others = True

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        seed_graph: SeedGraph,
        *,
        keeps_apart: bool = True,
        reset: Callable[[DataPipe, Seeds, int], DataPipe] | None = None,
    ) -> None:
        self.source_datapipe = source_datapipe
        self.streams = Streams(1)
        self.was_interrupted = False
        self._stream = Stream(source_datapipe, seed_graph, keeps_apart=keeps_apart, reset=reset)
        self._seeds: Seeds = (0, 0)

    def begin(self, seeds: Seeds, streams: Streams) -> None:
        """Sets the epoch's seeds, and where the next iteration begins."""
        self._seeds = seeds
        self.streams = streams
        self.was_interrupted = False
        told = self._stream.facts()  # in an epoch that was left early
        if streams.continues and streams.points() == [None]:
            streams.facts[0].add(told)
            streams.facts[0].passes = [epoch.position for epoch in self._stream.chain.epochs]

    def __iter__(self) -> Iterator[Any]:
        streams = self.streams
        (point,) = streams.points()
        with closing(self._stream.items(self._seeds, 0, point, streams.epoch)) as items:
            try:
                for item in items:
                    streams.taken += 1
                    yield item
            except KeyboardInterrupt:
                self.was_interrupted = True
                raise
            except Exception as error:
                note_source_failure(error)
                raise
        streams.turns.note_end(streams.taken, 0)

    def wait_for_facts(self) -> None:
        """Notes what the stages have reported."""
        self.streams.facts[0].add(self._stream.facts())

    def close(self) -> None:
        """Does nothing: there is nothing to end."""
