"""How the values of one field are encoded: the steps, chosen once for each field name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchdata_wds.codecs.failures import NoValueError, StepFailedError, describe_value
from torchdata_wds.codecs.matching import matches
from torchdata_wds.codecs.optional import MissingPackageError
from torchdata_wds.codecs.options import BYTES_TYPES, EncodeOptions
from torchdata_wds.codecs.plans import guard, split_suffix
from torchdata_wds.codecs.suffixes import compress, is_compressed
from torchdata_wds.codecs.table import find_codec

__all__ = ["EncodingPlan", "UserEncoder", "make_encoding_plan", "refuse_value"]

#: Value -> bytes; raises StepFailedError.
EncodingPlan = Callable[[Any], bytes]
UserEncoder = Callable[[Any], Any]


def make_encoding_plan(field: str, users: Mapping[str, UserEncoder], options: EncodeOptions) -> EncodingPlan:
    """Chooses how the values of a field are encoded.

    Args:
        field: The field's name, without a leading dot.
        users: Extension -> the user's function for it.
        options: The options of the built-in codecs.

    Returns:
        A function of the field's value.
    """
    inner, suffix = split_suffix(field)
    if suffix:
        plan = _plan_suffix(suffix, make_encoding_plan(inner, users, options), options)
    else:
        plan = _plan_type(field, options)
    user = _find_user(field, users)
    return plan if user is None else _plan_user(user, plan)


def refuse_value(value: Any, options: EncodeOptions) -> bytes:  # noqa: ARG001
    """Says what to do about a value of a field that holds bytes only.

    Raises:
        TypeError: always.
    """
    if isinstance(value, str):
        raise TypeError("such a field takes bytes only: give value.encode(), or name the field with .txt at its end")
    raise TypeError(
        "such a field takes bytes only: give bytes, or name the field by its type, with .json, .npy, .pth or .pkl at "
        "its end"
    )


def _find_user(field: str, users: Mapping[str, UserEncoder]) -> UserEncoder | None:
    """Finds the function of the longest extension that the field ends in: the field itself is the longest of all."""
    found = [extension for extension in users if matches(field, [extension])]
    return users[max(found, key=len)] if found else None


def _plan_user(user: UserEncoder, plan: EncodingPlan) -> EncodingPlan:
    name = getattr(user, "__qualname__", None) or repr(user)

    def encode(value: Any) -> bytes:
        if not isinstance(value, BYTES_TYPES):
            try:
                value = _check_result(user(value))
            except MissingPackageError:
                raise
            except Exception as cause:
                raise StepFailedError(f"by function {name}", value, cause) from cause
        return plan(value)

    return encode


def _check_result(result: Any) -> Any:
    if not isinstance(result, BYTES_TYPES):
        raise TypeError(f"it must return bytes, but its result is {describe_value(result)}")
    return result


def _plan_suffix(suffix: str, inner: EncodingPlan, options: EncodeOptions) -> EncodingPlan:
    def write(data: bytes, _: EncodeOptions) -> bytes:
        return compress(suffix, data)

    def look(data: bytes, _: EncodeOptions) -> bool:
        return is_compressed(suffix, data)

    pack = guard(f"as compressed data (.{suffix})", write, options)
    is_whole = guard(f"as compressed data (.{suffix})", look, options)

    def encode(value: Any) -> bytes:
        if isinstance(value, BYTES_TYPES):
            data = bytes(value)
            return data if is_whole(data) else pack(inner(data))
        return pack(inner(value))

    return encode


def _plan_type(field: str, options: EncodeOptions) -> EncodingPlan:
    codec = find_codec(field)
    if codec is None or codec.encode is None:
        return _allow_bytes(guard("as it is", refuse_value, options))
    return _allow_bytes(guard(f"as {codec.name}", codec.encode, options))


def _allow_bytes(encode: EncodingPlan) -> EncodingPlan:
    def allow(value: Any) -> bytes:
        if isinstance(value, BYTES_TYPES):
            return bytes(value)
        if value is None:
            raise StepFailedError("", value, NoValueError())
        return encode(value)

    return allow
