"""The good samples of a shard that validation has read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchdata_wds.cli.validate.findings import Finding
from torchdata_wds.cli.validate.shard_reports import RepairPlan
from torchdata_wds.cli.validate.shard_validation import CheckedSample, ShardValidation, ValidationRules
from torchdata_wds.errors import ShardFormatError
from torchdata_wds.storage import mask_url

__all__ = ["repaired_samples"]


_LOST = "other members of sample {!r} are bad or cut off, so these are left out as well"


def repaired_samples(url: str, plan: RepairPlan, rules: ValidationRules) -> Iterator[dict[str, Any] | Finding]:
    """Reads a shard again and gives its good samples.

    A sample whose members are not next to each other is joined where the last of them stands: its runs of members must
    all be good, and agree where they have the same field; one that does not agree with those before it is left out.
    Until then the runs are in memory: a large shard in which most keys come back is better sorted first.

    Args:
        url: The shard, which must be one that can be read twice.
        plan: What validation has found.
        rules: The rules by which it did.

    Yields:
        Samples, in their order; and a note for each run of members that was joined or is left out although it is whole.

    Raises:
        ShardFormatError: at the end, if the shard is another one by now, or could not be read as far as before.

    Example:
        >>> from torchdata_wds.cli.validate.shard_reports import RepairPlan
        >>> list(repaired_samples("no-such.tar", RepairPlan(), ValidationRules()))
        []
    """
    runs = _Runs(plan)
    is_same = True
    validation = ShardValidation(url, rules._replace(check_fields=None))
    for item in validation:
        if isinstance(item, Finding):
            continue
        key = item.sample["__key__"]
        if key in plan.runs:
            yield from runs.add(item)
        elif item.number in plan.bad:
            continue
        elif not item.is_sound:
            is_same = False
        elif key in plan.lost:
            yield _note(item, "left-out", _LOST.format(key))
        else:
            yield item.sample
    count = validation.sound + validation.bad
    if count != plan.count or not is_same or not runs.are_complete:
        raise ShardFormatError(
            f"shard {validation.shard} is not the same when it is read again: {plan.count:,} samples then, {count:,} "
            "now. Repair it when nothing changes it, or from a copy",
            shard=validation.shard,
        )


class _Runs:
    """The runs of members whose keys come back."""

    def __init__(self, plan: RepairPlan) -> None:
        self._plan = plan
        self._left = dict(plan.runs)
        self._held: dict[str, dict[str, Any]] = {}

    def add(self, item: CheckedSample) -> Iterator[dict[str, Any] | Finding]:
        """Takes the next run of a key; gives the sample if it was the last one."""
        sample = item.sample
        key = sample["__key__"]
        self._left[key] -= 1
        if key in self._plan.lost:
            yield _note(item, "left-out", _LOST.format(key))
            return
        held = self._held.setdefault(key, {})
        others = [field for field in sample if field in held and held[field] != sample[field]]
        if others:
            yield _note(
                item,
                "left-out",
                f"the key {key!r} comes back with another content of {', '.join(others)}: the first is kept, these "
                "members are left out",
            )
        else:
            if held:
                yield _note(item, "joined", f"members of sample {key!r} are joined with those that stand before")
            held.update(sample)
        if not self._left[key]:
            yield self._held.pop(key)

    @property
    def are_complete(self) -> bool:
        """Whether as many runs have come as were counted."""
        return not any(self._left.values())


def _note(item: CheckedSample, kind: str, message: str) -> Finding:
    key = item.sample["__key__"]
    return Finding("note", kind, message, mask_url(item.sample["__url__"]), key=key, offset=item.offset)
