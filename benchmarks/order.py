"""The global order of an index: `load_in_order` against reading front to back, and samples by number against others'.

    python benchmarks/order.py [--quick] [--table local|random|http|large] [--json FILE] [--chart FILE]

Undecoded samples of 50 KB and a class, in one process, shards in the page cache, indexes packed beforehand.

"local": all samples in a shuffled order, by runs of neighbours, against `load_wds_shards().group_by_key()`, which
reads them as they lie. "limit" reads the same bytes in the same order and makes no samples of them.

"random": samples by numbers drawn at random, with `IndexedShards`; with litdata, out of its own format, to which they
were converted; with wids, which scans a shard when it opens it and keeps 10 open; and with tarfile, all shards open and
scanned before. Of few shards and of more than wids keeps open. litdata decodes 256 samples around each one by default,
and with batch_decode=0 gives views of mapped files: what nobody looks at is never read.

"http": the same as "local" from a server that waits 5 ms before each answer, with as many shards, or runs, read ahead.

"large": see order_large.py.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

import order_large
from harness import Contender, Run, compare, finish, parse, run_rounds, timed
from peers import find_peers, import_quietly
from report import Report, Row, Table
from serving import serve
from shards import Shards, make_shards
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import DatasetIndex, IndexedShards, index_shard
from torchdata_wds.pipes.order.permutation import Order

RUNS = (1, 4, 16, 64)
FEW = 4  # shards
AT_ONCE = 32  # samples in a batch by numbers
LATENCY, AHEAD = 0.005, 16
SEQUENTIAL = "front to back"

COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "samples/s": "{samples_per_second:,.0f}",
    "µs/sample": "{microseconds:,.1f}",
}
SPEEDS = COLUMNS | {"÷ front to back": "{speed:.2f}", "by round": "{slowest:.2f}-{fastest:.2f}"}
RATIOS = COLUMNS | {"IndexedShards ÷ it": "{ratio:.2f}", "by round": "{lowest:.2f}-{highest:.2f}"}
FIGURES = "medians; the ratio of medians, and the lowest and highest ratio of a round"


def pack_index(shards: Shards) -> str:
    """Makes the index of all shards in one file."""
    path = shards.paths[0].parent / "all.packed"
    DatasetIndex.of((str(shard), index_shard(shard, to=False)) for shard in shards.paths).save(path)
    return str(path)


def front_to_back(urls: list[str], read_ahead: int = 0) -> Any:
    """The chain that reads shards as they lie."""
    return IterableWrapper(urls).load_wds_shards(read_ahead=read_ahead).group_by_key()


def in_order(urls: list[str], index: str, run: int, read_ahead: int | None = None) -> Any:
    """The chain that reads samples in the global order."""
    return IterableWrapper(urls).load_in_order(index=index, run=run, seed=1, read_ahead=read_ahead)


def bare_reads(urls: list[str], index: str, run: int) -> Iterator[int]:
    """Reads the bytes of each run, and makes nothing of them."""
    opened = DatasetIndex.load(index).select(urls)
    offsets = [opened.rows(shard, 0, entry.samples)[0].tolist() for shard, entry in enumerate(opened.shards)]
    bounds = opened.bounds.tolist()
    shard_of = [shard for shard, entry in enumerate(opened.shards) for _ in range(entry.samples)]
    numbers = Order(len(opened), run=run, seed=1).numbers(0, len(opened)).tolist()
    with ExitStack() as stack:
        files = [stack.enter_context(Path(url).open("rb", buffering=0)).fileno() for url in urls]
        for _, group in groupby(enumerate(numbers), key=lambda pair: (pair[1] - pair[0], shard_of[pair[1]])):
            piece = [number for _, number in group]
            shard = shard_of[piece[0]]
            start = offsets[shard][piece[0] - bounds[shard]]
            stop = offsets[shard][piece[-1] + 1 - bounds[shard]]
            assert len(os.pread(files[shard], stop - start, start)) == stop - start
            yield from piece


def speeds(kind: str, contenders: list[Contender], shards: Shards, rounds: int) -> list[Row]:
    """Rows whose "speed" is that of the first contender's, by medians and by rounds."""
    for contender in contenders:
        samples = contender.run().samples
        assert samples == shards.samples, f"{contender.name}: {samples} samples of {shards.samples}"
    rows = compare(kind, run_rounds(kind, contenders, rounds))
    for row in rows:
        row |= {"speed": 1 / row["ratio"], "slowest": 1 / row["highest"], "fastest": 1 / row["lowest"]}
        row["limit"] = row["contender"].startswith("limit")
    return rows


def measure_local(report: Report, arguments: argparse.Namespace) -> list[Table]:  # noqa: ARG001 - as all
    """Whole epochs of local shards."""
    shards = make_shards("photos", arguments.folder, quick=arguments.quick)
    index, urls = pack_index(shards), [*map(str, shards.paths)]
    contenders = [Contender(SEQUENTIAL, partial(timed, partial(front_to_back, urls)))]
    contenders += [Contender(f"run={run}", partial(timed, partial(in_order, urls, index, run))) for run in RUNS]
    contenders += [
        Contender(f"limit, run={run}", partial(timed, partial(bare_reads, urls, index, run))) for run in (1, 16)
    ]
    rows = speeds("local", contenders, shards, arguments.rounds)
    return [Table(f"One order: {FIGURES}", SPEEDS, rows, "samples_per_second", "samples/s")]


