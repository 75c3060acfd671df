"""One shard, read to find everything that is wrong with it, with the place of each thing.

The parts are those of loading (`TarEntries`, `HardLinks`, `check_new`, `make_sample`), read one entry at a time so that
the place of each is known. Damage of the archive ends a shard here as it does there; a wrong sample does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import chain, starmap
from typing import Any, NamedTuple

from torchdata_wds.cli.validate.findings import FieldSets, Finding, Level
from torchdata_wds.cli.validate.index_checks import IndexCheck
from torchdata_wds.cli.validate.odd_headers import odd_headers, odd_pieces
from torchdata_wds.cli.validate.odd_members import odd_kind, odd_name
from torchdata_wds.errors import (
    DuplicateFieldError,
    ReappearingKeyError,
    SampleError,
    ShardFormatError,
    ShardOpenError,
    UnsafeDataError,
    WdsError,
)
from torchdata_wds.format.samples.building import Draft, check_new, make_sample
from torchdata_wds.format.samples.names import RESERVED_FIELDS, grouping_rules, is_metadata
from torchdata_wds.format.tar.entries import DEFAULT_MAX_MEMBER_BYTES, TarEntries, TarEntry
from torchdata_wds.format.tar.headers import HARD_LINK, is_file
from torchdata_wds.format.tar.members import ShardMember
from torchdata_wds.format.tar.sparse_maps import Segments
from torchdata_wds.format.tar.special import HardLinks, read_payload
from torchdata_wds.option_types import KeyRule, OnDuplicate, OnReappearing
from torchdata_wds.storage import ByteStream, StorageOptions, can_reopen, mask_url, open_shard
from torchdata_wds.storage.urls import url_text

__all__ = ["CheckFields", "CheckedSample", "ShardValidation", "ValidationRules"]


#: Gives an exception for each field of a sample that does not decode; its ``field`` says which.
CheckFields = Callable[[Mapping[str, Any]], Iterable[Exception]]

#: What an error of the archive begins with, behind the shard's name, and the word for it.


class ValidationRules(NamedTuple):
    """How shards are validated; `validate_shard` describes the options."""

    keys: KeyRule = "first_dot"
    lowercase: bool = True
    on_duplicate: OnDuplicate = "error"
    on_reappearing: OnReappearing = "error"
    require_end_marker: bool = True
    concatenated: bool = False
    check_fields: CheckFields | None = None
    storage_options: Mapping[str, Mapping[str, Any]] | None = None
    max_member_bytes: int = DEFAULT_MAX_MEMBER_BYTES


_DEFAULT = ValidationRules()


class CheckedSample(NamedTuple):
    """A run of members with one key, after its findings.

    Attributes:
        number: Which run of the shard it is, from 0.
        sample: ``__key__``, ``__url__`` and bytes by field, without members that are at fault.
        offset: Where it begins.
        is_sound: Whether nothing is wrong with it by itself.
        reappears: Whether its key has come before.
    """

    number: int
    sample: dict[str, Any]
    offset: int
    is_sound: bool
    reappears: bool


class _Part(NamedTuple):
    """One member of a sample."""

    key: str
    field: str
    name: str
    data: bytes | Exception
    start: int
    stop: int


class _Archive(TarEntries):
    """Entries of an archive, whose headers are kept."""

    keeps_raw = True


class ShardValidation:
    """The validation of one shard: iterating, once, gives findings, and each sample behind those that are about it.

    Args:
        url: The shard.
        rules: What counts as wrong.

    Attributes:
        shard: The URL as messages may show it.
        sound: How many samples are whole and sound so far.
        bad: How many are not, or were cut off.
        cut: The key of the sample that was cut off.
        field_sets: Which fields the sound ones have.

    Raises:
        ValueError: if an option is none of those that are valid.
    """

    def __init__(self, url: str, rules: ValidationRules = _DEFAULT) -> None:
        self.url = url_text(url)
        self.shard = mask_url(self.url)
        self.sound = 0
        self.bad = 0
        self.cut: str | None = None
        self.field_sets = FieldSets()
        self._rules = grouping_rules(rules.keys, rules.lowercase, None, rules.on_duplicate, rules.on_reappearing)
        self._markers = {"require_end_marker": rules.require_end_marker, "concatenated": rules.concatenated}
        self._max_member_bytes = rules.max_member_bytes
        self._check_fields = rules.check_fields
        self._options = StorageOptions(rules.storage_options)
        self._index = IndexCheck(self.url, rules.keys, self._options)
        self._seen: set[int] = set()
        self._run: list[_Part] = []  # the members so far of the sample that is open
        self._has_globals = False
        self._passed_over = 0  # members that belong to no sample
        self._entered: str | None = None  # the member whose content is being read

    def __iter__(self) -> Iterator[Finding | CheckedSample]:
        archive: _Archive | None = None
        is_broken = False
        try:
            with open_shard(self.url, storage_options=self._options) as stream:
                largest = self._max_member_bytes
                archive = _Archive(stream, self.shard, max_member_bytes=largest, **self._markers)
                yield from self._read(archive)
                self._index.finish(archive.offset)
                if self._passed_over and not self.sound + self.bad:
                    what = f"the shard has no samples: loaders pass over all of its members ({self._passed_over:,})"
                    yield Finding("error", "no-samples", what, self.shard)
        except (ShardOpenError, ShardFormatError, UnsafeDataError) as error:
            is_broken = True
            yield from self._end_at(error, archive)
        # that a broken shard is not as its index says is no fault of the index
        if self._index.fault is not None and not (is_broken and self._index.is_readable):
            yield Finding("error", "index", self._index.fault, self.shard)

    def _read(self, archive: _Archive) -> Iterator[Finding | CheckedSample]:
        """Reads all members, tells what is odd about each, and checks a run of one key when its end has been seen."""
        reopens = can_reopen(self.url, storage_options=self._options)
        largest = self._max_member_bytes
        links = HardLinks(self.url, self.shard, self._open_at if reopens else None, max_member_bytes=largest)
        with closing(links):
            yield from self._read_entries(archive, links)

    def _read_entries(self, archive: _Archive, links: HardLinks) -> Iterator[Finding | CheckedSample]:
        for entry in archive:
            if entry is None:
                yield from self._close_run()
                continue
            if links.met:
                links.note(entry)
            yield from self._odd(entry, archive)
            if not is_file(entry.kind):
                if (odd := odd_kind(entry)) is not None:
                    self._passed_over += 1
                    yield self._about(entry, "warning", *odd)
                archive.skip(entry)
                continue
            try:
                parts = self._rules.split(entry.name)
            except Exception as error:  # noqa: BLE001 - the rule is the user's
                what = f"the rule for keys fails for member {entry.name}: {type(error).__name__}: {error}"
                yield self._about(entry, "error", "key-rule", what)
                parts = None
            else:
                self._passed_over += parts is None
                for kind, message in odd_name(entry.name, parts is not None, archive.raw):
                    yield self._about(entry, "warning", kind, message)
            self._entered = entry.name
            maps: list[tuple[Segments, int]] = []
            data = _content(entry, archive, links, maps)
            self._entered = None
            for kind, message in chain.from_iterable(starmap(odd_pieces, maps)):
                yield self._about(entry, "warning", kind, f"member {entry.name} {message}")
            if links.recent is not None and not isinstance(data, Exception):
                links.recent.note(ShardMember(self.url, entry.name, data))
            if isinstance(data, Exception):
                yield self._about(entry, "error", "hard-link", f"{data} Loaders end the shard here.")
            if parts is None:
                continue
            if self._run and self._run[0].key != parts[0]:
                yield from self._close_run()
            self._run.append(_Part(*parts, entry.name, data, entry.offset, archive.offset))
        yield from self._close_run()

    def _odd(self, entry: TarEntry, archive: _Archive) -> Iterator[Finding]:
        """Tells of headers that other programs read in another way."""
        for kind, message in odd_headers(entry, archive.raw):
            yield self._about(entry, "warning", kind, f"member {entry.name} {message}")
        if archive.has_globals and not self._has_globals:
            self._has_globals = True
            what = f"member {entry.name}, and all after it, have a name or a size from a global header"
            yield self._about(entry, "warning", "global-header", what)

    def _close_run(self) -> Iterator[Finding | CheckedSample]:
        run, self._run = self._run, []
        if not run:
            return
        number = self.sound + self.bad
        self._index.compare(run[0].key, run[0].start, run[-1].stop)
        again = self._reappearing(run)
        if again is not None:
            yield again
        sample, findings = self._make_sample(run)
        if self._check_fields is not None:
            findings += self._decode(self._check_fields(sample), run)
        yield from findings
        is_sound = len(sample) > 2 and not any(finding.level == "error" for finding in findings)
        is_sound = is_sound and not any(isinstance(part.data, Exception) for part in run)
        if is_sound and (again is None or again.level != "error"):
            self.sound += 1
            self.field_sets.add(sample, self.shard, run[0].key, run[0].start)
        else:
            self.bad += 1
        yield CheckedSample(number, sample, run[0].start, is_sound, again is not None)

    def _reappearing(self, run: list[_Part]) -> Finding | None:
        rule = self._rules.on_reappearing
        try:
            check_new(_draft(self.url, run[:1]), self._seen, "allow" if rule == "allow" else "error", mask_url)
        except ReappearingKeyError as error:
            level: Level = "warning" if rule == "warn" else "error"
            return self._of(run[0], level, "reappearing-key", str(error))
        return None

    def _make_sample(self, run: list[_Part]) -> tuple[dict[str, Any], list[Finding]]:
        """Makes a sample of the members that can be in it, and tells of each other one."""
        findings = [finding for part in run if not part.data or "__" in part.field for finding in self._odd_field(part)]
        good = [part for part in run if not isinstance(part.data, Exception)]
        try:
            return make_sample(_draft(self.url, good, run[0].key), self._rules, mask_url), findings
        except SampleError:
            good, wrong = self._divide(good)
        return make_sample(_draft(self.url, good, run[0].key), self._rules, mask_url), findings + wrong

    def _odd_field(self, part: _Part) -> Iterator[Finding]:
        if part.data == b"":
            yield self._of(part, "warning", "empty-field", f"member {part.name} is empty: it has 0 bytes")
        if is_metadata(part.field) and self._field(part) not in RESERVED_FIELDS:
            what = f"member {part.name} has a field of the form __x__, which is metadata and never written again"
            yield self._of(part, "warning", "metadata-field", what)

    def _divide(self, parts: list[_Part]) -> tuple[list[_Part], list[Finding]]:
        """Divides members into those that can be in one sample, and findings about the others."""
        good: list[_Part] = []
        findings = []
        there: dict[str, _Part] = {}
        for part in parts:
            field = self._field(part)
            before = [there[field]] if field in there else []
            try:
                make_sample(_draft(self.url, [*before, part]), self._rules, mask_url)
            except SampleError as error:
                kind = "duplicate-field" if isinstance(error, DuplicateFieldError) else "reserved-field"
                findings.append(self._of(part, "error", kind, str(error)))
            else:
                good.append(part)
                there.setdefault(field, part)
        return good, findings

    def _decode(self, errors: Iterable[Exception], run: list[_Part]) -> Iterator[Finding]:
        """Tells of fields that do not decode, each at the member that it is from."""
        parts: dict[str | None, _Part] = {}
        for error in errors:
            parts = parts or {self._field(part): part for part in reversed(run)}
            part = parts.get(getattr(error, "field", None), run[0])
            if isinstance(error, (UnsafeDataError, ImportError)):
                yield self._of(part, "note", "not-decoded", str(error))
            else:
                yield self._of(part, "error", "undecodable", str(error))

    def _field(self, part: _Part) -> str:
        return part.field.lower() if self._rules.lowercase else part.field

    def _end_at(self, error: WdsError, archive: _Archive | None) -> Iterator[Finding | CheckedSample]:
        """Tells of damage that ends the shard, after the sample before it if that is complete."""
        entered = self._next_key()
        if self._run and entered not in (None, self._run[0].key):
            yield from self._close_run()
        self.cut = self._run[0].key if self._run else entered
        number = self.sound + self.bad
        self._run = []
        self.bad += self.cut is not None
        counted = "1 sample is" if number == 1 else f"{number:,} samples are"
        kind, offset = _kind_of(error, archive)
        cut = "" if self.cut is None else f", and sample {self.cut!r} is cut off"
        message = f"{error} {counted} complete before it{cut}." if archive is not None else str(error)
        yield Finding("error", kind, message, self.shard, member=error.member, offset=offset)

    def _next_key(self) -> str | None:
        """The key of the member in which the archive failed, if it did in one: another key ends the sample before."""
        if self._entered is None:
            return None
        try:
            parts = self._rules.split(self._entered)
        except Exception:  # noqa: BLE001 - told before
            return None
        return None if parts is None else parts[0]

    def _open_at(self, offset: int) -> ByteStream:
        return open_shard(self.url, offset=offset, storage_options=self._options)

    def _about(self, entry: TarEntry, level: Level, kind: str, message: str) -> Finding:
        return Finding(level, kind, message, self.shard, member=entry.name, offset=entry.offset)

    def _of(self, part: _Part, level: Level, kind: str, message: str) -> Finding:
        return Finding(level, kind, message, self.shard, part.name, part.key, part.field, part.start)


def _content(
    entry: TarEntry, archive: TarEntries, links: HardLinks, maps: list[tuple[Segments, int]]
) -> bytes | ShardFormatError:
    """Reads a member, or gives the reason why what a hard link stands for is not there; keeps a sparse member's map."""
    if entry.kind != HARD_LINK:
        return read_payload(archive, entry, look=lambda segments, size: maps.append((segments, size)))
    try:
        return links.resolve(entry)
    except ShardFormatError as error:
        return error


def _draft(url: str, parts: list[_Part], key: str | None = None) -> Draft:
    return Draft(parts[0].key if key is None else key, url, 0, [(part.field, part.name, part.data) for part in parts])


def _kind_of(error: WdsError, archive: _Archive | None) -> tuple[str, int | None]:
    """A word for damage that ends a shard, and its place."""
    offset = None if archive is None else archive.offset
    if isinstance(error, ShardFormatError):
        return error.kind, offset if error.offset is None else error.offset
    if isinstance(error, UnsafeDataError):
        return "refused", offset
    return "unreadable", offset
