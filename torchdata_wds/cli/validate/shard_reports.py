"""What validation finds in shards, in bounded memory and fit to be sent between processes; and what repair needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchdata_wds.cli.validate.findings import FieldSets, Finding, Level
from torchdata_wds.cli.validate.shard_validation import ShardValidation, ValidationRules

__all__ = ["RepairPlan", "ShardReport", "Totals", "report_shard"]


@dataclass
class RepairPlan:
    """What must be known before the good samples of a shard can be written.

    Attributes:
        bad: Numbers of the runs of members that are left out.
        lost: The keys of those, and of a sample that was cut off.
        runs: For each key that comes back, how many runs of members have it.
        count: How many runs of members there are, one that was cut off among them.
    """

    bad: set[int] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    runs: dict[str, int] = field(default_factory=dict)
    count: int = 0


@dataclass
class ShardReport:
    """The findings of one shard.

    Attributes:
        url: The shard.
        shard: Its URL as messages may show it.
        findings: The first of each kind.
        counts: How many there are of each level and kind.
        sound: How many samples are whole and sound.
        bad: How many are not, or were cut off.
        field_sets: Which fields the sound samples have.
        plan: How to write them again.
    """

    url: str
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
        """Counts a finding, and keeps it unless there are enough of its kind.

        Args:
            finding: The finding.
            most: How many of a level and kind are kept.
        """
        kind = finding.level, finding.kind
        if self.counts[kind] < most:
            self.findings.append(finding)
        self.counts[kind] += finding.samples

    def left_out(self) -> Counter[tuple[Level, str]]:
        """How many findings of each level and kind are not kept."""
        kept: Counter[tuple[Level, str]] = Counter()
        for finding in self.findings:
            kept[finding.level, finding.kind] += finding.samples
        return self.counts - kept


@dataclass
class Totals:
    """The findings of all shards, counted.

    Attributes:
        counts: How many there are of each level and kind.
        good: How many shards have no error.
        damaged: How many have one.
        sound: How many samples are whole and sound.
        bad: How many are not, or were cut off.
    """

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
        """Counts the samples whose fields are not those of most, and gives at most so many notes for each shard."""
        given: Counter[str] = Counter()
        for finding in self._field_sets.findings():
            self.counts[finding.level, finding.kind] += finding.samples
            given[finding.shard] += 1
            if given[finding.shard] <= most:
                yield finding

    def count_of(self, level: Level) -> int:
        """How many findings there are of a level."""
        return sum(count for (found, _), count in self.counts.items() if found == level)


def report_shard(url: str, rules: ValidationRules, most: int) -> ShardReport:
    """Validates a shard.

    Args:
        url: The shard.
        rules: What counts as wrong.
        most: How many findings of a kind to keep.

    Raises:
        ValueError: if a rule is none of those that are valid.
        ImportError: if the shard's compression needs a package that is not installed.

    Example:
        >>> report = report_shard("no-such.tar", ValidationRules(), 20)
        >>> report.is_good, dict(report.counts)
        (False, {('error', 'unreadable'): 1})
    """
    validation = ShardValidation(url, rules)
    report = ShardReport(url, validation.shard)
    plan = report.plan
    for item in validation:
        if isinstance(item, Finding):
            report.add(item, most)
            continue
        key = item.sample["__key__"]
        if not item.is_sound:
            plan.bad.add(item.number)
        if rules.on_reappearing != "error":
            continue
        if not item.is_sound:
            plan.lost.add(key)
        if item.reappears:
            plan.runs[key] = plan.runs.get(key, 1) + 1
    if validation.cut is not None and rules.on_reappearing == "error":
        plan.lost.add(validation.cut)
    report.sound, report.bad = validation.sound, validation.bad
    plan.count = report.sound + report.bad
    report.field_sets = validation.field_sets
    return report
