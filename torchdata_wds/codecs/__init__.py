"""Field bytes <-> Python values."""

from __future__ import annotations

from torchdata_wds.codecs.decoder import Decoder, DecoderLike, decode_sample
from torchdata_wds.codecs.encoder import Encoder, EncoderLike, encode_sample
from torchdata_wds.codecs.images.batches import decode_jpegs
from torchdata_wds.codecs.images.crops import center_crop_decoder, crop_decoder
from torchdata_wds.codecs.images.decoding import image_decoder
from torchdata_wds.codecs.images.pixels import IMAGE_FIELDS, IMAGE_SPECS
from torchdata_wds.codecs.options import DEFAULT_MAX_BYTES
from torchdata_wds.codecs.table import CODECS, Codec, handle_extension

__all__ = [
    "Decoder", "DecoderLike", "Encoder", "EncoderLike", "decode_sample", "encode_sample", "handle_extension",
    "image_decoder", "crop_decoder", "center_crop_decoder", "decode_jpegs", "CODECS", "Codec", "DEFAULT_MAX_BYTES",
    "IMAGE_FIELDS", "IMAGE_SPECS",
]  # fmt: skip
