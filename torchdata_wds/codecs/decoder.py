"""Decoding samples: every field's bytes to its value, by the user's decoders, image specs and the table of types."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

from torchdata_wds.checks import check_flags
from torchdata_wds.codecs.failures import StepFailedError, describe_failure
from torchdata_wds.codecs.images.decoding import ImageDecoder
from torchdata_wds.codecs.images.specs import IMAGE_SPECS
from torchdata_wds.codecs.matching import is_named, parse_extensions
from torchdata_wds.codecs.options import BYTES_TYPES, DEFAULT_MAX_BYTES, DecodeOptions
from torchdata_wds.codecs.plans import Plan, Planner, UserDecoder, plan_decoding
from torchdata_wds.format.samples.names import is_metadata

DecoderLike = str | Callable[[str, bytes], Any]


class Decoder(Planner[Plan | None]):
    """Turns a sample of bytes into a new sample of values.

    A compression suffix (``gz bz2 xz zst``) is removed first, and the data decompressed; only a
    ``handle_extension("nii.gz", fn)`` that names the suffix gets the compressed bytes. Then the field is offered to the
    user's decoders in their order, and then the image spec and the table of types decide by the last part of the name.
    A field that none of them takes stays bytes. Names like ``__key__`` and values that are not bytes (decoded before)
    are left alone; open streams, as torchdata's own ``.webdataset()`` yields, are read and closed. A decoder pickles
    when the user's functions do.

    Args:
        *decoders: Image specs such as ``"pil"`` or ``"torchrgb8"``; functions ``(key, data) -> value``, with None to
            pass and the key as ``".seg.png"``; and what ``handle_extension`` and ``image_decoder`` make.
        only: The fields to decode, as ``"jpg cls"`` or a list. Each is the whole name of a field, or a glob:
            ``"*.cls"`` names ``left.cls``. None for all.
        allow_pickle: Whether pickle fields may be loaded, which runs code that the shard chooses.
        exif_transpose: Whether images are turned as their EXIF orientation says.
        errors: What text fields do with bytes that are not UTF-8, as in ``bytes.decode``.
        max_bytes: The most that a compressed field may decompress to, in bytes.

    Raises:
        TypeError: for an argument of a wrong type.
        ValueError: for an unknown or a second image spec, or an unknown ``errors``.

    Example:
        >>> decoder = Decoder()
        >>> decoder({"__key__": "a", "cls": b"7", "meta.json": b"[1]", "raw": b"x"})
        {'__key__': 'a', 'cls': 7, 'meta.json': [1], 'raw': b'x'}
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
        """Decodes one sample.

        Args:
            sample: Field -> bytes (or a value decoded before); it is not changed.

        Returns:
            A new dict with the same fields in the same order.

        Raises:
            DecodingError: if a field does not decode.
            UnsafeDataError: if a field is a pickle and those are not allowed.
            ImportError: if a field needs a package that is not installed.
        """
        result = dict(sample)
        plans = self._plans
        for field, value in sample.items():
            if type(value) is not bytes:
                data = _as_data(value)
                if data is None:
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
        return self._show([getattr(decoder, "__qualname__", None) or repr(decoder) for decoder in self.decoders])

    def _prepare(self) -> None:
        check_flags(exif_transpose=self.exif_transpose)
        self._options = DecodeOptions(self.errors, self.allow_pickle, self.max_bytes)
        self._image, self._users = _sort_decoders(self.decoders, self.exif_transpose)
        super()._prepare()

    def _make_plan(self, field: str) -> Plan | None:
        if is_metadata(field) or (self.only is not None and not is_named(field, self.only)):
            return None
        return plan_decoding(field, self._users, self._image, self._options)


def decode_sample(
    sample: Mapping[str, Any], decoders: DecoderLike | Iterable[DecoderLike] = (), **options: Any
) -> dict[str, Any]:
    """Decodes one sample; for many, a ``Decoder`` is faster.

    Args:
        sample: Field -> bytes; it is not changed.
        decoders: One decoder or several, as ``Decoder`` takes them.
        **options: ``only``, ``allow_pickle``, ``exif_transpose``, ``errors`` and ``max_bytes``, as in ``Decoder``.

    Returns:
        A new dict with the same fields.

    Raises:
        DecodingError: if a field does not decode.
        UnsafeDataError: if a field is a pickle and those are not allowed.
        ImportError: if a field needs a package that is not installed.

    Example:
        >>> decode_sample({"__key__": "a", "json.gz": b"not gzip", "cls": b" 7"}, only="cls")
        {'__key__': 'a', 'json.gz': b'not gzip', 'cls': 7}
    """
    given = (decoders,) if isinstance(decoders, str) or callable(decoders) else tuple(decoders)
    return Decoder(*given, **options)(sample)


def _as_data(value: Any) -> bytes | None:
    """Returns a value as bytes where it is a field's data; a stream is read and closed. None: it was decoded before."""
    if isinstance(value, BYTES_TYPES):
        return bytes(value)
    # torch's wrapper of streams is known by its name, so that its module need not be imported
    if isinstance(value, io.IOBase) or type(value).__name__ == "StreamWrapper":
        with closing(value):
            return bytes(value.read())
    return None


def _sort_decoders(
    decoders: Iterable[DecoderLike], exif_transpose: bool
) -> tuple[ImageDecoder | None, tuple[UserDecoder, ...]]:
    """Separates the decoder of the image spec, if there is one, from the user's."""
    specs: list[str] = []
    users: list[UserDecoder] = []
    for decoder in decoders:
        if isinstance(decoder, str):
            specs.append(decoder)
        elif not callable(decoder):
            raise TypeError(f"a decoder is an image spec ({', '.join(IMAGE_SPECS)}) or a callable, not {decoder!r}")
        elif exif_transpose and isinstance(decoder, ImageDecoder):
            users.append(ImageDecoder(decoder.spec, max_size=decoder.max_size, exif_transpose=True))
        else:
            users.append(decoder)
    images = [ImageDecoder(spec, exif_transpose=exif_transpose) for spec in specs]
    if len(images) > 1:
        raise ValueError(f"one image spec decodes all images, but {len(images)} were given: {', '.join(specs)}")
    return (images[0] if images else None), tuple(users)
