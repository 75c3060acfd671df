"""Groups members into samples."""

import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

from torchdata_wds import storage
from torchdata_wds.checks import check_flags
from torchdata_wds.consumers import upstream
from torchdata_wds.errors import SampleError
from torchdata_wds.format.samples.grouping import WITHOUT_FIELDS, group_members
from torchdata_wds.format.samples.names import grouping_rules
from torchdata_wds.format.tar.members import FailedMember, Mark, ShardMember, Unit
from torchdata_wds.handlers import Asked, Handler, keep_going, reraise_exception, warn_once
from torchdata_wds.option_types import KeyRule, OnDuplicate, OnReappearing
from torchdata_wds.pipes.base import Pipe, in_order, register
from torchdata_wds.pipes.chain_text import short_name
from torchdata_wds.pipes.resume_facts import ShardBegun, Wanted, Watch
from torchdata_wds.pipes.samples.field_specs import ENOUGH_SAMPLES
from torchdata_wds.pipes.samples.map import HandlingPipe
from torchdata_wds.pipes.shards.load_shards import ShardLoaderIterDataPipe
from torchdata_wds.pipes.shards.shard_sources import in_sequence, interleave
from torchdata_wds.pipes.shards.split_shards import ShardSplitterIterDataPipe
from torchdata_wds.storage.compression import SHARD_SUFFIXES

_ARCHIVE = re.compile(rf"(?is)(.*(?:{'|'.join(map(re.escape, (*SHARD_SUFFIXES, '.zip')))}))[/\\](.*)")


class _Restart(NamedTuple):
    """Where a grouping directly after ``load_wds_shards`` resumes."""

    wanted: Wanted  # which samples to yield
    begun: ShardBegun | None  # an item of the loader's source before these samples; None for the first
    in_shard: bool  # whether the first sample is known to be in that item, or at its end
    is_over: bool  # whether no samples are left

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of a pipe starts at the beginning


