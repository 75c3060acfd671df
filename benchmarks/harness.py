"""How the benchmarks measure: contenders in turn, several rounds, ratios of medians.

Importing this module first makes the scripts measure the checkout that they stand in, installed or not.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Self

from report import Report, Row, Table, note
from shards import DEFAULT_FOLDER

__all__ = [
    "ROOT",
    "Apart",
    "Contender",
    "Run",
    "compare",
    "finish",
    "measure_kinds",
    "parse",
    "run_rounds",
    "timed",
    "timed_from",
]

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # for children

_COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "samples/s": "{samples_per_second:,.0f}",
    "MB/s": "{megabytes_per_second:,.0f}",
    "ours ÷ it": "{ratio:.3g}",
    "by round": "{lowest:.3g}-{highest:.3g}",
}
_FIGURES = "medians; the ratio of medians, and the lowest and highest ratio of a round"


class Run(NamedTuple):
    """One measurement.

    Attributes:
        seconds: How long it took.
        samples: How many samples that were.
    """

    seconds: float
    samples: int


class Contender(NamedTuple):
    """Something that is measured against others.

    Attributes:
        name: Its name in the table; "ours" or something that begins so for this package.
        run: Measures it once.
    """

    name: str
    run: Callable[[], Run]


def parse(
    description: str | None, *, rounds: int = 7, add: Callable[[argparse.ArgumentParser], Any] | None = None
) -> argparse.Namespace:
    """Reads a benchmark's arguments.

    Args:
        description: The script's docstring.
        rounds: The default number of rounds.
        add: Adds arguments of the script's own.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few samples, two rounds: to see that it runs")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"how many rounds (default: {rounds})")
    parser.add_argument(
        "--folder", type=Path, default=DEFAULT_FOLDER, help="where shards are kept (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="write a bar chart there, as PNG (needs matplotlib)")
    if add is not None:
        add(parser)
    arguments = parser.parse_args()
    if arguments.rounds is None:
        arguments.rounds = 2 if arguments.quick else rounds
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


def finish(report: Report, arguments: argparse.Namespace) -> None:
    """Prints the report and writes the files that were asked for."""
    report.print()
    if arguments.json is not None:
        report.write_json(arguments.json)
    if arguments.chart is not None:
        report.write_chart(arguments.chart)


def measure_kinds(
    name: str,
    description: str | None,
    kinds: Iterable[str],
    measure: Callable[[str, Report, argparse.Namespace], list[Row]],
    title: str,
) -> None:
    """Runs a benchmark that has rows for each kind of samples, or for those that are asked for.

    Args:
        name: The benchmark's name.
        description: The script's docstring.
        kinds: The kinds that there are.
        measure: Makes the rows of a kind.
        title: What the table is about.
    """
    kinds = tuple(kinds)
    arguments = parse(description, add=lambda parser: parser.add_argument("--kind", action="append", choices=kinds))
    report = Report(name, quick=arguments.quick)
    rows = [row for kind in arguments.kind or kinds for row in measure(kind, report, arguments)]
    report.tables.append(Table(f"{title}: {_FIGURES}", _COLUMNS, rows, "samples_per_second", "samples/s"))
    finish(report, arguments)


def timed(items: Callable[[], Iterable[Any]]) -> Run:
    """Measures making an iterable and iterating it to its end."""
    samples = 0
    start = perf_counter()
    for _ in items():
        samples += 1
    return Run(perf_counter() - start, samples)


def timed_from(start: int, items: Iterable[Any], size: Callable[[Any], int] | None = None) -> Run:
    """Measures an epoch from a number of items on: starting it, and what was made ahead, is left out.

    Args:
        start: How many items come before the clock starts.
        items: The epoch.
        size: The number of samples in an item; by default an item is one.
    """
    samples, begun = 0, perf_counter()
    for number, item in enumerate(items, 1):
        if number > start:
            samples += 1 if size is None else size(item)
        else:
            begun = perf_counter()
    return Run(perf_counter() - begun, samples)


def run_rounds(what: str, contenders: Sequence[Contender], rounds: int) -> dict[str, list[Run]]:
    """Runs all contenders one after the other, again and again, each round in another order.

    Every second round is the one before it backwards, so that no contender always runs after the same other one.
    """
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        note(f"{what}: round {number + 1} of {rounds}")
        turn = number // 2 % len(contenders)
        order = [*contenders[turn:], *contenders[:turn]]
        for contender in order[::-1] if number % 2 else order:
            gc.collect()
            runs[contender.name].append(contender.run())
    return runs


class Apart:
    """Functions that are called in a process of their own, as forked when this is made, one call after the other.

    What a library does to its process, as to how memory is freed, changes nothing for the others there.
    """

    def __init__(self, **functions: Callable[[], Any]) -> None:
        fork = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(1, fork, _functions.update, (functions,))
        self._pool.submit(os.getpid).result()

    def call(self, name: str) -> Any:
        """Calls one of the functions; its result must be picklable."""
        return self._pool.submit(_call, name).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


_functions: dict[str, Callable[[], Any]] = {}  # those of this process


def _call(name: str) -> Any:
    gc.collect()
    return _functions[name]()


def compare(kind: str, runs: dict[str, list[Run]], base: str | None = None) -> list[Row]:
    """Rows of medians, and of ratios to one contender.

    Args:
        kind: What was read.
        runs: The runs of each contender, by round.
        base: The contender whose speed is divided by the others'; by default the first.

    Returns:
        Rows with `samples_per_second`, `microseconds` per sample, `ratio` of medians, the `lowest` and `highest` ratio
        of a round, and the `rounds` in seconds per sample.
    """
    costs = {name: [run.seconds / run.samples for run in of_name] for name, of_name in runs.items()}
    base_costs = costs[base or next(iter(costs))]
    rows = []
    for name, of_name in costs.items():
        ratios = [cost / base_cost for cost, base_cost in zip(of_name, base_costs, strict=True)]
        rows.append(
            {
                "kind": kind,
                "contender": name,
                "samples_per_second": 1 / median(of_name),
                "microseconds": 1e6 * median(of_name),
                "ratio": median(of_name) / median(base_costs),
                "lowest": min(ratios),
                "highest": max(ratios),
                "rounds": of_name,
            }
        )
    return rows
