"""What is raised when a field does not decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdata_wds.errors import DecodingError, UnsafeDataError
from torchdata_wds.storage.urls import mask_url

__all__ = ["StepFailedError", "describe_failure"]

_SHOWN_BYTES = 16
_SHOWN_CAUSE = 300


class StepFailedError(Exception):
    """One step of decoding a field failed: raised inside this package only, to carry what failed and on what."""

    def __init__(self, step: str, data: bytes, cause: Exception) -> None:
        super().__init__(step)
        self.step = step
        self.data = data
        self.cause = cause


def describe_failure(failed: StepFailedError, sample: Mapping[str, Any], field: str) -> DecodingError | UnsafeDataError:
    """Makes the exception that names shard, key, field, decoder and cause."""
    key = str(sample.get("__key__", "?"))
    shard = mask_url(str(sample["__url__"])) if sample.get("__url__") is not None else None
    where = f"field {field!r} of sample {key!r}" + (f" in shard {shard}" if shard else "")
    if isinstance(failed.cause, UnsafeDataError):
        return UnsafeDataError(f"{where} {failed.cause}", shard=shard, key=key, field=field)
    message = (
        f"{where} does not decode as {failed.step}: {_describe_cause(failed.cause)}. {_describe_data(failed.data)}. "
        "Repair the sample, leave the field out with only=, or skip such samples with handler=warn_and_continue."
    )
    return DecodingError(message, shard=shard, key=key, field=field)


def _describe_cause(cause: Exception) -> str:
    text = " ".join(str(cause).split()).rstrip(".")
    if len(text) > _SHOWN_CAUSE:
        text = text[:_SHOWN_CAUSE] + "..."
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def _describe_data(data: bytes) -> str:
    if not data:
        return "The field is empty"
    return f"It has {len(data):,} bytes, beginning with {data[:_SHOWN_BYTES]!r}"
