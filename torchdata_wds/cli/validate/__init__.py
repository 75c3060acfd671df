"""``validate``: everything that is wrong with shards, and the samples that are good."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torchdata_wds.cli.arguments.inputs import add_input_arguments, list_all_inputs, part_of, tell_part
from torchdata_wds.cli.arguments.outputs import SampleOutput, add_rekey_argument
from torchdata_wds.cli.command import (
    Command,
    UsageError,
    counted,
    in_our_words,
    let_go_of_output,
    positive_number,
    say,
    whole_number,
)
from torchdata_wds.cli.jobs import map_in_order
from torchdata_wds.cli.map.target_names import is_target_pattern, name_targets
from torchdata_wds.cli.printing import printable
from torchdata_wds.cli.progress_bar import Progress, paused, stdout_is_apart
from torchdata_wds.cli.validate.decoding import FieldChecker
from torchdata_wds.cli.validate.findings import Finding
from torchdata_wds.cli.validate.repairing import repaired_samples
from torchdata_wds.cli.validate.shard_reports import RepairPlan, ShardReport, Totals, report_shard
from torchdata_wds.cli.validate.shard_validation import ValidationRules
from torchdata_wds.errors import SampleError, ShardListError
from torchdata_wds.storage import can_reopen, mask_url, open_target
from torchdata_wds.storage.urls import STDIN, local_path, scheme_of

__all__ = ["COMMAND"]


_MOST = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``validate``."""
    add_input_arguments(parser, slices=False, errors=False)
    parser.add_argument("--decode", action="store_true", help="decode each field too: images, media, no pickles")
    parser.add_argument("--strict", action="store_true", help="exit with 1 at warnings as well")
    parser.add_argument("--json", action="store_true", help="a JSON object a line, the summary last")
    parser.add_argument(
        "--most",
        type=whole_number,
        default=_MOST,
        metavar="N",
        help=f"show N findings of a kind and shard, and count the others (default: {_MOST})",
    )
    parser.add_argument(
        "-p", "--parallel", type=positive_number, default=1, metavar="N", help="read N shards at once, in processes"
    )
    group = parser.add_argument_group("repair")
    group.add_argument(
        "--fix",
        metavar="OUT",
        help="write the good samples: to one archive, or one for each shard: 'folder/', or a name with {name} (the "
        "shard's, without .tar and the like) or {shard:06d} (its number)",
    )
    group.add_argument("--force", action="store_true", help="replace what exists")
    add_rekey_argument(group)


def run(arguments: argparse.Namespace) -> int:
    """Validates the shards, and returns 1 if there is an error in one."""
    if arguments.fix is None and (arguments.force or arguments.rekey is not None):
        raise UsageError("--force and --rekey are about the archive that --fix writes")
    listed = list_all_inputs(arguments)
    tell_part(len(listed), arguments.part)
    urls = part_of(listed, arguments.part)
    repair = None if arguments.fix is None else Repair(arguments, urls, listed)
    rules = _rules(arguments)
    printer = Printer(arguments.json, goes_on=repair is not None)
    totals = Totals()
    plans = []
    processes = 1 if STDIN in urls else arguments.parallel
    reports = map_in_order(partial(report_shard, rules=rules, most=arguments.most), urls, processes)
    with closing(reports), _progress(len(urls)) as progress:  # type: ignore[type-var]
        for report in reports:
            printer.print_report(report)
            totals.take(report)
            if repair is not None:
                plans.append(report.plan)
            progress.advance()
    for finding in totals.unlike_others(arguments.most):
        printer.print_finding(finding)
    lost = 0 if repair is None else repair.write(plans, rules, printer, totals)
    printer.print_summary(totals)
    is_bad = totals.count_of("error") or lost or (arguments.strict and totals.count_of("warning"))
    return 1 if is_bad else 0


COMMAND = Command(
    "read everything, report every damage and oddity with its place, and write the good samples",
    add_arguments,
    run,
    """
    wds validate --decode 'train-{000000..000003}.tar'
    wds validate damaged.tar --fix repaired.tar
    wds validate --strict repaired.tar
    """,
)


def _progress(total: int) -> Progress:
    hidden = not (sys.stdout.isatty() or stdout_is_apart())
    return Progress("shards", total, only_on_terminal=True, hidden=hidden)


def _rules(arguments: argparse.Namespace) -> ValidationRules:
    return ValidationRules(
        arguments.keys,
        not arguments.keep_case,
        arguments.on_duplicate,
        arguments.on_reappearing,
        not arguments.no_end_marker,
        arguments.concatenated,
        FieldChecker() if arguments.decode else None,
        max_member_bytes=int(arguments.max_member_bytes),
    )


