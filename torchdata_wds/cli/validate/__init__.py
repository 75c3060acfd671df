"""Read everything, report all damage and oddities with their place, and write the good samples.

wds validate --decode 'train-{000000..000003}.tar'
wds validate damaged.tar --fix repaired.tar
wds validate --strict repaired.tar
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torchdata_wds.cli import command
from torchdata_wds.cli.command import Command, UsageError, flag, option
from torchdata_wds.cli.inputs import add_input_arguments, list_all_inputs, part_of
from torchdata_wds.cli.jobs import map_in_order
from torchdata_wds.cli.map.shard_tasks import is_target_pattern, name_targets
from torchdata_wds.cli.outputs import SampleOutput, check_target
from torchdata_wds.cli.terminal import Progress, counted, discard_output, paused, printable, say, stdout_is_apart
from torchdata_wds.cli.validate.findings import (
    FieldChecker,
    FieldSets,
    Finding,
    Level,
    RepairPlan,
    ShardReport,
    ValidationRules,
)
from torchdata_wds.cli.validate.shard_validation import CheckedSample, ShardValidation, report_shard
from torchdata_wds.errors import SampleError, ShardFormatError, ShardListError, cli_message
from torchdata_wds.storage import can_reopen, mask_url
from torchdata_wds.storage.urls import STDIN, is_local, local_path

_MOST = 20

#: A good sample, or a note on members that were joined or left out.
_Items = Iterator[dict[str, Any] | Finding]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser, slices=False, errors=False)
    flag(parser, "--decode", "also decode each field: images and media, but no pickles")
    flag(parser, "--strict", "exit with 1 on warnings too")
    flag(parser, "--json", "one JSON object per line, the summary last")
    text = f"show N findings of each kind per shard, and count the others (default: {_MOST})"
    option(parser, "--most", "N", text, command.whole_number, default=_MOST)
    command.add_parallel(parser, "read N shards at once, in processes")
    group = parser.add_argument_group("repair")
    text = (
        "write the good samples to one archive, or to one per shard: 'folder/', or a name with {name} (the "
        "shard's, without .tar and the like) or {shard:06d} (its number)"
    )
    option(group, "--fix", "OUT", text)
    command.add_force(group)
    command.add_rekey(group)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.fix is None and (arguments.force or arguments.rekey is not None):
        raise UsageError("--force and --rekey need --fix, for whose archive they are")
    listed = list_all_inputs(arguments)
    urls = part_of(listed, arguments.part)
    rules = ValidationRules(
        arguments.keys,
        not arguments.keep_case,
        arguments.on_duplicate,
        arguments.on_reappearing,
        not arguments.no_end_marker,
        arguments.concatenated,
        FieldChecker() if arguments.decode else None,
        int(arguments.max_member_bytes),
    )
    targets = () if arguments.fix is None else _targets(arguments, urls, listed)
    results = Results(arguments)
    repaired: list[_Items] = []
    processes = 1 if STDIN in urls else arguments.parallel
    reports = map_in_order(partial(report_shard, rules=rules, most=arguments.most), urls, processes)
    hidden = not (sys.stdout.isatty() or stdout_is_apart())
    with closing(reports), Progress("shards", urls=urls, hidden=hidden) as progress:
        for url, report in zip(urls, reports, strict=True):
            results.take(report)
            if arguments.fix is not None:
                repaired.append(repaired_samples(url, report.plan, rules))
            progress.advance(shard=url, samples=report.sound + report.bad)
    results.take_fields()
    lost = 0 if arguments.fix is None else _repair(arguments, targets, repaired, results)
    results.print_summary()
    levels = {level for level, _ in results.counts}
    return 1 if lost or "error" in levels or (arguments.strict and "warning" in levels) else 0


class Results:
    """Prints findings as text or JSON, and counts them, shards and samples."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.counts: Counter[tuple[Level, str]] = Counter()
        self.shards, self.samples = {"good": 0, "bad": 0}, {"good": 0, "bad": 0}
        self._field_sets = FieldSets()
        self._arguments = arguments

    def take(self, report: ShardReport) -> None:
        """Adds the findings of a shard, prints those that were kept, and counts the others."""
        self.counts += report.counts
        self.shards["bad" if any(level == "error" for level, _ in report.counts) else "good"] += 1
        self.samples["good"] += report.sound
        self.samples["bad"] += report.bad
        self._field_sets.update(report.field_sets)
        for finding in report.findings:
            self._print_finding(finding)
        for (level, kind), count in report.left_out.items():
            record = {"level": level, "kind": kind, "shard": report.shard, "more": count}
            self._print(record, f"{report.shard}: {level}: {kind}: {count:,} more")

    def take_fields(self) -> None:
        """Adds the samples whose fields differ from the majority's, and prints some of each shard."""
        given: Counter[str] = Counter()
        for finding in self._field_sets.findings():
            self.counts[finding.level, finding.kind] += finding.samples
            given[finding.shard] += 1
            if given[finding.shard] <= self._arguments.most:
                self._print_finding(finding)

    def tell(self, finding: Finding) -> None:
        """Adds and prints a finding."""
        self.counts[finding.level, finding.kind] += 1
        self._print_finding(finding)

    def print_summary(self) -> None:
        """Prints the numbers of findings of each kind, of shards and of samples."""
        counts: dict[str, dict[str, int]] = {}
        for (level, kind), count in sorted(self.counts.items()):
            counts.setdefault(level, {})[kind] = count
        both = {"shards": self.shards, "samples": self.samples}
        rows = [(what, *row) for what, numbers in (counts | both).items() for row in numbers.items()]
        lines = [f"{what:<8} {kind:<18} {count:>12,}" for what, kind, count in rows]
        self._print({"level": "summary", "counts": counts, **both}, *lines)

    def _print_finding(self, finding: Finding) -> None:
        record = {name: value for name, value in finding._asdict().items() if value is not None}
        place = "" if finding.offset is None else f":{finding.offset}"
        self._print(record, f"{finding.shard}{place}: {finding.level}: {finding.kind}: {finding.message}")

    def _print(self, record: dict[str, Any], *lines: str) -> None:
        text = json.dumps(record) if self._arguments.json else "\n".join(map(printable, lines))
        try:
            with paused():
                print(text, flush=True)
        except BrokenPipeError:
            if self._arguments.fix is None:
                raise  # otherwise samples are still to be written
            discard_output()


