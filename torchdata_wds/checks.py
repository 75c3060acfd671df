"""Checks of options: counts, numbers, weights, flags, choices, timeouts and start methods."""

import math
import multiprocessing
import operator
from collections.abc import Iterable
from contextlib import suppress
from numbers import Real
from typing import Any, TypeGuard


def is_count(value: object, least: int) -> bool:
    """Returns whether an option is an int (but not a bool) of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_count(name: str, value: object, least: int) -> None:
    """Raises a ValueError unless an option is an int of at least `least`."""
    if not is_count(value, least):
        raise ValueError(f"{name} must be a whole number from {least}, not {value!r}")


def checked_int(name: str, value: Any, least: float, most: int | None = None) -> int:
    """Returns an integer option, also numpy's, as an int; raises TypeError for other types, ValueError out of range."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    number = operator.index(value)
    if number < least or (most is not None and number > most):
        valid = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} must be {valid}, not {value!r}")
    return number


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether an option is an int or a float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def checked_weights(weights: Iterable[Any], count: int) -> tuple[float, ...]:
    """Returns one finite weight above 0 for each of `count` sources; raises ValueError for others."""
    given = tuple(weights) if isinstance(weights, Iterable) else ()
    if len(given) != count:
        raise ValueError(f"weights must be {count} numbers, one for each source, not {weights!r}")
    found = []
    for number, weight in enumerate(given):
        with suppress(OverflowError):  # of an int that is too large
            if isinstance(weight, Real) and not isinstance(weight, bool) and 0 < float(weight) < math.inf:
                found.append(float(weight))
                continue
        raise ValueError(
            f"weights must be finite numbers above 0, but that of source {number}, counted from 0, is {weight!r}; "
            "leave out a source that is not wanted"
        )
    return tuple(found)


def check_flags(**flags: object) -> None:
    """Raises a TypeError for the first option that is not True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises a ValueError unless an option is one of the choices."""
    if value not in (known := tuple(choices)):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")


def checked_timeout(timeout: Any, name: str = "timeout", *, zero: str = "wait for ever") -> float:
    """Returns a number of seconds, 0 for no limit (which is `zero`); raises TypeError or ValueError for others."""
    if not is_number(timeout):
        raise TypeError(f"{name} must be a number of seconds, not {timeout!r}")
    if not timeout >= 0:
        raise ValueError(f"{name} must be 0 ({zero}) or a positive number of seconds, not {timeout!r}")
    return timeout


def checked_context(name: Any) -> str | None:
    """Returns a multiprocessing start method, or None for the default; raises TypeError or ValueError for others."""
    known = multiprocessing.get_all_start_methods()
    if name is not None and name not in known:
        error = ValueError if isinstance(name, str) else TypeError
        raise error(f"multiprocessing_context must be None or one of {known}, not {name!r}")
    return name  # type: ignore[no-any-return]
