"""Decodes samples: turns each field's bytes into a value by the user's decoders, image specs and the table of types."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

from torchdata_wds.checks import check_flags
from torchdata_wds.codecs.images.decoding import ImageDecoder, ImageFieldDecoder
from torchdata_wds.codecs.images.pixels import IMAGE_FIELDS, IMAGE_SPECS
from torchdata_wds.codecs.media import torch_audio, torch_video
from torchdata_wds.codecs.options import BYTES_TYPES, DEFAULT_MAX_BYTES, DecodeOptions, MissingPackageError
from torchdata_wds.codecs.plans import Plan, Planner, StepFailedError, describe_cause, guard, shown_call
from torchdata_wds.codecs.suffixes import decompress, split_suffix
from torchdata_wds.codecs.table import ExtensionDecoder, find_codec, is_named, matches, parse_extensions
from torchdata_wds.errors import SKIPPING, Advice, DecodingError, UnsafeDataError
from torchdata_wds.format.samples.names import is_metadata
from torchdata_wds.storage.urls import mask_url

DecoderLike = str | Callable[[str, bytes], Any]
_KINDS = f"a decoder is an image spec ({', '.join(IMAGE_SPECS)}), 'torchcodec' or a callable"


class Decoder(Planner):
    """Decodes samples of bytes into new samples of values; ``.wds_decode(...)`` describes the arguments.

    Compressed data (``gz bz2 xz zst``) is decompressed first; only a decoder that names the suffix, as
    ``handle_extension("nii.gz", fn)``, receives the compressed bytes. The user's decoders are tried in order, then the
    image spec or the table of types by the last part of the name; if none applies, the field stays bytes. Names like
    ``__key__`` and decoded values are kept; open streams are read and closed. Pickles if the user's functions do.

    Raises:
        TypeError, ValueError: if an argument is wrong, or there are two image specs.
        DecodingError, UnsafeDataError: when called, for a field that does not decode, or a pickle that is not allowed.
        ImportError: when called, if a field needs a package that is not installed.
    """

    def __init__(
        self,
        *decoders: DecoderLike,
        only: str | Iterable[str] | None = None,
        allow_pickle: bool = False,
        exif_transpose: bool = False,
        errors: str = "strict",
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self.decoders = decoders
        self.only = None if only is None else parse_extensions("only", only)
        self.allow_pickle = allow_pickle
        self.exif_transpose = exif_transpose
        self.errors = errors
        self.max_bytes = max_bytes
        self._prepare()

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Decodes one sample into a new dict with the same fields in the same order."""
        result = dict(sample)
        plans = self._plans
        for field, value in sample.items():
            if type(value) is not bytes:
                if (data := _as_data(value)) is None:
                    continue
                if not isinstance(value, BYTES_TYPES):
                    result[field] = data  # a stream is read only once: it is bytes from here on, decoded or not
                value = data
            try:
                plan = plans[field]
            except KeyError:
                plan = self._add_plan(field)
            if plan is None:
                continue
            try:
                result[field] = plan(value)
            except StepFailedError as failed:
                raise describe_failure(failed, sample, field) from failed.cause
        return result

    def __repr__(self) -> str:
        shown = [getattr(decoder, "__qualname__", None) or repr(decoder) for decoder in self.decoders]
        return shown_call("Decoder", self, *shown)

    def _prepare(self) -> None:
        check_flags(exif_transpose=self.exif_transpose)
        self._options = DecodeOptions(self.errors, self.allow_pickle, self.max_bytes)
        images: list[ImageDecoder] = []
        self._users: list[Callable[[str, bytes], Any]] = []
        for decoder in self.decoders:
            if decoder == "torchcodec":
                self._users += [torch_video(backend="torchcodec"), torch_audio(backend="torchcodec")]
            elif isinstance(decoder, str):
                images.append(ImageDecoder(decoder, exif_transpose=self.exif_transpose))
            elif not callable(decoder):
                raise TypeError(f"{_KINDS}, not {decoder!r}")
            elif self.exif_transpose and isinstance(decoder, ImageFieldDecoder):
                self._users.append(decoder.turning())
            else:
                self._users.append(decoder)
        if len(images) > 1:
            specs = ", ".join(image.spec for image in images)
            raise ValueError(f"one image spec decodes all images, but {len(images)} were given: {specs}")
        self._image = images[0] if images else None
        super()._prepare()

    def _make_plan(self, field: str) -> Plan:
        if is_metadata(field) or (self.only is not None and not is_named(field, self.only)):
            return None
        return self._plan(field)

    def _plan(self, field: str) -> Plan:
        """Chooses how a field is decoded: by the user's decoders in order, then by the image spec or the table."""
        # A plan is made once per name, so that decoding a sample never looks at names again. The plan of x.json.gz
        # contains that of x.json: once decompressed, a field is offered to all decoders under its shorter name.
        inner, suffix = split_suffix(field)
        codec, image = None if suffix else find_codec(field), self._image
        last: Plan = None
        if suffix:
            rest = self._plan(inner)

            def unpack(data: bytes, options: DecodeOptions) -> Any:
                data = decompress(suffix, data, options.max_bytes)
                return data if rest is None else rest(data)

            last = guard(f"compressed data (.{suffix})", unpack, self._options)
        elif codec is not None and codec.decode is not None:
            last = guard(codec.name, codec.decode, self._options)
        elif codec is not None and image is not None:
            last = guard(f"an image (spec {image.spec!r})", lambda data, _: image.decode(data))
        # Decoders that the name rules out are dropped here, instead of being called for each sample.
        users = [decoder for decoder in self._users if _may_take(decoder, field, suffix)]
        key = "." + field

        def ask_users(data: bytes) -> Any:
            for decoder in users:
                try:
                    value = decoder(key, data)
                except MissingPackageError:
                    raise
                except Exception as cause:
                    name = f"decoder {getattr(decoder, '__qualname__', type(decoder).__qualname__)}"
                    is_ours = isinstance(decoder, ExtensionDecoder | ImageFieldDecoder)
                    raise StepFailedError(repr(decoder) if is_ours else name, data, cause) from cause
                if value is not None:
                    return value
            return data if last is None else last(data)

        return ask_users if users else last


