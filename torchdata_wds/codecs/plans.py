"""Plans: how one field is decoded or encoded, chosen once for each field name, and the cache of these choices."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torchdata_wds.codecs.failures import NoValueError, StepFailedError, describe_value
from torchdata_wds.codecs.images.decoding import ImageDecoder
from torchdata_wds.codecs.images.specs import IMAGE_FIELDS
from torchdata_wds.codecs.matching import ExtensionDecoder, matches
from torchdata_wds.codecs.options import BYTES_TYPES, DecodeOptions, EncodeOptions, MissingPackageError
from torchdata_wds.codecs.suffixes import SUFFIXES, compress, decompress, is_compressed
from torchdata_wds.codecs.table import find_codec

#: Bytes -> value; raises StepFailedError.
Plan = Callable[[bytes], Any]

#: Value -> bytes; raises StepFailedError.
EncodingPlan = Callable[[Any], bytes]
UserDecoder = Callable[[str, bytes], Any]
UserEncoder = Callable[[Any], Any]
T = TypeVar("T")
R = TypeVar("R")
P = TypeVar("P")
Options = TypeVar("Options")

# Field names come from the shards: a data set with ever new ones must not fill the memory.
_MAX_PLANS = 1000


class Planner(ABC, Generic[P]):
    """Keeps a plan for each field name it meets, and pickles only its arguments; the base of Decoder and Encoder."""

    # a plain dict without __missing__: every field of every sample is looked up here
    _plans: dict[str, P]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    def _prepare(self) -> None:
        """Derives the private attributes from the arguments."""
        self._plans = {}

    @abstractmethod
    def _make_plan(self, field: str) -> P:
        """Chooses the plan of a field."""

    def _add_plan(self, field: str) -> P:
        """Makes and keeps the plan of a field that has none yet."""
        plan = self._make_plan(field)
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[field] = plan
        return plan

    def _show(self, arguments: list[str]) -> str:
        """Writes the call that makes an equal object, with the options that differ from their defaults."""
        for name, option in inspect.signature(type(self)).parameters.items():
            if option.kind is option.KEYWORD_ONLY and getattr(self, name) != option.default:
                arguments.append(f"{name}={getattr(self, name)!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"


def plan_decoding(
    field: str, decoders: Sequence[UserDecoder], image: ImageDecoder | None, options: DecodeOptions
) -> Plan | None:
    """Chooses how a field is decoded: by the user's decoders in order, then by the image decoder or the table of types.

    None means that its bytes stay as they are.
    """
    inner, suffix = split_suffix(field)
    codec = None if suffix else find_codec(field)
    last: Plan | None = None
    if suffix:
        rest = plan_decoding(inner, decoders, image, options)

        def read(data: bytes, options: DecodeOptions) -> bytes:
            return decompress(suffix, data, options.max_bytes)

        unpack = _guard(f"compressed data (.{suffix})", read, options)
        last = unpack if rest is None else lambda data: rest(unpack(data))
    elif codec is not None and codec.decode is not None:
        last = _guard(codec.name, codec.decode, options)
    elif codec is not None and image is not None:
        last = _guard(f"an image (spec {image.spec!r})", lambda data, _: image.decode(data), options)
    # Decoders that the name alone rules out are not called for each sample.
    users = [decoder for decoder in decoders if _may_take(decoder, field, suffix)]
    return _plan_users("." + field, users, last) if users else last


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


def _plan_users(key: str, decoders: list[UserDecoder], last: Plan | None) -> Plan:
    def decode(data: bytes) -> Any:
        for decoder in decoders:
            try:
                value = decoder(key, data)
            except MissingPackageError:
                raise
            except Exception as cause:
                name = f"decoder {getattr(decoder, '__qualname__', type(decoder).__qualname__)}"
                is_ours = isinstance(decoder, ExtensionDecoder | ImageDecoder)
                raise StepFailedError(repr(decoder) if is_ours else name, data, cause) from cause
            if value is not None:
                return value
        return data if last is None else last(data)

    return decode


def _guard(step: str, function: Callable[[T, Options], R], options: Options) -> Callable[[T], R]:
    """Makes a function raise StepFailedError for everything except a missing package."""

    def guarded(given: T) -> R:
        try:
            return function(given, options)
        except MissingPackageError:
            raise
        except Exception as cause:
            raise StepFailedError(step, given, cause) from cause

    return guarded


def plan_encoding(field: str, users: Mapping[str, UserEncoder], options: EncodeOptions) -> EncodingPlan:
    """Chooses how the values of a field are encoded: first by the user's function for the longest extension that fits.

    What it returns, and the values of fields without one, are encoded by the table of types and compressed.
    """
    inner, suffix = split_suffix(field)
    codec = find_codec(field)
    if suffix:
        plan = _plan_compression(suffix, plan_encoding(inner, users, options), options)
    elif codec is None or codec.encode is None:
        plan = _allow_bytes(_guard("as it is", _refuse_value, options))
    else:
        plan = _allow_bytes(_guard(f"as {codec.name}", codec.encode, options))
    found = [extension for extension in users if matches(field, [extension])]
    return _plan_user(users[max(found, key=len)], plan) if found else plan


def _refuse_value(value: Any, _: EncodeOptions) -> bytes:
    """Says what to do about a value in a field that can only hold bytes."""
    if isinstance(value, str):
        raise TypeError("such a field takes bytes only: give value.encode(), or name the field with .txt at its end")
    raise TypeError(
        "such a field takes bytes only: give bytes, or name the field by its type, with .json, .npy, .pth or .pkl at "
        "its end"
    )


def _plan_user(user: UserEncoder, plan: EncodingPlan) -> EncodingPlan:
    name = getattr(user, "__qualname__", None) or repr(user)

    def encode(value: Any) -> bytes:
        if isinstance(value, BYTES_TYPES):
            return plan(value)
        try:
            result = user(value)
            if not isinstance(result, BYTES_TYPES):
                raise TypeError(f"it must return bytes, but its result is {describe_value(result)}")
        except MissingPackageError:
            raise
        except Exception as cause:
            raise StepFailedError(f"by function {name}", value, cause) from cause
        return plan(result)

    return encode


def _plan_compression(suffix: str, inner: EncodingPlan, options: EncodeOptions) -> EncodingPlan:
    step = f"as compressed data (.{suffix})"
    pack: EncodingPlan = _guard(step, lambda data, _: compress(suffix, data), options)
    is_whole: Callable[[bytes], bool] = _guard(step, lambda data, _: is_compressed(suffix, data), options)

    def encode(value: Any) -> bytes:
        if isinstance(value, BYTES_TYPES):
            value = data = bytes(value)
            if is_whole(data):
                return data
        return pack(inner(value))

    return encode


def _allow_bytes(encode: EncodingPlan) -> EncodingPlan:
    def allow(value: Any) -> bytes:
        if isinstance(value, BYTES_TYPES):
            return bytes(value)
        if value is None:
            raise StepFailedError("", value, NoValueError())
        return encode(value)

    return allow
