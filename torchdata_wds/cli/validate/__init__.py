"""``validate``: everything that is wrong with shards, and the samples that are good."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from functools import partial
from typing import Any

from torchdata_wds.cli.command import (
    Command,
    UsageError,
    add_force,
    add_parallel,
    add_rekey,
    flag,
    option,
    whole_number,
)
from torchdata_wds.cli.inputs import add_input_arguments, list_all_inputs, part_of, tell_part
from torchdata_wds.cli.jobs import map_in_order
from torchdata_wds.cli.terminal import Progress, discard_output, paused, printable, stdout_is_apart
from torchdata_wds.cli.validate.checks import FieldChecker
from torchdata_wds.cli.validate.findings import Finding, ShardReport, Totals
from torchdata_wds.cli.validate.repairing import Repair
from torchdata_wds.cli.validate.shard_validation import ValidationRules, report_shard
from torchdata_wds.storage.urls import STDIN

_MOST = 20


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser, slices=False, errors=False)
    flag(parser, "--decode", "decode each field too: images, media, no pickles")
    flag(parser, "--strict", "exit with 1 at warnings as well")
    flag(parser, "--json", "a JSON object a line, the summary last")
    text = f"show N findings of a kind and shard, and count the others (default: {_MOST})"
    option(parser, "--most", "N", text, whole_number, default=_MOST)
    add_parallel(parser, "read N shards at once, in processes")
    group = parser.add_argument_group("repair")
    text = (
        "write the good samples: to one archive, or one for each shard: 'folder/', or a name with {name} (the "
        "shard's, without .tar and the like) or {shard:06d} (its number)"
    )
    option(group, "--fix", "OUT", text)
    add_force(group)
    add_rekey(group)


def _run(arguments: argparse.Namespace) -> int:
    """Validates the shards, and returns 1 if there is an error in one."""
    if arguments.fix is None and (arguments.force or arguments.rekey is not None):
        raise UsageError("--force and --rekey are about the archive that --fix writes")
    listed = list_all_inputs(arguments)
    tell_part(len(listed), arguments.part)
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
    repair = None if arguments.fix is None else Repair(arguments, urls, listed, rules)
    printer = _Printer(arguments.json, goes_on=repair is not None)
    totals = Totals()
    plans = []
    processes = 1 if STDIN in urls else arguments.parallel
    reports = map_in_order(partial(report_shard, rules=rules, most=arguments.most), urls, processes)
    hidden = not (sys.stdout.isatty() or stdout_is_apart())
    progress = Progress("shards", len(urls), only_on_terminal=True, hidden=hidden)
    with closing(reports), progress:
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

    lost = 0 if repair is None else repair.write(plans, tell, totals.bad)
    printer.print_summary(totals)
    is_bad = totals.count_of("error") or lost or (arguments.strict and totals.count_of("warning"))
    return 1 if is_bad else 0


class _Printer:
    """Prints findings as text or JSON; with `goes_on`, a reader that goes away does not end the program."""

    def __init__(self, as_json: bool, *, goes_on: bool) -> None:
        self._as_json = as_json
        self._goes_on = goes_on

    def print_report(self, report: ShardReport) -> None:
        """Prints the findings of a shard that are kept, and the number of the others."""
        for finding in report.findings:
            self.print_finding(finding)
        for (level, kind), count in report.left_out.items():
            record = {"level": level, "kind": kind, "shard": report.shard, "more": count}
            self._print(record, f"{report.shard}: {level}: {kind}: {count:,} more")

    def print_finding(self, finding: Finding) -> None:
        """Prints a finding."""
        record = {name: value for name, value in finding._asdict().items() if value is not None}
        place = "" if finding.offset is None else f":{finding.offset}"
        self._print(record, f"{finding.shard}{place}: {finding.level}: {finding.kind}: {finding.message}")

    def print_summary(self, totals: Totals) -> None:
        """Prints the numbers of findings of each kind, of shards and of samples."""
        counts: dict[str, dict[str, int]] = {}
        for (level, kind), count in sorted(totals.counts.items()):
            counts.setdefault(level, {})[kind] = count
        both = {
            "shards": {"good": totals.good, "bad": totals.damaged},
            "samples": {"good": totals.sound, "bad": totals.bad},
        }
        rows = [(what, *row) for what, numbers in (counts | both).items() for row in numbers.items()]
        lines = [f"{what:<8} {kind:<18} {count:>12,}" for what, kind, count in rows]
        self._print({"level": "summary", "counts": counts, **both}, *lines)

    def _print(self, record: dict[str, Any], *lines: str) -> None:
        text = json.dumps(record) if self._as_json else "\n".join(map(printable, lines))
        try:
            with paused():
                print(text, flush=True)
        except BrokenPipeError:
            if not self._goes_on:
                raise
            discard_output()


COMMAND = Command(
    "read everything, report every damage and oddity with its place, and write the good samples",
    _add_arguments,
    _run,
    """
    wds validate --decode 'train-{000000..000003}.tar'
    wds validate damaged.tar --fix repaired.tar
    wds validate --strict repaired.tar
    """,
)
