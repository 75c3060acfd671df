"""How one field is decoded: the steps, chosen once for each field name.

How the values of one field are encoded: the steps, chosen once for each field name.

What Decoder and Encoder share: one plan for each field name, and a state of arguments only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torchdata_wds.codecs.failures import NoValueError, StepFailedError, describe_value
from torchdata_wds.codecs.images.decoding import ImageDecoder
from torchdata_wds.codecs.images.specs import IMAGE_FIELDS
from torchdata_wds.codecs.matching import ExtensionDecoder, matches
from torchdata_wds.codecs.options import BYTES_TYPES, DecodeOptions, EncodeOptions, MissingPackageError
from torchdata_wds.codecs.suffixes import SUFFIXES, compress, decompress, is_compressed
from torchdata_wds.codecs.table import find_codec

__all__ = [
    "Plan",
    "guard",
    "make_plan",
    "split_suffix",
    "EncodingPlan",
    "UserEncoder",
    "make_encoding_plan",
    "refuse_value",
    "Planner",
]


#: Bytes -> value; raises StepFailedError.
Plan = Callable[[bytes], Any]

UserDecoder = Callable[[str, bytes], Any]

T = TypeVar("T")

Options = TypeVar("Options")

R = TypeVar("R")


def make_plan(
    field: str, decoders: Sequence[UserDecoder], image: ImageDecoder | None, options: DecodeOptions
) -> Plan | None:
    """Chooses how a field is decoded.

    Args:
        field: The field's name, without a leading dot.
        decoders: The user's decoders, tried in order.
        image: What decodes images that no user's decoder took.
        options: The options of the built-in codecs.

    Returns:
        A function of the field's bytes, or None where they stay as they are.
    """
    inner, suffix = split_suffix(field)
    if suffix:
        last: Plan | None = _plan_suffix(suffix, make_plan(inner, decoders, image, options), options)
    else:
        last = _plan_type(field, image, options)
    # Decoders that the name alone rules out are not called for each sample.
    asked = [decoder for decoder in decoders if _may_take(decoder, field, suffix)]
    return _plan_users("." + field, asked, last) if asked else last


def split_suffix(field: str) -> tuple[str, str]:
    """Splits a compression suffix off: ``x.json.gz`` gives ``("x.json", "gz")``, ``json`` gives ``("json", "")``."""
    inner, _, suffix = field.rpartition(".")
    suffix = suffix.lower()
    return (inner, suffix) if suffix in SUFFIXES else (field, "")


def _may_take(decoder: UserDecoder, field: str, suffix: str) -> bool:
    if isinstance(decoder, ExtensionDecoder):
        return matches(field, decoder.extensions)
    if suffix:
        return False  # a plain function sees the decompressed data, under the rest of the name
    return not isinstance(decoder, ImageDecoder) or matches(field, IMAGE_FIELDS)


def _plan_users(key: str, decoders: Iterable[UserDecoder], last: Plan | None) -> Plan:
    asked = tuple(decoders)

    def decode(data: bytes) -> Any:
        for decoder in asked:
            try:
                value = decoder(key, data)
            except MissingPackageError:
                raise
            except Exception as cause:
                raise StepFailedError(_name_decoder(decoder), data, cause) from cause
            if value is not None:
                return value
        return data if last is None else last(data)

    return decode


def _plan_suffix(suffix: str, inner: Plan | None, options: DecodeOptions) -> Plan:
    def read(data: bytes, options: DecodeOptions) -> bytes:
        return decompress(suffix, data, options.max_bytes)

    unpack = guard(f"compressed data (.{suffix})", read, options)
    if inner is None:
        return unpack
    return lambda data: inner(unpack(data))


def _plan_type(field: str, image: ImageDecoder | None, options: DecodeOptions) -> Plan | None:
    codec = find_codec(field)
    if codec is None:
        return None
    if codec.decode is not None:
        return guard(codec.name, codec.decode, options)
    if image is not None and matches(field, IMAGE_FIELDS):
        return guard(f"an image (spec {image.spec!r})", lambda data, _: image.decode(data), options)
    return None


def guard(step: str, function: Callable[[T, Options], R], options: Options) -> Callable[[T], R]:
    """Makes a function raise StepFailedError for everything but a package that is not installed."""

    def guarded(given: T) -> R:
        try:
            return function(given, options)
        except MissingPackageError:
            raise
        except Exception as cause:
            raise StepFailedError(step, given, cause) from cause

    return guarded


def _name_decoder(decoder: UserDecoder) -> str:
    if isinstance(decoder, ExtensionDecoder | ImageDecoder):
        return repr(decoder)
    return f"decoder {getattr(decoder, '__qualname__', type(decoder).__qualname__)}"


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
        plan = _plan_suffix_encoding(suffix, make_encoding_plan(inner, users, options), options)
    else:
        plan = _plan_type_encoding(field, options)
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


def _plan_suffix_encoding(suffix: str, inner: EncodingPlan, options: EncodeOptions) -> EncodingPlan:
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


def _plan_type_encoding(field: str, options: EncodeOptions) -> EncodingPlan:
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


P = TypeVar("P")

# Field names come from the shards: a data set with ever new ones must not fill the memory.
_MAX_PLANS = 1000


class Planner(ABC, Generic[P]):
    """An object with a plan for each field, which pickles its arguments only.

    ``_prepare`` makes from the arguments what it works with, ``_make_plan`` the plan of a field.
    """

    # a plain dict, not one that makes its values: looking up is what every field of every sample does
    _plans: dict[str, P]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    def _prepare(self) -> None:
        self._plans = {}

    @abstractmethod
    def _make_plan(self, field: str) -> P:
        """Makes the plan of a field."""

    def _add_plan(self, field: str) -> P:
        """Makes the plan of a field that has none yet, and keeps it."""
        plan = self._make_plan(field)
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[field] = plan
        return plan
