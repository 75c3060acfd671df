"""What validation finds in shards, counted in bounded memory and fit to be sent between processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Level = Literal["error", "warning", "note"]

#: The number of different sets of fields to tell apart: data with ever new ones must not fill the memory.
_MOST_SETS = 1000


class Finding(NamedTuple):
    """One thing that is wrong with a shard, or odd.

    Attributes:
        level: ``"error"`` for what loaders refuse or lose, ``"warning"`` for what they pass over, ``"note"`` else.
        kind: What it is, in a word.
        message: What was found, and what to do about it.
        shard: The shard's URL, credentials masked.
        member, key, field: The archive member, and the sample's key and field.
        offset: Where, in bytes of the decompressed archive: a member's place is that of its header.
        samples: The number of samples it is about, where one finding covers several.
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
    """The samples of one shard with the same fields: their number, and the first of them."""

    samples: int
    key: str
    offset: int


class FieldSets:
    """The sets of fields that samples have, to find those that are unlike the majority.

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
        """Adds a sample by its fields (names like ``__key__`` do not count), shard, key and offset."""
        found = frozenset([field for field in fields if not field.startswith("__")])
        self._count(found, shard, _Place(1, key, offset))

    def update(self, other: FieldSets) -> None:
        """Adds the samples of later shards."""
        self._others += other._others
        for (shard, fields), place in other._places.items():
            self._count(fields, shard, place)

    def _count(self, fields: frozenset[str], shard: str, place: _Place) -> None:
        if fields not in self._samples and len(self._samples) >= _MOST_SETS:
            self._others += place.samples
            return
        self._samples[fields] += place.samples
        before = self._places.get((shard, fields))
        if before is not None:
            place = _Place(before.samples + place.samples, before.key, before.offset)
        self._places[shard, fields] = place

    def findings(self) -> Iterator[Finding]:
        """Yields a note for each shard and set of fields that is not the set of more than half of all samples."""
        total = self._samples.total() + self._others
        usual, count = self._samples.most_common(1)[0] if total else (frozenset(), 0)
        if 2 * count <= total:
            return
        most = f"{count:,} of {total:,}: {', '.join(sorted(usual))}"
        for (shard, fields), place in self._places.items():
            if fields != usual:
                samples = "1 sample has" if place.samples == 1 else f"{place.samples:,} samples have"
                unlike = ", ".join(
                    f"{', '.join(sorted(names))} {'is' if len(names) == 1 else 'are'} {verb}"
                    for names, verb in ((usual - fields, "missing"), (fields - usual, "more"))
                    if names
                )
                message = f"{samples} not the fields of most ({most}): {unlike}, the first is {place.key!r}"
                yield Finding(
                    "note", "other-fields", message, shard, None, place.key, None, place.offset, place.samples
                )


@dataclass
class RepairPlan:
    """What must be known before the good samples of a shard can be written.

    `bad` numbers the runs of members that are left out, and `lost` has their keys and that of a sample that was cut
    off; `runs` counts the runs of each key that comes back, and `count` all runs, including one that was cut off.
    """

    bad: set[int] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    runs: dict[str, int] = field(default_factory=dict)
    count: int = 0


@dataclass
class ShardReport:
    """The first findings of each kind in one shard, `counts` of all by level and kind, and its samples in numbers."""

    shard: str
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[tuple[Level, str]] = field(default_factory=Counter)
    sound: int = 0
    bad: int = 0
    field_sets: FieldSets = field(default_factory=FieldSets)
    plan: RepairPlan = field(default_factory=RepairPlan)

    @property
    def is_good(self) -> bool:
        """Whether there is no error."""
        return not any(level == "error" for level, _ in self.counts)

    def add(self, finding: Finding, most: int) -> None:
        """Counts a finding, and keeps it unless there are `most` of its kind."""
        kind = finding.level, finding.kind
        if self.counts[kind] < most:
            self.findings.append(finding)
        self.counts[kind] += finding.samples

    def left_out(self) -> Counter[tuple[Level, str]]:
        """The counts of findings that are not kept."""
        kept: Counter[tuple[Level, str]] = Counter()
        for finding in self.findings:
            kept[finding.level, finding.kind] += finding.samples
        return self.counts - kept


@dataclass
class Totals:
    """The findings of all shards, counted: `good` and `damaged` are shards, `sound` and `bad` samples."""

    counts: Counter[tuple[Level, str]] = field(default_factory=Counter)
    good: int = 0
    damaged: int = 0
    sound: int = 0
    bad: int = 0
    _field_sets: FieldSets = field(default_factory=FieldSets)

    def take(self, report: ShardReport) -> None:
        """Adds a shard's findings."""
        self.counts += report.counts
        self.good += report.is_good
        self.damaged += not report.is_good
        self.sound += report.sound
        self.bad += report.bad
        self._field_sets.update(report.field_sets)

    def unlike_others(self, most: int) -> Iterator[Finding]:
        """Counts the samples whose fields are not those of the majority, and yields at most `most` notes a shard."""
        given: Counter[str] = Counter()
        for finding in self._field_sets.findings():
            self.counts[finding.level, finding.kind] += finding.samples
            given[finding.shard] += 1
            if given[finding.shard] <= most:
                yield finding

    def count_of(self, level: Level) -> int:
        """The number of findings of a level."""
        return sum(count for (found, _), count in self.counts.items() if found == level)
