"""Counts of one field: sizes, values and images, made shard by shard and added up in the order of the shards."""

from array import array
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from PIL import UnidentifiedImageError

from torchdata_wds.cli.show.summaries import mode_text
from torchdata_wds.cli.terminal import guess_text, printable
from torchdata_wds.codecs.images.files import open_image
from torchdata_wds.codecs.images.pixels import IMAGE_FIELDS
from torchdata_wds.codecs.plans import describe_cause
from torchdata_wds.codecs.table import matches

LONGEST_LABEL = 64  # bytes
MOST_LABELS = 1 << 16  # of one field
MOST_EXAMPLES = 5

Integers = np.ndarray[Any, np.dtype[Any]]


class Place(NamedTuple):
    """A sample: its shard, credentials masked, and its key."""

    shard: str
    key: str


class Examples(list[Place]):
    """The first few samples of a kind, and why they are of it, if that needs words."""

    reason = ""

    def note(self, place: Place, reason: str = "") -> None:
        """Keeps a sample if it is one of the first."""
        if len(self) < MOST_EXAMPLES:
            self.reason = self.reason or reason
            self.append(place)

    def update(self, other: "Examples") -> None:
        """Adds those of later samples."""
        for place in other:
            self.note(place, other.reason)


class Numbers:
    """Whole numbers, 0 or more, of which each shard's take as few bytes as its largest needs."""

    def __init__(self) -> None:
        self._parts: list[Integers] = []
        self._open = array("Q")
        self.append = self._open.append

    def update(self, other: "Numbers") -> None:
        """Adds the numbers of a later shard."""
        self._parts += other._all()

    def values(self) -> Integers:
        """Returns all numbers, in the order in which they came."""
        return np.concatenate([np.empty(0, np.uint8), *self._all()])

    def __len__(self) -> int:
        return sum(map(len, self._all()))

    def _all(self) -> list[Integers]:
        if self._open:
            numbers = np.frombuffer(self._open, np.uint64)
            self._parts.append(numbers.astype(np.min_scalar_type(int(numbers.max()))))
            self._open = array("Q")
            self.append = self._open.append
        return self._parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _numbers, (self._all(),)


def _numbers(parts: list[Integers]) -> Numbers:
    made = Numbers()
    made._parts = parts
    return made


class LabelTally:
    """Counts the values of a field while all are short texts and at most 65,536 differ; else `counts` is None."""

    def __init__(self) -> None:
        self.counts: dict[bytes, int] | None = {}

    def add(self, data: bytes) -> None:
        """Counts a value."""
        counts = self.counts
        if counts is None:
            return
        if len(data) > LONGEST_LABEL:
            self.counts = None
        elif data in counts:
            counts[data] += 1
        elif guess_text(data, len(data)) is None or len(counts) == MOST_LABELS:
            self.counts = None
        else:
            counts[data] = 1

    def update(self, other: "LabelTally") -> None:
        """Adds the values of a later shard."""
        if self.counts is None or other.counts is None:
            self.counts = None
            return
        for data, count in other.counts.items():
            self.counts[data] = self.counts.get(data, 0) + count
        if len(self.counts) > MOST_LABELS:
            self.counts = None

    def by_text(self) -> Counter[str] | None:
        """Returns how often each text came, without blanks and line ends around it."""
        if self.counts is None:
            return None
        texts: Counter[str] = Counter()
        for data, count in self.counts.items():
            texts[data.decode().strip()] += count
        return texts


class ImageTally:
    """Counts the images of a field by format and mode, and collects their sizes, all from the files' headers."""

    def __init__(self) -> None:
        self.kinds: Counter[tuple[str, str]] = Counter()  # format and mode
        self.widths, self.heights = Numbers(), Numbers()
        self.failed = 0
        self.failures = Examples()

    def add(self, data: bytes, place: Place) -> None:
        """Reads the header of an image file."""
        try:
            with open_image(data) as image:
                kind, (width, height) = (image.format or "?", mode_text(image)), image.size
        except Exception as error:  # noqa: BLE001 - Pillow raises anything at damaged files
            self.failed += 1
            is_unknown = isinstance(error, UnidentifiedImageError)
            reason = "not an image of a known format" if is_unknown else describe_cause(error)
            self.failures.note(place, printable(reason))
            return
        self.kinds[kind] += 1
        self.widths.append(width)
        self.heights.append(height)

    def update(self, other: "ImageTally") -> None:
        """Adds the images of a later shard."""
        self.kinds.update(other.kinds)
        self.widths.update(other.widths)
        self.heights.update(other.heights)
        self.failed += other.failed
        self.failures.update(other.failures)


class FieldTally:
    """Counts one field: its samples and sizes, empty members, values and images."""

    def __init__(self, name: str) -> None:
        self.sizes = Numbers()
        self.empty = 0
        self.empties = Examples()
        self.labels = LabelTally()
        self.images = ImageTally() if matches(name, IMAGE_FIELDS) else None

    def add(self, data: bytes, place: Place) -> None:
        """Counts the field of one sample."""
        self.sizes.append(len(data))
        if not data:
            self.empty += 1
            self.empties.note(place)
        if self.images is None:
            self.labels.add(data)
        elif data:
            self.images.add(data, place)

    def update(self, other: "FieldTally") -> None:
        """Adds the field of a later shard."""
        self.sizes.update(other.sizes)
        self.empty += other.empty
        self.empties.update(other.empties)
        self.labels.update(other.labels)
        if self.images is not None and other.images is not None:
            self.images.update(other.images)
