"""Summaries of samples: what each field holds, in a few words."""

import json
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from PIL import UnidentifiedImageError
from PIL.Image import Image
from PIL.ImageFile import ImageFile

from torchdata_wds.cli.terminal import guess_text, printable, shorten
from torchdata_wds.codecs.decoder import Decoder
from torchdata_wds.codecs.images.decoding import image_decoder
from torchdata_wds.codecs.images.files import deep_reader, open_image, read_orientation
from torchdata_wds.codecs.images.pixels import IMAGE_FIELDS, to_pil, turn
from torchdata_wds.codecs.media import AUDIO_FIELDS, VIDEO_FIELDS
from torchdata_wds.codecs.options import DEFAULT_MAX_BYTES
from torchdata_wds.codecs.plans import describe_cause, describe_value
from torchdata_wds.codecs.table import handle_extension, matches, parse_extensions
from torchdata_wds.errors import DecodingError, UnsafeDataError
from torchdata_wds.format.samples.names import is_metadata

_SHOWN_BYTES = 24
_LONGEST_ITEM = 200
_DEPTH = 8  # a value from torch or cbor may even contain itself
_DIGITS = 40
# Modes that can be reduced before their colours are converted, and how much larger the cheap first step leaves them.
_SMOOTH = frozenset(["L", "RGB", "RGBA", "CMYK", "YCbCr"])
_ROUGH = 1.25

_MEDIA = {
    **dict.fromkeys(parse_extensions("fields", AUDIO_FIELDS), "audio"),
    **dict.fromkeys(parse_extensions("fields", VIDEO_FIELDS), "video"),
}


class FieldSummary(NamedTuple):
    """One field in a few words, with a thumbnail if one was wanted."""

    field: str
    size: int  # bytes
    text: str  # what it holds, printable, on one line; or why it does not decode
    is_damaged: bool = False
    is_image: bool = False  # by its name
    picture: Image | None = None


class ImageView(NamedTuple):
    """An image file in words, such as ``JPEG image, RGB, 640 x 480``, and its thumbnail, RGB or RGBA, if wanted."""

    text: str
    picture: Image | None


class Summarizer:
    """Summarizes samples of bytes, each field in at most `width` characters.

    Fields are decoded as by `Decoder`, pickles never; images to their pixels, so that damage shows; video and audio not
    at all. `max_size` is the longest side of thumbnails in pixels; 0 keeps the images' own size, None makes none.
    """

    def __init__(self, *, width: int = 80, max_size: int | None = None) -> None:
        self._width = width
        self._decode = Decoder(handle_extension(" ".join(IMAGE_FIELDS), lambda data: view_image(data, max_size)))

    def __call__(self, sample: Mapping[str, Any]) -> list[FieldSummary]:
        """Summarizes the fields of a sample, in their order; never raises because of what is in them."""
        place = {name: sample[name] for name in ("__key__", "__url__") if name in sample}
        return [
            self._summarize(field, data, place)
            for field, data in sample.items()
            if not is_metadata(field) and isinstance(data, bytes)
        ]

    def each(
        self, samples: Iterable[Mapping[str, Any]], threads: int = 0
    ) -> Generator[tuple[Mapping[str, Any], list[FieldSummary]], None, None]:
        """Yields each sample and its summary, in order; two samples are read ahead for each thread."""
        if threads == 0:
            yield from ((sample, self(sample)) for sample in samples)
            return
        pool = ThreadPoolExecutor(threads, thread_name_prefix="wds-summaries")
        waiting: deque[tuple[Mapping[str, Any], Future[list[FieldSummary]]]] = deque()
        try:
            for sample in samples:
                waiting.append((sample, pool.submit(self, sample)))
                if len(waiting) > 2 * threads:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _summarize(self, field: str, data: bytes, place: dict[str, Any]) -> FieldSummary:
        picture, is_damaged = None, False
        try:
            value = self._decode({**place, field: data})[field]
            if isinstance(value, ImageView):
                text, picture = value
            else:
                text = _MEDIA.get(field.rpartition(".")[2]) or summarize(value, self._width)
        except UnsafeDataError:
            text = "a pickle, not loaded: it could run code"
        except ImportError as error:
            text, is_damaged = f"not decoded: {error}", True
        except DecodingError as error:
            # what the codec said, without the key and the field, which are shown beside it
            cause: Any = error.__cause__
            is_unknown = isinstance(cause, UnidentifiedImageError)
            reason = "not an image of a known format" if is_unknown else describe_cause(cause)
            text, is_damaged = f"does not decode: {reason}", True
        text = shorten(printable(text), self._width)
        return FieldSummary(field, len(data), text, is_damaged, matches(field, IMAGE_FIELDS), picture)


