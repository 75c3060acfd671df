"""100,000 shards: how long it takes to list them, to start an epoch, to take a state and to resume; and the memory.

    python benchmarks/scale.py [--quick] [--case braces|...] [--rounds N] [--json FILE] [--chart FILE]

The shards are hard links to a few of two samples each, so that nothing is large but their number. Each case is a way to
list and divide them; it runs in a new process, which has imported everything before the clock starts, while names are
in the caches of the file system. All is compared with 100 of the shards, and with webdataset where it has the same
case. litdata is left out: it reads one index instead of a list of shards.

"start" is from making a loader to its first sample, and "next epoch" from its next `iter()`. "first state" is the first
`state_dict()` of an epoch, "later" another one, "after" one after thousands of samples, whose pickle has that many
bytes. "resume" is from making a loader to its first sample after that state, and "its state" the first one taken then.
CPU time is that of the main process, memory that of a worker which no other process shares. Linux only.
"""

from __future__ import annotations

import argparse
import glob
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from harness import finish, parse
from order_large import memory_of
from peers import import_quietly
from report import Report, Row, Table, note
from shards import make_shards
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import StatefulPipeline, WdsLoader
from torchdata_wds.storage import list_urls

MANY, FEW = 100_000, 100  # shards
LINKS = 20_000  # to one file: ext4 allows 65,000
TAKEN = 4_000  # samples, until the last state and memory are measured
WORKERS = (0, 2)
OURS, STATEFUL, WEBDATASET = "ours: WdsLoader", "ours: StatefulDataLoader", "webdataset"
NAMES = {"kind": "{kind}", "contender": "{contender}"}
LISTING = {**NAMES, "seconds": "{seconds:.3f}", "by round": "{lowest:.3f}-{highest:.3f}"}
STARTS = {
    **NAMES,
    "start, s": "{start:.3f}",
    "its CPU, s": "{start_cpu:.3f}",
    "next epoch, s": "{next_epoch:.3f}",
    "its CPU, s ": "{next_epoch_cpu:.3f}",
}
STATES = {
    **NAMES,
    "first state, ms": "{first_state:.1f}",
    "its CPU, ms": "{first_state_cpu:.1f}",
    "later, ms": "{later_state:.1f}",
    "after, ms": "{last_state:.1f}",
    "bytes": "{size:,.0f}",
    "resume, s": "{resume:.3f}",
    "its state, ms": "{resumed_state:.1f}",
}
MEMORY = {**NAMES, "MB": "{private:.1f}", "above few shards": "{above_few:.1f}"}
Figures = dict[str, float]


def make_links(folder: Path, count: int, *, quick: bool) -> list[str]:
    """Makes or finds `count` names of few shards."""
    shard = make_shards("tiny", folder, quick=quick).paths[0]
    place = shard.parent / f"{count}"
    urls = [str(place / f"shard-{number:06d}.tar") for number in range(count)]
    if not (place / "complete").exists():
        note(f"making {count:,} names of shards")
        place.mkdir(exist_ok=True)
        for number, url in enumerate(urls):
            Path(url).unlink(missing_ok=True)
            if number % LINKS:
                os.link(urls[number - number % LINKS], url)
            else:
                Path(url).write_bytes(shard.read_bytes())
        (place / "complete").touch()
    return urls


def braces_of(urls: list[str]) -> str:
    """All shards as one pattern."""
    return urls[0].replace("000000", f"{{000000..{len(urls) - 1:06d}}}")


def _listed(urls: list[str]) -> Any:
    return IterableWrapper([braces_of(urls)]).list_shards()


#: The stages before the loader of each case, made from the names of the shards.
CASES: dict[str, Callable[[list[str]], Any]] = {
    "braces": lambda urls: _listed(urls).sharding_filter(),
    "names": lambda urls: IterableWrapper(urls).list_shards().sharding_filter(),
    "wildcard": lambda urls: IterableWrapper([f"{Path(urls[0]).parent}/*.tar"]).list_shards().sharding_filter(),
    "shuffle": lambda urls: _listed(urls).shuffle(buffer_size=len(urls)).sharding_filter(),
    "split": lambda urls: _listed(urls).shuffle(buffer_size=len(urls)).split_shards(),
    "split, index": lambda urls: _listed(urls).split_shards(dict.fromkeys(urls, 2)),
    "resample": lambda urls: _listed(urls).resample_shards(),
}


