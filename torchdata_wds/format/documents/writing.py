"""Interleaved documents to samples that can be written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdata_wds.errors import SampleError
from torchdata_wds.format.documents.parsing import (
    DOCUMENT_KEYS,
    INFO_KEYS,
    OUR_FIELDS,
    ImageSegment,
    TextSegment,
    find_images,
    is_image_field,
)
from torchdata_wds.format.samples.names import is_metadata


def interleaved_sample(document: Mapping[str, Any], *, extension: str = "jpg") -> dict[str, Any]:
    """Turns a document, as ``.wds_interleaved()`` yields it, into a sample to write: ``json``, and a field per image.

    The fields are called as the images; images without a name, or with one that can be no field (an address, say), by
    their number. Values are not encoded: the writers do that, by the extension. The JSON is MMC4's, with
    ``matched_text_index`` equal to the number of texts for images behind the last text.

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
    if DOCUMENT_KEYS & set(metadata):
        raise _unwritable(key, f"its metadata has {sorted(DOCUMENT_KEYS & set(metadata))}, which segments are for")
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
    info = {key: value for key, value in (segment.info or {}).items() if key not in INFO_KEYS}
    if segment.similarity is not None:
        info = {"matched_sim": segment.similarity, **info}
    name = segment.name
    if not name or "/" in name or "\0" in name or name.startswith(".") or is_metadata(name):
        if name:
            info.setdefault("raw_url", name)
        name = f"{number}.{extension}"
    return name, (name if is_image_field(name) else f"{name}.{extension}").lower(), info


def _unwritable(key: object, reason: str) -> SampleError:
    return SampleError(
        f"document {key!r} cannot be written: {reason}", key=key if isinstance(key, str) else None, field="segments"
    )
