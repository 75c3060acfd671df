"""Which memory a forked process may see: the forks of this process, counted around the time that each one takes."""

from __future__ import annotations

import os

__all__ = ["fork_mark", "has_forked_since"]

# Two counts, because other threads go on while handlers of a fork run: what begins or ends between the two counts to
# the fork as well.
_begun = 0
_ended = 0


def fork_mark() -> int:
    """Returns a mark of this moment, for `has_forked_since`."""
    return _begun if _begun == _ended else -1


def has_forked_since(mark: int) -> bool:
    """Whether a process may have been forked from this one since a moment, so that it sees what there was to see.

    Example:
        >>> has_forked_since(fork_mark())
        False
    """
    return mark != _begun or _begun != _ended


def _begin() -> None:
    global _begun
    _begun += 1


def _end() -> None:
    global _ended
    _ended += 1


def _end_in_child() -> None:
    global _ended
    _ended = _begun


os.register_at_fork(before=_begin, after_in_parent=_end, after_in_child=_end_in_child)
