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
    """One thing that is wrong with a shard, or odd; an offset is in bytes of the decompressed archive."""

    level: Level  # "error" for what loaders refuse or lose, "warning" for what they pass over, "note" else
    kind: str  # what it is, in a word
    message: str  # what was found, and what to do about it
    shard: str  # the URL, credentials masked
    member: str | None = None
    key: str | None = None
    field: str | None = None
    offset: int | None = None  # a member's place is that of its header
    samples: int = 1  # more where one finding is about several


class FieldSets:
    """The sets of fields that samples have, to find those that are unlike the majority."""

    def __init__(self) -> None:
        self._samples: Counter[frozenset[str]] = Counter()
        # for each shard and set: the number of samples, and key and offset of the first
        self._places: dict[tuple[str, frozenset[str]], tuple[int, str, int]] = {}
        self._others = 0

    def add(self, fields: Iterable[str], shard: str, key: str, offset: int, samples: int = 1) -> None:
        """Adds samples by their fields (names like ``__key__`` do not count), shard, first key and offset."""
        found = frozenset([field for field in fields if not field.startswith("__")])
        if found not in self._samples and len(self._samples) >= _MOST_SETS:
            self._others += samples
            return
        self._samples[found] += samples
        before, *first = self._places.get((shard, found), (0, key, offset))
        self._places[shard, found] = (before + samples, *first)  # type: ignore[assignment]

    def update(self, other: FieldSets) -> None:
        """Adds the samples of later shards."""
        self._others += other._others
        for (shard, fields), (samples, key, offset) in other._places.items():
            self.add(fields, shard, key, offset, samples)

    def findings(self) -> Iterator[Finding]:
        """Yields a note for each shard and set of fields that is not the set of more than half of all samples."""
        total = self._samples.total() + self._others
        usual, count = self._samples.most_common(1)[0] if total else (frozenset(), 0)
        if 2 * count <= total:
            return
        most = f"{count:,} of {total:,}: {', '.join(sorted(usual))}"
        for (shard, fields), (samples, key, offset) in self._places.items():
            if fields == usual:
                continue
            unlike = ", ".join(
                f"{', '.join(sorted(names))} {'is' if len(names) == 1 else 'are'} {verb}"
                for names, verb in ((usual - fields, "missing"), (fields - usual, "more"))
                if names
            )
            have = "1 sample has" if samples == 1 else f"{samples:,} samples have"
            message = f"{have} not the fields of most ({most}): {unlike}, the first is {key!r}"
            yield Finding("note", "other-fields", message, shard, key=key, offset=offset, samples=samples)


@dataclass
class RepairPlan:
    """What must be known before the good samples of a shard can be written, by its runs of members with one key."""

    count: int = 0  # of all runs, one that was cut off too
    bad: set[int] = field(default_factory=set)  # numbers of the runs that are left out
    lost: set[str] = field(default_factory=set)  # their keys, and that of a sample that was cut off
    runs: dict[str, int] = field(default_factory=dict)  # of each key that comes back


@dataclass
class ShardReport:
    """The first findings of each kind in one shard, all of them counted, and its samples in numbers."""

    shard: str
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[tuple[Level, str]] = field(default_factory=Counter)  # by level and kind
    left_out: Counter[tuple[Level, str]] = field(default_factory=Counter)  # those that are not in `findings`
    sound: int = 0
    bad: int = 0
    field_sets: FieldSets = field(default_factory=FieldSets)
    plan: RepairPlan = field(default_factory=RepairPlan)

    def add(self, finding: Finding, most: int) -> None:
        """Counts a finding, and keeps it unless there are `most` of its kind."""
        kind = finding.level, finding.kind
        if self.counts[kind] < most:
            self.findings.append(finding)
        else:
            self.left_out[kind] += finding.samples
        self.counts[kind] += finding.samples
