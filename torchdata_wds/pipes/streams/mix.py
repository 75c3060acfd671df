"""Mixes several streams into one: in turn or by weights, to the first end, to the last, or over and over."""

import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, get_args

from torch.utils.data import IterDataPipe

from torchdata_wds.checks import checked_weights
from torchdata_wds.consumers import place_of
from torchdata_wds.errors import ShardListError
from torchdata_wds.handlers import warn_once
from torchdata_wds.option_types import Stop
from torchdata_wds.pipes.base import Pipe, WdsPipe, register
from torchdata_wds.pipes.foreign_loaders import heed_dealer
from torchdata_wds.pipes.seeds import Passes, Seed, Seeded

_STOPS = (
    "'first' ends when the source whose turn it is has ended, 'all' yields every item of every source once, 'cycle' "
    "restarts sources that have ended until each has been seen whole"
)

_END: Any = object()


class _Source:
    """One source, during one epoch of the mix."""

    def __init__(self, pipe: Pipe, number: int, stop: Stop, seed: Seed) -> None:
        self.number = number
        self.passes = Passes(pipe)
        self.passes.begin_stream()
        self.was_exhausted = False
        self._pipe, self._stop, self._seed = pipe, stop, seed
        self._iterator: Iterator[Any] | None = None
        self._pass, self._gave = 0, False

    def take(self) -> Any:
        """Returns the next item of this pass, or _END; raises if this pass has no item at all."""
        if self._iterator is None:
            # A stream that wds_epoch continues was seeded in its middle, before this source began.
            if self._pass or self._seed.epoch == 0:
                self.passes.begin_pass(self._pass)
            self._iterator = iter(self._pipe)
        if (item := next(self._iterator, _END)) is not _END:
            self._gave = True
            return item
        self.was_exhausted = True
        if not self._gave:
            self._report_empty()
        return _END

    def begin_next_pass(self) -> None:
        """Restarts the source in a new order."""
        self._pass, self._iterator, self._gave = self._pass + 1, None, False

    def close(self) -> None:
        """Closes the source's iterator."""
        if (close := getattr(self._iterator, "close", None)) is not None:
            close()

    def _report_empty(self) -> None:
        place = place_of(self._pipe)
        source = f"source {self.number} of wds_mix, counted from 0, a {type(self._pipe).__name__}, gave nothing"
        if place.consumers == 1:
            raise ShardListError(
                f"{source} in pass {self._pass}. Check its list of shards, its filters, and what its handlers skipped; "
                "leave it out if there is nothing in it"
            )
        divided = f"consumer {place.number} of {place.consumers}, counted from 0, among which its shards are divided"
        advice = "with fewer shards than consumers, use more shards, fewer workers or .resample_shards()"
        if self._stop != "all":
            raise ShardListError(f"{source} in pass {self._pass} to {divided}: {advice}, or stop='all'")
        warn_once(f"wds_mix {self.number}", f"{source} to {divided}, and was left out of the mix: {advice}")