class Printer:
    """Prints findings to standard output.

    Args:
        as_json: Whether each is a JSON object.
        goes_on: Whether there is work left to do when nobody reads them any more.
    """

    def __init__(self, as_json: bool, *, goes_on: bool = False) -> None:
        self._as_json = as_json
        self._goes_on = goes_on

    def print_report(self, report: ShardReport) -> None:
        """Prints the findings of a shard that are kept, and how many there are besides."""
        for finding in report.findings:
            self.print_finding(finding)
        for (level, kind), count in report.left_out().items():
            if self._as_json:
                self._print(json.dumps({"level": level, "kind": kind, "shard": report.shard, "more": count}))
            else:
                self._print(f"{printable(report.shard)}: {level}: {kind}: {count:,} more")

    def print_finding(self, finding: Finding) -> None:
        """Prints a finding."""
        message = in_our_words(finding.message)
        if self._as_json:
            content = {**finding._asdict(), "message": message}
            self._print(json.dumps({name: value for name, value in content.items() if value is not None}))
            return
        place = "" if finding.offset is None else f":{finding.offset}"
        self._print(printable(f"{finding.shard}{place}: {finding.level}: {finding.kind}: {message}"))

    def print_summary(self, totals: Totals) -> None:
        """Prints how many findings of each kind, shards and samples there are."""
        counts = sorted(totals.counts.items())
        if self._as_json:
            found: dict[str, dict[str, int]] = {}
            for (level, kind), count in counts:
                found.setdefault(level, {})[kind] = count
            shards = {"good": totals.good, "bad": totals.damaged}
            samples = {"good": totals.sound, "bad": totals.bad}
            self._print(json.dumps({"level": "summary", "counts": found, "shards": shards, "samples": samples}))
            return
        for (level, kind), count in counts:
            self._print(f"{level:<8} {kind:<18} {count:>12,}")
        for what, good, bad in (
            ("shards", totals.good, totals.damaged),
            ("samples", totals.sound, totals.bad),
        ):
            self._print(f"{what:<8} {'good':<18} {good:>12,}")
            self._print(f"{what:<8} {'bad':<18} {bad:>12,}")

    def _print(self, line: str) -> None:
        try:
            with paused():
                print(line, flush=True)
        except BrokenPipeError:
            if not self._goes_on:
                raise
            let_go_of_output()


class Repair:
    """Writes the good samples of shards that have been validated.

    Args:
        arguments: The command's.
        urls: The shards.
        listed: Those of all parts, by which outputs are named.

    Raises:
        UsageError: if a shard cannot be read twice, or two would be written to one file.
        ShardOpenError: if a file exists or cannot be written.
    """

    def __init__(self, arguments: argparse.Namespace, urls: Sequence[str], listed: Sequence[str]) -> None:
        if arguments.fix in ("", STDIN):
            raise UsageError("--fix needs a file or a folder: the report has standard output")
        for url in urls:
            if not can_reopen(url):
                raise UsageError(
                    f"--fix reads each shard twice, and {mask_url(url)} can be read only once: name a file"
                )
        self._arguments = arguments
        self._urls = urls
        self._count = 0
        self._lost = 0
        self._targets: Sequence[str] | None = None
        if is_target_pattern(arguments.fix):
            self._targets = part_of(_targets(arguments.fix, listed), arguments.part)
        for target in [arguments.fix] if self._targets is None else self._targets:
            folder = _local_folder(target)
            # a command would see an empty shard
            if scheme_of(target) != "pipe" and (folder is None or self._targets is None or folder.exists()):
                open_target(target, overwrite=arguments.force).abort()  # else it would fail when all is read

    def write(self, plans: list[RepairPlan], rules: ValidationRules, printer: Printer, totals: Totals) -> int:
        """Writes them.

        Args:
            plans: What validation has found in each shard.
            rules: By which rules.
            printer: Prints what else is joined or left out.
            totals: Where that is counted.

        Returns:
            How many could not be written although they are good.
        """
        self._tell = partial(_tell, printer, totals)
        parts = [self._samples(url, plan, rules) for url, plan in zip(self._urls, plans, strict=True)]
        if self._targets is None:
            self._write(self._arguments.fix, chain.from_iterable(parts))
        else:
            for target, samples in zip(self._targets, parts, strict=True):
                if (folder := _local_folder(target)) is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                self._write(target, samples)
        say(
            f"wrote {counted(self._count, 'good sample')} to {printable(self._arguments.fix)}, "
            f"left out {counted(totals.bad, 'bad one')}"
        )
        if self._lost:
            say(
                f"lost: {counted(self._lost, 'run of members was', 'runs of members were')} left out although whole "
                "(see the report)"
            )
        return self._lost

    def _samples(self, url: str, plan: RepairPlan, rules: ValidationRules) -> Iterator[Mapping[str, Any]]:
        for item in repaired_samples(url, plan, rules):
            if isinstance(item, Finding):
                self._lost += item.kind == "left-out"
                self._tell(item)
            else:
                yield item

    def _write(self, target: str, samples: Iterable[Mapping[str, Any]]) -> None:
        """Writes an archive; none without samples."""
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
                    self._tell(Finding("error", "not-written", str(error), shard, key=sample["__key__"]))
        self._count += output.count


def _tell(printer: Printer, totals: Totals, finding: Finding) -> None:
    totals.counts[finding.level, finding.kind] += 1
    printer.print_finding(finding)


def _targets(pattern: str, urls: Sequence[str]) -> list[str]:
    """Names an archive for each shard."""
    try:
        return name_targets(urls, pattern, in_place=True)
    except ShardListError as error:
        raise UsageError(f"--fix: {error}") from error


def _local_folder(target: str) -> Path | None:
    return Path(local_path(target)).parent if scheme_of(target) in ("", "file") else None
