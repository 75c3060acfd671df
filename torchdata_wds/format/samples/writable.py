"""Which keys, fields and values may be written: those that are read back as they are."""

from __future__ import annotations

from typing import Any

from torchdata_wds.errors import Advice, EncodingError, MissingFieldError, SampleError
from torchdata_wds.format.samples.names import is_metadata, skip_reason, split_name

_CURES = {
    "metadata": "its first part has the form __x__, which marks what belongs to no sample",
    "macOS metadata": "macOS writes such names beside the real files, and readers skip them",
}

_LONE_SURROGATE = "it holds {!r}, which is not a character of its own (a lone surrogate)"
_KEEP_CASE = Advice.of("Rename it, or write and read with {}", "lowercase=False", "--keep-case")


def is_written(field: object, key: object = None) -> bool:
    """Returns whether a sample's entry becomes a member: not names like ``__key__``, which describe the sample."""
    if not isinstance(field, str):
        raise SampleError(
            f"field {field!r} of sample {key!r} is of type {type(field).__name__}: the name of a field must be a str, "
            "such as 'jpg'",
            key=key if isinstance(key, str) else None,
        )
    return not is_metadata(field)


def check_key(key: object) -> bytes:
    """Checks a sample's key."""
    if key is None:
        raise MissingFieldError(
            "the sample has no __key__: each needs one, a str that no other sample of its shard has", field="__key__"
        )
    if not isinstance(key, str):
        message = f"__key__ is {key!r}, of type {type(key).__name__}: it must be a str. Write str(key), say"
        raise SampleError(message, field="__key__")
    # a member name that the reader would split elsewhere, skip, or that unpacking would put anywhere else
    if split_name(key + ".x") != (key, "x") or key[0] == "/" or "\0" in key or (".." in key and ".." in key.split("/")):
        reason = _reason(key)
    else:
        try:
            return key.encode()
        except UnicodeEncodeError as error:
            reason = _LONE_SURROGATE.format(key[error.start])
    raise SampleError(f"key {key!r} cannot be written, because it could not be read back: {reason}", key=key)


def check_field(field: str, key: object, lowercase: bool = True) -> bytes:
    """Checks the name of a field."""
    reason = ""
    if not field:
        reason = "it is empty"
    elif "/" in field or "\0" in field:
        reason = "it holds a slash or NUL"
    elif lowercase and field.lower() != field:
        reason = f"it is read as {field.lower()!r}, in lower case."
    try:
        encoded = field.encode()
    except UnicodeEncodeError as error:
        reason = _LONE_SURROGATE.format(field[error.start])
    if reason:
        raise SampleError(
            f"field {field!r} of sample {key!r} cannot be written, because it could not be read back: {reason}",
            key=key if isinstance(key, str) else None,
            field=field,
            advice=_KEEP_CASE if reason.endswith("lower case.") else "",
        )
    return encoded


def as_bytes(value: Any, key: object, field: str) -> bytes:
    """Gives a value that is bytes, a bytearray or a memoryview as bytes."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    found = "None" if value is None else f"a value of type {type(value).__name__}"
    raise EncodingError(
        f"field {field!r} of sample {key!r} is not encoded: expected bytes, found {found}. Encode it first, or let "
        "encoder=True do it",
        key=key if isinstance(key, str) else None,
        field=field,
    )


def _reason(key: str) -> str:
    base = key.rpartition("/")[2]
    cure = base.replace(".", "_")
    dotted = f"its last part {base!r} has a dot, and the field begins behind the first dot; write {cure!r}, say"
    reasons = (
        (not key, "it is empty"),
        (key.startswith("/"), "it is an absolute path; leave the first slash out"),
        (".." in key.split("/"), "it has a part '..', which leads out of the folder that an archive is unpacked in"),
        ("\0" in key, "it holds a NUL"),
        (not base, "it ends in a slash, so that its file has no name"),
        ("." in base, dotted),
        (key.startswith("./"), "a leading './' is stripped when it is read; leave it out"),
    )
    return next((reason for holds, reason in reasons if holds), None) or _CURES[skip_reason(key + ".x")]
