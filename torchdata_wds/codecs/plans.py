"""How one field is decoded: the steps, chosen once for each field name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torchdata_wds.codecs.failures import StepFailedError
from torchdata_wds.codecs.image_specs import IMAGE_FIELDS
from torchdata_wds.codecs.images import ImageDecoder
from torchdata_wds.codecs.matching import ExtensionDecoder, matches
from torchdata_wds.codecs.optional import MissingPackageError
from torchdata_wds.codecs.options import DecodeOptions
from torchdata_wds.codecs.suffixes import SUFFIXES, decompress
from torchdata_wds.codecs.table import find_codec

__all__ = ["Plan", "guard", "make_plan", "split_suffix"]

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
