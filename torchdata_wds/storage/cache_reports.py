"""What a cache says about its work, on request."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torchdata_wds.environment import reports_caching
from torchdata_wds.storage.urls import mask_url

__all__ = ["download_bar", "report"]

logger = logging.getLogger(__name__)


def report(verbose: bool, message: str, *values: object) -> None:
    """Logs what has happened; if asked to, also where nobody has configured logging: on standard error.

    Args:
        verbose: Whether the cache was asked to; ``WDS_VERBOSE_CACHE=1`` is the same.
        message: The message, for the values to be put in.
        values: Their secrets are masked already.
    """
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(message, *values)
    elif verbose or reports_caching():
        record = logger.makeRecord(logger.name, logging.INFO, "", 0, "cache: " + message, values, None)
        logging.StreamHandler(sys.stderr).handle(record)


@contextlib.contextmanager
def download_bar(url: str, verbose: bool) -> Iterator[Callable[[int], Any]]:
    """Shows the progress of a download, if asked to and tqdm is installed, where standard error is a terminal.

    Yields:
        What is to be called with the number of bytes that have come.
    """
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
