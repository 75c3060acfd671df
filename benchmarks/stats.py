"""What a loader's figures cost: `stats()` is always on, so the same epochs are run with what collects it and without.

    python benchmarks/stats.py [--quick] [--kind KIND ...] [--rounds N] [--json FILE] [--chart FILE]

"On" is the package as it is. "Off" takes out the thread that looks at stacks, the clocks of `next(loader)` and of
sources, and the snapshots. CPU time is that of this program and of its workers, over all epochs of a loader from its
first item to the end of its workers: other programs have less influence on it than on the time of a clock. Each round
has a new loader for both, and every second round begins with the other one.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

from harness import Contender, Run, compare, finish, parse, run_rounds
from report import Report, Table
from torch.utils.data import IterDataPipe
from workers import batched, count_rows, read_shards

from torchdata_wds import WdsLoader
from torchdata_wds.storage.meters import Meter
from torchdata_wds.workers.stats.sampling import sampler
from torchdata_wds.workers.stats.sampling.tally import Tally
from torchdata_wds.workers.stats.wait_clock import WaitClock

COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "CPU µs/sample": "{microseconds:,.2f}",
    "more than off": "{overhead:+.2f} %",
}
TITLE = "Figures on and off: CPU time a sample, medians, and the ratio of medians"


class Case(NamedTuple):
    """What is run.

    Attributes:
        graph: Its last pipe.
        workers: How many workers run it.
        epochs: How many epochs a round has.
        size: How many samples an item holds.
    """

    graph: IterDataPipe[Any]
    workers: int
    epochs: int
    size: Callable[[Any], int]


def one(_: Any) -> int:
    """An item that is a sample."""
    return 1


def cases(arguments: argparse.Namespace) -> dict[str, Case]:
    """What is run, by the name of its kind."""
    quick = arguments.quick
    batch, images, epochs, few = (8, 4, 2, 1) if quick else (64, 32, 10, 2)
    text = read_shards("text", 4, arguments)
    decoded = read_shards("images", 4, arguments).wds_decode("rgb8").wds_to_tuple("jpg", "cls")
    return {
        "text": Case(text, 0, epochs, one),
        f"text, batches of {batch}": Case(batched(text, batch), 0, epochs, count_rows),
        f"text, batches of {batch}, 2 workers": Case(batched(text, batch), 2, epochs, count_rows),
        "images to rgb8": Case(decoded, 0, few, one),
        f"images to rgb8, batches of {images}, 2 workers": Case(batched(decoded, images), 2, few, count_rows),
    }


def never_due(clock: WaitClock, begin: Callable[[WaitClock], None] = WaitClock.__init__) -> None:
    """A clock that measures nothing."""
    begin(clock)
    clock.due = 1 << 62


def read_unmeasured(_: Meter, read: Callable[[Any], Any], argument: Any) -> Any:
    """What a meter does, without its clock."""
    return read(argument) or 0


@contextmanager
def turned_off() -> Iterator[None]:
    """Takes out what collects figures, also in workers that are forked meanwhile."""
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    with ExitStack() as stack:
        for place, name, replacement in (
            (sampler, "watch", nothing),
            (Tally, "_tell", nothing),
            (WaitClock, "__init__", never_due),
            (Meter, "read_into", read_unmeasured),
            (Meter, "read", lambda _, read, size: read(size) or b""),
            (Meter, "add", nothing),
        ):
            stack.enter_context(patch.object(place, name, replacement))
        yield


def cpu_seconds() -> float:
    """The CPU time of this process, and of its children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def run_on(case: Case) -> Run:
    """Runs the epochs of one loader."""
    samples = 0
    begun = cpu_seconds()
    with WdsLoader(
        case.graph, case.workers, seed=1, multiprocessing_context="fork" if case.workers else None
    ) as loader:
        for _ in range(case.epochs):
            samples += sum(map(case.size, loader))
    return Run(cpu_seconds() - begun, samples)


def run_off(case: Case) -> Run:
    """The same without figures."""
    with turned_off():
        return run_on(case)


def measure(kinds: Iterable[str], arguments: argparse.Namespace) -> Table:
    """The rows of all kinds."""
    rows = []
    for kind in kinds:
        case = cases(arguments)[kind]
        run_on(case)  # takes memory for the first time
        contenders = [Contender("on", partial(run_on, case)), Contender("off", partial(run_off, case))]
        found = compare(kind, run_rounds(kind, contenders, arguments.rounds), base="off")
        rows += [{**row, "overhead": 100 * (1 / row["ratio"] - 1)} for row in found]
    return Table(TITLE, COLUMNS, rows, "microseconds", "CPU µs/sample")


if __name__ == "__main__":
    arguments = parse(__doc__, rounds=9, add=lambda parser: parser.add_argument("--kind", action="append"))
    report = Report("stats", quick=arguments.quick)
    report.tables.append(measure(arguments.kind or cases(arguments), arguments))
    finish(report, arguments)