def _may_take(decoder: Callable[[str, bytes], Any], field: str, suffix: str) -> bool:
    if isinstance(decoder, ExtensionDecoder):
        return matches(field, decoder.extensions)
    if suffix:
        return False  # a plain function sees the decompressed data, under the rest of the name
    return not isinstance(decoder, ImageFieldDecoder) or matches(field, IMAGE_FIELDS)


def _as_data(value: Any) -> bytes | None:
    """Returns the bytes of a value, reading and closing it if it is a stream; None if it is already decoded."""
    if isinstance(value, BYTES_TYPES):
        return bytes(value)
    # torch's stream wrapper is recognized by name, so that its module need not be imported
    if isinstance(value, io.IOBase) or type(value).__name__ == "StreamWrapper":
        with closing(value):
            return bytes(value.read())
    return None


def describe_failure(failed: StepFailedError, sample: Mapping[str, Any], field: str) -> DecodingError | UnsafeDataError:
    """Returns the exception that names shard, key, field, decoder and cause."""
    key = str(sample.get("__key__", "?"))
    shard = mask_url(str(sample["__url__"])) if sample.get("__url__") is not None else None
    where = f"field {field!r} of sample {key!r}" + (f" in shard {shard}" if shard else "")
    if isinstance(failed.cause, UnsafeDataError):
        return UnsafeDataError(f"{where} {failed.cause}", shard=shard, key=key, field=field)
    data = failed.data
    found = f"It has {len(data):,} bytes, beginning with {data[:16]!r}" if data else "The field is empty"
    message = f"{where} does not decode as {failed.step}: {describe_cause(failed.cause)}. {found}."
    advice = Advice.of("Repair the sample, leave the field out with only=, or skip such samples with {}.", *SKIPPING)
    return DecodingError(message, shard=shard, key=key, field=field, advice=advice)


def decode_sample(
    sample: Mapping[str, Any], decoders: DecoderLike | Iterable[DecoderLike] = (), **options: Any
) -> dict[str, Any]:
    """Decodes one sample with the given decoders and the options of `Decoder`, which is faster for many samples."""
    given = (decoders,) if isinstance(decoders, str) or callable(decoders) else tuple(decoders)
    return Decoder(*given, **options)(sample)
