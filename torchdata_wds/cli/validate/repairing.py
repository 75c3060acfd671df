"""Writing the good samples of shards that validation has read: their selection, and their archives."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from torchdata_wds.cli.command import UsageError
from torchdata_wds.cli.inputs import part_of
from torchdata_wds.cli.map.target_names import is_target_pattern, name_targets
from torchdata_wds.cli.outputs import SampleOutput
from torchdata_wds.cli.terminal import counted, printable, say
from torchdata_wds.cli.validate.findings import Finding, RepairPlan
from torchdata_wds.cli.validate.shard_validation import CheckedSample, ShardValidation, ValidationRules
from torchdata_wds.errors import SampleError, ShardFormatError, ShardListError, cli_message
from torchdata_wds.storage import can_reopen, mask_url, open_target
from torchdata_wds.storage.urls import STDIN, is_local, local_path, scheme_of

#: A good sample, or a note on members that were joined or left out.
_Items = Iterator[dict[str, Any] | Finding]


class Repair:
    """Writes the good samples of validated shards to the outputs that ``--fix`` names.

    The shards `listed`, which are those of all parts, name the outputs.
    """

    def __init__(
        self, arguments: argparse.Namespace, urls: Sequence[str], listed: Sequence[str], rules: ValidationRules
    ) -> None:
        if arguments.fix in ("", STDIN):
            raise UsageError("--fix needs a file or a folder: the report has standard output")
        for url in urls:
            if not can_reopen(url):
                shard = mask_url(url)
                raise UsageError(f"--fix reads each shard twice, and {shard} can be read only once: name a file")
        self._arguments = arguments
        self._urls = urls
        self._rules = rules
        self._targets: Sequence[str] = [arguments.fix]
        self._has_many = is_target_pattern(arguments.fix)
        if self._has_many:
            try:
                self._targets = part_of(name_targets(listed, arguments.fix, in_place=True), arguments.part)
            except ShardListError as error:
                raise UsageError(f"--fix: {error}") from error
        for target in self._targets:
            # What cannot be written must fail now, not when all is read. A command is not tried: it would see an empty
            # shard. Nor is a new folder, which is made when there is something to write.
            is_new = self._has_many and is_local(target) and not Path(local_path(target)).parent.exists()
            if scheme_of(target) != "pipe" and not is_new:
                open_target(target, overwrite=arguments.force).abort()

    def write(self, plans: Sequence[RepairPlan], tell: Callable[[Finding], None], bad: int) -> int:
        """Writes the samples; returns how many could not be written although they are good.

        `tell` is called with each finding about samples that are joined or left out; `bad` samples were found.
        """
        parts: list[_Items]
        parts = [repaired_samples(url, plan, self._rules) for url, plan in zip(self._urls, plans, strict=True)]
        if not self._has_many:
            parts = [chain.from_iterable(parts)]
        count = lost = 0
        for target, items in zip(self._targets, parts, strict=True):
            if self._has_many and is_local(target):
                Path(local_path(target)).parent.mkdir(parents=True, exist_ok=True)
            written, left_out = self._write(target, items, tell)
            count, lost = count + written, lost + left_out
        wrote = f"wrote {counted(count, 'good sample')} to {printable(self._arguments.fix)}"
        say(f"{wrote}, left out {counted(bad, 'bad one')}")
        if lost:
            runs = counted(lost, "run of members was", "runs of members were")
            say(f"lost: {runs} left out although whole (see the report)")
        return lost

    def _write(self, target: str, items: _Items, tell: Callable[[Finding], None]) -> tuple[int, int]:
        """Writes an archive, unless there are no samples; returns how many it has, and how many whole ones it lacks."""
        lost = 0
        output: SampleOutput | None = None
        options = argparse.Namespace(**{**vars(self._arguments), "output": target, "compress": None, "index": False})
        with ExitStack() as stack:
            for item in items:
                if isinstance(item, Finding):
                    lost += item.kind == "left-out"
                    tell(item)
                    continue
                if output is None:
                    output = stack.enter_context(SampleOutput(options))
                try:
                    output.write(item)
                except SampleError as error:
                    lost += 1
                    shard = mask_url(item["__url__"])
                    tell(Finding("error", "not-written", cli_message(error), shard, key=item["__key__"]))
        if output is None:
            say(f"no good sample: {printable(mask_url(target))} is not written")
            return 0, lost
        return output.count, lost


def repaired_samples(url: str, plan: RepairPlan, rules: ValidationRules) -> _Items:
    """Reads a shard again and yields its good samples in their order.

    A sample whose members are not next to each other is joined where the last of them stands: its runs of members must
    all be good, and agree where they have the same field; one that does not agree with those before it is left out.
    Until then the runs are in memory: a large shard in which most keys come back is better sorted first. A note follows
    each run of members that was joined, or is left out although it is whole.

    Raises:
        ShardFormatError: at the end, if the shard has changed, or could not be read as far as before.
    """
    left = dict(plan.runs)  # how many runs of each key that comes back are still to come
    held: dict[str, dict[str, Any]] = {}
    is_same = True
    validation = ShardValidation(url, rules._replace(check_fields=None))
    for item in validation:
        if isinstance(item, Finding):
            continue
        key = item.sample["__key__"]
        if key in left:
            left[key] -= 1
        elif item.number in plan.bad:
            continue
        elif not item.is_sound:
            is_same = False
            continue
        if key in plan.lost:
            what = f"other members of sample {key!r} are bad or cut off, so these are left out as well"
            yield _note(item, "left-out", what)
        elif key not in left:
            yield item.sample
        else:
            yield from _join(held.setdefault(key, {}), item)
            if not left[key]:
                yield held.pop(key)
    count = validation.report.plan.count
    if count != plan.count or not is_same or any(left.values()):
        raise ShardFormatError(
            f"shard {validation.shard} is not the same when it is read again: {plan.count:,} samples then, {count:,} "
            "now. Repair it when nothing changes it, or from a copy",
            shard=validation.shard,
        )


def _join(held: dict[str, Any], item: CheckedSample) -> Iterator[Finding]:
    """Adds a run of members to those of the same key before it, unless they contradict each other."""
    key = item.sample["__key__"]
    others = [field for field, value in item.sample.items() if field in held and held[field] != value]
    if others:
        different = f"the key {key!r} comes back with another content of {', '.join(others)}"
        yield _note(item, "left-out", f"{different}: the first is kept, these members are left out")
        return
    if held:
        yield _note(item, "joined", f"members of sample {key!r} are joined with those that stand before")
    held.update(item.sample)


def _note(item: CheckedSample, kind: str, message: str) -> Finding:
    shard = mask_url(item.sample["__url__"])
    return Finding("note", kind, message, shard, key=item.sample["__key__"], offset=item.offset)