# ------------------------------------------------------------------------------------------------------------- repair


def _targets(arguments: argparse.Namespace, urls: Sequence[str], listed: Sequence[str]) -> Sequence[str]:
    """Returns the outputs of ``--fix`` for shards, numbered by their place among those `listed`, of all parts."""
    if arguments.fix in ("", STDIN):
        raise UsageError("--fix needs a file or a folder: the report goes to standard output")
    if unfit := [mask_url(url) for url in urls if not can_reopen(url)]:
        raise UsageError(f"--fix reads each shard twice, and {unfit[0]} can be read only once: name a file")
    targets: Sequence[str] = [arguments.fix]
    has_many = is_target_pattern(arguments.fix)
    if has_many:
        try:
            targets = name_targets(listed, arguments.fix, in_place=True)
        except ShardListError as error:
            raise UsageError(f"--fix: {error}") from error
        targets = part_of(targets, arguments.part) if urls else ()  # an empty part was reported before
    for target in targets:
        # not new folders, which are made when there is something to write
        is_new = has_many and is_local(target) and not Path(local_path(target)).parent.exists()
        if not is_new:
            check_target(target, overwrite=arguments.force)
    return targets


def _repair(arguments: argparse.Namespace, targets: Sequence[str], parts: list[_Items], results: Results) -> int:
    """Writes the good samples of each shard; returns how many good ones could not be written."""
    count = 0
    has_many = is_target_pattern(arguments.fix)
    for target, items in zip(targets, parts if has_many else [chain.from_iterable(parts)], strict=True):
        if has_many and is_local(target):
            Path(local_path(target)).parent.mkdir(parents=True, exist_ok=True)
        output = None
        options = argparse.Namespace(**{**vars(arguments), "output": target, "compress": None, "index": False})
        with ExitStack() as stack:
            for item in items:
                if isinstance(item, Finding):
                    results.tell(item)
                    continue
                if output is None:
                    output = stack.enter_context(SampleOutput(options))
                try:
                    output.write(item)
                except SampleError as error:
                    shard = mask_url(item["__url__"])
                    results.tell(Finding("error", "not-written", cli_message(error), shard, key=item["__key__"]))
        if output is None:
            say(f"no good sample: {printable(mask_url(target))} is not written")
        else:
            count += output.count
    wrote = f"wrote {counted(count, 'good sample')} to {printable(arguments.fix)}"
    say(f"{wrote}, left out {counted(results.samples['bad'], 'bad one')}")
    if lost := results.counts["note", "left-out"] + results.counts["error", "not-written"]:
        runs = counted(lost, "run of members was", "runs of members were")
        say(f"lost: {runs} left out although whole (see the report)")
    return lost


def repaired_samples(url: str, plan: RepairPlan, rules: ValidationRules) -> _Items:
    """Reads a shard again and yields its good samples in order.

    If the members of a sample are not next to each other, their runs are joined at the last one. All must be good; one
    with another content for the same field than those before it is left out. Until then the runs are in memory: sort a
    large shard first if most of its keys come back. A note follows each run that was joined, or left out although it
    is whole. Raises ShardFormatError at the end if the shard has changed, or could not be read as far as before.
    """
    left = dict(plan.runs)  # runs still to come of keys that come back: for runs of a, b and a it is {"a": 2}
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
        else:  # the runs of a key are joined, unless they contradict each other
            before = held.setdefault(key, {})
            others = [field for field, value in item.sample.items() if field in before and before[field] != value]
            if others:
                different = f"the key {key!r} comes back with different content for {', '.join(others)}"
                yield _note(item, "left-out", f"{different}: the first is kept, these members are left out")
            else:
                if before:
                    yield _note(item, "joined", f"members of sample {key!r} are joined with earlier ones")
                before.update(item.sample)
            if not left[key]:
                yield held.pop(key)
    count = validation.report.plan.count
    if count != plan.count or not is_same or any(left.values()):
        what = f"shard {validation.shard} is not the same on a second reading: {plan.count:,} samples before,"
        cure = "Repair it when nothing changes it, or repair a copy"
        raise ShardFormatError(f"{what} {count:,} now. {cure}", shard=validation.shard)


def _note(item: CheckedSample, kind: str, message: str) -> Finding:
    shard = mask_url(item.sample["__url__"])
    return Finding("note", kind, message, shard, key=item.sample["__key__"], offset=item.offset)


COMMAND = Command(__doc__, _add_arguments, _run)
