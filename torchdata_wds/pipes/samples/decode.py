"""Field bytes to values, and back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchdata_wds.codecs import Decoder, Encoder, EncoderLike
from torchdata_wds.codecs.options import DEFAULT_MAX_BYTES
from torchdata_wds.codecs.table import is_named
from torchdata_wds.format.samples.names import is_metadata
from torchdata_wds.handlers import Handler, reraise_exception, warn_once
from torchdata_wds.pipes.base import Held, Pipe, register
from torchdata_wds.pipes.samples.field_specs import expect_sample
from torchdata_wds.pipes.samples.map import ItemMapper, check_function


@register("wds_decode")
class SampleDecoderIterDataPipe(ItemMapper):
    """Decodes the fields of samples (functional name: ``wds_decode``).

    Order, metadata (``__key__``, ``__url__``) and values that are not bytes are kept. Compressed fields (``txt.gz``)
    are decompressed first.

    Args:
        *decoders: Image specs (``"pil"``, ``"rgb8"``, ``"torchrgb"``, ...), ``"torchcodec"`` for video and audio, and
            functions ``callable(key, data)``, such as those of `handle_extension`, `image_decoder` and
            `crop_decoder`, and `torch_video` and `torch_audio` (by PyAV). A function gets the field with a leading dot,
            and returns None to pass. Functions are tried first, in order.
        only: Which fields to decode: a list, or one str separated by blanks. Each is a whole name (``"png"`` is not
            ``seg.png``) or a glob (``"*.png"``); None decodes all.
        allow_pickle: Whether pickles may be loaded, which can run any code.
        exif_transpose: Whether to turn images upright by their EXIF orientation.
        errors: How to treat text that is not UTF-8: ``"strict"``, ``"replace"`` or another of Python's handlers.
        max_bytes: The most bytes that a compressed field (``txt.gz``, ``npz``) may decompress to.
        handler: Called for each sample with a DecodingError, or an UnsafeDataError for a pickle without `allow_pickle`.

    Yields:
        dict: Samples with decoded values.

    Raises:
        ValueError: if an image spec is unknown.
        TypeError: if a decoder is neither a spec nor callable.
        DecodingError: through the handler; it names shard, key, field and cause.
        UnsafeDataError: through the handler, for a pickle without `allow_pickle`.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"__key__": "a", "cls": b"3", "txt": b"cat"}]).wds_decode())
        [{'__key__': 'a', 'cls': 3, 'txt': 'cat'}]
    """

    def __init__(
        self,
        source_datapipe: Pipe,
        *decoders: str | Callable[[str, Any], Any],
        only: str | Sequence[str] | None = None,
        allow_pickle: bool = False,
        exif_transpose: bool = False,
        errors: str = "strict",
        max_bytes: int = DEFAULT_MAX_BYTES,
        handler: Handler = reraise_exception,
    ) -> None:
        for decoder in filter(callable, decoders):
            check_function("wds_decode", decoder)
        self._decode = Decoder(
            *decoders,
            only=only,
            allow_pickle=allow_pickle,
            exif_transpose=exif_transpose,
            errors=errors,
            max_bytes=max_bytes,
        )
        super().__init__(source_datapipe, handler)
        self.decoders = Held(decoders)
        self.only = only
        self.allow_pickle, self.exif_transpose = allow_pickle, exif_transpose
        self.errors, self.max_bytes = errors, max_bytes
        self._is_unsure = bool(self._decode.only)

    def apply(self, item: Any) -> dict[str, Any]:
        """Decodes the fields of one sample."""
        if not isinstance(item, dict):
            expect_sample(item, "wds_decode")
        if self._is_unsure:
            self._check_only(item)
        return self._decode(item)

    def _check_only(self, sample: dict[str, Any]) -> None:
        """Warns if `only` names no field of the first sample: it is probably misspelled."""
        self._is_unsure = False
        fields = [field for field in sample if not is_metadata(field)]
        if not any(is_named(field, self._decode.only or ()) for field in fields):
            warning = (
                f"wds_decode(only={self.only!r}) names none of the fields of sample {sample.get('__key__')!r}, which "
                f"has {', '.join(sorted(fields))}: they stay bytes. Names are whole fields, or globs such as '*.png'"
            )
            warn_once(warning, warning)


@register("wds_encode")
class SampleEncoderIterDataPipe(ItemMapper):
    """Encodes the fields of samples (functional name: ``wds_encode``).

    The inverse of ``wds_decode``, with the same table; order, metadata and bytes are kept. ``save_wds_shards`` and the
    writers also encode; use this stage to encode in workers.

    Args:
        encoder: True encodes each field by its extension. A str is an image spec (with ``"torchrgb8"`` and the like,
            image tensors are CHW). A dict maps fields or extensions to functions, tried before the table. A callable
            turns a sample into a dict of bytes. False only checks that all values are bytes.
        jpeg_quality: Quality of JPEG fields, 1 to 100.
        png_compression: Effort for PNG fields, 0 to 9.
        handler: Called for each sample that cannot be encoded, with an EncodingError.

    Yields:
        dict: Samples with bytes by field.

    Raises:
        TypeError: if an option has the wrong type.
        ValueError: if an option is not valid.
        EncodingError: through the handler; it names key, field, what was found and what to do.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"__key__": "a", "cls": 3, "txt": "cat"}]).wds_encode())
        [{'__key__': 'a', 'cls': b'3', 'txt': b'cat'}]
    """

    def __init__(
        self,
        source_datapipe: Pipe,
        encoder: EncoderLike = True,
        *,
        jpeg_quality: int = 95,
        png_compression: int = 6,
        handler: Handler = reraise_exception,
    ) -> None:
        self._encode = Encoder(encoder, jpeg_quality=jpeg_quality, png_compression=png_compression)
        super().__init__(source_datapipe, handler)
        self.encoder = Held(encoder)
        self.jpeg_quality, self.png_compression = jpeg_quality, png_compression

    def apply(self, item: Any) -> dict[str, Any]:
        """Encodes the fields of one sample."""
        if not isinstance(item, Mapping):
            expect_sample(item, "wds_encode")
        return self._encode(item)
