"""What the exceptions say of a field that does not decode, and of a value that does not encode."""

from __future__ import annotations

from typing import Any

_SHOWN_CAUSE = 600
_SHOWN_VALUE = 60


class StepFailedError(Exception):
    """One step of a field, named for the message, failed on its bytes or value with a cause; stays in this package."""

    def __init__(self, step: str, data: Any, cause: Exception) -> None:
        super().__init__(step)
        self.step = step
        self.data = data
        self.cause = cause


def describe_value(value: Any) -> str:
    """Says what a value is, in a few words however large it is; never raises, whatever the value's own code does."""
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
    if len(text) > _SHOWN_CAUSE:
        text = text[:_SHOWN_CAUSE] + "..."
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__
