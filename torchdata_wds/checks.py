"""Checks of the options of ``WorkersReadingService``."""

from __future__ import annotations

import multiprocessing
import operator
from typing import Any

__all__ = ["checked_context", "checked_int", "checked_timeout", "check_count", "check_flags"]


def checked_int(name: str, value: Any, least: int, limit: int | None = None) -> int:
    """Returns a whole number as an int, if it is in its range."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    number = operator.index(value)
    if number < least or (limit is not None and number >= limit):
        upper = "" if limit is None else f" and less than {limit}"
        raise ValueError(f"{name} must be at least {least}{upper}, not {value!r}")
    return number


def checked_context(name: Any) -> str | None:
    """Returns the name of a start method, if there is such."""
    known = multiprocessing.get_all_start_methods()
    if name is not None and not isinstance(name, str):
        raise TypeError(f"multiprocessing_context must be None or one of {known}, not {name!r}")
    if name is not None and name not in known:
        raise ValueError(f"multiprocessing_context must be None or one of {known}, not {name!r}")
    return name


def checked_timeout(timeout: Any) -> float:
    """Returns a number of seconds, if it is one."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    if not timeout >= 0:
        raise ValueError(f"timeout must be 0 (wait for ever) or a positive number of seconds, not {timeout!r}")
    return timeout


def check_count(name: str, value: object, least: int) -> None:
    """Checks that an option which is a number of things is one.

    Raises:
        ValueError: names it, if it is no whole number, or less than the least.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number from {least}, not {value!r}")


def check_flags(**flags: object) -> None:
    """Checks that options which are yes or no are True or False.

    Raises:
        TypeError: names the one that is not.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")
