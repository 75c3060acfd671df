"""How long to wait for a server or store that fails, and when to give up: the same for every backend."""

from __future__ import annotations

import logging
import random
import threading

__all__ = ["Patience", "seconds_to_wait"]


logger = logging.getLogger(__name__)

_FIRST_SECONDS = 0.5

_LONGEST_SECONDS = 30.0

#: So long nothing new may come because of pauses, whatever the server asks for.
_LONGEST_WITHOUT_PROGRESS = 600.0

_WORTH_A_WARNING = 5.0

# Not the global generator, whose state belongs to the user, and not one that all workers share by fork.
_jitter = random.SystemRandom()


class Patience:
    """Counts the attempts that brought nothing new, and waits before the next.

    Args:
        retries: How many attempts may do so after the failure that ends the progress.
        shard: The masked URL, for the log.

    Attributes:
        failures: How many failures there were since something new came.
    """

    def __init__(self, retries: int, shard: str) -> None:
        self.failures = 0
        self._retries = retries
        self._shard = shard
        self._waited = 0.0
        self._interrupted = threading.Event()

    @property
    def is_interrupted(self) -> bool:
        """Whether nobody wants what is waited for any more."""
        return self._interrupted.is_set()

    def interrupt(self) -> None:
        """Ends the waiting, also in another thread, for good."""
        self._interrupted.set()

    def renew(self) -> None:
        """Begins to count anew: something new came."""
        self.failures = 0
        self._waited = 0.0

    def endures(self, reason: str, asked: float = 0.0) -> bool:
        """Counts a failure and waits, or tells that it is time to give up.

        Args:
            reason: What happened, masked.
            asked: Seconds that the server wants to be left alone.
        """
        self.failures += 1
        seconds = seconds_to_wait(self.failures, asked)
        if (
            self.failures > self._retries
            or self._waited + seconds > _LONGEST_WITHOUT_PROGRESS
            or self._interrupted.is_set()
        ):
            return False
        logger.log(
            logging.WARNING if seconds >= _WORTH_A_WARNING else logging.INFO,
            "shard %s: %s; attempt %d of %d follows in %.1f s",
            *(self._shard, reason, self.failures, self._retries, seconds),
        )
        self._waited += seconds
        return not self._interrupted.wait(seconds)


def seconds_to_wait(failures: int, asked: float = 0.0) -> float:
    """Decides about the pause behind a failure: none behind the first, then longer and longer, never twice the same.

    Args:
        failures: How many failures there were without progress, this one included.
        asked: Seconds that the server wants.
    """
    own = min(_LONGEST_SECONDS, _FIRST_SECONDS * 2.0 ** min(failures - 2, 32)) if failures > 1 else 0.0
    return max(own * _jitter.uniform(0.5, 1), asked * _jitter.uniform(1, 1.1))
