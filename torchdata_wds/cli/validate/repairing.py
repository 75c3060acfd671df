"""Writing the good samples of shards that validation has read: their selection, and their archives."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

_LOST = "other members of sample {!r} are bad or cut off, so these are left out as well"


class Repair:
    """Writes the good samples of validated shards to the outputs that ``--fix`` names.

    The shards `listed`, which are those of all parts, name the outputs.
    """

    def __init__(self, arguments: argparse.Namespace, urls: Sequence[str], listed: Sequence[str]) -> None:
        if arguments.fix in ("", STDIN):
            raise UsageError("--fix needs a file or a folder: the report has standard output")
        for url in urls:
            if not can_reopen(url):
                shard = mask_url(url)
                raise UsageError(f"--fix reads each shard twice, and {shard} can be read only once: name a file")
        self._arguments = arguments
        self._urls = urls
        self._count = 0
        self._lost = 0
        self._targets: Sequence[str] | None = None
        if is_target_pattern(arguments.fix):
            try:
                self._targets = part_of(name_targets(listed, arguments.fix, in_place=True), arguments.part)
            except ShardListError as error:
                raise UsageError(f"--fix: {error}") from error
        for target in [arguments.fix] if self._targets is None else self._targets:
            folder = _local_folder(target)
            # What cannot be written must fail now, not when all is read. A command is not tried: it would see an empty
            # shard. Nor is a new folder, which is made when there is something to write.
            if scheme_of(target) != "pipe" and (folder is None or self._targets is None or folder.exists()):
                open_target(target, overwrite=arguments.force).abort()

    def write(
        self, plans: Sequence[RepairPlan], rules: ValidationRules, tell: Callable[[Finding], None], bad: int
    ) -> int:
        """Writes the samples; returns how many could not be written although they are good.

        `tell` is called with each finding about samples that are joined or left out; `bad` samples were found.
        """
        parts = [self._samples(url, plan, rules, tell) for url, plan in zip(self._urls, plans, strict=True)]
        if self._targets is None:
            self._write(self._arguments.fix, chain.from_iterable(parts), tell)
        else:
            for target, samples in zip(self._targets, parts, strict=True):
                if (folder := _local_folder(target)) is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                self._write(target, samples, tell)
        wrote = f"wrote {counted(self._count, 'good sample')} to {printable(self._arguments.fix)}"
        say(f"{wrote}, left out {counted(bad, 'bad one')}")
        if self._lost:
            runs = counted(self._lost, "run of members was", "runs of members were")
            say(f"lost: {runs} left out although whole (see the report)")
        return self._lost

    def _samples(
        self, url: str, plan: RepairPlan, rules: ValidationRules, tell: Callable[[Finding], None]
    ) -> Iterator[Mapping[str, Any]]:
        for item in repaired_samples(url, plan, rules):
            if isinstance(item, Finding):
                self._lost += item.kind == "left-out"
                tell(item)
            else:
                yield item

    def _write(self, target: str, samples: Iterable[Mapping[str, Any]], tell: Callable[[Finding], None]) -> None:
        """Writes an archive, unless there are no samples."""
        found = iter(samples)
        first = next(found, None)
        if first is None:
            say(f"no good sample: {printable(mask_url(target))} is not written")
            return
        options = argparse.Namespace(**{**vars(self._arguments), "output": target, "compress": None, "index": False})
        with SampleOutput(options) as output:
            for sample in chain((first,), found):
                try:
                    output.write(sample)
                except SampleError as error:
                    self._lost += 1
                    shard = mask_url(sample["__url__"])
                    tell(Finding("error", "not-written", cli_message(error), shard, key=sample["__key__"]))
        self._count += output.count


def _local_folder(target: str) -> Path | None:
    return Path(local_path(target)).parent if is_local(target) else None


def repaired_samples(url: str, plan: RepairPlan, rules: ValidationRules) -> Iterator[dict[str, Any] | Finding]:
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
            if key in plan.lost:
                yield _note(item, "left-out", _LOST.format(key))
            else:
                yield from _join(held.setdefault(key, {}), item)
                if not left[key]:
                    yield held.pop(key)
        elif item.number in plan.bad:
            continue
        elif not item.is_sound:
            is_same = False
        elif key in plan.lost:
            yield _note(item, "left-out", _LOST.format(key))
        else:
            yield item.sample
    count = validation.sound + validation.bad
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
