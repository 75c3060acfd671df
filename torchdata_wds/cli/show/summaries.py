"""Samples in a few words: what each field holds, for people who look into shards."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchdata_wds.cli.printing import printable, shorten
from torchdata_wds.cli.show.thumbnails import ImageView, view_image
from torchdata_wds.codecs.decoder import Decoder
from torchdata_wds.codecs.failures import describe_value
from torchdata_wds.codecs.images.specs import IMAGE_FIELDS
from torchdata_wds.codecs.matching import handle_extension, matches, parse_extensions
from torchdata_wds.codecs.media import AUDIO_FIELDS, VIDEO_FIELDS
from torchdata_wds.codecs.options import DEFAULT_MAX_BYTES
from torchdata_wds.errors import DecodingError, UnsafeDataError
from torchdata_wds.format.samples.names import is_metadata

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["FieldSummary", "Summarizer", "guess_text", "summarize"]


_SHOWN_BYTES = 24

_LONGEST_ITEM = 200

_DEPTH = 8  # what torch and cbor load may even hold itself

_DIGITS = 40

_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")  # tabs, line ends and form feeds are

_MEDIA = {
    **dict.fromkeys(parse_extensions("fields", AUDIO_FIELDS), "audio"),
    **dict.fromkeys(parse_extensions("fields", VIDEO_FIELDS), "video"),
}


class FieldSummary(NamedTuple):
    """One field in a few words.

    Attributes:
        field: Its name.
        size: Its bytes.
        text: What it holds, printable, on one line; or why it does not decode.
        is_damaged: Whether it does not decode.
        is_image: Whether its name is that of an image.
        picture: A thumbnail, upright, if that was asked for.
    """

    field: str
    size: int
    text: str
    is_damaged: bool = False
    is_image: bool = False
    picture: Image | None = None


class Summarizer:
    r"""Summarizes samples of bytes.

    Fields are decoded as `Decoder` does it, pickles never; images to their pixels, so that damage shows; video and
    audio not at all.

    Args:
        width: The longest summary, in characters.
        max_size: The longest side of the thumbnails in pixels; 0 keeps the images' own size, None makes none.

    Example:
        >>> for summary in Summarizer()({"__key__": "a", "cls": b"7", "json": b'{"a": [1]}', "raw": b"x\x00"}):
        ...     print(*summary[:3])
        cls 1 7
        json 10 {"a": [1]}
        raw 2 2 bytes: 78 00
    """

    def __init__(self, *, width: int = 80, max_size: int | None = None) -> None:
        self.width = width
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
        """Summarizes samples.

        Args:
            samples: The samples; two for each thread are read ahead.
            threads: How many threads work on them: for thumbnails, which Pillow makes outside of Python's lock.

        Yields:
            Each sample and its summary, in their order.
        """
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
        is_image = matches(field, IMAGE_FIELDS)
        try:
            value = self._decode({**place, field: data})[field]
        except UnsafeDataError:
            return self._summary(field, data, "a pickle, not loaded: it could run code")
        except ImportError as error:
            return self._summary(field, data, f"not decoded: {error}", is_damaged=True, is_image=is_image)
        except DecodingError as error:
            return self._summary(field, data, f"does not decode: {_reason(error)}", is_damaged=True, is_image=is_image)
        if isinstance(value, ImageView):
            return self._summary(field, data, value.text, is_image=True, picture=value.picture)
        media = _MEDIA.get(field.rpartition(".")[2])
        return self._summary(field, data, media or summarize(value, self.width), is_image=is_image)

    def _summary(self, field: str, data: bytes, text: str, **facts: Any) -> FieldSummary:
        return FieldSummary(field, len(data), shorten(printable(text), self.width), **facts)


def summarize(value: Any, width: int = 80) -> str:
    r"""Says in a few printable words what a decoded value is, however large it is.

    Args:
        value: What a codec gives.
        width: The most characters.

    Example:
        >>> summarize({"label": 3, "boxes": np.zeros((2, 4), np.float32)})
        '{"label": 3, "boxes": array float32 (2, 4), 0 .. 0}'
        >>> summarize("two\nlines"), summarize(b"\x89PNG", 8)
        ('two\\nlines', '4 byt...')
    """
    if isinstance(value, str):
        return shorten(printable(value[: width + 1]), width)
    if isinstance(value, bytes) and (text := guess_text(value, width + 1)) is not None:
        return summarize(text, width) or "empty"
    pieces, length = [], 0
    for piece in _pieces(value, 0):
        pieces.append(printable(piece))
        length += len(pieces[-1])
        if length > width:
            break
    return shorten("".join(pieces), width)


def guess_text(data: bytes, length: int) -> str | None:
    r"""Takes bytes as text if they look like it: UTF-8 without control characters.

    Args:
        data: Any bytes.
        length: How many to look at.

    Returns:
        The beginning of the text, or None.

    Example:
        >>> guess_text("größe".encode(), 3), guess_text(b"\x00\x01", 9)
        ('gr', None)
    """
    try:
        text = data[:length].decode()
    except UnicodeDecodeError as error:
        if len(data) <= length or error.start < length - 3:
            return None
        text = data[: error.start].decode()  # the last character was cut
    return None if _NO_TEXT.search(text) else text


def _reason(error: DecodingError) -> str:
    """What the codec said: the key and the field stand beside it."""
    cause = error.__cause__
    if type(cause).__name__ == "UnidentifiedImageError":
        return "no image that is known here"
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """Gives the summary bit by bit, so that no more of a large value is looked at than is shown."""
    if isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str | bytes)):
        opening, closing = "{}" if isinstance(value, Mapping) else "[]"
        yield opening
        if depth == _DEPTH and value:
            yield "..."
        else:
            yield from _items(value, depth)
        yield closing
    else:
        yield _atom(value)


def _items(container: Any, depth: int) -> Iterator[str]:
    for number, item in enumerate(container):
        if number:
            yield ", "
        if isinstance(container, Mapping):
            yield f"{_atom(item)}: "
            item = container[item]
        yield from _pieces(item, depth + 1)


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
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return _describe_array(value)
        return repr(value)[:_LONGEST_ITEM]
    except Exception:  # noqa: BLE001 - whatever the value's own code does, the others are to be seen
        return describe_value(value)


def _describe_array(value: Any) -> str:
    kind = "array" if isinstance(value, np.ndarray | np.generic) else "tensor"
    dtype = str(value.dtype).removeprefix("torch.")
    if not tuple(value.shape):
        return f"{dtype} {value.item()!r}"
    return f"{kind} {shorten(dtype, _LONGEST_ITEM)} {tuple(value.shape)}{_range(value)}"


def _range(value: Any) -> str:
    try:
        if value.nbytes > DEFAULT_MAX_BYTES:
            return ""  # a small file can name a tensor that repeats one number as often as it likes
        numbers = value if isinstance(value, np.ndarray) else _as_array(value)
    except Exception:  # noqa: BLE001 - torch has layouts and types that NumPy has not
        return ""
    if numbers.dtype.kind not in "biuf" or not numbers.size:
        return ""
    finite = numbers[np.isfinite(numbers)]
    odd = f", {numbers.size - finite.size:,} not finite" if finite.size < numbers.size else ""
    return (f", {finite.min():.6g} .. {finite.max():.6g}" if finite.size else "") + odd


def _as_array(tensor: Any) -> Any:
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
