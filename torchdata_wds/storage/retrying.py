"""Retries: how long to wait, when to give up, and how to reopen a shard at the byte where reading broke off."""

import contextlib
import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torchdata_wds.errors import TRY_AGAIN, ShardOpenError, WdsError
from torchdata_wds.storage.byte_streams import Source
from torchdata_wds.storage.meters import retried
from torchdata_wds.storage.secrets.masking import mask_text, masked_cause

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Errors that would only happen again.
HOPELESS = (
    FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError,
    ImportError, NotImplementedError, TypeError,
)  # fmt: skip

#: The longest total of pauses without progress, in seconds, even if the server requests longer ones.
_LONGEST_WITHOUT_PROGRESS = 600.0
_WORTH_A_WARNING = 5.0

# Not the global generator, whose state belongs to the user, nor one whose state forked workers would share.
_jitter = random.SystemRandom()


class Patience:
    """Counts failures without progress, and waits before each of at most `retries` further attempts."""

    def __init__(self, retries: int, shard: str) -> None:
        self.failures = 0  # since the last progress
        self.retries = retries
        self._shard = shard
        self._waited = 0.0
        self.interrupted = threading.Event()  # ends this and all later pauses: the result is no longer wanted

    def renew(self) -> None:
        """Resets the counts, after progress."""
        self.failures = 0
        self._waited = 0.0

    def endures(self, reason: str, asked: float = 0.0) -> bool:
        """Counts a failure; waits, at least `asked` seconds, and returns True, or returns False to give up."""
        self.failures += 1
        seconds = seconds_to_wait(self.failures, asked)
        is_too_long = self._waited + seconds > _LONGEST_WITHOUT_PROGRESS
        if self.failures > self.retries or is_too_long or self.interrupted.is_set():
            return False
        logger.log(
            logging.WARNING if seconds >= _WORTH_A_WARNING else logging.INFO,
            "shard %s: %s; attempt %d of %d follows in %.1f s",
            *(self._shard, reason, self.failures, self.retries, seconds),
        )
        self._waited += seconds
        retried(self._shard)
        return not self.interrupted.wait(seconds)


def seconds_to_wait(failures: int, asked: float = 0.0) -> float:
    """Returns the pause in seconds after a number of failures without progress: none after the first, then doubling.

    Failure 2 waits up to 0.5 seconds, 3 up to 1, 4 up to 2, ... 8 and later up to 30; at random, but at least half of
    that, so that many workers do not retry at the same moment.
    """
    own = min(30.0, 0.5 * 2.0 ** min(failures - 2, 32)) if failures > 1 else 0.0
    return max(own * _jitter.uniform(0.5, 1), asked * _jitter.uniform(1, 1.1))


def error_words(error: Exception) -> str:
    """Describes an exception of a client library without secrets."""
    return f"{type(error).__name__}: {mask_text(str(error))}"


def attempt(work: Callable[[], T], retries: int, shard: str, doing: str = "") -> T:
    """Calls a function until it succeeds, at most `retries` further times; log messages begin with `doing`."""
    patience = Patience(retries, shard)
    while True:
        try:
            return work()
        except (WdsError, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, HOPELESS) or not patience.endures(doing + error_words(error)):
                raise


@dataclass(eq=False)
class Failure(Exception):  # noqa: N818 - internal: users see a ShardOpenError
    """A connection, request or body that failed."""

    reason: str  # without secrets
    lasting: bool = False  # whether another attempt would fail too
    wait: float = 0.0  # the minimum number of seconds before the next attempt
    error: Exception | None = None  # the library's exception


class RetryingSource(Source):
    """An object on a server or in a store; when a connection fails, a new one continues at the same byte.

    A backend implements `_connect`, which opens the object at `_position`, checks that it is the same one, and sets
    `_connection` (or `_ended`), `_total` and `_has_begun`; `_receive`, which reads from the connection; and `_refusal`.
    The first two raise `Failure` or a library's errors. Reading gives up after `retries` attempts without new bytes.
    """

    def __init__(self, shard: str, start: int, retries: int) -> None:
        self._shard = shard
        self._start = self._position = start
        self._patience = Patience(retries, shard)
        self._connection: Any = None
        self._total: int | None = None  # the size of the object, if known
        self._has_begun = False
        self._ended = False

    def connect(self) -> None:
        """Opens the object, unless it is open, and makes sure that it is the same one as before."""
        while self._connection is None and not self._ended:
            try:
                self._connect()
            except Exception as error:  # noqa: BLE001 - client libraries raise anything
                self._bear(error)

    def fill(self, view: memoryview) -> int:
        """Reads bytes into the buffer; 0 only at the verified end."""
        while True:
            self.connect()
            if self._ended:
                return 0
            try:
                count = self._receive(view)
            except Exception as error:  # noqa: BLE001 - client libraries raise anything
                self._bear(error)
            else:
                # `retries` limits attempts without progress, not attempts per shard: over a link that breaks every
                # 100 MB, a shard of 10 GB takes 100 connections, and each of them resets the count.
                if count:
                    self._position += count
                    self._patience.renew()
                return count

    def interrupt(self) -> None:
        """Ends a pause in another thread, but not a request in progress."""
        self._patience.interrupted.set()

    def stored_position(self) -> int:
        """Returns the position."""
        return self._position

    def _connect(self) -> None:
        raise NotImplementedError

    def _receive(self, view: memoryview) -> int:
        raise NotImplementedError

    def _refusal(self, failure: Failure, more: str) -> ShardOpenError:
        """Returns the error for an object that was never open; `more` says why there are no more attempts."""
        raise NotImplementedError

    def _bear(self, error: Exception) -> None:
        """Drops a failed connection and waits, so that the caller can retry; raises ShardOpenError to give up."""
        # A WdsError is a verdict that no new connection changes: the object has changed, or is shorter than the offset.
        if isinstance(error, (WdsError, MemoryError)):
            raise error
        lasting = isinstance(error, HOPELESS)
        failure = error if isinstance(error, Failure) else Failure(error_words(error), lasting, error=error)
        self._disconnect()
        reason = f"failed at byte {self._position:,}: {failure.reason}" if self._has_begun else failure.reason
        if not failure.lasting and self._patience.endures(reason, failure.wait):
            return
        more, attempts = "", self._patience.failures
        if self._patience.interrupted.is_set() and not failure.lasting:
            more = "; reading was interrupted"
        elif not failure.lasting:
            count = f"{attempts} attempt{'s' * (attempts > 1)} without progress (retries={self._patience.retries})"
            more = f"; gave up at byte {self._position:,} after {count}"
        # An object that was never open may not exist: its backend knows the likely cause.
        if not self._has_begun:
            refusal = self._refusal(failure, more)
        else:
            of = "" if self._total is None else f" of {self._total:,}"
            refusal = ShardOpenError(
                f"shard {self._shard} broke off after {self._position:,}{of} bytes: {failure.reason}{more}.",
                shard=self._shard,
                advice=TRY_AGAIN,
            )
        raise refusal from (failure.error and masked_cause(failure.error))

    def _changed(self, what: str) -> ShardOpenError:
        return ShardOpenError(
            f"shard {self._shard} was changed while it was read, after {self._position:,} bytes: {what}. Write new "
            "versions under new names, or read it again from its start.",
            shard=self._shard,
        )

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    def _close(self) -> None:
        self._disconnect()
