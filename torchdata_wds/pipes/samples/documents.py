"""Samples to interleaved documents: ordered lists of texts and images."""

import base64
import math
from collections.abc import Iterator
from typing import Any, get_args

from torchdata_wds.checks import check_choice, check_count, is_number
from torchdata_wds.codecs.decoder import describe_failure
from torchdata_wds.codecs.images.decoding import ImageDecoder, ImageFieldDecoder
from torchdata_wds.codecs.plans import StepFailedError
from torchdata_wds.consumers import upstream
from torchdata_wds.errors import MissingFieldError, SampleError
from torchdata_wds.format.documents import layouts
from torchdata_wds.format.documents.assembling import FoundDocument, find_documents
from torchdata_wds.format.documents.layouts import ImageEntry, ImageSegment, find_images, is_image_field
from torchdata_wds.handlers import Handler, count_loss, reraise_exception
from torchdata_wds.option_types import Layout, Missing
from torchdata_wds.pipes.base import Pipe, register
from torchdata_wds.pipes.samples.field_specs import name_sample
from torchdata_wds.pipes.samples.map import HandlingPipe
from torchdata_wds.pipes.shards.load_shards import ShardLoaderIterDataPipe
from torchdata_wds.storage import mask_url

_SHOWN = 5


@register("wds_interleaved")
class DocumentInterleaverIterDataPipe(HandlingPipe[dict[str, Any]]):
    """Assembles interleaved documents from samples (functional name: ``wds_interleaved``).

    A document is JSON in a ``json`` field, decoded or not. In MMC4's form, with ``text_list`` and
    ``image_info[{image_name, matched_text_index, matched_sim}]``, an image comes before the text with its index, or
    after all texts if the index is their number. In OBELICS' form, ``images`` and ``texts`` are lists of equal length,
    and exactly one of them has null at each place. The field of an image is its ``image_name``, the same in lower case,
    or the same with another extension, ``jpg`` first; a field that fits two images belongs to neither.

    Documents are yielded as soon as they are complete. Memory holds one document and, with ``"dash"`` and ``"auto"``,
    up to 1,000 samples that wait for the document that names them: of one shard, or of each of 2k shards after
    ``load_wds_shards(interleave=k)``. These two layouts need whole shards, none open twice at a time, and must come
    before any shuffle or mix; a document ends at the end of its shard. Everything left out, including images that no
    document names, is counted in ``skipped``.

    Args:
        layout: Where the images are: ``"members"`` of the document's sample, such as ``doc.<image>.jpg`` beside
            ``doc.json``; ``"dash"``, samples ``doc-<image>.jpg`` after or before it, or members; ``"base64"``, MMC4's
            form with ``image_base64`` in ``image_info``; ``"obelics"``, OBELICS' form with members; ``"auto"``, any
            of these, detected for each document.
        missing: What happens to an image that is named but missing: ``"error"``; ``"drop_image"`` leaves the image out,
            ``"skip_sample"`` the document; ``"none"`` keeps a segment with None.
        images: How to decode kept images that are still bytes: a spec such as ``"pil"``, or a result of
            `image_decoder`; None leaves them bytes.
        min_images: Documents with fewer images are left out.
        max_images: Documents with more images keep the first ones.
        min_similarity: Images with a lower similarity are left out; those without one are kept.
        handler: Called once for each document whose JSON is invalid (SampleError), that lacks an image
            (MissingFieldError) or has an undecodable one (DecodingError), and for images without a document.

    Yields:
        dict: ``__key__`` and ``__url__``; ``segments``, a list of `TextSegment` and `ImageSegment`;
        ``similarity_matrix``, with a row per image segment and a column per text, or None; ``metadata``, the rest of
        the JSON as a dict; and all fields that are not images.

    Raises:
        ValueError: if an option is not one of those listed.
        SampleError: through the handler, if a document's JSON is wrong, or images belong to no document.
        MissingFieldError: through the handler, if an image is missing and ``missing="error"``.
        DecodingError: through the handler, if an image does not decode.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> document = {"text_list": ["A cat."], "image_info": [{"image_name": "cat.png", "matched_text_index": 0}]}
        >>> samples = IterableWrapper([{"__key__": "a", "json": document, "cat.jpg": b"..."}])
        >>> next(iter(samples.wds_interleaved()))["segments"]
        [ImageSegment(image=b'...', name='cat.png', similarity=None, info={}), TextSegment(text='A cat.')]
    """

    def __init__(
        self,
        source_datapipe: Pipe,
        *,
        layout: Layout = "auto",
        missing: Missing = "error",
        images: str | ImageFieldDecoder | None = None,
        min_images: int | None = None,
        max_images: int | None = None,
        min_similarity: float | None = None,
        handler: Handler = reraise_exception,
    ) -> None:
        check_choice("layout", layout, get_args(Layout))
        check_choice("missing", missing, get_args(Missing))
        check_count("min_images", 0 if min_images is None else min_images, 0)
        check_count("max_images", 0 if max_images is None else max_images, 0)
        if None not in (min_images, max_images) and min_images > max_images:  # type: ignore[operator]
            raise ValueError(f"min_images={min_images} is more than max_images={max_images}: nothing would be left")
        if min_similarity is not None and not is_number(min_similarity):
            raise TypeError(f"min_similarity must be a number or None, not {min_similarity!r}")
        if min_similarity is not None and not math.isfinite(min_similarity):
            raise ValueError(f"min_similarity must be a finite number, not {min_similarity}")
        if images is not None and not isinstance(images, (str, ImageFieldDecoder)):
            raise TypeError(f"images must be an image spec, what image_decoder makes, or None, not {images!r}")
        super().__init__(source_datapipe, handler)
        self.layout, self.missing, self.images = layout, missing, images
        self.min_images, self.max_images, self.min_similarity = min_images, max_images, min_similarity
        self._decoder = ImageDecoder(images) if isinstance(images, str) else images

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # Stages in between may drop samples, so that shards seem to miss turns: hence twice as many as are open.
        widths = [pipe.interleave for pipe in upstream(self) if isinstance(pipe, ShardLoaderIterDataPipe)]
        shards, ask = 2 * max(widths) if max(widths, default=1) > 1 else 1, self.asked()
        for found in find_documents(self.source_datapipe, self.layout, mask_url, shards=shards):
            try:
                if isinstance(found, SampleError):
                    raise found
                document = self._assemble(found)
            except Exception as error:  # noqa: BLE001  (the handler decides)
                if not ask(error):
                    return
                continue
            if document is not None:
                yield document

    def __len__(self) -> int:
        raise TypeError("wds_interleaved merges and skips samples: its length is not known; .set_length(n) sets one")

    def _assemble(self, found: FoundDocument) -> dict[str, Any] | None:
        """Returns the output of a document; counts it and returns None if it is left out."""
        document = found.document
        rest = {field: value for field, value in found.fields.items() if not is_image_field(field)}
        if field := next((field for field in layouts.OUR_FIELDS if field in rest), None):
            key = found.sample["__key__"]
            raise SampleError(
                f"document {key!r} has a field {field!r}, which wds_interleaved makes itself: rename it, or leave it "
                "out with group_by_key(fields=...)",
                key=key,
                field=field,
            )
        if (images := self._choose(found)) is None:
            count_loss(self.skipped, "document with missing images")
            return None
        if sum(value is not None for _, value in images) < (self.min_images or 0):
            self.skipped["document with too few images"] += 1
            return None
        placed = [(entry.place, self._segment(found, entry, value)) for entry, value in images]
        segments, matrix = list(layouts.in_order_of_place(document.texts, placed)), document.matrix
        similarities = None if matrix is None else [matrix[entry.row] for entry, _ in images]
        ours = {"segments": segments, "similarity_matrix": similarities, "metadata": document.metadata}
        return {**found.sample, **rest, **ours}

    def _choose(self, found: FoundDocument) -> list[tuple[ImageEntry, Any]] | None:
        """Returns the images to keep, with their values (None if missing); returns None to leave the document out."""
        # The options apply in this order: similarity, missing, max_images. Of 5 images where the first is unlike its
        # text and the second is missing, missing="drop_image" and max_images=2 keep the third and fourth; and an image
        # below min_similarity is never reported as missing.
        entries, lowest = found.document.images, self.min_similarity
        names = [entry.name for entry in entries if entry.name is not None]
        fields = {} if self.layout == "base64" else find_images(names, found.fields)
        unnamed = found.fields.keys() - set(fields.values())
        self._count("image without a name in its document", sum(map(is_image_field, unnamed)))
        in_json = self.layout in ("auto", "base64")
        images = [
            (entry, entry.base64 if in_json and entry.base64 else found.fields.get(fields.get(entry.name or "", "")))
            for entry in entries
            if lowest is None or entry.similarity is None or entry.similarity >= lowest
        ]
        self._count("image below min_similarity", len(entries) - len(images))
        lost = [str(entry.name) for entry, value in images if value is None]
        if lost and self.missing == "error":
            raise _missing(found, lost)
        if lost and self.missing == "skip_sample":
            return None
        if lost and self.missing == "drop_image":
            self._count("missing image", len(lost))
            images = [(entry, value) for entry, value in images if value is not None]
        kept = images[: self.max_images]
        self._count("image above max_images", len(images) - len(kept))
        return kept

    def _count(self, reason: str, number: int) -> None:
        if number:
            self.skipped[reason] += number

    def _segment(self, found: FoundDocument, entry: ImageEntry, value: Any) -> ImageSegment:
        step = "base64"
        try:
            if isinstance(value, str) and value is entry.base64:
                value = base64.b64decode(value, validate=True)
            if self._decoder is not None and isinstance(value, (bytes, bytearray, memoryview)):
                step = f"an image (spec {self._decoder.spec!r})"
                value = self._decoder.decode(bytes(value))
        except Exception as cause:
            failed = StepFailedError(step, value, cause)
            raise describe_failure(failed, found.sample, entry.name or f"image_info[{entry.row}]") from cause
        return ImageSegment(value, entry.name, entry.similarity, entry.info)


def _missing(found: FoundDocument, lost: list[str]) -> MissingFieldError:
    place = name_sample(found.sample)[1]
    shard = f" in shard {place['shard']}" if place["shard"] else ""
    there = sorted(filter(is_image_field, found.fields))
    some, others = (
        ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        for names in (lost, there or ["none"])
    )
    return MissingFieldError(
        f"document {place['key']!r}{shard} names images that are not there: {some}. The images that are there are "
        f"{others}. Choose what happens to such documents with missing='drop_image', 'skip_sample' or 'none'.",
        **place,
        field=lost[0],
    )
