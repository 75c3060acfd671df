"""Values to field bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterDataPipe

from torchdata_wds.codecs import Encoder, EncoderLike
from torchdata_wds.handlers import Handler, reraise_exception
from torchdata_wds.pipes.base import Held, register
from torchdata_wds.pipes.field_specs import expect_sample
from torchdata_wds.pipes.mapping import ItemMapper

__all__ = ["SampleEncoderIterDataPipe"]


@register("wds_encode")
class SampleEncoderIterDataPipe(ItemMapper):
    """Encodes the fields of samples (functional name: ``wds_encode``).

    The other direction of ``wds_decode``, by the same table. Order and metadata (``__key__``, ``__url__``) are kept,
    bytes pass untouched. ``save_wds_shards`` and the writers encode by themselves; this stage is for doing it in
    workers, or for looking at the bytes. An item, for the handler, is a sample.

    Args:
        source_datapipe: Yields samples.
        encoder: True encodes each field by its extension; a str is an image spec (behind ``"torchrgb8"`` and its kin,
            tensors of images are CHW); a dict has functions for fields or extensions, before the table; a callable
            turns a sample into a dict of bytes; False only checks that all is bytes.
        jpeg_quality: Quality of JPEG fields, 1 to 100.
        png_compression: Effort for PNG fields, 0 to 9.
        handler: Asked about each sample that cannot be encoded.

    Yields:
        dict: Samples with bytes by field.

    Raises:
        TypeError: if an option has the wrong type.
        ValueError: if an option is none of those that are valid.
        EncodingError: through the handler; it names key, field, what was found and what to do.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"__key__": "a", "cls": 3, "txt": "cat"}]).wds_encode())
        [{'__key__': 'a', 'cls': b'3', 'txt': b'cat'}]
    """

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        encoder: EncoderLike = True,
        *,
        jpeg_quality: int = 95,
        png_compression: int = 6,
        handler: Handler = reraise_exception,
    ) -> None:
        self._encode = Encoder(encoder, jpeg_quality=jpeg_quality, png_compression=png_compression)
        super().__init__(source_datapipe, handler)
        self.encoder = Held(encoder)
        self.jpeg_quality = jpeg_quality
        self.png_compression = png_compression

    def apply(self, item: Any) -> dict[str, Any]:
        """Encodes one sample."""
        if not isinstance(item, Mapping):
            expect_sample(item, "wds_encode")
        return self._encode(item)
