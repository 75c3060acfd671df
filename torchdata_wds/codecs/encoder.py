"""Encodes samples: turns each field's value into bytes by the user's functions and the table of types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torchdata_wds.codecs.images.pixels import IMAGE_SPECS, parse_image_spec
from torchdata_wds.codecs.options import BYTES_TYPES, EncodeOptions, MissingPackageError
from torchdata_wds.codecs.plans import Plan, Planner, StepFailedError, describe_cause, describe_value, guard, shown_call
from torchdata_wds.codecs.suffixes import compress, is_compressed, split_suffix
from torchdata_wds.codecs.table import find_codec, matches, parse_extensions
from torchdata_wds.errors import SKIPPING, Advice, EncodingError
from torchdata_wds.format.samples.names import as_bytes, is_metadata, is_written

SampleEncoder = Callable[[dict[str, Any]], Mapping[str, Any]]
EncoderLike = bool | str | Mapping[str, Callable[[Any], bytes]] | SampleEncoder

_Plan = Callable[[Any], bytes]


class Encoder(Planner):
    """Encodes samples of values into new samples of bytes; ``.wds_encode(...)`` describes the arguments.

    The last part of a field's name decides its type. A value that would not read back equal (JPEG: up to its loss) is
    refused. The same value always becomes the same bytes, except in pickle and torch fields, where they also depend on
    which equal objects are one object, and in pickle fields on the order of sets. Bytes, bytearrays and memoryviews are
    written as they are; a compressed field (``gz bz2 xz zst``) compresses them unless they are complete in that
    compression. Names like ``__key__`` are copied. Pickles if the user's functions do.

    Raises:
        TypeError, ValueError: if an argument is wrong.
        EncodingError: when called, if a value cannot be written as its field's type.
        ImportError: when called, if a field needs a package that is not installed.
    """

    def __init__(self, encoder: EncoderLike = True, *, jpeg_quality: int = 95, png_compression: int = 6) -> None:
        self.encoder = encoder
        self.jpeg_quality = jpeg_quality
        self.png_compression = png_compression
        self._prepare()

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Encodes one sample into a new dict; fields keep their order, unless a function encodes whole samples."""
        if self._is_whole:
            return _require_bytes(self._encode_whole(sample))
        if self.encoder is False:
            return _require_bytes(sample)
        result = dict(sample)
        plans = self._plans
        for field, value in sample.items():
            try:
                plan = plans[field] if field in plans else self._add_plan(field)
                if plan is not None:
                    result[field] = plan(value)
            except StepFailedError as failed:
                raise _describe_failure(failed, sample, field) from failed.cause
        return result

    def __repr__(self) -> str:
        return shown_call("Encoder", self, *([] if self.encoder is True else [_show(self.encoder)]))

    def _prepare(self) -> None:
        self._users = _parse_users(self.encoder)
        self._is_whole = callable(self.encoder) and not isinstance(self.encoder, Mapping)
        channels_first = isinstance(self.encoder, str) and parse_image_spec(self.encoder).container == "torch"
        self._options = EncodeOptions(self.jpeg_quality, self.png_compression, channels_first)
        super()._prepare()

    def _encode_whole(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        encoder = cast(SampleEncoder, self.encoder)
        try:
            encoded = encoder(dict(sample))
            if not isinstance(encoded, Mapping):
                raise TypeError(f"it must return a mapping of field -> bytes, not a {type(encoded).__name__}")
        except MissingPackageError:
            raise
        except Exception as cause:
            key = str(sample.get("__key__", "?"))
            raise EncodingError(
                f"sample {key!r} cannot be encoded by function {_show(encoder)}: {describe_cause(cause)}.",
                key=key,
                advice=Advice.of("Repair the function or the sample, or skip such samples with {}.", *SKIPPING),
            ) from cause
        if "__key__" in sample and "__key__" not in encoded:
            encoded = {"__key__": sample["__key__"], **encoded}
        return encoded

    def _make_plan(self, field: str) -> Plan:
        if not isinstance(field, str):
            raise StepFailedError("under its name", field, TypeError("a field's name must be a str, such as 'jpg'"))
        return None if is_metadata(field) else self._plan(field)

    def _plan(self, field: str) -> _Plan:
        """Chooses how to encode a field: the user's function for its longest extension, the table, then compression."""
        inner, suffix = split_suffix(field)
        codec = find_codec(field)
        if suffix:
            plan = _plan_compression(suffix, self._plan(inner))
        elif codec is None or codec.encode is None:
            plan = _allow_bytes(guard("as it is", _refuse_value))
        else:
            plan = _allow_bytes(guard(f"as {codec.name}", codec.encode, self._options))
        found = [extension for extension in self._users if matches(field, [extension])]
        return _plan_user(self._users[max(found, key=len)], plan) if found else plan


def _plan_user(user: Callable[[Any], Any], plan: _Plan) -> _Plan:
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
            raise StepFailedError(f"by function {_show(user)}", value, cause) from cause
        return plan(result)

    return encode


def _plan_compression(suffix: str, inner: _Plan) -> _Plan:
    def pack(value: Any, _: None) -> bytes:
        if isinstance(value, BYTES_TYPES):
            value = data = bytes(value)
            if is_compressed(suffix, data):
                return data
        return compress(suffix, inner(value))

    return guard(f"as compressed data (.{suffix})", pack)


def _allow_bytes(encode: _Plan) -> _Plan:
    def allow(value: Any) -> bytes:
        if isinstance(value, BYTES_TYPES):
            return bytes(value)
        if value is None:
            raise StepFailedError("", value, ValueError("None has no bytes"))
        return encode(value)

    return allow


def _refuse_value(value: Any, _: None) -> bytes:
    cure = "bytes, or name the field by its type, with .json, .npy, .pth or .pkl at its end"
    cure = "value.encode(), or name the field with .txt at its end" if isinstance(value, str) else cure
    raise TypeError(f"such a field takes bytes only: pass {cure}")


def _require_bytes(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a sample of bytes; refuses any other value."""
    result = dict(sample)
    for field, value in sample.items():
        if is_written(field, sample.get("__key__")) and type(value) is not bytes:
            result[field] = as_bytes(value, sample.get("__key__"), field)
    return result


def _parse_users(encoder: EncoderLike) -> dict[str, Callable[[Any], Any]]:
    if not isinstance(encoder, Mapping):
        if isinstance(encoder, bool | str) or callable(encoder):
            return {}
        raise TypeError(
            f"encoder must be True, False, an image spec ({', '.join(IMAGE_SPECS)}), a mapping of fields to functions, "
            f"or a function of the sample, not {encoder!r}"
        )
    users: dict[str, Callable[[Any], Any]] = {}
    for name, function in encoder.items():
        if not (extensions := parse_extensions("encoder", name)):
            raise ValueError(f"encoder must map fields or extensions, such as 'seg.png', to functions, not {name!r}")
        if any(map(is_metadata, extensions)):
            raise ValueError(f"encoder maps {name!r}, but names of the form __x__ are never encoded; leave it out")
        if not callable(function):
            raise TypeError(f"encoder must map {name!r} to a function from value to bytes, not {function!r}")
        users.update(dict.fromkeys(extensions, function))
    return users


def _show(encoder: object) -> str:
    if isinstance(encoder, Mapping):
        return "{" + ", ".join(f"{name!r}: {_show(function)}" for name, function in encoder.items()) + "}"
    return getattr(encoder, "__qualname__", None) or repr(encoder)


def _describe_failure(failed: StepFailedError, sample: Mapping[str, Any], field: str) -> EncodingError:
    """Returns the exception that names key, field, what was expected, what was found, and what to do."""
    key = str(sample.get("__key__", "?"))
    where = f"field {field!r} of sample {key!r}"
    is_deep = isinstance(failed.cause, RecursionError)
    cause = "it is nested too deeply, or contains itself" if is_deep else describe_cause(failed.cause)
    message = (
        f"{where} cannot be written {failed.step}: {cause}. It is {describe_value(failed.data)}. "
        f"Otherwise, pass bytes, or a function that makes them: encoder={{{field!r}: function}}."
    )
    if not failed.step:  # None, which no codec takes
        message = f"{where} is None, which has no bytes: leave the field out of the sample, or pass bytes (b'' is fine)"
    return EncodingError(message, key=key, field=field)


def encode_sample(sample: Mapping[str, Any], encoder: EncoderLike = True, **options: Any) -> dict[str, Any]:
    """Encodes one sample with the options of `Encoder`, which is faster for many samples."""
    return Encoder(encoder, **options)(sample)
