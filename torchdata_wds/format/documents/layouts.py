"""Interleaved documents: what their JSON says, made one form whatever its layout, and samples to write of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchdata_wds.checks import is_number
from torchdata_wds.errors import SampleError
from torchdata_wds.format.samples.names import is_metadata
from torchdata_wds.option_types import Layout

# As the codecs have them; a test compares. JPEG first: images are mostly stored re-encoded.
IMAGE_EXTENSIONS = (
    *("jpg", "jpeg", "png", "webp", "gif", "avif", "ppm", "pgm", "pbm", "pnm", "bmp", "tif", "tiff"),
    *("jpe", "jfif", "apng", "jp2", "j2k", "ico", "img", "image"),
)

# What MMC4's form has besides what an image's ``info`` and a document's ``metadata`` keep.
_INFO_KEYS = frozenset({"image_name", "matched_text_index", "matched_sim", "image_base64"})
_DOCUMENT_KEYS = frozenset({"text_list", "image_info", "similarity_matrix"})
OUR_FIELDS = ("segments", "similarity_matrix", "metadata")  # of documents as `.wds_interleaved()` yields them


class TextSegment(NamedTuple):
    """A piece of text in a document."""

    text: str


class ImageSegment(NamedTuple):
    """An image in a document.

    Attributes:
        image: What the image field holds, decoded or not; None where it is missing and ``missing="none"``.
        name: What the document calls it.
        similarity: How well it fits the text after it; None if the document does not say.
        info: What else the document says about it.
    """

    image: Any
    name: str | None = None
    similarity: float | None = None
    info: Mapping[str, Any] | None = None


class ImageEntry(NamedTuple):
    """What a document's JSON says about one image."""

    name: str | None  # None where the JSON holds the image and gives no name
    place: int  # the number of the text that it stands before; the number of texts for one after them all
    similarity: float | None
    base64: str | None  # the image itself, where the JSON holds it
    info: dict[str, Any]
    row: int  # its number among all of the document, which is its row in the similarity matrix


class Document(NamedTuple):
    """A document's JSON, whatever its layout; texts and images in their order."""

    texts: list[str]
    images: list[ImageEntry]
    matrix: list[list[float]] | None  # a row for each image by its `row`, a column for each text
    metadata: dict[str, Any]  # the rest


def find_json(sample: Mapping[str, Any]) -> str | None:
    """Finds the field with a document's JSON: ``json``, or else the same in other case."""
    return "json" if "json" in sample else next((field for field in sample if field.lower() == "json"), None)


def load_json(value: Any) -> Any:
    """Parses JSON that is still bytes; other values were decoded before."""
    is_encoded = isinstance(value, (bytes, bytearray, memoryview))
    return json.loads(bytes(value).decode("utf-8-sig")) if is_encoded else value


def is_document(value: Any) -> bool:
    """Returns whether parsed JSON is meant as a document."""
    return isinstance(value, Mapping) and ("text_list" in value or {"images", "texts"} <= value.keys())


def is_image_field(field: str) -> bool:
    """Returns whether a field holds an image, by its extension."""
    return field.lower().rpartition(".")[2] in IMAGE_EXTENSIONS


