"""The exceptions for a field that does not decode, or a value that does not encode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdata_wds.errors import SKIPPING, Advice, DecodingError, EncodingError, UnsafeDataError
from torchdata_wds.storage.urls import mask_url

_SHOWN_BYTES = 16
_SHOWN_CAUSE = 600
_SHOWN_VALUE = 60


class StepFailedError(Exception):
    """One step of a field, named for the message, failed on its bytes or value with a cause; stays in this package."""

    def __init__(self, step: str, data: Any, cause: Exception) -> None:
        super().__init__(step)
        self.step = step
        self.data = data
        self.cause = cause


class NoValueError(ValueError):
    """A field is None, which cannot be written: a field that is not there has no bytes at all."""


def describe_failure(failed: StepFailedError, sample: Mapping[str, Any], field: str) -> DecodingError | UnsafeDataError:
    """Makes the exception that names shard, key, field, decoder and cause."""
    key = _key(sample)
    shard = mask_url(str(sample["__url__"])) if sample.get("__url__") is not None else None
    where = f"field {field!r} of sample {key!r}" + (f" in shard {shard}" if shard else "")
    if isinstance(failed.cause, UnsafeDataError):
        return UnsafeDataError(f"{where} {failed.cause}", shard=shard, key=key, field=field)
    data = failed.data
    found = f"It has {len(data):,} bytes, beginning with {data[:_SHOWN_BYTES]!r}" if data else "The field is empty"
    message = f"{where} does not decode as {failed.step}: {_describe_cause(failed.cause)}. {found}."
    advice = Advice.of("Repair the sample, leave the field out with only=, or skip such samples with {}.", *SKIPPING)
    return DecodingError(message, shard=shard, key=key, field=field, advice=advice)


def describe_encoding_failure(failed: StepFailedError, sample: Mapping[str, Any], field: str) -> EncodingError:
    """Makes the exception that names key, field, what was expected, what was found, and what to do."""
    key = _key(sample)
    where = f"field {field!r} of sample {key!r}"
    if isinstance(failed.cause, NoValueError):
        message = f"{where} is None, which has no bytes: leave the field out of the sample, or give bytes (b'' is fine)"
    else:
        is_deep = isinstance(failed.cause, RecursionError)
        cause = "it is nested too deeply, or contains itself" if is_deep else _describe_cause(failed.cause)
        message = (
            f"{where} cannot be written {failed.step}: {cause}. It is {describe_value(failed.data)}. "
            f"Otherwise, give bytes, or a function that makes them: encoder={{{field!r}: function}}."
        )
    return EncodingError(message, key=key, field=field)


def describe_encoder_failure(name: str, sample: Mapping[str, Any], cause: Exception) -> EncodingError:
    """Makes the exception for a user's function that failed to encode a whole sample."""
    key = _key(sample)
    return EncodingError(
        f"sample {key!r} cannot be encoded by function {name}: {_describe_cause(cause)}.",
        key=key,
        advice=Advice.of("Repair the function or the sample, or skip such samples with {}.", *SKIPPING),
    )


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


def _key(sample: Mapping[str, Any]) -> str:
    return str(sample.get("__key__", "?"))


def _describe_cause(cause: Exception) -> str:
    text = " ".join(str(cause).split()).rstrip(".")
    if len(text) > _SHOWN_CAUSE:
        text = text[:_SHOWN_CAUSE] + "..."
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__