def ways_to_list(case: str, urls: list[str]) -> dict[str, Callable[[], Iterable[Any]]]:
    """Lists all shards, ours and others."""
    wds = import_quietly("webdataset")
    pattern = f"{Path(urls[0]).parent}/*.tar"
    return {
        "braces": {
            "ours": lambda: list_urls(braces_of(urls)),
            WEBDATASET: lambda: wds.SimpleShardList(braces_of(urls)),
        },
        "names": {"ours": lambda: list_urls(urls), WEBDATASET: lambda: wds.SimpleShardList(urls)},
        "wildcard": {"ours": lambda: list_urls(pattern), "glob.glob": lambda: sorted(glob.glob(pattern))},  # noqa: PTH207
    }.get(case, {})


def webdataset_loader(case: str, urls: list[str], workers: int) -> Any:
    """webdataset's loader of a case; None if it has no such case."""
    options: dict[str, Any] = {"shuffle": {"shardshuffle": len(urls)}, "resample": {"resampled": True}}.get(case, {})
    if case not in ("braces", "names", "shuffle", "resample"):
        return None
    wds = import_quietly("webdataset")
    shards = urls if case == "names" else braces_of(urls)
    dataset = wds.WebDataset(shards, **{"shardshuffle": False, **options})
    return DataLoader(dataset, batch_size=None, num_workers=workers)


def our_loader(case: str, urls: list[str], workers: int) -> WdsLoader[Any]:
    """This package's loader of a case."""
    return WdsLoader(CASES[case](urls).load_wds_shards().group_by_key(), workers, seed=1)


def stateful_loader(case: str, urls: list[str], workers: int) -> Any:
    """torchdata's loader of a case, whose states this package makes exact."""
    loader = import_quietly("torchdata.stateful_dataloader").StatefulDataLoader
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    pipe = StatefulPipeline(CASES[case](urls).load_wds_shards().group_by_key(), seed=1)
    return loader(pipe, batch_size=None, num_workers=workers)