def parse_document(value: Any, layout: Layout) -> Document:
    """Reads what a document's JSON says, as a layout has it: ``auto`` goes by the names of its lists.

    Example:
        >>> parse_document({"images": [None, "a.jpg"], "texts": ["One.", None]}, "auto").images[0].place
        1
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"expected an object with text_list and image_info, found {_kind(value)}")  # noqa: TRY004
    if layout == "obelics" or (layout == "auto" and "text_list" not in value and {"images", "texts"} <= value.keys()):
        return _parse_parallel(value)
    # MMC4's form: text_list, and image_info with the index of the text that each image stands before
    texts = _list(value, "text_list")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"expected text_list[{number}] to be a str, found {_kind(text)}")  # noqa: TRY004
    images = [_parse_info(info, number, len(texts)) for number, info in enumerate(_list(value, "image_info"))]
    matrix = _parse_matrix(value.get("similarity_matrix"), len(images), len(texts))
    metadata = {name: rest for name, rest in value.items() if name not in _DOCUMENT_KEYS}
    return Document(texts, sorted(images, key=lambda entry: entry.place), matrix, metadata)


def _parse_info(info: Any, number: int, texts: int) -> ImageEntry:
    where = f"image_info[{number}]"
    if not isinstance(info, Mapping):
        raise ValueError(f"expected {where} to be an object, found {_kind(info)}")  # noqa: TRY004
    name, base64 = info.get("image_name"), info.get("image_base64") or None
    if base64 is not None and not isinstance(base64, str):
        raise ValueError(f"expected {where}.image_base64 to be a str, found {_kind(base64)}")
    if not (isinstance(name, str) and name) and (name is not None or base64 is None):
        raise ValueError(f"expected {where}.image_name to be the name of an image, found {_kind(name)}")
    place = info.get("matched_text_index")
    if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place <= texts:
        valid = f"the number of a text, 0 to {texts - 1}, or {texts} for an image after them all"
        raise ValueError(f"expected {where}.matched_text_index to be {valid}, found {_kind(place)}")
    similarity = info.get("matched_sim")
    if similarity is not None and not _is_finite(similarity):
        raise ValueError(f"expected {where}.matched_sim to be a finite number or null, found {_kind(similarity)}")
    rest = {key: item for key, item in info.items() if key not in _INFO_KEYS}
    return ImageEntry(name, place, similarity, base64, rest, number)


def _parse_matrix(matrix: Any, rows: int, columns: int) -> list[list[float]] | None:
    if matrix is None:
        return None
    expected = f"expected similarity_matrix to be {rows} lists, one for each image, of {columns} finite numbers, found "
    if not isinstance(matrix, list) or len(matrix) != rows:
        raise ValueError(expected + (_kind(matrix) if not isinstance(matrix, list) else f"{len(matrix)}"))
    for number, row in enumerate(matrix):
        if not isinstance(row, list) or len(row) != columns or not all(map(_is_finite, row)):
            raise ValueError(f"{expected}something else as number {number}")
    return matrix


def _parse_parallel(value: Mapping[str, Any]) -> Document:
    """Reads OBELICS' form: images and texts of one length, of which one is null at each place and the other is not."""
    names, passages = _list(value, "images"), _list(value, "texts")
    if len(names) != len(passages):
        raise ValueError(f"expected images and texts to be of one length, found {len(names)} and {len(passages)}")
    infos = value.get("metadata")  # about each place: a list, or the JSON of one
    infos = [None] * len(names) if infos is None else json.loads(infos) if isinstance(infos, str) else infos
    if not isinstance(infos, list) or len(infos) != len(names):
        found = f"{len(infos)}" if isinstance(infos, list) else _kind(infos)
        raise ValueError(f"expected metadata to be a list of {len(names)}, one for each place, found {found}")
    for number, info in enumerate(infos):
        if info is not None and not isinstance(info, Mapping):
            raise ValueError(f"expected metadata[{number}] to be an object or null, found {_kind(info)}")
    texts: list[str] = []
    images: list[ImageEntry] = []
    for number, (name, text) in enumerate(zip(names, passages, strict=True)):
        if isinstance(text, str) and name is None:
            texts.append(text)
        elif isinstance(name, str) and name and text is None:
            images.append(ImageEntry(name, len(texts), None, None, dict(infos[number] or {}), len(images)))
        else:
            valid = f"a name in images[{number}] or a str in texts[{number}] and null in the other"
            raise ValueError(f"expected {valid}, found {_kind(name)} and {_kind(text)}")
    metadata = {name: rest for name, rest in value.items() if name not in ("images", "texts", "metadata")}
    return Document(texts, images, None, metadata)


def _list(value: Mapping[str, Any], name: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list):
        keys = "" if name in value else f" among the keys {sorted(map(str, value))}"
        raise ValueError(f"expected {name} to be a list, found {_kind(found) if name in value else 'none'}{keys}")  # noqa: TRY004
    return found


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _kind(value: Any) -> str:
    text = "null" if value is None else repr(value)
    if value is None or isinstance(value, (bool, int, float)):
        return text
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"


def find_images(names: Iterable[str], fields: Iterable[str]) -> dict[str, str]:
    """Finds fields of images by name: exact, in lower case, or with another extension, ``jpg`` first.

    A field that may be that of two names is that of neither.

    Example:
        >>> find_images(["B.b.PNG", "a"], ["b.b.jpg", "a.png"])
        {'B.b.PNG': 'b.b.jpg', 'a': 'a.png'}
    """
    exact = set(fields)
    lowered = {field.lower(): field for field in sorted(exact)}
    found: dict[str, str] = {}
    wanted = list(dict.fromkeys(names))
    candidates: tuple[Callable[[str], Sequence[str | None]], ...] = (
        lambda name: [name if name in exact else None],
        lambda name: [lowered.get(name.lower())],
        lambda name: _re_encoded(name.lower(), lowered),
    )
    for fields_for in candidates:
        claims: dict[str, list[str]] = {}
        taken = {*found.values(), None}
        for name in wanted:
            pool = () if name in found else fields_for(name)
            field = next((field for field in pool if field not in taken), None)
            if field is not None:
                claims.setdefault(field, []).append(name)
        found.update((names[0], field) for field, names in claims.items() if len(names) == 1)
    return found


def _re_encoded(name: str, lowered: Mapping[str, str]) -> Sequence[str]:
    """Returns the fields that hold an image with another extension than its name has, in order of preference."""
    stem, _, extension = name.rpartition(".")
    bases = (stem, name) if extension in IMAGE_EXTENSIONS else (name, stem)
    candidates = (f"{base}.{extension}" for base in bases if base for extension in IMAGE_EXTENSIONS)
    return [lowered[candidate] for candidate in candidates if candidate in lowered]


