"""What a loader's figures cost: `stats()` is always on, so the same epochs are run with what collects it and without.

    python benchmarks/stats.py [--quick] [--kind KIND ...] [--rounds N] [--json FILE] [--chart FILE]

"On" is the package as it is. "Off" takes out the thread that looks at stacks, the clocks of `next(loader)` and of
sources, and the snapshots. "Off again" is a second one without, and differs from the first by the scatter alone. They
take turns in one loader, an epoch each, every second turn in the other order, so that a machine that is slower for a
while is so for all; each epoch is compared with the mean of the two without figures of the same turn. The CPU time is
that of this process and of the loader's workers: other programs have less influence on it than on the time of a
clock. What the imports left in memory is hidden from the garbage collector, which otherwise takes a tenth of a second
for it in some of the epochs.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes import c_bool
from functools import partial
from multiprocessing import active_children
from multiprocessing.sharedctypes import RawValue
from statistics import mean, median
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
    "more than off": "{overhead:+.2f}%",
}
TITLE = "Figures on and off: CPU time a sample, medians, and the median of the ratios to both epochs of a turn without"


class Case(NamedTuple):
    """What is run.

    Attributes:
        graph: Its last pipe.
        workers: How many workers run it.
        epochs: How many epochs each loader has in a round.
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
    batch, images, epochs, few = (8, 4, 2, 1) if quick else (64, 32, 20, 4)
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


class Switch:
    """Turns what collects figures on and off, also in workers that are forked within `installed`."""

    def __init__(self) -> None:
        self._is_on = RawValue(c_bool, True)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Puts the switch in the place of everything that it turns off."""
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        with ExitStack() as stack:
            for place, name, other in (
                (sampler, "watch", nothing),
                (Tally, "_tell", nothing),
                (WaitClock, "__init__", never_due),
                (Meter, "read_into", read_unmeasured),
                (Meter, "read", lambda _, read, size: read(size) or b""),
                (Meter, "add", nothing),
            ):
                stack.enter_context(patch.object(place, name, self._between(getattr(place, name), other)))
            yield

    def _between(self, on: Callable[..., Any], off: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            return (on if self._is_on.value else off)(*arguments)

        return call

    def turn(self, *, is_on: bool) -> None:
        """Turns it all on or off, in all processes."""
        self._is_on.value = is_on


class Epochs:
    """A loader whose epochs are run with figures or without; its workers are the same in both cases."""

    def __init__(self, loader: WdsLoader, case: Case, switch: Switch) -> None:
        self._loader, self._size, self._switch = loader, case.size, switch
        gc.collect()
        gc.freeze()
        self._clocks = [time.CLOCK_PROCESS_CPUTIME_ID]
        self.run(is_on=True)  # starts the workers, and takes memory for the first time
        self._clocks += [cpu_clock(child.pid) for child in active_children() if child.pid]

    def run(self, *, is_on: bool) -> Run:
        """Runs an epoch."""
        self._switch.turn(is_on=is_on)
        begun = self._cpu_seconds()
        samples = sum(map(self._size, self._loader))
        return Run(self._cpu_seconds() - begun, samples)

    def _cpu_seconds(self) -> float:
        return sum(map(time.clock_gettime, self._clocks))


def loader_of(case: Case) -> WdsLoader:
    """Makes a loader, whose workers start with its first epoch."""
    return WdsLoader(case.graph, case.workers, seed=1, multiprocessing_context="fork" if case.workers else None)


def cpu_clock(process: int) -> int:
    """The number that Linux gives the clock of a process's CPU time; see clock_getcpuclockid(3)."""
    return (~process << 3) | 2


def measure(kinds: Iterable[str], arguments: argparse.Namespace) -> Table:
    """The rows of all kinds."""
    rows = []
    for kind in kinds:
        case = cases(arguments)[kind]
        switch = Switch()
        with switch.installed(), loader_of(case) as loader:
            epochs = Epochs(loader, case, switch)
            on, off = partial(epochs.run, is_on=True), partial(epochs.run, is_on=False)
            contenders = [Contender("on", on), Contender("off", off), Contender("off again", off)]
            runs = run_rounds(kind, contenders, arguments.rounds * case.epochs)
        found = compare(kind, runs, base="off")
        costs = {row["contender"]: row["rounds"] for row in found}
        without = list(map(mean, zip(costs["off"], costs["off again"], strict=True)))
        for row in found:
            ratio = median(now / off for now, off in zip(row["rounds"], without, strict=True))
            rows.append({**row, "overhead": 100 * (ratio - 1)})
    return Table(TITLE, COLUMNS, rows, "microseconds", "CPU µs/sample")


if __name__ == "__main__":
    arguments = parse(__doc__, rounds=9, add=lambda parser: parser.add_argument("--kind", action="append"))
    report = Report("stats", quick=arguments.quick)
    report.tables.append(measure(arguments.kind or cases(arguments), arguments))
    finish(report, arguments)