def clocked(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what the work returns."""
    begun = time.perf_counter()
    found = work()
    return time.perf_counter() - begun, found


def clocked_twice(name: str, work: Callable[[], Any], unit: float = 1) -> tuple[Figures, Any]:
    """The time and this process's CPU time under a name, and what the work returns."""
    begun = time.process_time()
    seconds, found = clocked(work)
    return {name: seconds * unit, f"{name}_cpu": (time.process_time() - begun) * unit}, found


def first_of(loader: Any) -> Iterator[Any]:
    """The samples of an epoch after the first."""
    samples = iter(loader)
    next(samples)
    return samples


def start(make: Callable[[], Any], taken: int) -> tuple[Figures, Any, Iterator[Any]]:
    """Starts two epochs of a loader; returns it, and the rest of the second."""
    loader: Any = None

    def begin() -> Iterator[Any]:
        nonlocal loader
        loader = make()
        return first_of(loader)

    figures, samples = clocked_twice("start", begin)
    for _ in islice(samples, taken):
        pass
    children = [child.pid for child in multiprocessing.active_children() if child.pid]
    if children:
        figures["private"] = median(memory_of(child)[0] for child in children)
    del samples
    again, samples = clocked_twice("next_epoch", lambda: first_of(loader))
    return figures | again, loader, samples


def close(loader: Any) -> None:
    """Ends a loader's workers."""
    if isinstance(loader, WdsLoader):
        loader.shutdown()


def measure_states(make: Callable[[], Any], loader: Any, samples: Iterator[Any], taken: int) -> Figures:
    """Takes states in the running epoch, and resumes the last one."""
    figures, _ = clocked_twice("first_state", loader.state_dict, 1e3)
    next(samples)
    figures["later_state"] = clocked(loader.state_dict)[0] * 1e3
    for _ in islice(samples, taken):
        pass
    seconds, state = clocked(loader.state_dict)
    figures |= {"last_state": seconds * 1e3, "size": len(pickle.dumps(state))}
    close(loader)

    def resume() -> tuple[Any, Iterator[Any]]:
        again = make()
        again.load_state_dict(state)
        return again, first_of(again)

    figures["resume"], (again, samples) = clocked(resume)
    figures["resumed_state"] = clocked(again.state_dict)[0] * 1e3
    close(again)
    return figures


def measure_here(case: str, urls: list[str], taken: int) -> dict[str, Figures]:
    """All figures of one process, by what they are of."""
    found: dict[str, Figures] = {}
    for name, ways in ways_to_list(case, urls).items():
        found[f"list/{name}"] = {"seconds": clocked(lambda ways=ways: sum(1 for _ in ways()))[0]}  # type: ignore[misc]
    for workers in WORKERS:
        loaders = {OURS: our_loader, STATEFUL: stateful_loader, WEBDATASET: webdataset_loader}
        for name, loader_of in loaders.items():
            if name == WEBDATASET and loader_of(case, urls, 0) is None:
                continue
            make = lambda loader_of=loader_of, workers=workers: loader_of(case, urls, workers)  # type: ignore[misc]  # noqa: E731
            figures, loader, samples = start(make, taken)
            if name != WEBDATASET:
                figures |= measure_states(make, loader, samples, taken)
            del loader, samples
            found[f"{workers}/{name}"] = figures
    return found


def run_process(case: str, count: int, arguments: argparse.Namespace) -> dict[str, Figures]:
    """All figures of a new process."""
    command = [sys.executable, __file__, "--here", "--case", case, "--shards", str(count)]
    command += ["--folder", str(arguments.folder), *(["--quick"] if arguments.quick else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Figures] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(case: str, counts: tuple[int, ...], runs: dict[int, list[dict[str, Figures]]]) -> list[Row]:
    """The medians of a case, a row for each contender and number of shards."""
    rows: list[Row] = []
    for what in runs[counts[0]][0]:
        place, _, name = what.partition("/")
        for count in counts:
            figures = [found[what] for found in runs[count]]
            row: Row = {"kind": f"{case}, {count:,} shards" + ("" if place == "list" else f", {place} workers")}
            row |= {"contender": name, "rounds": figures}
            row |= {key: median(found[key] for found in figures) for key in figures[0]}
            if "seconds" in row:
                times = [found["seconds"] for found in figures]
                row |= {"lowest": min(times), "highest": max(times)}
            if "private" in row:
                few = median(found[what]["private"] for found in runs[counts[0]])
                row["above_few"] = row["private"] - few
            rows.append(row)
    return rows


def measure(arguments: argparse.Namespace) -> list[Row]:
    """The rows of all cases."""
    counts = (FEW // 10, MANY // 1000) if arguments.quick else (FEW, MANY)
    for count in counts:
        make_links(arguments.folder, count, quick=arguments.quick)
    rows: list[Row] = []
    for case in arguments.case or CASES:
        runs: dict[int, list[dict[str, Figures]]] = {count: [] for count in counts}
        for number in range(arguments.rounds):
            note(f"{case}: round {number + 1} of {arguments.rounds}")
            for count in counts[:: -1 if number % 2 else 1]:
                runs[count].append(run_process(case, count, arguments))
        rows += sorted(rows_of(case, counts, runs), key=lambda row: str(row["kind"]))
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this script."""
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--shards", type=int, default=FEW, help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)


def main() -> None:
    """Measures all cases, or one in this process for `run_process`."""
    arguments = parse(__doc__, rounds=3, add=add_arguments)
    if arguments.here:
        urls = make_links(arguments.folder, arguments.shards, quick=arguments.quick)
        taken = 4 if arguments.quick else min(TAKEN, arguments.shards)
        print(json.dumps(measure_here(arguments.case[0], urls, taken)))
        return
    report = Report("scale", quick=arguments.quick)
    report.leave_out("litdata", "it reads one index instead of a list of shards")
    rows = measure(arguments)
    tables = (
        ("Listing all shards: medians", LISTING, "seconds", "s"),
        ("Starting an epoch: medians until the first sample", STARTS, "start", "s"),
        ("States: medians", STATES, "first_state", "ms"),
        ("A worker's private memory: medians", MEMORY, "private", "MB"),
    )
    for title, columns, figure, unit in tables:
        if chosen := [row for row in rows if figure in row]:
            report.tables.append(Table(title, columns, chosen, figure, unit))
    finish(report, arguments)


if __name__ == "__main__":
    main()
