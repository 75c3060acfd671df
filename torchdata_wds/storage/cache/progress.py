"""Progress in a cache: waiting for that of another process, and reporting our own."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from torchdata_wds.environment import reports_caching
from torchdata_wds.storage.urls import mask_url

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02

#: After this many seconds without progress, a process may be suspended: others read the source.
_LONGEST_WAIT = 300.0


class StalledError(OSError):
    """Another process has a shard's lock, and makes no progress."""

    def __init__(self) -> None:
        super().__init__(f"the process that downloads it has not gone on for {_LONGEST_WAIT:.0f} seconds")


class Waiting:
    """Waits for another process, as long as that makes progress."""

    def __init__(self) -> None:
        self._pause = _SHORTEST_PAUSE
        self._seen: object = None
        self._since = time.monotonic()

    def go_on(self, seen: object = None) -> None:
        """Sleeps briefly, longer each time; a StalledError if `seen` of the other has not changed for minutes."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since > _LONGEST_WAIT:
            raise StalledError
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


logger = logging.getLogger(__name__)


def report(verbose: bool, message: str, *values: object) -> None:
    """Logs an event; if reports are on and logging is not configured, prints it on standard error instead.

    ``verbose=True`` and ``WDS_VERBOSE_CACHE=1`` turn reports on. Secrets in `values` must already be masked.
    """
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(message, *values)
    elif verbose or reports_caching():
        record = logger.makeRecord(logger.name, logging.INFO, "", 0, "cache: " + message, values, None)
        logging.StreamHandler(sys.stderr).handle(record)


@contextlib.contextmanager
def download_bar(url: str, verbose: bool) -> Iterator[Callable[[int], Any]]:
    """Shows progress on a terminal if reports are on and tqdm is installed; yields a function of the new bytes."""
    if not (verbose or reports_caching()):
        yield int
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        yield int
        return
    with tqdm(desc=mask_url(url)[-40:], unit="B", unit_scale=True, leave=False, disable=None) as bar:
        yield bar.update
