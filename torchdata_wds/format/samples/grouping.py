"""Members to samples: a run of consecutive members with one key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from torchdata_wds.errors import Advice
from torchdata_wds.format.samples.building import Draft, check_new, drafts_of, make_sample, make_samples
from torchdata_wds.format.samples.names import GroupingRules, grouping_rules, skip_reason, split_names
from torchdata_wds.format.tar.members import (
    FailedMember,
    Mark,
    MemberRun,
    PassedMember,
    ShardMember,
    Single,
    Unit,
    singles,
)
from torchdata_wds.handlers import count_loss, warn_seldom
from torchdata_wds.option_types import KeyRule, OnDuplicate, OnReappearing, SplitName

#: What samples are counted by that have none of the fields to keep.
WITHOUT_FIELDS = "sample without the chosen fields"


def _raise(error: Exception) -> bool:
    raise error


def _with_parts(
    units: Iterable[Unit], split: SplitName, on_error: Callable[[Exception], bool]
) -> Iterator[tuple[Single | MemberRun, tuple[str, str] | None]]:
    """Pairs members with the key and field of their name; one whose name cannot be split goes to the handler.

    A run stays together where all its names can be split at once.
    """
    for unit in units:
        items: Iterable[Single]
        if not isinstance(unit, MemberRun):
            items = (unit,)
        elif (columns := split_names(unit.names, split)) is None:
            items = unit.members()
        else:
            yield unit._replace(keys=columns[0], fields=columns[1]), None
            continue
        for item in items:
            try:
                parts = None if isinstance(item, Mark) else split(item.name)
            except Exception as error:  # noqa: BLE001  (the handler decides)
                if not on_error(error):
                    return
            else:
                yield item, parts


def release_whole_samples(
    items: Iterable[Unit], split: SplitName, on_error: Callable[[Exception], bool] = _raise
) -> Iterator[ShardMember]:
    """Passes members on a whole sample at a time, once the next key or the archive's end marker has been seen.

    Each shard ends in a mark; samples that a broken shard has cut are left out. `on_error` is called where `split`
    raises: True leaves the member out, False ends the iterator.
    """
    held: list[ShardMember] = []
    current: str | None = None
    closed = True  # whether the end of the held sample has been seen
    for item, parts in _with_parts(singles(items), split, on_error):
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
) -> Generator[dict[str, Any], None, None]:
    """Groups consecutive members with one key into samples: ``__key__``, ``__url__`` and the bytes of each field.

    Options are those of ``group_by_key``. The end of a shard, or of one reading of it, always ends a sample; at
    `Mark.BROKEN` the open sample is dropped. `on_error` is called for each sample that is wrong: True skips it, False
    ends the iterator. `skipped` counts members that belong to no sample, by reason, and `shown` turns a URL into what
    messages may show. To find keys that come back, a 64-bit hash of each key of the current shard is kept in a set.

    Example:
        >>> members = [ShardMember("x.tar", "a.txt", b"A"), ShardMember("x.tar", "a.cls", b"1")]
        >>> list(group_members(members))
        [{'__key__': 'a', '__url__': 'x.tar', 'txt': b'A', 'cls': b'1'}]
    """
    rules = grouping_rules(keys, lowercase, fields, on_duplicate, on_reappearing)
    return _group(members, rules, on_error, Counter() if skipped is None else skipped, shown)


def _group(
    members: Iterable[Unit],
    rules: GroupingRules,
    on_error: Callable[[Exception], bool],
    skipped: Counter[str],
    shown: Callable[[str], str],
) -> Generator[dict[str, Any], None, None]:
    seen: set[int] = set()
    reading: tuple[str, int] | None = None
    for found in _drafts(members, rules.split, on_error, skipped, shown):
        if (found.url, found.visit) != reading:
            reading = (found.url, found.visit)
            seen.clear()
        if isinstance(found, MemberRun) and (samples := make_samples(found, rules, seen)) is not None:
            yield from samples
            continue
        for draft in drafts_of(found) if isinstance(found, MemberRun) else (found,):
            try:
                check_new(draft, seen, rules.on_reappearing, shown)
                sample = make_sample(draft, rules, shown)
            except Exception as error:  # noqa: BLE001  (the handler decides)
                if not on_error(error):
                    return
            else:
                if len(sample) > 2:
                    yield sample
                else:
                    skipped[WITHOUT_FIELDS] += 1


def _drafts(
    members: Iterable[Unit],
    split: SplitName,
    on_error: Callable[[Exception], bool],
    skipped: Counter[str],
    shown: Callable[[str], str],
) -> Iterator[Draft | MemberRun]:
    """Gives whole samples: one at a time, or those in the middle of a run together."""
    draft: Draft | None = None
    outside: ShardMember | FailedMember | None = None  # the first member of a shard that has had no sample yet
    has_samples = False
    closed = False  # whether the end of the open draft has been seen
    for item, parts in _with_parts(members, split, on_error):
        if isinstance(item, MemberRun):
            whole, draft = _finish(draft, item)
            closed = False
            has_samples = True
            yield from whole
        elif isinstance(item, Mark):
            if outside is not None and not has_samples and item is Mark.END:
                _warn_of_no_sample(outside, shown)
            outside, has_samples = None, False
            if draft is not None and (closed or item is Mark.END):
                yield draft
            elif draft is not None:
                count_loss(skipped, "sample cut off by a broken shard")
            draft = None
        elif isinstance(item, PassedMember):
            closed = closed or (draft is not None and parts is not None and parts[0] != draft.key)
        elif parts is None:
            skipped[skip_reason(item.name)] += 1
            outside = outside or item
        else:
            has_samples = True
            url, name, data, visit = item if isinstance(item, ShardMember) else (*item, 0)
            key, field = parts
            if draft is None or key != draft.key or visit != draft.visit or url != draft.url:
                if draft is not None:
                    yield draft
                draft = Draft(key, url, visit, [])
            closed = False
            draft.parts.append((field, name, data))
    if draft is not None:
        yield draft


def _warn_of_no_sample(member: ShardMember | FailedMember, shown: Callable[[str], str]) -> None:
    warn_seldom(
        "shards without samples",
        f"shard {shown(member.url)} gives no sample: no member has a name of the form key.field; the first is "
        f"{member.name} ({skip_reason(member.name)}).",
        Advice.of("{} changes how names are read.", "keys=", "--keys"),
    )


def _finish(draft: Draft | None, run: MemberRun) -> tuple[list[Draft | MemberRun], Draft]:
    """Continues the open draft with a run; returns what is whole now, and the draft that is open after the run.

    With the draft ``a`` open, a run of the keys ``a a b b c`` completes ``a``, gives ``b b`` as a whole run and
    leaves ``c`` open, because the next run may go on with it.
    """
    whole: list[Draft | MemberRun] = []
    keys, count = run.keys, len(run.keys)
    begin = 0
    if draft is not None and (keys[0], run.visit, run.url) == (draft.key, draft.visit, draft.url):
        begin = next((row for row, key in enumerate(keys) if key != draft.key), count)
        draft.parts.extend(run.rows(0, begin).parts())
        if begin == count:
            return whole, draft
    if draft is not None:
        whole.append(draft)
    last = count - 1
    while last > begin and keys[last - 1] == keys[-1]:
        last -= 1
    if last > begin:
        whole.append(run.rows(begin, last))
    return whole, Draft(keys[last], run.url, run.visit, list(run.rows(last, count).parts()))
