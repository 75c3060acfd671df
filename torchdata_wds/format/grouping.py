"""Members to samples: a run of consecutive members with one key."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from torchdata_wds.errors import DuplicateFieldError, ReappearingKeyError, SampleError
from torchdata_wds.format.members import Mark, PassedMember, ShardMember, Unit
from torchdata_wds.format.names import RESERVED_FIELDS, KeyRule, SplitName, key_splitter, skip_reason
from torchdata_wds.handlers import warn_rarely

__all__ = ["GroupingRules", "OnDuplicate", "OnReappearing", "group_members", "grouping_rules", "release_whole_samples"]

OnDuplicate = Literal["error", "first", "last"]
OnReappearing = Literal["error", "warn", "allow"]


def _raise(error: Exception) -> bool:
    raise error


def _with_parts(
    items: Iterable[Unit], split: SplitName, on_error: Callable[[Exception], bool]
) -> Iterator[tuple[Unit, tuple[str, str] | None]]:
    """Pairs members with the key and field of their name; one whose name cannot be split goes to the handler."""
    for item in items:
        try:
            parts = None if isinstance(item, Mark) else split(item.name)
        except Exception as error:  # noqa: BLE001  (the handler decides)
            if not on_error(error):
                return
            continue
        yield item, parts


def release_whole_samples(
    items: Iterable[Unit], split: SplitName, on_error: Callable[[Exception], bool] = _raise
) -> Iterator[ShardMember]:
    """Passes members on a whole sample at a time, once the next key or the archive's end marker has been seen.

    Args:
        items: Members and marks of any number of shards; each shard ends in a mark.
        split: From name to (key, field), or None for a member that belongs to no sample.
        on_error: Asked where `split` raises: True leaves the member out, False ends the iterator.

    Yields:
        The members in their order, without those of samples that a broken shard has cut.
    """
    held: list[ShardMember] = []
    current: str | None = None
    closed = True  # whether the end of the held sample has been seen
    for item, parts in _with_parts(items, split, on_error):
        if isinstance(item, Mark):
            if closed or item is Mark.END:
                yield from held
            held, current, closed = [], None, True
            continue
        if parts is not None and parts[0] != current:
            closed = True
            if isinstance(item, ShardMember):
                yield from held
                held, current, closed = [], parts[0], False
        elif parts is not None and isinstance(item, ShardMember):
            closed = False  # the sample goes on behind a member that was left out
        if isinstance(item, ShardMember):
            held.append(item)
            if closed:
                yield from held
                held = []


class GroupingRules(NamedTuple):
    """How members become samples.

    Attributes:
        split: From name to (key, field), or None.
        lowercase: Whether fields are lower-cased.
        fields: The fields to keep, None for all.
        on_duplicate: What the same field twice in a sample does.
        on_reappearing: What a key that comes back later in its shard does.
    """

    split: SplitName
    lowercase: bool = True
    fields: frozenset[str] | None = None
    on_duplicate: OnDuplicate = "error"
    on_reappearing: OnReappearing = "error"


def group_members(
    members: Iterable[Unit],
    *,
    keys: KeyRule = "first_dot",
    lowercase: bool = True,
    fields: Iterable[str] | str | None = None,
    on_duplicate: OnDuplicate = "error",
    on_reappearing: OnReappearing = "error",
    on_error: Callable[[Exception], bool] = _raise,
    skipped: Counter[str] | None = None,
    shown: Callable[[str], str] = str,
) -> Iterator[dict[str, Any]]:
    """Groups consecutive members with one key into samples.

    The end of a shard, or of one reading of it, always ends a sample. At `Mark.BROKEN` the open sample is dropped.

    Args:
        members: Members of any number of shards, in order, with or without marks.
        keys: ``"first_dot"``, ``"last_dot"`` or a ``callable(name)`` that gives (key, field) or None.
        lowercase: Whether fields are lower-cased.
        fields: Which fields to keep: names, or one str of names separated by blanks or ``;``, with or without a
            leading dot; lower-cased as the members' are. None keeps all.
        on_duplicate: The same field twice in a sample: ``"error"``, or the ``"first"`` or ``"last"`` one counts.
        on_reappearing: A key that comes back later in its shard: ``"error"``, or ``"warn"`` and ``"allow"``, which
            give a second sample of that key. To find out, a 64-bit hash of each key of the current shard is kept
            in a set.
        on_error: Asked about each sample that is wrong: True skips it, False ends the iterator.
        skipped: Counts members that belong to no sample, by reason.
        shown: Turns a URL into what messages may show.

    Yields:
        Samples: ``__key__`` (str), ``__url__`` (str) and the bytes of each field.

    Raises:
        ValueError: if an option is none of those listed.
        SampleError: through `on_error`: `DuplicateFieldError`, `ReappearingKeyError`, or a reserved field.

    Example:
        >>> members = [ShardMember("x.tar", "a.txt", b"A"), ShardMember("x.tar", "a.cls", b"1")]
        >>> list(group_members(members))
        [{'__key__': 'a', '__url__': 'x.tar', 'txt': b'A', 'cls': b'1'}]
    """
    rules = grouping_rules(keys, lowercase, fields, on_duplicate, on_reappearing)
    return _group(members, rules, on_error, Counter() if skipped is None else skipped, shown)


def grouping_rules(
    keys: KeyRule,
    lowercase: bool,
    fields: Iterable[str] | str | None,
    on_duplicate: OnDuplicate,
    on_reappearing: OnReappearing,
) -> GroupingRules:
    """Checks the options of grouping.

    Raises:
        ValueError: if an option is none of those that `group_members` lists.
    """
    if on_duplicate not in ("error", "first", "last"):
        raise ValueError(f"on_duplicate must be 'error', 'first' or 'last', not {on_duplicate!r}")
    if on_reappearing not in ("error", "warn", "allow"):
        raise ValueError(f"on_reappearing must be 'error', 'warn' or 'allow', not {on_reappearing!r}")
    return GroupingRules(key_splitter(keys), lowercase, _field_names(fields, lowercase), on_duplicate, on_reappearing)


def _field_names(fields: Iterable[str] | str | None, lowercase: bool) -> frozenset[str] | None:
    if fields is None:
        return None
    if isinstance(fields, str):
        names = re.split(r"[;\s]+", fields.strip("; \t\n"))
    else:
        names = list(fields) if isinstance(fields, Iterable) else []
    if not names or not all(isinstance(name, str) and name.strip(".") for name in names):
        raise ValueError(f"fields must name at least one field, as 'jpg cls' or ['jpg', 'cls'], not {fields!r}")
    return frozenset((name.lower() if lowercase else name).removeprefix(".") for name in names)


class _Run(NamedTuple):
    """Consecutive members of one reading of a shard that share a key."""

    key: str
    url: str
    visit: int
    parts: list[tuple[str, str, bytes | Exception]]  # field, member name, data or why there is none


def _group(
    members: Iterable[Unit],
    rules: GroupingRules,
    on_error: Callable[[Exception], bool],
    skipped: Counter[str],
    shown: Callable[[str], str],
) -> Iterator[dict[str, Any]]:
    seen: set[int] = set()
    reading: tuple[str, int] | None = None
    for run in _runs(members, rules.split, on_error, skipped):
        if (run.url, run.visit) != reading:
            reading = (run.url, run.visit)
            seen.clear()
        try:
            _check_new(run, seen, rules.on_reappearing, shown)
            sample = _make_sample(run, rules, shown)
        except Exception as error:  # noqa: BLE001  (the handler decides)
            if not on_error(error):
                return
            continue
        if len(sample) > 2:
            yield sample
        else:
            skipped["sample without the chosen fields"] += 1


def _runs(
    members: Iterable[Unit], split: SplitName, on_error: Callable[[Exception], bool], skipped: Counter[str]
) -> Iterator[_Run]:
    run: _Run | None = None
    closed = False  # whether the end of the open run has been seen
    for item, parts in _with_parts(members, split, on_error):
        if isinstance(item, Mark):
            if run is not None and (closed or item is Mark.END):
                yield run
            elif run is not None:
                skipped["sample cut off by a broken shard"] += 1
            run = None
            continue
        if isinstance(item, PassedMember):
            closed = closed or (run is not None and parts is not None and parts[0] != run.key)
            continue
        if parts is None:
            skipped[skip_reason(item.name)] += 1
            continue
        url, name, data, visit = item if isinstance(item, ShardMember) else (*item, 0)
        key, field = parts
        if run is None or key != run.key or visit != run.visit or url != run.url:
            if run is not None:
                yield run
            run = _Run(key, url, visit, [])
        closed = False
        run.parts.append((field, name, data))
    if run is not None:
        yield run


def _check_new(run: _Run, seen: set[int], on_reappearing: OnReappearing, shown: Callable[[str], str]) -> None:
    """Compares a key with those before it in its shard, by their 64-bit hashes."""
    if on_reappearing == "allow":
        return
    digest = hash(run.key)
    if digest not in seen:
        seen.add(digest)
        return
    shard, member = shown(run.url), run.parts[0][1]
    message = (
        f"key {run.key!r} comes back at member {member} of shard {shard} after other samples: its members are not "
        "next to each other. Write the shard sorted (tar --sort=name), or pass on_reappearing='allow' to take each "
        "run of members as a sample of its own (also where a native loader gives the same archive twice)."
    )
    error = ReappearingKeyError(message, shard=shard, member=member, key=run.key)
    if on_reappearing == "error":
        raise error
    warn_rarely("kept", error)


def _make_sample(run: _Run, rules: GroupingRules, shown: Callable[[str], str]) -> dict[str, Any]:
    sample: dict[str, Any] = {"__key__": run.key, "__url__": run.url}
    for field, name, data in run.parts:
        if isinstance(data, Exception):
            raise data
        if rules.lowercase:
            field = field.lower()
        if field in RESERVED_FIELDS:
            raise _reserved(run, field, name, shown(run.url))
        if rules.fields is not None and field not in rules.fields:
            continue
        if field in sample:
            if rules.on_duplicate == "error":
                raise _duplicate(run, field, name, shown(run.url), rules.lowercase)
            if rules.on_duplicate == "first":
                continue
        sample[field] = data
    return sample


def _reserved(run: _Run, field: str, name: str, shard: str) -> SampleError:
    return SampleError(
        f"member {name} of shard {shard} would become the field {field!r}, which the library sets itself. "
        "Rename it with rename= of load_wds_shards, or leave it out with select=.",
        shard=shard,
        member=name,
        key=run.key,
        field=field,
    )


def _duplicate(run: _Run, field: str, name: str, shard: str, lowercase: bool) -> DuplicateFieldError:
    first = next(other for spelled, other, _ in run.parts if (spelled.lower() if lowercase else spelled) == field)
    cure = "Pass on_duplicate='first' or 'last' to choose"
    return DuplicateFieldError(
        f"field {field!r} comes twice in sample {run.key!r} of shard {shard}: members {first} and {name}. "
        f"{cure}{', or lowercase=False if they differ in case' if lowercase else ''}.",
        shard=shard,
        member=name,
        key=run.key,
        field=field,
    )
