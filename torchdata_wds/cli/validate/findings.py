"""The rules of validation, its findings, counted in bounded memory, and its checks of indexes and fields."""

import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

from torchdata_wds.codecs.decoder import Decoder
from torchdata_wds.codecs.media import AUDIO_FIELDS, VIDEO_FIELDS, torch_audio, torch_video
from torchdata_wds.codecs.options import MissingPackageError
from torchdata_wds.errors import DecodingError, ShardFormatError, ShardOpenError, UnsafeDataError, cli_message
from torchdata_wds.format.index import ShardIndex
from torchdata_wds.format.samples.names import is_metadata
from torchdata_wds.format.tar.entries import DEFAULT_MAX_MEMBER_BYTES
from torchdata_wds.option_types import KeyRule, OnDuplicate, OnReappearing
from torchdata_wds.storage.urls import is_local, local_path

Level = Literal["error", "warning", "note"]

#: How many different sets of fields to count: data with ever new ones must not fill the memory.
_MOST_SETS = 1000
_CURE = "It is of another version of the shard, and loaders that divide the shard by it fail: make a new one"


class ValidationRules(NamedTuple):
    """How shards are validated: options as in ``load_wds_shards`` and ``group_by_key``."""

    keys: KeyRule = "first_dot"
    lowercase: bool = True
    on_duplicate: OnDuplicate = "error"
    on_reappearing: OnReappearing = "error"  # with "warn", a key that comes back is a warning
    require_end_marker: bool = True
    concatenated: bool = False
    # yields an exception, with its ``field``, for each field of a sample that does not decode
    check_fields: Callable[[Mapping[str, Any]], Iterable[Exception]] | None = None
    max_member_bytes: int = DEFAULT_MAX_MEMBER_BYTES


class Finding(NamedTuple):
    """One fault or oddity of a shard; its offset is in bytes of the decompressed archive."""

    level: Level  # "error" for what loaders refuse or lose, "warning" for what they skip, "note" otherwise
    kind: str  # what it is, in a word
    message: str  # what was found, and what to do about it
    shard: str  # the URL, credentials masked
    member: str | None = None
    key: str | None = None
    field: str | None = None
    offset: int | None = None  # for a member, that of its header
    samples: int = 1  # more if the finding is about several


class FieldSets:
    """Counts the sets of fields that samples have, to find those that differ from the majority."""

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

    def update(self, other: Self) -> None:
        """Adds the samples of later shards."""
        self._others += other._others
        for (shard, fields), (samples, key, offset) in other._places.items():
            self.add(fields, shard, key, offset, samples)

    def table(self) -> list[tuple[frozenset[str], int, str, str]]:
        """Returns each set of fields, its samples, and shard and key of the first one; the most frequent set first."""
        firsts: dict[frozenset[str], tuple[str, str]] = {}
        for (shard, fields), (_, key, _) in self._places.items():
            firsts.setdefault(fields, (shard, key))
        return [(fields, samples, *firsts[fields]) for fields, samples in self._samples.most_common()]

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
                for names, verb in ((usual - fields, "missing"), (fields - usual, "extra"))
                if names
            )
            have = "1 sample does" if samples == 1 else f"{samples:,} samples do"
            message = f"{have} not have the fields of most ({most}): {unlike}; the first is {key!r}"
            yield Finding("note", "other-fields", message, shard, key=key, offset=offset, samples=samples)


@dataclass
class RepairPlan:
    """What a repair must know about a shard's runs of members with one key before it writes the good samples."""

    count: int = 0  # of all runs, including one that was cut off
    bad: set[int] = field(default_factory=set)  # numbers of the runs that are left out
    lost: set[str] = field(default_factory=set)  # their keys, and that of a sample that was cut off
    runs: dict[str, int] = field(default_factory=dict)  # how many, for each key that comes back


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


class IndexCheck:
    """Compares the index next to a shard with the samples as they are read, unless its rule for keys differs."""

    def __init__(self, url: str, keys: KeyRule) -> None:
        self.fault: str | None = None  # the first thing wrong with it
        self.is_readable = True
        self._index: ShardIndex | None = None
        try:
            index = ShardIndex.beside(url)
        except ShardFormatError as error:
            self.fault, self.is_readable = cli_message(error), False
            return
        except (ShardOpenError, UnsafeDataError, ValueError):  # there is none, or no place for one
            return
        if index.header.keys != keys:
            return
        self._index = index
        expected = index.header.bytes
        if expected is not None and is_local(url):
            with suppress(OSError):  # opening the shard gives a better error
                found = os.stat(local_path(url)).st_size  # noqa: PTH116 - a str
                if found != expected:
                    self._blame(f"the shard has {found:,} bytes, and the index says {expected:,}")

    def compare(self, number: int, key: str, start: int, stop: int) -> None:
        """Compares a sample: its key, and the bytes from its first header to its last padding."""
        if self._index is None or self.fault is not None or number >= len(self._index):
            return
        try:
            row = self._index[number]
        except ShardFormatError as error:
            self.fault = cli_message(error)
            return
        if (row.key, row.start, row.stop) != (key, start, stop):
            what = f"sample {number:,} is {key!r} from byte {start:,} to {stop:,}"
            self._blame(f"{what}, and the index says {row.key!r} from byte {row.start:,} to {row.stop:,}")

    def finish(self, count: int, tar_bytes: int) -> None:
        """Compares the number of samples and the archive's size at the shard's end."""
        header = None if self._index is None else self._index.header
        if header is not None and header.samples != count:
            self._blame(f"the shard has {count:,} samples, and the index says {header.samples:,}")
        if header is not None and header.tar_bytes != tar_bytes:
            self._blame(f"the archive has {tar_bytes:,} bytes, and the index says {header.tar_bytes:,}")

    def _blame(self, what: str) -> None:
        if self.fault is None:
            self.fault = f"the index beside the shard is stale: {what}. {_CURE}"


class FieldChecker:
    """Tries to decode all fields except pickles, and keeps nothing; media only if PyAV is installed."""

    def __init__(self) -> None:
        has_media = importlib.util.find_spec("av") is not None
        self._decode = Decoder("pil", torch_video, torch_audio) if has_media else Decoder("pil")
        self._unchecked = frozenset() if has_media else frozenset(f"{VIDEO_FIELDS} {AUDIO_FIELDS}".split())

    def __call__(self, sample: Mapping[str, Any]) -> Iterator[Exception]:
        """Yields an error, with its ``field``, for each field that fails (DecodingError) or was not tried."""
        about = {name: sample[name] for name in ("__key__", "__url__") if name in sample}
        for name, data in sample.items():
            if is_metadata(name):
                continue
            try:
                if name.lower().rpartition(".")[2] in self._unchecked:
                    raise MissingPackageError("decoding media needs the av package: pip install 'torchdata_wds[media]'")
                self._decode({**about, name: data})
            except (DecodingError, UnsafeDataError) as error:
                yield error
            except MissingPackageError as error:
                skipped = MissingPackageError(f"field {name!r} was not decoded: {error}")
                skipped.field = name  # type: ignore[attr-defined]
                yield skipped
