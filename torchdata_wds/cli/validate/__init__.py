"""``validate``: everything that is wrong with shards, and the samples that are good."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from functools import partial

from torchdata_wds.cli.command import Command, UsageError, add_rekey, positive_number, whole_number
from torchdata_wds.cli.inputs import add_input_arguments, list_all_inputs, part_of, tell_part
from torchdata_wds.cli.jobs import map_in_order
from torchdata_wds.cli.terminal import Progress, discard_output, paused, printable, stdout_is_apart
from torchdata_wds.cli.validate.decoding import FieldChecker
from torchdata_wds.cli.validate.findings import Finding, ShardReport, Totals
from torchdata_wds.cli.validate.repairing import Repair
from torchdata_wds.cli.validate.shard_validation import ShardValidation, ValidationRules
from torchdata_wds.storage.urls import STDIN

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
    add_rekey(group)


def run(arguments: argparse.Namespace) -> int:
    """Validates the shards, and returns 1 if there is an error in one."""
    if arguments.fix is None and (arguments.force or arguments.rekey is not None):
        raise UsageError("--force and --rekey are about the archive that --fix writes")
    listed = list_all_inputs(arguments)
    tell_part(len(listed), arguments.part)
    urls = part_of(listed, arguments.part)
    repair = None if arguments.fix is None else Repair(arguments, urls, listed)
    rules = ValidationRules(
        arguments.keys,
        not arguments.keep_case,
        arguments.on_duplicate,
        arguments.on_reappearing,
        not arguments.no_end_marker,
        arguments.concatenated,
        FieldChecker() if arguments.decode else None,
        max_member_bytes=int(arguments.max_member_bytes),
    )
    printer = Printer(arguments.json, goes_on=repair is not None)
    totals = Totals()
    plans = []
    processes = 1 if STDIN in urls else arguments.parallel
    reports = map_in_order(partial(report_shard, rules=rules, most=arguments.most), urls, processes)
    hidden = not (sys.stdout.isatty() or stdout_is_apart())
    progress = Progress("shards", len(urls), only_on_terminal=True, hidden=hidden)
    with closing(reports), progress:  # type: ignore[type-var]
        for report in reports:
            printer.print_report(report)
            totals.take(report)
            if repair is not None:
                plans.append(report.plan)
            progress.advance()
    for finding in totals.unlike_others(arguments.most):
        printer.print_finding(finding)

    def tell(finding: Finding) -> None:
        totals.counts[finding.level, finding.kind] += 1
        printer.print_finding(finding)

    lost = 0 if repair is None else repair.write(plans, rules, tell, totals.bad)
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


def report_shard(url: str, rules: ValidationRules, most: int) -> ShardReport:
    """Validates a shard, and keeps the first `most` findings of each kind."""
    validation = ShardValidation(url, rules)
    report = ShardReport(validation.shard)
    plan = report.plan
    # only where a key must not come back are its runs of members one sample, lost as a whole or joined
    is_joined = rules.on_reappearing == "error"
    for item in validation:
        if isinstance(item, Finding):
            report.add(item, most)
            continue
        key = item.sample["__key__"]
        if not item.is_sound:
            plan.bad.add(item.number)
            if is_joined:
                plan.lost.add(key)
        if is_joined and item.reappears:
            plan.runs[key] = plan.runs.get(key, 1) + 1
    if is_joined and validation.cut is not None:
        plan.lost.add(validation.cut)
    report.sound, report.bad = validation.sound, validation.bad
    plan.count = report.sound + report.bad
    report.field_sets = validation.field_sets
    return report


class Printer:
    """Prints findings as text or JSON; with `goes_on`, a reader that goes away does not end the program."""

    def __init__(self, as_json: bool, *, goes_on: bool = False) -> None:
        self._as_json = as_json
        self._goes_on = goes_on

    def print_report(self, report: ShardReport) -> None:
        """Prints the findings of a shard that are kept, and the number of the others."""
        for finding in report.findings:
            self.print_finding(finding)
        for (level, kind), count in report.left_out().items():
            if self._as_json:
                self._print(json.dumps({"level": level, "kind": kind, "shard": report.shard, "more": count}))
            else:
                self._print(f"{printable(report.shard)}: {level}: {kind}: {count:,} more")

    def print_finding(self, finding: Finding) -> None:
        """Prints a finding."""
        if self._as_json:
            self._print(json.dumps({name: value for name, value in finding._asdict().items() if value is not None}))
            return
        place = "" if finding.offset is None else f":{finding.offset}"
        self._print(printable(f"{finding.shard}{place}: {finding.level}: {finding.kind}: {finding.message}"))

    def print_summary(self, totals: Totals) -> None:
        """Prints the numbers of findings of each kind, of shards and of samples."""
        counts = sorted(totals.counts.items())
        both = {
            "shards": {"good": totals.good, "bad": totals.damaged},
            "samples": {"good": totals.sound, "bad": totals.bad},
        }
        if self._as_json:
            found: dict[str, dict[str, int]] = {}
            for (level, kind), count in counts:
                found.setdefault(level, {})[kind] = count
            self._print(json.dumps({"level": "summary", "counts": found, **both}))
            return
        for (level, kind), count in counts:
            self._print(f"{level:<8} {kind:<18} {count:>12,}")
        for what, numbers in both.items():
            for kind, count in numbers.items():
                self._print(f"{what:<8} {kind:<18} {count:>12,}")

    def _print(self, line: str) -> None:
        try:
            with paused():
                print(line, flush=True)
        except BrokenPipeError:
            if not self._goes_on:
                raise
            discard_output()
