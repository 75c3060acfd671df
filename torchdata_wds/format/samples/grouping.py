"""Members to samples: a run of consecutive members with one key, and everything that can be wrong about one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from operator import ne
from typing import Any, NamedTuple

from torchdata_wds.errors import Advice, DuplicateFieldError, ReappearingKeyError, SampleError
from torchdata_wds.format.samples.names import RESERVED_FIELDS, GroupingRules, grouping_rules, skip_reason, split_names
from torchdata_wds.format.tar.members import FailedMember, Mark, MemberRun, PassedMember, ShardMember, Unit, singles
from torchdata_wds.handlers import count_loss, warn_rarely, warn_seldom
from torchdata_wds.option_types import OnReappearing, SplitName

WITHOUT_FIELDS = "sample without the chosen fields"  # what samples are counted by that have none of the fields to keep
OnError = Callable[[Exception], bool]  # called for what is wrong: True skips it, False ends the iterator
Shown = Callable[[str], str]
Make = Callable[[MemberRun, GroupingRules, set[int]], Sequence[Any] | None]
_RENAME = Advice(
    "Rename it with rename= of load_wds_shards, or leave it out with select=.", "Write the shard again without it."
)
_ALLOW = Advice.of(
    "Write the shard sorted (tar --sort=name), or pass {} to take each run of members as a sample of its own (also "
    "where a native loader gives the same archive twice).",
    "on_reappearing='allow'",
    "--on-reappearing allow",
)
_OTHER_KEYS = Advice.of("{} changes how names are read.", "keys=", "--keys")
_CHOOSE = Advice("Pass on_duplicate='first' or 'last' to choose.", "Pass --on-duplicate first or last to choose.")
_CHOOSE_OR_KEEP_CASE = Advice(
    "Pass on_duplicate='first' or 'last' to choose, or lowercase=False if they differ in case.",
    "Pass --on-duplicate first or last to choose, or --keep-case if they differ in case.",
)


class Draft(NamedTuple):
    """Consecutive members of one reading of a shard (its `visit`) that share a key."""

    key: str
    url: str
    visit: int
    parts: list[tuple[str, str, bytes | Exception]]  # field, member name, and data or why there is none


def drafts_of(run: MemberRun) -> Iterator[Draft]:
    """Cuts the members of a run out, a draft for each key."""
    draft = Draft(run.keys[0], run.url, run.visit, [])
    for key, part in zip(run.keys, run.parts(), strict=True):
        if key != draft.key:
            yield draft
            draft = Draft(key, run.url, run.visit, [])
        draft.parts.append(part)
    yield draft


def check_new(draft: Draft, seen: set[int], on_reappearing: OnReappearing, shown: Shown) -> None:
    """Compares a key with those before it in its shard, by their 64-bit hashes."""
    if on_reappearing == "allow":
        return
    digest = hash(draft.key)
    if digest not in seen:
        seen.add(digest)
        return
    shard, member = shown(draft.url), draft.parts[0][1]
    what = f"key {draft.key!r} comes back at member {member} of shard {shard} after other samples: its members are not"
    where = {"shard": shard, "member": member, "key": draft.key}
    error = ReappearingKeyError(f"{what} next to each other.", advice=_ALLOW, **where)
    if on_reappearing == "error":
        raise error
    warn_rarely("kept", error)


def make_sample(draft: Draft, rules: GroupingRules, shown: Shown) -> dict[str, Any]:
    """Makes the sample of a draft, or raises what is wrong with it; without any chosen field it has two entries."""
    sample: dict[str, Any] = {"__key__": draft.key, "__url__": draft.url}
    for field, name, data in draft.parts:
        if isinstance(data, Exception):
            raise data
        if rules.lowercase:
            field = field.lower()
        if field in RESERVED_FIELDS:
            raise _misfit(draft, field, name, shown(draft.url), rules.lowercase)
        if rules.fields is not None and field not in rules.fields:
            continue
        if field in sample:
            if rules.on_duplicate == "error":
                raise _misfit(draft, field, name, shown(draft.url), rules.lowercase)
            if rules.on_duplicate == "first":
                continue
        sample[field] = data
    if len(sample) > 2:
        _mark([sample], draft)
    return sample


def _mark(samples: Iterable[dict[str, Any]], source: Draft | MemberRun) -> None:
    url: Any = source.url
    if hasattr(url, "local_path"):  # a LocatedUrl
        for sample in samples:
            sample["__url__"] = url.url
            sample["__local_path__"] = url.local_path
    if source.visit < 0:  # another consumer reads these samples too
        for sample in samples:
            sample["__pad__"] = True


def _misfit(draft: Draft, field: str, name: str, shard: str, lowercase: bool) -> SampleError:
    """Makes the error for a member whose field is reserved, or comes twice."""
    where = {"shard": shard, "member": name, "key": draft.key, "field": field}
    if field in RESERVED_FIELDS:
        what = f"member {name} of shard {shard} would become the field {field!r}, which the library sets itself."
        return SampleError(what, advice=_RENAME, **where)
    first = next(other for spelled, other, _ in draft.parts if (spelled.lower() if lowercase else spelled) == field)
    what = f"field {field!r} comes twice in sample {draft.key!r} of shard {shard}: members {first} and {name}."
    return DuplicateFieldError(what, advice=_CHOOSE_OR_KEEP_CASE if lowercase else _CHOOSE, **where)


def make_samples(run: MemberRun, rules: GroupingRules, seen: set[int]) -> list[dict[str, Any]] | None:
    """Makes the samples of a run in one loop, or None where one needs the closer look of `check_new` and `make_sample`.

    `seen` are hashes of the keys before them in the shard; theirs are added.
    """
    fields = {field: field.lower() if rules.lowercase else field for field in set(run.fields)}
    if not RESERVED_FIELDS.isdisjoint(fields.values()):
        return None
    rows: Iterable[tuple[str, str, int, int]] = zip(run.keys, run.fields, run.starts, run.ends, strict=True)
    count = len(run.keys)
    if rules.fields is not None:
        rows = [row for row in rows if fields[row[1]] in rules.fields]
        count = len(rows)
    samples: list[dict[str, Any]] = []
    url, data, last = run.url, run.data, None
    for key, field, start, end in rows:
        if key != last:
            sample: dict[str, Any] = {"__key__": key, "__url__": url}
            samples.append(sample)
            last = key
        sample[fields[field]] = data[start:end]
    # A field that comes twice has overwritten the first: 5 members of 2 samples must make 5 + 2 * 2 entries.
    if sum(map(len, samples)) != count + 2 * len(samples):
        return None
    if rules.fields is not None and len(samples) <= sum(map(ne, run.keys, run.keys[1:])):
        return None  # a sample has none of the chosen fields
    if rules.on_reappearing != "allow":
        hashes = {hash(sample["__key__"]) for sample in samples}
        if len(hashes) < len(samples) or not seen.isdisjoint(hashes):
            return None
        seen |= hashes
    _mark(samples, run)
    return samples


def _raise(error: Exception) -> bool:
    raise error


def _with_parts(
    units: Iterable[Unit], split: SplitName, on_error: OnError
) -> Iterator[tuple[Unit, tuple[str, str] | None]]:
    """Pairs members, or runs that can be split at once, with key and field; names that fail go to the handler."""
    for unit in units:
        if isinstance(unit, MemberRun):
            columns = split_names(unit.names, split)
            if columns is not None:
                yield unit._replace(keys=columns[0], fields=columns[1]), None
                continue
            items: Iterable[Any] = unit.members()
        else:
            items = (unit,)
        for item in items:
            try:
                parts = None if isinstance(item, Mark) else split(item.name)
            except Exception as error:  # noqa: BLE001  (the handler decides)
                if not on_error(error):
                    return
            else:
                yield item, parts


def release_whole_samples(items: Iterable[Unit], split: SplitName, on_error: OnError = _raise) -> Iterator[ShardMember]:
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
            closed = False  # the sample continues after a member that was left out
        if isinstance(item, ShardMember):
            held.append(item)
            if closed:
                yield from held
                held = []


def group_members(
    members: Iterable[Unit],
    *,
    on_error: OnError = _raise,
    skipped: Counter[str] | None = None,
    shown: Shown = str,
    make: Make = make_samples,
    **rules: Any,
) -> Generator[Any, None, None]:
    """Groups consecutive members with one key into samples: ``__key__``, ``__url__`` and the bytes of each field.

    Rules are those of `grouping_rules`. The end of a shard, or of one reading of it, always ends a sample; at
    `Mark.BROKEN` the open sample is dropped. `on_error` is called for each sample that is wrong: True skips it, False
    ends the iterator. `skipped` counts members that belong to no sample, by reason, and `shown` turns a URL into what
    messages may show. To find keys that come back, a 64-bit hash of each key of the current shard is kept in a set.
    `make` is `make_samples`, or makes something else of a run's samples.

    Example:
        >>> members = [ShardMember("x.tar", "a.txt", b"A"), ShardMember("x.tar", "a.cls", b"1")]
        >>> list(group_members(members))
        [{'__key__': 'a', '__url__': 'x.tar', 'txt': b'A', 'cls': b'1'}]
    """
    return _group(members, grouping_rules(**rules), on_error, Counter() if skipped is None else skipped, shown, make)


def _group(
    members: Iterable[Unit], rules: GroupingRules, on_error: OnError, skipped: Counter[str], shown: Shown, make: Make
) -> Generator[Any, None, None]:
    seen: set[int] = set()
    reading: tuple[str, int] | None = None
    for found in _drafts(members, rules.split, on_error, skipped, shown):
        if (found.url, found.visit) != reading:
            reading = (found.url, found.visit)
            seen.clear()
        if isinstance(found, MemberRun) and (samples := make(found, rules, seen)) is not None:
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
    members: Iterable[Unit], split: SplitName, on_error: OnError, skipped: Counter[str], shown: Shown
) -> Iterator[Draft | MemberRun]:
    """Gives whole samples: one at a time, or those in the middle of a run together."""
    draft: Draft | None = None
    outside: ShardMember | FailedMember | None = None  # the first member of a shard that has had no sample yet
    has_samples = False
    closed = False  # whether the end of the open draft has been seen
    for item, parts in _with_parts(members, split, on_error):
        if parts is not None and isinstance(item, (ShardMember, FailedMember)):
            has_samples = True
            url, name, data, visit = item if isinstance(item, ShardMember) else (*item, 0)
            key, field = parts
            if draft is None or key != draft.key or visit != draft.visit or url != draft.url:
                if draft is not None:
                    yield draft
                draft = Draft(key, url, visit, [])
            closed = False
            draft.parts.append((field, name, data))
        elif isinstance(item, MemberRun):
            whole, draft = _finish(draft, item)
            closed = False
            has_samples = True
            yield from whole
        elif isinstance(item, Mark):
            if outside is not None and not has_samples and item is Mark.END:
                reason = f"no member has a name of the form key.field; the first is {outside.name}"
                what = f"shard {shown(outside.url)} gives no sample: {reason} ({skip_reason(outside.name)})."
                warn_seldom("shards without samples", what, _OTHER_KEYS)
            outside, has_samples = None, False
            if draft is not None and (closed or item is Mark.END):
                yield draft
            elif draft is not None:
                count_loss(skipped, "sample cut off by a broken shard")
            draft = None
        elif isinstance(item, PassedMember):
            closed = closed or (draft is not None and parts is not None and parts[0] != draft.key)
        else:
            skipped[skip_reason(item.name)] += 1
            outside = outside or item
    if draft is not None:
        yield draft


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
