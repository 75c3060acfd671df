"""Sends a loader's figures to functions: every few seconds while an epoch runs, and at its end."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torchdata_wds.checks import checked_timeout
from torchdata_wds.pipes.chain_text import value_text
from torchdata_wds.workers.stats.loader_stats import LoaderStats

logger = logging.getLogger(__name__)

#: Seconds that the end of an epoch waits for functions that are slow; they then finish beside the training.
_PATIENCE = 5.0


class Source(Protocol):
    """What figures are taken from."""

    def moment(self) -> Any:
        """Returns what is known now."""

    def between(self, since: Any, now: Any) -> LoaderStats:
        """Returns the figures of the epoch up to a moment, and those since another one."""


class _Sink:
    """One function, and when it was called last."""

    def __init__(self, function: Callable[[LoaderStats], object], every: float) -> None:
        self.function, self.every = function, every
        self.since: Any = None  # the moment of the last call, or of the beginning
        self.due = 0.0
        self.has_failed = False

    def wait_from(self, moment: Any) -> None:
        self.since = moment
        self.due = time.monotonic() + (self.every or threading.TIMEOUT_MAX)

    def send(self, stats: LoaderStats) -> None:
        try:
            self.function(stats)
        except Exception:
            if not self.has_failed:
                logger.warning(
                    "%s, to which send_stats passes figures, failed; this is not logged again",
                    value_text(self.function),
                    exc_info=True,
                )
            self.has_failed = True


class _Sender:
    """A thread that calls sinks while one epoch runs; does not keep the source alive."""

    def __init__(self, source: Source, sinks: Sequence[_Sink], wait_from: Any) -> None:
        self._woken = threading.Event()
        self._last: list[tuple[_Sink, LoaderStats]] = []
        self._sinks = list(sinks)
        self._source = weakref.ref(source, lambda _, woken=self._woken: woken.set())  # type: ignore[misc]
        self._owner = os.getpid()
        for sink in self._sinks:
            sink.wait_from(wait_from)
        self._thread = threading.Thread(target=self._run, name="stats of a loader", daemon=True)
        self._thread.start()

    def end(self, last: Sequence[tuple[_Sink, LoaderStats]] = ()) -> None:
        """Sends the last figures, and ends the thread."""
        if self._owner == os.getpid():  # a forked process has no such thread
            self._last = list(last)
            self._woken.set()
            if threading.current_thread() is not self._thread:  # a function may end the epoch
                self._thread.join(_PATIENCE)

    def _run(self) -> None:
        while not self._woken.wait(self._pause()):
            if (source := self._source()) is None:
                return
            due = self._due_of(source)
            del source  # while this thread waits, or a function takes long, the loader may go
            for sink, stats in due:
                sink.send(stats)
        for sink, stats in self._last:
            sink.send(stats)

    def _pause(self) -> float:
        wanted = min(sink.due for sink in self._sinks) - time.monotonic()
        return min(max(wanted, 0.0), threading.TIMEOUT_MAX / 2)

    def _due_of(self, source: Source) -> list[tuple[_Sink, LoaderStats]]:
        """Returns what is to be sent now; nothing if the loader is being closed."""
        due = [sink for sink in self._sinks if sink.due <= time.monotonic()]
        try:
            now = source.moment()
            found = [(sink, source.between(sink.since, now)) for sink in due]
        except Exception:
            logger.debug("figures were not sent", exc_info=True)
            found, now = [], None
        for sink in due:
            sink.wait_from(sink.since if now is None else now)
        return found


class StatsSinks:
    """The functions that get the figures of one loader."""

    def __init__(self) -> None:
        self._sinks: list[_Sink] = []
        self._sender: _Sender | None = None
        self._source: Callable[[], Source | None] = lambda: None  # of the running epoch

    def add(self, function: Callable[[LoaderStats], object], every: float) -> None:
        """Adds a function, or changes how often it is called; it is called from now on if an epoch runs.

        Raises:
            TypeError, ValueError: if the function cannot be called, or the number of seconds is not valid.
        """
        if not callable(function):
            raise TypeError(f"send_stats takes a function of a LoaderStats, not {function!r}")
        every = checked_timeout(every, "every", zero="only at the end of each epoch")
        self._sinks = [*(sink for sink in self._sinks if sink.function != function), _Sink(function, every)]
        if (source := self._source()) is not None:
            self._restart(source)

    def begin(self, source: Source) -> None:
        """Begins an epoch, whose figures the source has; does not keep it alive."""
        self._source = weakref.ref(source)
        if self._sinks:
            self._restart(source)

    def end(self) -> None:
        """Ends the epoch: sends its last figures."""
        source, sender = self._source(), self._sender
        self._source, self._sender = lambda: None, None
        if sender is None:
            return
        last = []
        if source is not None:
            with contextlib.suppress(Exception):  # of workers that were lost
                now = source.moment()
                last = [(sink, source.between(sink.since, now)) for sink in self._sinks]
        sender.end(last)

    def _restart(self, source: Source) -> None:
        if self._sender is not None:
            self._sender.end()
        self._sender = _Sender(source, self._sinks, source.moment())