@register("group_by_key")
class KeyGrouperIterDataPipe(HandlingPipe[dict[str, Any]]):
    """Groups members into samples by their key (functional name: ``group_by_key``).

    A sample is a run of consecutive members of one shard with the same key. Order is kept, with one sample in memory.
    Directly after ``load_wds_shards`` the two run as one loop, which yields the same samples faster.

    Args:
        source_datapipe: Yields `ShardMember`, or ``(path, bytes or stream)`` pairs such as those of ``load_from_tar``.
        keys: ``"first_dot"`` (the key ends at the base name's first dot), ``"last_dot"``, or a ``callable(name)``
            that returns (key, field), or None to skip the member.
        lowercase: Whether to convert fields to lower case.
        fields: Which fields to keep: a list, or one str of names separated by blanks; None keeps all. Samples with none
            of them are left out and counted; a field that no sample has causes a warning.
        on_duplicate: What to do with a field that occurs twice in a sample: ``"error"``, or use the ``"first"`` or
            ``"last"`` one.
        on_reappearing: What to do with a key that returns later in its shard: ``"error"``, or ``"warn"`` or ``"allow"``
            to yield another sample with that key.
        handler: Called for each SampleError: DuplicateFieldError, ReappearingKeyError, or a reserved field name.

    Yields:
        dict: ``__key__`` (str), ``__url__`` (str), and bytes by field.

    Raises:
        DuplicateFieldError, ReappearingKeyError: through the handler.
        SampleError: through the handler, for a member that would become a reserved field.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([("x.tar/a.txt", b"A"), ("x.tar/a.cls", b"1")]).group_by_key())
        [{'__key__': 'a', '__url__': 'x.tar', 'txt': b'A', 'cls': b'1'}]
    """

    makes_samples = True

    def __init__(
        self,
        source_datapipe: Pipe,
        *,
        keys: KeyRule = "first_dot",
        lowercase: bool = True,
        fields: Iterable[str] | str | None = None,
        on_duplicate: OnDuplicate = "error",
        on_reappearing: OnReappearing = "error",
        handler: Handler = reraise_exception,
    ) -> None:
        check_flags(lowercase=lowercase)
        fields = fields if fields is None or isinstance(fields, str) else in_order(fields)
        grouping_rules(keys, lowercase, fields, on_duplicate, on_reappearing)
        super().__init__(source_datapipe, handler)
        self.keys, self.lowercase, self.fields = keys, lowercase, fields
        self.on_duplicate, self.on_reappearing = on_duplicate, on_reappearing
        self._watch: Watch | None = None
        self._restart: _Restart | None = None
        self._passed_over = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        source, watch = self.source_datapipe, self._watch
        if self._restart is not None:
            restart, self._restart = self._restart, None
            yield from self._go_on(restart)
            return
        if type(source) is ShardLoaderIterDataPipe:  # a subclass may read in another way
            samples = self._samples_of(source, watch)
        else:
            samples, watch = self._group(self._members(), self.asked()), None
            loader = next((found for found in upstream(self) if type(found) is ShardLoaderIterDataPipe), None)
            if loader is not None and loader.keys != self.keys:
                warn_once(
                    "keys",
                    "load_wds_shards and group_by_key, with stages between them, have different keys=: where a shard "
                    "is damaged, the last sample before the damage may lose members. Use the same keys= for both",
                )
        if self.fields is not None:
            samples = self._noting_fields(samples)
        if watch is not None:
            watch.samples = 0
            samples = self._counted(samples, watch)
        yield from samples

    def __len__(self) -> int:
        """Returns how many samples this consumer gets in the coming epoch, if an index states it."""
        loader = self.source_datapipe
        splitter = loader.source_datapipe if type(loader) is ShardLoaderIterDataPipe else None
        if type(splitter) is not ShardSplitterIterDataPipe:
            raise TypeError(
                "group_by_key has a length only directly after .split_shards(index).load_wds_shards(): nothing else "
                "tells how many samples there will be"
            )
        raises = loader.handler is reraise_exception and self.handler is reraise_exception
        if loader.select is not None or self.fields is not None or not raises:
            raise TypeError(
                "group_by_key has no length with select=, fields= or a handler that may skip: they can leave samples "
                "out that the index counts"
            )
        return splitter.count_samples()

    @property
    def _shards_read(self) -> int | None:
        """How many shards have been read, if this pipe reads them."""
        return self.source_datapipe._shards_read if type(self.source_datapipe) is ShardLoaderIterDataPipe else None

    def obstacle(self) -> str | None:
        """Returns why the loader cannot skip samples for this pipe; None if it can."""
        source = self.source_datapipe
        is_loader = type(source) is ShardLoaderIterDataPipe
        return None if is_loader else f"{short_name(source)} stands between load_wds_shards and group_by_key"

    def restart(self, wanted: Wanted, begun: ShardBegun | None, in_shard: bool, *, is_over: bool) -> None:
        """Makes the next iteration read only the wanted samples and their shards; see `_Restart`."""
        self._restart = _Restart(wanted, begun, in_shard, is_over)

    def _samples_of(
        self,
        loader: ShardLoaderIterDataPipe,
        watch: Watch | None = None,
        begun: ShardBegun | None = None,
        skips: Mapping[int, int] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Groups the members that the loader reads, shard by shard or from several shards in turn."""
        if watch is not None:
            watch.counts = loader.handler is reraise_exception and self.handler is reraise_exception
        loading, grouping = loader.asked(), self.asked()
        with closing(loader.shards(loading, watch, begun, skips, keys=self.keys)) as shards:
            if loader.interleave == 1:
                yield from self._group(in_sequence(shards), grouping)
                return
            places = [] if begun is None else list(begun.places)
            if watch is not None:
                watch.places = places
            samples = (self._group(units, grouping) for units in shards)
            yield from interleave(samples, loader.interleave, lambda: loading.is_over or grouping.is_over, places)

    def _group(self, members: Generator[Unit, None, None], ask: Asked) -> Generator[dict[str, Any], None, None]:
        names = ("keys", "lowercase", "fields", "on_duplicate", "on_reappearing")
        rules = {name: getattr(self, name) for name in names}
        with closing(members):
            yield from group_members(members, on_error=ask, skipped=self.skipped, shown=storage.mask_url, **rules)

    def _noting_fields(self, samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Passes samples through; warns at the end, or after 10,000 samples, about fields to keep that none has."""
        absent = set(grouping_rules(self.keys, self.lowercase, self.fields).fields or ())
        left_out, count = self.skipped[WITHOUT_FIELDS], 0
        for count, sample in enumerate(samples, 1):
            if absent:
                absent -= sample.keys()
                if count == ENOUGH_SAMPLES:
                    _warn_of_fields(absent, count, self.skipped[WITHOUT_FIELDS] - left_out)
            yield sample
        _warn_of_fields(absent, count, self.skipped[WITHOUT_FIELDS] - left_out)

    def _counted(self, samples: Iterator[dict[str, Any]], watch: Watch) -> Iterator[dict[str, Any]]:
        for sample in samples:
            watch.samples += 1
            yield sample
        watch.end_samples()

    def _go_on(self, restart: _Restart) -> Iterator[dict[str, Any]]:
        wanted, begun, in_shard, is_over = restart
        loader: Any = self.source_datapipe
        watch = self._watch or Watch()
        if is_over:
            return
        # If every sample of a shard is yielded here, the loader can skip samples by number: when the shard began after
        # 1,000 samples and 1,070 is wanted, its first 70. With fields=, select= or a handler, how many samples the
        # loader must skip is unknown: the shard is read whole, and 70 samples are dropped below. Interleaved shards
        # resume by number too; if they cannot, the pass is read from its beginning.
        is_counted = self.fields is None and self.handler is reraise_exception and loader.select is None
        if loader.interleave > 1 and not is_counted:
            begun = None
        watch.samples, skips = (0, {}) if begun is None else (begun.samples, dict(begun.places))
        if is_counted and in_shard and loader.interleave == 1:
            skips[0 if begun is None else begun.ordinal] = wanted.least - watch.samples
            watch.samples = wanted.least
        early = set(wanted.early)
        for sample in self._counted(self._samples_of(loader, watch, begun, skips), watch):
            number = watch.samples - 1
            if number >= wanted.first or number in early:
                yield sample
            else:
                self._passed_over += 1

    def _members(self) -> Generator[Unit, None, None]:
        """Converts the items of any source to members; other items go to the handler."""
        for item in self.source_datapipe:
            try:
                yield _as_member(item)
            except SampleError as error:
                if not keep_going(self.handler, error, self.skipped):
                    yield Mark.BROKEN
                    return


def _warn_of_fields(absent: set[str], count: int, left_out: int) -> None:
    if absent and count + left_out:
        names = ", ".join(map(repr, sorted(absent)))
        warn_once(
            f"fields {names}",
            f"group_by_key(fields=) names {names}, which none of {count + left_out:,} samples has; {left_out:,} "
            "of them have none of the fields and are left out. `wds ls SHARD` shows the fields of a shard",
        )


def _as_member(item: Any) -> ShardMember | FailedMember:
    if isinstance(item, ShardMember):
        return item
    if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
        raise SampleError(
            f"group_by_key got {type(item).__name__} {str(item)[:80]!r}; it takes the ShardMember of "
            ".load_wds_shards(), or pairs (path, bytes or stream)"
        )
    path, value = item
    found = _ARCHIVE.fullmatch(path)
    url, name = found.groups() if found else ("", path)
    try:
        if isinstance(value, (bytes, bytearray, memoryview)):
            return ShardMember(url, name, bytes(value))
        if not hasattr(value, "read"):
            raise SampleError(f"group_by_key takes pairs (path, bytes or stream), not (path, {type(value).__name__})")
        with closing(value):  # the stream of a native loader
            data = value.read()
        if not isinstance(data, bytes):
            raise SampleError(f"a stream passed to group_by_key returns {type(data).__name__}: open it with mode='rb'")
        return ShardMember(url, name, data)
    except Exception as error:  # noqa: BLE001  (the handler is called for its sample)
        return FailedMember(url, name, error)