def measure_http(report: Report, arguments: argparse.Namespace) -> list[Table]:  # noqa: ARG001 - as all
    """Whole epochs from a web server."""
    shards = make_shards("photos", arguments.folder, quick=arguments.quick)
    index = pack_index(shards)
    rows = []
    with serve(shards.paths[0].parent, latency=LATENCY) as address:
        urls = [f"{address}/{path.name}" for path in shards.paths]
        contenders = [Contender(SEQUENTIAL, partial(timed, partial(front_to_back, urls, AHEAD)))]
        contenders += [
            Contender(f"run={run}", partial(timed, partial(in_order, urls, index, run, AHEAD))) for run in RUNS
        ]
        rows = speeds(f"HTTP, 5 ms, {AHEAD} ahead", contenders, shards, arguments.rounds)
    return [Table(f"One order from a server: {FIGURES}", SPEEDS, rows, "samples_per_second", "samples/s")]


class TarSamples:
    """Samples by number with the standard library: all shards open, and their members known."""

    def __init__(self, paths: list[Path], stack: ExitStack) -> None:
        archives = [stack.enter_context(tarfile.TarFile(path)) for path in paths]
        self._samples = [
            (archive, key, list(members))
            for archive in archives
            for key, members in groupby(archive.getmembers(), lambda member: member.name.partition(".")[0])
        ]

    def __getitem__(self, number: int) -> dict[str, Any]:
        archive, key, members = self._samples[number]
        fields = {member.name.partition(".")[2]: archive.extractfile(member) for member in members}
        return {"__key__": key, **{field: file.read() for field, file in fields.items() if file is not None}}


def open_wids(shards: Shards, index: DatasetIndex, folder: Path, **options: Any) -> Any:
    """The data set of wids, over links to the shards: it writes locks beside them."""
    wids = import_quietly("wids")
    folder.mkdir(exist_ok=True)
    listed = []
    for path, entry in zip(shards.paths, index.shards, strict=True):
        if not (link := folder / path.name).exists():
            os.link(path, link)
        listed.append({"url": str(link), "nsamples": entry.samples})
    with contextlib.redirect_stderr(io.StringIO()):
        return wids.ShardListDataset(listed, localname=str, transformations=[], keep=True, **options)


def numbers_of(count: int, total: int) -> list[int]:
    """Numbers at random, others each time."""
    return [random.randrange(total) for _ in range(count)]


def one_by_one(samples: Any, count: int, total: int) -> Run:
    """Measures samples by number."""
    numbers, start = numbers_of(count, total), perf_counter()
    for number in numbers:
        samples[number]
    return Run(perf_counter() - start, count)


def in_batches(samples: Any, count: int, total: int) -> Run:
    """Measures batches of samples by numbers."""
    numbers, start = numbers_of(count, total), perf_counter()
    for first in range(0, count, AT_ONCE):
        samples.__getitems__(numbers[first : first + AT_ONCE])
    return Run(perf_counter() - start, count)


def random_rows(shards: Shards, report: Report, arguments: argparse.Namespace) -> list[Row]:
    """Measures reading samples by number from a number of shards; returns the rows."""
    count = 40 if arguments.quick else 2_000
    everything = make_shards("photos", arguments.folder, quick=arguments.quick)
    path = pack_index(everything)
    index = DatasetIndex.load(path).select([*map(str, shards.paths)])
    peers, missing = find_peers("litdata")
    for name, why in missing.items():
        report.leave_out(name, why)
    with ExitStack() as stack:
        ours = IndexedShards([*map(str, shards.paths)], index=path)
        opened: dict[str, Any] = {"IndexedShards": ours, "tarfile, all open": TarSamples(shards.paths, stack)}
        for name, read in peers.items():
            epoch = read(everything)
            opened |= {name: epoch(), f"{name}, batch_decode=0": epoch(batch_decode=0)}
        try:
            folder = shards.paths[0].parent / "wids"
            opened["wids"] = open_wids(shards, index, folder)
            opened["wids, all open"] = open_wids(shards, index, folder, lru_size=len(shards.paths))
        except ImportError as error:
            report.leave_out("wids", f"cannot be imported: {error}")
        expected = ours[shards.samples - 1]["jpg"]
        for name, samples in opened.items():
            found = samples[shards.samples - 1]
            assert bytes(found["jpg"] if "jpg" in found else found[".jpg"].read()) == expected, name
        runs: dict[str, Callable[[], Run]] = {
            name: partial(one_by_one, samples, count, shards.samples) for name, samples in opened.items()
        }
        runs[f"IndexedShards, {AT_ONCE} at once"] = partial(in_batches, ours, count, shards.samples)
        contenders = [Contender(name, run) for name, run in runs.items()]
        return compare(f"{len(shards.paths)} shards", run_rounds("random", contenders, arguments.rounds))


def measure_random(report: Report, arguments: argparse.Namespace) -> list[Table]:
    """Samples by number, of few shards and of all."""
    shards = make_shards("photos", arguments.folder, quick=arguments.quick)
    per_shard = shards.samples // len(shards.paths)
    few = shards._replace(paths=shards.paths[:FEW], samples=FEW * per_shard)
    rows = random_rows(few, report, arguments) + random_rows(shards, report, arguments)
    return [Table(f"Samples by number: {FIGURES}", RATIOS, rows, "samples_per_second", "samples/s")]


TABLES: dict[str, Callable[[Report, argparse.Namespace], list[Table]]] = {
    "local": measure_local,
    "random": measure_random,
    "http": measure_http,
    "large": order_large.measure,
}


def main() -> None:
    """Makes all tables, or the one that is asked for."""
    arguments = parse(__doc__, add=lambda parser: parser.add_argument("--table", choices=TABLES))
    report = Report("order", quick=arguments.quick)
    for name, measure in TABLES.items():
        if arguments.table in (None, name):
            report.tables += measure(report, arguments)
    finish(report, arguments)


if __name__ == "__main__":
    main()
