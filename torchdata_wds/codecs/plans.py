"""Plans: how to decode or encode a field, chosen once per field name; and descriptions of values and failures."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchdata_wds.codecs.options import MissingPackageError

#: Bytes -> value, or value -> bytes; raises StepFailedError. None: the field stays as it is.
Plan = Callable[[Any], Any] | None

# Field names come from the shards: a data set with a new name in every sample must not fill the memory.
_MAX_PLANS = 1000
_SHOWN_CAUSE, _SHOWN_VALUE = 600, 60


@dataclass(eq=False)
class StepFailedError(Exception):
    """A step of coding a field failed: its name for messages, its input, and the cause. Never leaves this package."""

    step: str
    data: Any
    cause: Exception


class Planner(ABC):
    """Keeps a plan for each field name it meets, and pickles only its arguments; the base of Decoder and Encoder."""

    # a plain dict without __missing__: every field of every sample is looked up here
    _plans: dict[str, Plan]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    def _prepare(self) -> None:
        """Derives the private attributes from the arguments."""
        self._plans = {}

    @abstractmethod
    def _make_plan(self, field: str) -> Plan:
        """Chooses the plan of a field."""

    def _add_plan(self, field: str) -> Plan:
        plan = self._make_plan(field)
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[field] = plan
        return plan


def shown_call(name: str, owner: object, *arguments: str) -> str:
    """Writes the call that makes an equal object, with the options that differ from their defaults."""
    options = [f"{option}={value!r}" for option, value in changed_options(owner).items()]
    return f"{name}({', '.join([*arguments, *options])})"


def changed_options(owner: object) -> dict[str, Any]:
    """Returns the keyword arguments of an object that differ from their defaults."""
    options = [each for each in inspect.signature(type(owner)).parameters.values() if each.kind is each.KEYWORD_ONLY]
    given = [(option.name, getattr(owner, option.name), option.default) for option in options]
    return {name: value for name, value, default in given if value != default}


def guard(step: str, function: Callable[[Any, Any], Any], options: Any = None) -> Callable[[Any], Any]:
    """Makes a function raise StepFailedError for everything except a missing package."""

    def guarded(given: Any) -> Any:
        try:
            return function(given, options)
        except (MissingPackageError, StepFailedError):
            raise
        except Exception as cause:
            raise StepFailedError(step, given, cause) from cause

    return guarded


def describe_value(value: Any) -> str:
    """Describes a value in a few words, however large it is; never raises, even if the value's own code does."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        if kind.__module__.startswith("PIL."):
            return f"a PIL image of mode {getattr(value, 'mode', '?')!r} and size {getattr(value, 'size', '?')}"
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            dtype = str(value.dtype)
            shown = dtype if len(dtype) <= 2 * _SHOWN_VALUE else dtype[: 2 * _SHOWN_VALUE] + "..."
            return f"of type {name}, shape {tuple(value.shape)} and dtype {shown}"
        if isinstance(value, str):
            return f"of type {name}: {value[:_SHOWN_VALUE]!r}{'...' if len(value) > _SHOWN_VALUE else ''}"
        if kind in (bool, float, complex) or (kind is int and abs(value) < 10**_SHOWN_VALUE):
            return f"of type {name}: {value!r}"
    except Exception:  # noqa: BLE001 - it is called to report another failure
        return f"of type {kind.__name__}"
    return f"of type {name}"


def describe_cause(cause: Exception) -> str:
    """Returns the type of an exception and its message, in one line and without a full stop."""
    text = " ".join(str(cause).split()).rstrip(".")
    text = text if len(text) <= _SHOWN_CAUSE else text[:_SHOWN_CAUSE] + "..."
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__
