"""Reads one shard to find everything that is wrong with it, and where.

This uses the parts of loading (`TarEntries`, `HardLinks`, `check_new`, `make_sample`), one entry at a time so that the
place of each is known. As in loading, damage to the archive ends the shard; a faulty sample does not.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from itertools import groupby
from typing import Any, NamedTuple

from torchdata_wds.cli.terminal import counted
from torchdata_wds.cli.validate.findings import Finding, IndexCheck, Level, ShardReport, ValidationRules
from torchdata_wds.cli.validate.oddities import Oddity, odd_headers, odd_kind, odd_name, odd_pieces
from torchdata_wds.cli.validate.plain_runs import RunOfSamples, Windows
from torchdata_wds.errors import (
    DuplicateFieldError,
    ReappearingKeyError,
    SampleError,
    ShardFormatError,
    ShardOpenError,
    UnsafeDataError,
    WdsError,
    cli_message,
)
from torchdata_wds.format.headers import HARD_LINK, is_file, padding
from torchdata_wds.format.samples.grouping import Draft, check_new, make_sample
from torchdata_wds.format.samples.names import RESERVED_FIELDS, grouping_rules, is_metadata
from torchdata_wds.format.tar import walk
from torchdata_wds.format.tar.entries import TarEntries, TarEntry
from torchdata_wds.format.tar.links import HardLinks
from torchdata_wds.format.tar.members import MemberRun, ShardMember
from torchdata_wds.storage import can_reopen, mask_url, open_shard
from torchdata_wds.storage.urls import url_text

_DEFAULT = ValidationRules()


class CheckedSample(NamedTuple):
    """A run of members with one key, after its findings, without faulty members."""

    number: int  # in its shard, from 0
    sample: dict[str, Any]
    offset: int
    is_sound: bool  # nothing is wrong with this run alone
    reappears: bool  # its key came before


class _Part(NamedTuple):
    """One member of a sample."""

    key: str
    field: str
    name: str
    data: bytes | Exception
    offset: int
    stop: int


class ShardValidation:
    """Reads a whole shard; iterating (once) yields findings, and each sample after the findings about it.

    With `gives_samples` false, it yields only samples that had a closer look. Errors are what loaders with the same
    options refuse or lose, or an index next to the shard that does not fit; warnings are what they skip. Memory holds
    one sample, or a window of small ones. `report` has everything except the findings.
    """

    def __init__(self, url: str, rules: ValidationRules = _DEFAULT, *, gives_samples: bool = True) -> None:
        self.url = url_text(url)
        self.shard = mask_url(self.url)
        self.report = ShardReport(self.shard)
        self._options = rules
        self._rules = grouping_rules(rules.keys, rules.lowercase, None, rules.on_duplicate, rules.on_reappearing)
        # if a key must not come back, all of its runs of members are one sample, lost as a whole or joined
        self._is_joined = rules.on_reappearing == "error"
        self._index = IndexCheck(self.url, rules.keys)
        self._seen: set[int] = set()
        self._run: list[_Part] = []  # the members so far of the current sample
        self._passed_over = 0  # members that belong to no sample
        self._reading: str | None = None  # the key of the member whose content is being read
        self._has_globals = False
        self._gives_samples = gives_samples

    def __iter__(self) -> Iterator[Finding | CheckedSample]:
        archive: TarEntries | None = None
        is_broken = False
        options = self._options
        try:
            with open_shard(self.url) as stream:
                source = Windows(stream, self.url, 0, options.max_member_bytes)
                archive = TarEntries(
                    stream if options.check_fields else source,
                    self.shard,
                    max_member_bytes=options.max_member_bytes,
                    require_end_marker=options.require_end_marker,
                    concatenated=options.concatenated,
                )
                yield from self._read(archive, source)
                self._index.finish(self.report.plan.count, archive.offset)
                if self._passed_over and not self.report.plan.count:
                    what = f"the shard has no samples: loaders pass over all of its members ({self._passed_over:,})"
                    yield Finding("error", "no-samples", what, self.shard)
        except (ShardOpenError, ShardFormatError, UnsafeDataError) as error:
            is_broken = True
            yield self._end_at(error, archive)
        # an index that fits the whole shard is not at fault when the shard is broken
        if self._index.fault is not None and not (is_broken and self._index.is_readable):
            yield Finding("error", "index", self._index.fault, self.shard)

    def _read(self, archive: TarEntries, source: Windows) -> Iterator[Finding | CheckedSample]:
        """Reads all members, and checks each run of members with one key after its end."""
        reopen = (lambda offset: open_shard(self.url, offset=offset)) if can_reopen(self.url) else None
        with closing(HardLinks(self.url, self.shard, reopen, max_member_bytes=self._options.max_member_bytes)) as links:
            begin = 0  # of the entry
            for entry in archive if archive.stream is not source else walk(archive, source, links):
                if entry is None:
                    yield from self._close_run()
                elif isinstance(entry, TarEntry):
                    yield from self._read_entry(entry, archive, links)
                elif isinstance(entry, MemberRun):
                    yield from self._read_run(entry, begin, archive.offset, links)
                begin = archive.offset
        yield from self._close_run()

    def _read_entry(self, entry: TarEntry, archive: TarEntries, links: HardLinks) -> Iterator[Finding | CheckedSample]:
        """Reports what is odd about an entry, and reads it if it is a member."""
        if links.met:
            links.note(entry)
        for kind, message in odd_headers(entry, archive.raw):
            yield self._found(entry, "warning", kind, f"member {entry.name} {message}")
        if archive.has_globals and not self._has_globals:
            self._has_globals = True
            what = f"member {entry.name}, and all after it, have a name or a size from a global header"
            yield self._found(entry, "warning", "global-header", what)
        if is_file(entry.kind):
            yield from self._read_file(entry, archive, links)
            return
        if (odd := odd_kind(entry)) is not None:
            self._passed_over += 1
            yield self._found(entry, "warning", *odd)
        archive.skip(entry)

    def _read_run(self, run: MemberRun, begin: int, stop: int, links: HardLinks) -> Iterator[Finding | CheckedSample]:
        """Reads the members between two places of the archive: samples that are plainly sound at once."""
        base = stop - run.ends[-1] - padding(run.ends[-1])  # where its data begin
        current = self._run[0].key if self._run else None
        found = RunOfSamples.of(run, begin - base, self._rules, self._seen, current)
        if found is None:
            yield from self._read_entries(run.data[begin - base : stop - base], begin, links)
            return
        begins, firsts = found.begins, found.firsts
        for is_plain, numbers in groupby(range(len(found.is_plain)), key=found.is_plain.__getitem__):
            samples = list(numbers)
            rows = slice(firsts[samples[0]], firsts[samples[-1] + 1])
            if is_plain:
                yield from self._close_run()
                yield from self._take_plain(found, samples, base)
                if links.recent is not None:
                    links.recent.note(found.run.rows(rows.start, rows.stop))
            else:
                places = slice(begins[rows.start], begins[rows.stop])
                yield from self._read_entries(run.data[places], base + places.start, links)

    def _read_entries(self, data: bytes, offset: int, links: HardLinks) -> Iterator[Finding | CheckedSample]:
        """Reads entries from a part of the archive."""
        largest = self._options.max_member_bytes
        part = TarEntries(
            io.BytesIO(data), self.shard, offset=offset, require_end_marker=False, max_member_bytes=largest
        )
        for entry in filter(None, part):
            yield from self._read_entry(entry, part, links)

    def _take_plain(self, found: RunOfSamples, numbers: list[int], base: int) -> Iterator[CheckedSample]:
        """Counts samples that are plainly sound; their places are from `base` on."""
        run, begins, firsts = found.run, found.begins, found.firsts
        report, plan = self.report, self.report.plan
        sets: dict[tuple[str, ...], list[int]] = {}
        for number in numbers:
            first, last = firsts[number], firsts[number + 1]
            key, start = run.keys[first], base + begins[first]
            sets.setdefault(tuple(run.fields[first:last]), []).append(first)
            self._index.compare(plan.count, key, start, base + begins[last])
            if self._rules.on_reappearing != "allow":
                self._seen.add(hash(key))
            if self._gives_samples:
                draft = Draft(key, self.url, 0, list(run.rows(first, last).parts()))
                yield CheckedSample(plan.count, make_sample(draft, self._rules, mask_url), start, True, False)
            plan.count += 1
            report.sound += 1
        for fields, rows in sets.items():
            first = rows[0]
            report.field_sets.add(fields, self.shard, run.keys[first], base + begins[first], len(rows))

    def _read_file(self, entry: TarEntry, archive: TarEntries, links: HardLinks) -> Iterator[Finding | CheckedSample]:
        """Reads a member, reports what is odd about it, and adds it to its sample."""
        parts = None
        try:
            parts = self._rules.split(entry.name)
        except Exception as error:  # noqa: BLE001 - the rule is the user's
            what = f"the rule for keys fails for member {entry.name}: {type(error).__name__}: {error}"
            yield self._found(entry, "error", "key-rule", what)
        else:
            self._passed_over += parts is None
            for kind, message in odd_name(entry.name, parts is not None, archive.raw):
                yield self._found(entry, "warning", kind, message)
        if parts is not None:
            # A new key ends the run before it, now rather than after reading this member: if the archive is damaged in
            # its content, the run is complete, and only the sample of `_reading` is cut off (see `_end_at`).
            if self._run and self._run[0].key != parts[0]:
                yield from self._close_run()
            self._reading = parts[0]
        odd: list[Oddity] = []
        data: bytes | ShardFormatError
        if entry.kind != HARD_LINK:
            data = archive.take(entry, look=lambda segments, size: odd.extend(odd_pieces(segments, size)))
        else:
            try:
                data = links.resolve(entry)
            except ShardFormatError as error:
                data = error
        self._reading = None
        for kind, message in odd:
            yield self._found(entry, "warning", kind, f"member {entry.name} {message}")
        if isinstance(data, Exception):
            yield self._found(entry, "error", "hard-link", f"{cli_message(data)} Loaders end the shard here.")
        elif links.recent is not None:
            links.recent.note(ShardMember(self.url, entry.name, data))
        if parts is not None:
            self._run.append(_Part(*parts, entry.name, data, entry.offset, archive.offset))

    def _close_run(self) -> Iterator[Finding | CheckedSample]:
        """Checks a run of members with one key, as one sample."""
        run, self._run = self._run, []
        if not run:
            return
        key, start = run[0].key, run[0].offset
        report, plan = self.report, self.report.plan
        number, plan.count = plan.count, plan.count + 1
        self._index.compare(number, key, start, run[-1].stop)
        again: Finding | None = None
        rule = self._rules.on_reappearing
        # check_new would only log with "warn": it raises here too, and the finding is a warning
        try:
            check_new(self._draft(run[:1], key), self._seen, "allow" if rule == "allow" else "error", mask_url)
        except ReappearingKeyError as error:
            again = self._found(run[0], "warning" if rule == "warn" else "error", "reappearing-key", cli_message(error))
            yield again
        sample, findings = self._make_sample(run)
        findings += self._decode(sample, run)
        yield from findings
        is_whole = len(sample) > 2 and not any(isinstance(part.data, Exception) for part in run)
        is_sound = is_whole and not any(finding.level == "error" for finding in findings)
        if is_sound and (again is None or again.level != "error"):
            report.sound += 1
            report.field_sets.add(sample, self.shard, key, start)
        else:
            report.bad += 1
        # For runs of a, b and a, the second run of a makes plan.runs["a"] 2, as the first could not know of it. One bad
        # run loses the whole key if runs are joined; a good one that came back with an error is bad only in `report`.
        if not is_sound:
            plan.bad.add(number)
        if self._is_joined and not is_sound:
            plan.lost.add(key)
        if self._is_joined and again is not None:
            plan.runs[key] = plan.runs.get(key, 1) + 1
        yield CheckedSample(number, sample, start, is_sound, again is not None)

    def _make_sample(self, run: list[_Part]) -> tuple[dict[str, Any], list[Finding]]:
        """Makes a sample of the members that fit together, with findings about the others."""
        findings = []
        for part in run:
            if part.data == b"":
                message = f"member {part.name} is empty: it has 0 bytes"
                findings.append(self._found(part, "warning", "empty-field", message))
            if "__" in part.field and is_metadata(part.field) and self._field(part) not in RESERVED_FIELDS:
                message = f"member {part.name} has a field of the form __x__, which is metadata and never written again"
                findings.append(self._found(part, "warning", "metadata-field", message))
        parts = [part for part in run if not isinstance(part.data, Exception)]
        with suppress(SampleError):
            return self._sample(parts, run[0].key), findings
        # Each member is tried only with the first one of its field: that takes time in proportion to the number of
        # members, while trying it with all earlier ones would take the square of that.
        good: list[_Part] = []
        firsts: dict[str, _Part] = {}
        for part in parts:
            field = self._field(part)
            try:
                self._sample([firsts[field], part] if field in firsts else [part], part.key)
            except SampleError as error:
                kind = "duplicate-field" if isinstance(error, DuplicateFieldError) else "reserved-field"
                findings.append(self._found(part, "error", kind, cli_message(error)))
            else:
                good.append(part)
                firsts.setdefault(field, part)
        return self._sample(good, run[0].key), findings

    def _decode(self, sample: Mapping[str, Any], run: list[_Part]) -> Iterator[Finding]:
        """Reports fields that do not decode, each at its member."""
        if self._options.check_fields is None:
            return
        parts: dict[str | None, _Part] = {self._field(part): part for part in reversed(run)}
        for error in self._options.check_fields(sample):
            part = parts.get(getattr(error, "field", None), run[0])
            if isinstance(error, (UnsafeDataError, ImportError)):
                yield self._found(part, "note", "not-decoded", cli_message(error))
            else:
                yield self._found(part, "error", "undecodable", cli_message(error))

    def _end_at(self, error: WdsError, archive: TarEntries | None) -> Finding:
        """Reports damage that ends the shard, and counts the sample that it cuts off."""
        plan, complete = self.report.plan, self.report.plan.count
        if (cut := self._run[0].key if self._run else self._reading) is not None:
            self.report.bad += 1
            plan.count += 1
            if self._is_joined:
                plan.lost.add(cut)
        kind = "refused" if isinstance(error, UnsafeDataError) else getattr(error, "kind", "unreadable")
        message = cli_message(error)
        offset = error.offset if isinstance(error, ShardFormatError) else None
        if archive is not None:
            offset = archive.offset if offset is None else offset
            also = "" if cut is None else f", and sample {cut!r} is cut off"
            message += f" {counted(complete, 'sample is', 'samples are')} complete before it{also}."
        return Finding("error", kind, message, self.shard, member=error.member, offset=offset)

    def _field(self, part: _Part) -> str:
        return part.field.lower() if self._rules.lowercase else part.field

    def _draft(self, parts: list[_Part], key: str) -> Draft:
        return Draft(key, self.url, 0, [(part.field, part.name, part.data) for part in parts])

    def _sample(self, parts: list[_Part], key: str) -> dict[str, Any]:
        return make_sample(self._draft(parts, key), self._rules, mask_url)

    def _found(self, member: TarEntry | _Part, level: Level, kind: str, message: str) -> Finding:
        key, field = (member.key, member.field) if isinstance(member, _Part) else (None, None)
        return Finding(level, kind, message, self.shard, member.name, key, field, member.offset)


def report_shard(url: str, rules: ValidationRules, most: int) -> ShardReport:
    """Validates a shard, and keeps the first `most` findings of each kind."""
    validation = ShardValidation(url, rules, gives_samples=False)
    for item in validation:
        if isinstance(item, Finding):
            validation.report.add(item, most)
    return validation.report