def view_image(data: bytes, max_size: int | None = None) -> ImageView:
    """Reads an image file to its last pixel.

    `max_size` is the longest side of the thumbnail in pixels, turned upright as EXIF says, with 16 bits a channel
    scaled to 8. 0 keeps the image's own size, None makes no thumbnail.
    """
    with open_image(data) as image:
        orientation = read_orientation(image)
        turned = f", EXIF orientation {orientation}" if orientation != 1 else ""
        text = f"{image.format} image, {mode_text(image)}, {image.width} x {image.height}{turned}"
        mode = "RGBA" if image.has_transparency_data else "RGB"
        if max_size is None:
            image.load()
            return ImageView(text, None)
        is_smooth = image.mode in _SMOOTH and "transparency" not in image.info and deep_reader(image) is None
        if 0 < max_size < max(image.size) and is_smooth:
            # faster than for training: JPEG's own reduction and whole pixels first
            image.thumbnail((max_size, max_size), reducing_gap=_ROUGH)
            small, orientation = image.convert(mode), read_orientation(image)  # Pillow has applied that of a TIFF
            return ImageView(text, small if orientation == 1 else to_pil(turn(np.asarray(small), orientation)))
    spec = f"pil{mode.lower()}"
    whole: Image = image_decoder(spec, exif_transpose=True).decode(data)
    if max_size:
        whole.thumbnail((max_size, max_size))  # by Pillow: image_decoder would import torch
    return ImageView(text, whole)


def mode_text(image: ImageFile) -> str:
    """Describes the pixels of an opened, unloaded image: ``RGB``, or ``RGB, 16 bits``."""
    is_deep = deep_reader(image) is not None and not image.mode.startswith(("I", "F"))
    return f"{image.mode}, 16 bits" if is_deep else image.mode


def summarize(value: Any, width: int = 80) -> str:
    """Describes a decoded value in at most `width` printable characters, however large it is."""
    if isinstance(value, bytes) and (text := guess_text(value, width + 1)) is not None:
        value = text or "empty"
    if isinstance(value, str):
        return shorten(printable(value[: width + 1]), width)
    shown = ""
    for piece in _pieces(value, 0):
        shown += printable(piece)
        if len(shown) > width:
            break
    return shorten(shown, width)


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """Yields the summary piece by piece, so that no more of a large value is read than is shown."""
    is_mapping = isinstance(value, Mapping)
    if not is_mapping and (not isinstance(value, Sequence) or isinstance(value, str | bytes)):
        yield _atom(value)
        return
    opening, closing = "{}" if is_mapping else "[]"
    yield opening
    if depth == _DEPTH and value:
        yield "..."
    else:
        for number, item in enumerate(value):
            yield ", " if number else ""
            if is_mapping:
                yield f"{_atom(item)}: "
                item = value[item]
            yield from _pieces(item, depth + 1)
    yield closing


def _atom(value: Any) -> str:
    try:
        if isinstance(value, str):
            return json.dumps(value[:_LONGEST_ITEM], ensure_ascii=False)
        if isinstance(value, bytes):
            rest = "..." if len(value) > _SHOWN_BYTES else ""
            return f"{len(value):,} bytes: {value[:_SHOWN_BYTES].hex(' ')}{rest}"
        if value is None or isinstance(value, bool | float):
            return json.dumps(value)
        if isinstance(value, int):
            return str(value) if abs(value) < 10**_DIGITS else f"an integer of {value.bit_length():,} bits"
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            return repr(value)[:_LONGEST_ITEM]
        kind = "array" if isinstance(value, np.ndarray | np.generic) else "tensor"
        dtype = str(value.dtype).removeprefix("torch.")
        whole = f"{kind} {shorten(dtype, _LONGEST_ITEM)} {tuple(value.shape)}"
        return whole + _range(value) if tuple(value.shape) else f"{dtype} {value.item()!r}"
    except Exception:  # noqa: BLE001 - the value's own code may do anything, and the other values are still shown
        return describe_value(value)


def _range(value: Any) -> str:
    """Returns the smallest and the largest number of an array or tensor."""
    try:
        if value.nbytes > DEFAULT_MAX_BYTES:
            return ""  # a small file can hold a tensor that repeats one number any number of times
        if not isinstance(value, np.ndarray):
            value = value.detach()
            value = (value.float() if value.is_floating_point() else value).numpy()
    except Exception:  # noqa: BLE001 - torch has layouts and types that NumPy lacks
        return ""
    if value.dtype.kind not in "biuf" or not value.size:
        return ""
    finite = value[np.isfinite(value)]
    odd = f", {value.size - finite.size:,} not finite" if finite.size < value.size else ""
    return (f", {finite.min():.6g} .. {finite.max():.6g}" if finite.size else "") + odd
