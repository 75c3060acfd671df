"""Samples to documents: the images that belong to a document are found, in its own sample or in those around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torchdata_wds.errors import SKIP_SAMPLES, SampleError
from torchdata_wds.format.documents import layouts
from torchdata_wds.format.documents.layouts import Document, find_images, find_json
from torchdata_wds.format.samples.names import is_metadata
from torchdata_wds.option_types import Layout

MOST_WAITING = 1000  # how many images may wait for a document that names them: then the older half is given up
_WAITING = ("auto", "dash")
_SHOWN_KEYS = 5


class FoundDocument(NamedTuple):
    """A document, and all that may be its images."""

    sample: dict[str, Any]  # ``__key__`` and other metadata
    document: Document  # what its JSON says
    fields: dict[str, Any]  # of its sample, without the JSON, and as ``<image>.<field>`` of samples that belong to it

    def add(self, part: str, sample: Mapping[str, Any]) -> None:
        """Adds the fields of a sample that belongs to it."""
        for field, value in sample.items():
            if not is_metadata(field):
                self.fields.setdefault(f"{part}.{field}", value)


def find_documents(
    samples: Iterable[Any], layout: Layout, shown: Callable[[str], str] = str, *, shards: int = 1
) -> Iterator[FoundDocument | SampleError]:
    """Finds the documents in a stream of samples; they come as they are complete, and errors in place of what is none.

    Where a document names images that its own sample does not have, in the layouts ``auto`` and ``dash``, it waits for
    samples ``<key>-<image>`` until all have come, the next document comes, or the shard ends; samples that come before
    their document wait for it, at most `MOST_WAITING`. A document takes only images that it names. Samples of at most
    `shards` shards may come in turn: when one more begins, the one unused for longest ends.
    """
    finders: dict[str, _Finder] = {}  # the last one is that of the sample before
    for sample in samples:
        key = sample.get("__key__") if isinstance(sample, dict) else None
        if not isinstance(key, str):
            found = f"a dict with the keys {list(sample)[:8]}" if isinstance(sample, dict) else type(sample).__name__
            what = f"wds_interleaved takes samples with a __key__, as .group_by_key() yields them, not {found}"
            yield SampleError(f"{what}; it stands before .wds_to_tuple()")
            continue
        url = str(sample.get("__url__"))
        finder = finders.pop(url, None) or _Finder(layout, shown, sample.get("__url__"))
        finders[url] = finder
        if len(finders) > shards:
            yield from finders.pop(next(iter(finders))).end_shard()
        yield from finder.take(sample, key)
    for finder in finders.values():
        yield from finder.end_shard()


class _Finder:
    """What is open between two samples of a shard: one document, and images that wait or that others may share."""

    def __init__(self, layout: Layout, shown: Callable[[str], str], url: Any) -> None:
        self.layout = layout
        self.shard = shown(url) if isinstance(url, str) else None
        self.waits = layout in _WAITING
        self.first: tuple[str, bool] | None = None
        self.open: FoundDocument | None = None
        self.wanted: dict[str, str] = {}
        self.waiting: dict[str, Mapping[str, Any]] = {}
        self.spare: dict[str, Mapping[str, Any]] = {}

    def take(self, sample: dict[str, Any], key: str) -> Iterator[FoundDocument | SampleError]:
        begins = (key, find_json(sample) is not None)
        if begins == self.first:  # the same shard is read again
            yield from self.end_shard()
        self.first = self.first or begins
        try:
            found = self._read(sample, key)
        except SampleError as error:
            yield error
            if key in self.wanted:
                yield from self._add(key, sample)
            return
        if found is not None:
            yield from self._share(found, key)
            yield from self._close()
            yield from self._begin(found)
        elif key in self.wanted:
            yield from self._add(key, sample)
        else:
            if key in self.waiting:
                yield self._give_up([key])
            self.waiting[key] = sample
            if len(self.waiting) > MOST_WAITING:
                yield self._give_up(list(self.waiting)[: MOST_WAITING // 2])

    def end_shard(self) -> Iterator[FoundDocument | SampleError]:
        yield from self._close()
        self.spare.clear()
        if self.waiting:
            yield self._give_up(list(self.waiting))

    def _share(self, found: FoundDocument, key: str) -> Iterator[FoundDocument]:
        """Offers a document's plain image to others: with ``12-3.json``, ``12-3.jpg`` may be image 3 of document 12."""
        named = find_images((entry.name for entry in found.document.images if entry.name), found.fields).values()
        images = [field for field in found.fields if field.lower() in layouts.IMAGE_EXTENSIONS]
        plain = {field: found.fields[field] for field in images if field not in named}
        if not plain or not self.waits:
            return
        if key in self.wanted:
            for field in plain:
                del found.fields[field]
            yield from self._add(key, plain)
        elif "-" in key:
            self.spare[key] = plain
            if len(self.spare) > MOST_WAITING:
                del self.spare[next(iter(self.spare))]

    def _add(self, key: str, sample: Mapping[str, Any]) -> Iterator[FoundDocument]:
        if self.open is not None:
            self.open.add(self.wanted.pop(key), sample)
        if not self.wanted:
            yield from self._close()

    def _begin(self, found: FoundDocument) -> Iterator[FoundDocument]:
        """Opens a document; `wanted` has the keys of samples that may hold missing images, and their fields' prefix."""
        images = found.document.images if self.waits else []
        names = [entry.name for entry in images if entry.name and not (self.layout == "auto" and entry.base64)]
        there = find_images(names, found.fields)
        parts = (name.partition(".")[0] for name in names if name not in there)
        self.wanted = {f"{found.sample.get('__key__')}-{part}": part for part in parts if part}
        for key in list(self.wanted):
            sample = self.waiting.pop(key, None) or self.spare.pop(key, None)
            if sample is not None:
                found.add(self.wanted.pop(key), sample)
        self.open = found
        if not self.wanted:
            yield from self._close()

    def _close(self) -> Iterator[FoundDocument]:
        if self.open is not None:
            yield self.open
        self.open, self.wanted = None, {}

    def _read(self, sample: dict[str, Any], key: str) -> FoundDocument | None:
        """Reads a document; None for a sample that may be an image of one."""
        field = find_json(sample)
        may_wait = self.waits and "-" in key
        try:
            value = None if field is None else layouts.load_json(sample[field])
            if may_wait and not layouts.is_document(value) and any(map(layouts.is_image_field, sample)):
                return None
            if field is None:
                others = [name for name in sample if not is_metadata(name)]
                raise ValueError(f"expected the JSON of a document, found only the fields {others}")
            document = layouts.parse_document(value, "auto" if self.waits else self.layout)
        except Exception as cause:
            text = f"{type(cause).__name__}: {cause}" if type(cause) is not ValueError else str(cause)
            where = f"sample {key!r}" + (f" in shard {self.shard}" if self.shard else "")
            message = f"field 'json' of {where} is not an interleaved document: {text}."
            raise SampleError(message, shard=self.shard, advice=SKIP_SAMPLES, key=key, field="json") from cause
        metadata = {name: item for name, item in sample.items() if is_metadata(name)}
        fields = {name: item for name, item in sample.items() if name != field and not is_metadata(name)}
        return FoundDocument(metadata, document, fields)

    def _give_up(self, keys: list[str]) -> SampleError:
        for key in keys:
            del self.waiting[key]
        names = ", ".join(keys[:_SHOWN_KEYS]) + (", ..." if len(keys) > _SHOWN_KEYS else "")
        return SampleError(
            f"{len(keys)} samples{f' of shard {self.shard}' if self.shard else ''} belong to no document: {names}. "
            "Expected near them, in the same shard, a document that names them in its image_info. Place "
            ".wds_interleaved() before any shuffle, and filter out what belongs to no document; "
            "handler=warn_and_continue skips it.",
            shard=self.shard,
            key=keys[0],
        )
