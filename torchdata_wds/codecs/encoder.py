"""Encoding samples: every field's value to its bytes, by the user's functions and the table of types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torchdata_wds.codecs.failures import StepFailedError, describe_encoder_failure, describe_encoding_failure
from torchdata_wds.codecs.images.specs import IMAGE_SPECS, parse_image_spec
from torchdata_wds.codecs.matching import parse_extensions
from torchdata_wds.codecs.options import EncodeOptions, MissingPackageError
from torchdata_wds.codecs.plans import EncodingPlan, Planner, UserEncoder, plan_encoding
from torchdata_wds.format.samples.names import is_metadata
from torchdata_wds.format.samples.writable import as_bytes, is_written

SampleEncoder = Callable[[dict[str, Any]], Mapping[str, Any]]
EncoderLike = bool | str | Mapping[str, Callable[[Any], bytes]] | SampleEncoder


class Encoder(Planner[EncodingPlan | None]):
    """Turns a sample of values into a new sample of bytes, the reverse of ``Decoder``.

    Values are encoded by the last part of their field's name; what would not read back equal (JPEG: up to its loss) is
    refused. The same value gives the same bytes each time, with two exceptions: in pickle and torch fields the bytes
    also depend on which equal objects in the value are one object, and in pickle fields on the order of sets. Bytes,
    bytearrays and memoryviews are data already and pass untouched; in a field with a compression suffix (``gz bz2 xz
    zst``) only if they are whole in that compression. All else in such a field is encoded by the rest of the name and
    compressed. Names like ``__key__`` are copied as they are. An encoder pickles when the user's functions do.

    Args:
        encoder: True for the table of types; False to encode nothing and accept bytes only; an image spec to say with
            ``"torch..."`` that tensors of images are CHW, and HWC with any other; a mapping of field or extension to
            ``function(value) -> bytes``, tried before the table (the longest that fits); or a
            ``function(sample) -> mapping`` that makes all fields bytes.
        jpeg_quality: Quality of JPEG files, 1 to 100.
        png_compression: How hard PNG files are compressed, 0 to 9.

    Raises:
        TypeError: for an argument of a wrong type.
        ValueError: for an unknown image spec, or a number out of its range.

    Example:
        >>> encoder = Encoder()
        >>> encoder({"__key__": "a", "cls": 7, "meta.json": [1], "raw": b"x"})
        {'__key__': 'a', 'cls': b'7', 'meta.json': b'[1]', 'raw': b'x'}
    """

    def __init__(self, encoder: EncoderLike = True, *, jpeg_quality: int = 95, png_compression: int = 6) -> None:
        self.encoder = encoder
        self.jpeg_quality = jpeg_quality
        self.png_compression = png_compression
        self._prepare()

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Encodes one sample.

        Args:
            sample: Field -> value; it is not changed.

        Returns:
            A new dict with the same fields in the same order.

        Raises:
            EncodingError: if a value cannot be written as its field's type.
            ImportError: if a field needs a package that is not installed.
        """
        return self._encode(sample)

    def __repr__(self) -> str:
        return self._show([] if self.encoder is True else [_show(self.encoder)])

    def _prepare(self) -> None:
        self._users = _parse_users(self.encoder)
        channels_first = isinstance(self.encoder, str) and parse_image_spec(self.encoder).container == "torch"
        self._options = EncodeOptions(self.jpeg_quality, self.png_compression, channels_first)
        super()._prepare()
        self._encode: Callable[[Mapping[str, Any]], dict[str, Any]]
        if self.encoder is False:
            self._encode = _require_bytes
        elif callable(self.encoder) and not isinstance(self.encoder, Mapping):
            self._encode = self._encode_whole
        else:
            self._encode = self._encode_fields

    def _make_plan(self, field: str) -> EncodingPlan | None:
        if not isinstance(field, str):
            cause = TypeError("the name of a field must be a str, such as 'jpg'")
            raise StepFailedError("under its name", field, cause)
        return None if is_metadata(field) else plan_encoding(field, self._users, self._options)

    def _encode_fields(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        result = dict(sample)
        plans = self._plans
        for field, value in sample.items():
            try:
                plan = plans[field] if field in plans else self._add_plan(field)
                if plan is not None:
                    result[field] = plan(value)
            except StepFailedError as failed:
                raise describe_encoding_failure(failed, sample, field) from failed.cause
        return result

    def _encode_whole(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        encoder = cast(SampleEncoder, self.encoder)
        try:
            encoded = encoder(dict(sample))
            if not isinstance(encoded, Mapping):
                raise TypeError(f"it must return a mapping of field -> bytes, not a {type(encoded).__name__}")
        except MissingPackageError:
            raise
        except Exception as cause:
            raise describe_encoder_failure(_show(encoder), sample, cause) from cause
        if "__key__" in sample and "__key__" not in encoded:
            encoded = {"__key__": sample["__key__"], **encoded}
        return _require_bytes(encoded)


def encode_sample(
    sample: Mapping[str, Any], encoder: EncoderLike = True, *, jpeg_quality: int = 95, png_compression: int = 6
) -> dict[str, Any]:
    """Encodes one sample; for many, an ``Encoder`` is faster.

    Args:
        sample: Field -> value; it is not changed.
        encoder: As in ``Encoder``.
        jpeg_quality: As in ``Encoder``.
        png_compression: As in ``Encoder``.

    Returns:
        A new dict with the same fields.

    Raises:
        EncodingError: if a value cannot be written as its field's type.
        ImportError: if a field needs a package that is not installed.

    Example:
        >>> encode_sample({"__key__": "a", "cls": 7, "x.vocab": "a b"}, {"vocab": str.encode})
        {'__key__': 'a', 'cls': b'7', 'x.vocab': b'a b'}
    """
    return Encoder(encoder, jpeg_quality=jpeg_quality, png_compression=png_compression)(sample)


def _require_bytes(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a sample of bytes, and refuses all else."""
    result = dict(sample)
    for field, value in sample.items():
        if is_written(field, sample.get("__key__")) and type(value) is not bytes:
            result[field] = as_bytes(value, sample.get("__key__"), field)
    return result


def _parse_users(encoder: EncoderLike) -> dict[str, UserEncoder]:
    """Returns the user's functions by their extensions."""
    if not isinstance(encoder, Mapping):
        if isinstance(encoder, bool | str) or callable(encoder):
            return {}
        raise TypeError(
            f"encoder must be True, False, an image spec ({', '.join(IMAGE_SPECS)}), a mapping of fields to functions, "
            f"or a function of the sample, not {encoder!r}"
        )
    users: dict[str, UserEncoder] = {}
    for name, function in encoder.items():
        extensions = parse_extensions("encoder", name)
        if not extensions:
            raise ValueError(
                f"encoder maps fields or extensions, such as 'jpg' or 'seg.png', to functions, not {name!r}"
            )
        if any(map(is_metadata, extensions)):
            raise ValueError(
                f"encoder maps {name!r}, but names of the form __x__ are copied and never encoded; leave it out"
            )
        if not callable(function):
            raise TypeError(
                f"encoder must map {name!r} to a function of the value that returns bytes, not {function!r}"
            )
        users.update(dict.fromkeys(extensions, function))
    return users


def _show(encoder: object) -> str:
    if isinstance(encoder, Mapping):
        return "{" + ", ".join(f"{name!r}: {_show(function)}" for name, function in encoder.items()) + "}"
    return getattr(encoder, "__qualname__", None) or repr(encoder)
