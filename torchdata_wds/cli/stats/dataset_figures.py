"""What `wds stats` finds, as plain values."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchdata_wds.cli.stats.counting import DatasetTally, ShardCounts
from torchdata_wds.cli.stats.numbers import NumberFigures, summarize_numbers
from torchdata_wds.cli.stats.odd_samples import Oddity, find_oddities
from torchdata_wds.cli.stats.repeats import Places, Repeats, find_repeats, joined
from torchdata_wds.cli.stats.tallies import FieldTally, ImageTally, LabelTally, Numbers

_LEAST_SHARE = 0.02  # of the images, for the most frequent size to be worth a line
_LEAST_REPEATS = 2  # samples per value, on average: a field with fewer has no labels


class LabelFigures(NamedTuple):
    """The labels of a field: those of most samples, and how many others there are."""

    different: int
    top: list[tuple[str, int]]  # label and samples, the most frequent first
    others: int  # labels that `top` leaves out
    other_samples: int
    least: int  # samples of the rarest label


class ImageFigures(NamedTuple):
    """The images of a field, from the headers of their files."""

    images: int
    failed: int  # files whose header could not be read
    kinds: list[tuple[str, str, int]]  # format, mode and images
    widths: NumberFigures | None
    heights: NumberFigures | None
    sizes: list[tuple[int, int, int]]  # width, height and images, the most frequent first
    different_sizes: int

    @property
    def frequent_sizes(self) -> list[tuple[str, int]]:
        """Sizes as text, and their images; empty if hardly two images have the same size."""
        if not self.sizes or self.sizes[0][2] < _LEAST_SHARE * self.images:
            return []
        return [(f"{width:,} x {height:,}", count) for width, height, count in self.sizes]


class FieldFigures(NamedTuple):
    """One field."""

    field: str
    samples: int
    empty: int
    sizes: NumberFigures  # in bytes
    labels: LabelFigures | None
    images: ImageFigures | None


class FieldSet(NamedTuple):
    """Samples that have the same fields."""

    fields: list[str]
    samples: int


class DuplicateFigures(NamedTuple):
    """Samples that share content, by 128 bits of its SHA-256."""

    samples: Repeats  # the same fields with the same content
    largest: Repeats  # the same largest field, with other differences: such as one image with two labels


class DatasetFigures(NamedTuple):
    """A whole data set in numbers."""

    shards: list[ShardCounts]
    shard_samples: NumberFigures | None  # samples per shard
    samples: int
    bytes: int  # of the members' contents
    fields: list[FieldFigures]  # those of most samples first
    other_fields: int  # members of further fields
    field_sets: list[FieldSet]  # those of most samples first
    duplicates: DuplicateFigures
    oddities: list[Oddity]


def summarize_dataset(tally: DatasetTally, top: int = 20) -> DatasetFigures:
    """Summarizes the counts of a data set, with `top` labels and image sizes of each field."""
    places = Places(tally.keys)
    per_shard = Numbers()
    for shard in tally.shards:
        per_shard.append(shard.samples)
    by_samples = sorted(tally.fields.items(), key=lambda item: (-len(item[1].sizes), item[0]))
    return DatasetFigures(
        tally.shards,
        summarize_numbers(per_shard),
        tally.samples,
        sum(shard.bytes for shard in tally.shards),
        list(_fields(by_samples, top)),
        tally.other_fields,
        [FieldSet(sorted(fields), samples) for fields, samples, _, _ in tally.field_sets.table()],
        _duplicates(tally, places),
        list(find_oddities(tally, places)),
    )


def _fields(tallies: Sequence[tuple[str, FieldTally]], top: int) -> Iterator[FieldFigures]:
    for name, tally in tallies:
        if (sizes := summarize_numbers(tally.sizes)) is not None:
            images = None if tally.images is None else _images(tally.images, top)
            labels = None if tally.images is not None else _labels(tally.labels, top)
            yield FieldFigures(name, len(tally.sizes), tally.empty, sizes, labels, images)


def _labels(tally: LabelTally, top: int) -> LabelFigures | None:
    """Returns the labels of a field, or None if its values hardly repeat."""
    counts = tally.by_text()
    if not counts or counts.total() < _LEAST_REPEATS * len(counts):
        return None
    ordered = sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))  # 2 before 10
    rest = ordered[top:]
    return LabelFigures(len(counts), ordered[:top], len(rest), sum(count for _, count in rest), ordered[-1][1])


def _images(tally: ImageTally, top: int) -> ImageFigures:
    pairs = np.stack([tally.widths.values(), tally.heights.values()], axis=1)
    found, counts = np.unique(pairs, axis=0, return_counts=True)
    first = np.argsort(-counts, kind="stable")[:top]
    sizes = [(*map(int, found[row]), int(counts[row])) for row in first]
    kinds = [(*kind, count) for kind, count in sorted(tally.kinds.items(), key=lambda item: (-item[1], item[0]))]
    ranges = summarize_numbers(tally.widths), summarize_numbers(tally.heights)
    return ImageFigures(len(pairs), tally.failed, kinds, *ranges, sizes, len(found))  # type: ignore[arg-type]


def _duplicates(tally: DatasetTally, places: Places) -> DuplicateFigures:
    contents, largest = joined(tally.contents, 2), joined(tally.largest, 2)
    return DuplicateFigures(find_repeats(contents, places), find_repeats(largest, places, contents))


def as_plain(value: Any) -> Any:
    """Turns figures into dicts and lists that JSON can hold."""
    if hasattr(value, "_asdict"):
        return {name: as_plain(item) for name, item in value._asdict().items()}
    return [as_plain(item) for item in value] if isinstance(value, list | tuple) else value
