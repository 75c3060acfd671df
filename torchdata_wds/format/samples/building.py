"""Members whose names are split to samples, with everything that can be wrong about one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import ne
from typing import Any, NamedTuple

from torchdata_wds.errors import Advice, DuplicateFieldError, ReappearingKeyError, SampleError
from torchdata_wds.format.samples.names import RESERVED_FIELDS, GroupingRules
from torchdata_wds.format.tar.members import LocatedUrl, MemberRun
from torchdata_wds.handlers import warn_rarely
from torchdata_wds.option_types import OnReappearing

_RENAME = Advice(
    "Rename it with rename= of load_wds_shards, or leave it out with select=.", "Write the shard again without it."
)

_ALLOW = Advice.of(
    "Write the shard sorted (tar --sort=name), or pass {} to take each run of members as a sample of its own (also "
    "where a native loader gives the same archive twice).",
    "on_reappearing='allow'",
    "--on-reappearing allow",
)

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


def check_new(draft: Draft, seen: set[int], on_reappearing: OnReappearing, shown: Callable[[str], str]) -> None:
    """Compares a key with those before it in its shard, by their 64-bit hashes."""
    if on_reappearing == "allow":
        return
    digest = hash(draft.key)
    if digest not in seen:
        seen.add(digest)
        return
    shard, member = shown(draft.url), draft.parts[0][1]
    message = (
        f"key {draft.key!r} comes back at member {member} of shard {shard} after other samples: its members are not "
        "next to each other."
    )
    error = ReappearingKeyError(message, shard=shard, member=member, key=draft.key, advice=_ALLOW)
    if on_reappearing == "error":
        raise error
    warn_rarely("kept", error)


def make_sample(draft: Draft, rules: GroupingRules, shown: Callable[[str], str]) -> dict[str, Any]:
    """Makes the sample of a draft, or raises what is wrong with it; without any chosen field it has two entries.

    A negative visit is one of samples that another consumer reads too: they are marked with ``__pad__``. Samples of a
    shard that is read from a local copy have its path as ``__local_path__``.
    """
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
    """Adds what is known of the reading of the shard that samples are from."""
    if isinstance(source.url, LocatedUrl):
        url = str(source.url)
        for sample in samples:
            sample["__url__"] = url
            sample["__local_path__"] = source.url.local_path
    if source.visit < 0:
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
    """Makes the samples of a run of whole ones in one loop, as `check_new` and `make_sample` would make them.

    `seen` are hashes of the keys before them in the shard; theirs are added. None is returned, and nothing changed,
    where a sample needs the closer look that those two take.
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