@register("wds_mix")
class SampleMixerIterDataPipe(WdsPipe[Any], Seeded):
    """Mixes several pipes into one stream (functional name: ``wds_mix``).

    Each step chooses a source, in turn or at random by `weights`, and yields its next item. Nothing is read ahead, and
    sources keep their files open between turns. Downstream of a ``sharding_filter`` each consumer draws differently;
    upstream of it, or without one, all draw alike. A source that yields nothing in a pass raises ShardListError; with
    ``"all"`` and shards divided among several consumers it only leaves the mix, with a warning.

    Attributes:
        counts: How many items each source has yielded in this epoch (or the last one), in this process, in order.

    Args:
        *others: The other sources.
        weights: One finite number above 0 per source, in order: how often it is chosen, relative to the others. None
            takes the sources in turn.
        stop: When an epoch ends. ``"first"``: when the chosen source is exhausted (21 items of 100 and 10 samples in
            turn). ``"all"``: when all are exhausted; the others continue with their weights (110). ``"cycle"``: when
            each has been exhausted once; the others start new passes, in new orders that all consumers agree on (200).

    Yields:
        The items of all sources.

    Raises:
        TypeError: if a source is not a pipe, or `stop` is missing.
        ValueError: if `weights` or `stop` is wrong, or the same pipe is given twice.
        ShardListError: if a source yields nothing.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> mixed = IterableWrapper("abcd").wds_mix(IterableWrapper([1, 2]), stop="all")
        >>> list(mixed), mixed.counts
        (['a', 1, 'b', 2, 'c', 'd'], [4, 2])
    """

    def __init__(
        self,
        source_datapipe: Pipe,
        *others: IterDataPipe[Any],
        weights: Sequence[float] | None = None,
        stop: Stop | None = None,
    ) -> None:
        if stop is None:
            raise TypeError(f"wds_mix needs stop=: {_STOPS}")
        if stop not in get_args(Stop):
            raise ValueError(f"stop must be one of {', '.join(map(repr, get_args(Stop)))}, not {stop!r}: {_STOPS}")
        sources = (source_datapipe, *others)
        for number, source in enumerate(sources):
            if not isinstance(source, IterDataPipe):
                raise TypeError(f"wds_mix takes pipes; source {number}, counted from 0, is {source!r}")
            if any(source is other for other in sources[:number]):
                raise ValueError(
                    f"wds_mix got the same {type(source).__name__} again as source {number}, counted from 0: a pipe "
                    "has one reader at a time. Build it a second time, or give it a higher weight"
                )
        self.source_datapipe, self.others = source_datapipe, others
        self.weights = None if weights is None else checked_weights(weights, len(sources))
        self.stop = stop
        self.counts = [0] * len(sources)
        self._seed = Seed()

    def __iter__(self) -> Iterator[Any]:
        heed_dealer(self)
        rng = self._seed.begin_epoch("wds_mix", place_of(self))
        pipes = (self.source_datapipe, *self.others)
        self.counts = [0] * len(pipes)
        with ExitStack() as stack:
            sources = [_Source(pipe, number, self.stop, self._seed) for number, pipe in enumerate(pipes)]
            for source in sources:
                stack.callback(source.close)
            yield from self._mixed(sources, rng)

    def __len__(self) -> int:
        if self.stop != "all":
            raise TypeError(f"wds_mix(stop={self.stop!r}) does not know its length; stop='all' has that of all sources")
        return sum(map(len, (self.source_datapipe, *self.others)))

    def _mixed(self, sources: Sequence[_Source], rng: random.Random) -> Iterator[Any]:
        """Yields the items of all sources, and counts them."""
        left, place = [*sources], -1
        sums = self._sums_of(left)
        while left:
            # Weights 1 and 3 have the sums [1/3, 4/3]: a draw of 0.5 falls on 2/3, which is source 1. The product may
            # be rounded up to the last sum itself, hence min().
            drawn = min(bisect(sums, rng.random() * sums[-1]), len(left) - 1) if sums else None
            # Without weights a turn passes to the next place. If place 1 of 3 is removed, place goes back to 0, and the
            # next turn is place 1 again, where the third source now is.
            place = (place + 1) % len(left) if drawn is None else drawn
            source = left[place]
            item = source.take()
            if item is _END and self.stop == "cycle" and not all(other.was_exhausted for other in sources):
                source.begin_next_pass()
                item = source.take()
            if item is not _END:
                self.counts[source.number] += 1
                yield item
            elif self.stop == "all":
                del left[place]
                place -= 1
                sums = self._sums_of(left)
            else:
                break
        for source in sources if self.stop == "cycle" else ():
            source.passes.begin_pass(-1)  # agreed seeds, in case nothing seeds the next epoch

    def _sums_of(self, sources: Sequence[_Source]) -> list[float]:
        weights = [self.weights[source.number] for source in sources] if self.weights is not None else []
        return list(accumulate(weight / max(weights) for weight in weights))  # a sum of the weights might overflow
