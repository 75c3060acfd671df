"""Workers in actors of a Ray cluster against workers in local processes: speed, steps, and what a worker costs.

    python benchmarks/ray_pool.py [--quick] [--table speed|steps|costs] [--kind KIND] [--json FILE] [--chart FILE]

The first table has the same graphs in two workers each: of `WdsLoader`, of `WorkersReadingService`, and of `WdsLoader`
with `RayPool` in a cluster of one node, which the script starts. Each round has new workers, which run one epoch before
the timed one. That is measured from its start to its end. "CPU" is the time of all processors that the program, its
workers and Ray's own processes took: other programs on the machine have less influence on it than on the speed, and
where the workers are the bottleneck and no core is idle, the ratio of speeds is that of CPU times.

The second has the time of `next()` for batches of 10 MB, as in `workers.py`, where the main thread computes for 20 ms
before each: from local processes, from actors on the same node, and from actors on another one, which
`ray.cluster_utils.Cluster` starts on this machine.

The third has the time from making a loader to its first item in a cluster that runs, and a worker's memory after that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import harness  # first, as it makes the scripts measure this checkout
import ray
from order_large import memory_of
from ray.cluster_utils import Cluster
from report import Report, Row, Table
from torch.utils.data.datapipes.iter import IterableWrapper
from workers import IN_A_ROW, READY, WARM, Case, batched, compute, count_rows, make_batch, read_shards, time_steps

from torchdata_wds import RayPool, WdsLoader, WorkersReadingService
from torchdata_wds.workers.service import DataLoader2

WORKERS = 2
LOADER, SERVICE, ACTORS = "ours: WdsLoader", "ours: service", "ours: RayPool"
ELSEWHERE = "ours: RayPool, other node"
STORE = 500 << 20  # bytes of each node's object store
HERE, THERE = "here", "there"  # resources of this node and of the other one
COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "samples/s": "{samples_per_second:,.0f}",
    "RayPool ÷ it": "{ratio:.2f}",
    "by round": "{lowest:.2f}-{highest:.2f}",
    "CPU µs/sample": "{cpu:,.1f}",
    "its CPU ÷ RayPool's": "{cpu_ratio:.2f}",
}
TITLE = "Two workers: medians, and ratios of medians"
STEP_COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "CPU µs/step": "{microseconds:,.0f}",
    "µs/step": "{wall:,.0f}",
    "it ÷ WdsLoader": "{ratio:.2f}",
    "by round": "{lowest:.2f}-{highest:.2f}",
}
STEP_TITLE = "A step in the main process: medians of steps and rounds, and ratios of the CPU time"
COST_COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "first item, s": "{seconds:.2f}",
    "CPU s": "{cpu:.2f}",
    "private MB of a worker": "{private:,.0f}",
    "resident MB": "{resident:,.0f}",
}
COST_TITLE = "A loader of two workers: medians"


def crop(sample: tuple[Any, ...]) -> tuple[Any, ...]:
    """The middle of an image, 224 x 224."""
    image, *rest = sample
    top, left = ((side - 224) // 2 for side in image.shape[:2])
    return (image[top : top + 224, left : left + 224], *rest)


def cases(arguments: argparse.Namespace) -> dict[str, Case]:
    """The graphs by the name of their kind."""
    batch, images = (8, 4) if arguments.quick else (64, 32)
    text = read_shards("text", 4, arguments)
    decoded = read_shards("images", 4, arguments).wds_decode("rgb8").wds_to_tuple("jpg", "cls")
    return {
        "text, per item": Case(text, None),
        f"text, batches of {batch}": Case(batched(text, batch), count_rows),
        f"images to rgb8, batches of {images}": Case(batched(decoded, images), count_rows),
        f"images cropped to 224, batches of {images}": Case(batched(decoded.map(crop), images), count_rows),
    }


@contextmanager
def running(name: str, graph: Any, ahead: int = 2) -> Iterator[Iterable[Any]]:
    """A loader of a graph, whose workers end with the block."""
    if name == SERVICE:
        with DataLoader2(graph, reading_service=WorkersReadingService(WORKERS, prefetch_factor=ahead)) as service:
            yield service
        return
    resources = {THERE if name == ELSEWHERE else HERE: 1}
    pool = None if name == LOADER else RayPool(actor_options={"num_cpus": 0, "resources": resources})
    with WdsLoader(graph, WORKERS, prefetch_factor=ahead, pool=pool) as loader:
        yield loader


@contextmanager
def one_node() -> Iterator[None]:
    """A cluster of this process's own node."""
    ray.init(
        num_cpus=2 * WORKERS,
        resources={HERE: WORKERS},
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        object_store_memory=STORE,
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def two_nodes() -> Iterator[None]:
    """A cluster of this process's node and another one."""
    cluster = Cluster()
    try:
        for place in (HERE, THERE):
            cluster.add_node(
                num_cpus=2 * WORKERS,
                resources={place: WORKERS},
                include_dashboard=False,
                object_store_memory=STORE,
            )
        ray.init(cluster.address, logging_level="error", log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def descendants(process: int) -> set[int]:
    """The processes that a process has started, and theirs."""
    try:
        tasks = [*Path(f"/proc/{process}/task").iterdir()]
        children = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    except OSError:  # it has ended
        return set()
    return children.union(*map(descendants, children))


def processor_seconds() -> dict[int, float]:
    """The CPU time of this process and its descendants so far."""
    found = {}
    for process in {os.getpid(), *descendants(os.getpid())}:
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[process] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def processor_time_since(before: dict[int, float]) -> float:
    """The CPU time since then, also of processes that were started."""
    return sum(seconds - before.get(process, 0) for process, seconds in processor_seconds().items())


def measure(kind: str, case: Case, rounds: int) -> list[Row]:
    """The rows of one kind."""
    cpus: dict[str, list[float]] = {name: [] for name in (ACTORS, LOADER, SERVICE)}
    contenders = [harness.Contender(name, partial(timed_epoch, name, case, of_name)) for name, of_name in cpus.items()]
    rows = harness.compare(kind, harness.run_rounds(kind, contenders, rounds))
    base = median(cpus[ACTORS])
    for row in rows:
        cpu = median(cpus[row["contender"]])
        row |= {"cpu": 1e6 * cpu, "cpu_ratio": cpu / base, "cpu_rounds": cpus[row["contender"]]}
    return rows


def timed_epoch(name: str, case: Case, cpus: list[float]) -> harness.Run:
    """Measures the second epoch of a new loader; adds the CPU time of a sample."""
    with running(name, case.graph) as loader:
        harness.timed_from(0, loader, case.size)
        before = processor_seconds()
        run = harness.timed_from(0, loader, case.size)
        cpus.append(processor_time_since(before) / run.samples)
    return run


def measure_steps(kind: str, contenders: Iterable[str], steps: int, rounds: int) -> list[Row]:
    """The rows of the steps of some loaders."""
    graph = IterableWrapper(range(WARM + steps)).sharding_filter().map(make_batch)
    walls: dict[str, list[float]] = {name: [] for name in contenders}

    def timed(name: str, pause: Callable[[int], None]) -> harness.Run:
        with running(name, graph, READY) as loader:
            cpu, wall = time_steps(loader, steps, pause)
        walls[name].append(wall)
        return harness.Run(cpu, 1)

    runs = harness.run_rounds(kind, [harness.Contender(name, partial(timed, name, compute)) for name in walls], rounds)
    return [{**row, "wall": 1e6 * median(walls[row["contender"]])} for row in harness.compare(kind, runs)]


def measure_costs(kind: str, graph: Any, rounds: int) -> list[Row]:
    """The rows of what a worker costs."""
    memory: dict[str, list[tuple[float, float]]] = {name: [] for name in (LOADER, ACTORS)}
    cpus: dict[str, list[float]] = {name: [] for name in memory}

    def timed(name: str) -> harness.Run:
        before, begun = processor_seconds(), time.perf_counter()
        with running(name, graph) as loader:
            items = iter(loader)
            next(items)
            seconds = time.perf_counter() - begun
            cpus[name].append(processor_time_since(before))
            for _ in items:
                pass
            workers = [child.pid for child in multiprocessing.active_children() if child.pid]
            workers = workers or [process for process in descendants(os.getpid()) if is_actor(process)]
            memory[name] += map(memory_of, workers)
        return harness.Run(seconds, 1)

    runs = harness.run_rounds(kind, [harness.Contender(name, partial(timed, name)) for name in memory], rounds)
    rows = []
    for name, of_name in runs.items():
        private, resident = map(median, zip(*memory[name], strict=True))
        seconds = [run.seconds for run in of_name]
        row = {"kind": kind, "contender": name, "seconds": median(seconds), "rounds": seconds}
        row |= {"cpu": median(cpus[name]), "cpu_rounds": cpus[name]}
        rows.append({**row, "private": private, "resident": resident})
    return rows


def is_actor(process: int) -> bool:
    """Whether a process runs a loader's worker."""
    try:
        return b"StreamActor" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def main() -> None:
    """Measures every graph, steps and costs."""
    tables = ("speed", "steps", "costs")

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--table", choices=tables, action="append")
        parser.add_argument("--kind", help="only the graphs whose name begins so, in the first table")

    arguments = harness.parse(__doc__, rounds=5, add=add)
    wanted = arguments.table or tables
    report = Report("ray_pool", quick=arguments.quick)
    graphs = cases(arguments)
    with one_node():
        if "speed" in wanted:
            wanted_kinds = [kind for kind in graphs if kind.startswith(arguments.kind or "")]
            rows = [row for kind in wanted_kinds for row in measure(kind, graphs[kind], arguments.rounds)]
            report.tables.append(Table(TITLE, COLUMNS, rows, "samples_per_second", "samples/s"))
        if "costs" in wanted:
            rows = measure_costs("text", next(iter(graphs.values())).graph, arguments.rounds)
            report.tables.append(Table(COST_TITLE, COST_COLUMNS, rows, "seconds", "seconds"))
    if "steps" in wanted:
        steps = IN_A_ROW if arguments.quick else 10 * IN_A_ROW
        with two_nodes():
            rows = measure_steps("10 MB, computing before each", (LOADER, ACTORS, ELSEWHERE), steps, arguments.rounds)
        report.tables.append(Table(STEP_TITLE, STEP_COLUMNS, rows, "microseconds", "CPU µs/step"))
    harness.finish(report, arguments)


if __name__ == "__main__":
    main()
