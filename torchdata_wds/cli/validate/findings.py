"""What validation finds in shards, and how the fields of samples compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

__all__ = ["FieldSets", "Finding", "Level"]


Level = Literal["error", "warning", "note"]

#: So many different sets of fields are told apart: data with ever new ones must not fill the memory.
_MOST_SETS = 1000


class Finding(NamedTuple):
    """One thing that is wrong with a shard, or odd.

    Attributes:
        level: ``"error"`` for what loaders refuse or lose, ``"warning"`` for what they pass over, ``"note"`` else.
        kind: What it is, in a word.
        message: What was found, and what to do about it.
        shard: The shard's URL, credentials masked.
        member: Name of the archive member.
        key: Key of the sample.
        field: Field of the sample.
        offset: Where, in bytes of the decompressed archive: a member's place is that of its header.
        samples: How many samples it is about, where these are told together.
    """

    level: Level
    kind: str
    message: str
    shard: str
    member: str | None = None
    key: str | None = None
    field: str | None = None
    offset: int | None = None
    samples: int = 1


class _Place(NamedTuple):
    """Where samples with one set of fields are in a shard: how many, and the first of them."""

    samples: int
    key: str
    offset: int


class FieldSets:
    """Which fields samples have, to find those that are unlike the majority.

    Example:
        >>> sets = FieldSets()
        >>> for number, fields in enumerate([("jpg", "cls"), ("jpg", "cls"), ("jpg",)]):
        ...     sets.add(fields, "x.tar", str(number), 1024 * number)
        >>> [finding.message for finding in sets.findings()]
        ["1 sample has not the fields of most (2 of 3: cls, jpg): cls is missing, the first is '2'"]
    """

    def __init__(self) -> None:
        self._samples: Counter[frozenset[str]] = Counter()
        self._places: dict[tuple[str, frozenset[str]], _Place] = {}
        self._others = 0

    def add(self, fields: Iterable[str], shard: str, key: str, offset: int) -> None:
        """Takes note of a sample.

        Args:
            fields: Its fields; names like ``__key__`` are not looked at.
            shard: Its shard, as messages may show it.
            key: Its key.
            offset: Where it begins.
        """
        found = frozenset([field for field in fields if not field.startswith("__")])
        self._count(found, shard, _Place(1, key, offset))

    def update(self, other: FieldSets) -> None:
        """Takes over what another one has noted of later shards."""
        self._others += other._others
        for (shard, fields), place in other._places.items():
            self._count(fields, shard, place)

    def findings(self) -> Iterator[Finding]:
        """Tells of samples whose fields are not those that more than half of all have; one note for a shard and set."""
        total = self._samples.total() + self._others
        if not total:
            return
        usual, count = self._samples.most_common(1)[0]
        if 2 * count <= total:
            return
        most = f"{count:,} of {total:,}: {', '.join(sorted(usual))}"
        for (shard, fields), place in self._places.items():
            if fields != usual:
                samples = "1 sample has" if place.samples == 1 else f"{place.samples:,} samples have"
                unlike = ", ".join(_differences(usual, fields))
                message = f"{samples} not the fields of most ({most}): {unlike}, the first is {place.key!r}"
                yield Finding(
                    "note", "other-fields", message, shard, key=place.key, offset=place.offset, samples=place.samples
                )

    def _count(self, fields: frozenset[str], shard: str, place: _Place) -> None:
        if fields not in self._samples and len(self._samples) >= _MOST_SETS:
            self._others += place.samples
            return
        self._samples[fields] += place.samples
        before = self._places.get((shard, fields))
        if before is not None:
            place = _Place(before.samples + place.samples, before.key, before.offset)
        self._places[shard, fields] = place


def _differences(usual: frozenset[str], fields: frozenset[str]) -> Iterator[str]:
    for names, verb in ((usual - fields, "missing"), (fields - usual, "more")):
        if names:
            yield f"{', '.join(sorted(names))} {'is' if len(names) == 1 else 'are'} {verb}"