def in_order_of_place(
    texts: Sequence[str], images: Iterable[tuple[int, ImageSegment]]
) -> Iterator[TextSegment | ImageSegment]:
    """Puts images, each before the text of its number, among the texts; those with one number keep their order."""
    placed: dict[int, list[ImageSegment]] = {}
    for place, segment in images:
        placed.setdefault(place, []).append(segment)
    for number, text in enumerate(texts):
        yield from placed.get(number, ())
        yield TextSegment(text)
    yield from placed.get(len(texts), ())


def interleaved_sample(document: Mapping[str, Any], *, extension: str = "jpg") -> dict[str, Any]:
    """Turns a document, as ``.wds_interleaved()`` yields it, into a sample to write: ``json``, and a field per image.

    The fields are called as the images; images without a name, or with one that can be no field (an address, say), by
    their number. Values are not encoded: the writers do that, by the extension. The JSON is MMC4's, with
    ``matched_text_index`` equal to the number of texts for images after the last text.

    Args:
        document: ``__key__``, ``segments``, and if wanted ``metadata``, ``similarity_matrix`` and further fields.
        extension: That of images whose names have none that is an image's.

    Returns:
        A new sample, for ``TarWriter``, ``ShardWriter`` or ``.save_wds_shards``; `.wds_interleaved()` reads it back.

    Raises:
        SampleError: if there are no segments, a segment is none, or an image would not be read back as it is.

    Example:
        >>> segments = [ImageSegment(b"...", "cat.png"), TextSegment("A cat.")]
        >>> interleaved_sample({"__key__": "a", "segments": segments})["json"]["image_info"]
        [{'image_name': 'cat.png', 'matched_text_index': 0}]
    """
    key = document.get("__key__")
    sample = {field: value for field, value in document.items() if field not in OUR_FIELDS}
    segments = document.get("segments")
    if not isinstance(segments, (list, tuple)):
        raise _unwritable(key, f"expected a list of segments, found {type(segments).__name__}")
    if "json" in sample:
        raise _unwritable(key, "it has a field 'json' besides, where its texts are written; rename that")
    texts: list[str] = []
    infos: list[dict[str, Any]] = []
    images: list[tuple[str, str, Any]] = []  # the name that each is written under, its field, and the image
    for segment in segments:
        if isinstance(segment, TextSegment) and isinstance(segment.text, str):
            texts.append(segment.text)
        elif isinstance(segment, ImageSegment):
            name, field, info = _named(segment, len(infos), extension)
            images.append((name, field, segment.image))
            infos.append({"image_name": name, "matched_text_index": len(texts), **info})
        else:
            raise _unwritable(key, f"expected TextSegment (of a str) and ImageSegment, found {type(segment).__name__}")
    sample.update(_fields_of(images, key, sample))
    metadata = document.get("metadata") or {}
    if _DOCUMENT_KEYS & set(metadata):
        raise _unwritable(key, f"its metadata has {sorted(_DOCUMENT_KEYS & set(metadata))}, which segments are for")
    matrix = document.get("similarity_matrix")
    scores = {} if matrix is None else {"similarity_matrix": matrix}
    return {**sample, "json": {"text_list": texts, "image_info": infos, **scores, **metadata}}


def _fields_of(images: list[tuple[str, str, Any]], key: object, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the fields of images, and sees to it that these are found in them again, and those that are missing not."""
    fields: dict[str, Any] = {}
    for _, field, image in images:
        if image is not None and (field in sample or fields.setdefault(field, image) is not image):
            raise _unwritable(key, f"the field {field!r} would be two things; rename one of them")
    found = find_images((name for name, _, _ in images), [*sample, *fields])
    for name, field, image in images:
        if found.get(name) != (None if image is None else field):
            raise _unwritable(key, f"image {name!r} would be read back as another, or not at all; rename it")
    return fields


def _named(segment: ImageSegment, number: int, extension: str) -> tuple[str, str, dict[str, Any]]:
    """Returns the name that an image is written under, its field, and what else its ``info`` says."""
    info = {key: value for key, value in (segment.info or {}).items() if key not in _INFO_KEYS}
    if segment.similarity is not None:
        info = {"matched_sim": segment.similarity, **info}
    name = segment.name
    if not name or "/" in name or "\0" in name or name.startswith(".") or is_metadata(name):
        if name:
            info.setdefault("raw_url", name)
        name = f"{number}.{extension}"
    return name, (name if is_image_field(name) else f"{name}.{extension}").lower(), info


def _unwritable(key: object, reason: str) -> SampleError:
    known = key if isinstance(key, str) else None
    return SampleError(f"document {key!r} cannot be written: {reason}", key=known, field="segments")
