"""The command line against cp, GNU tar, webdataset and plain loading; `wds sort` in little memory, `wds show`.

    python benchmarks/tools.py [--quick] [--kind KIND ...] [--json FILE] [--chart FILE]

Each run is a process of its own, timed inside it after the imports, with the peak of its memory (VmHWM) above that of
the imports, so it runs on Linux only; `cp` and `wds show` are timed from outside, start included. The shards are in the
page cache. "copying": what `wds cat` and `cp` write is made durable (fsync), what webdataset's loop writes is not.
"sorting": by a class of ten values, with a tenth of the shards' size as memory and with room for all, against `wds cat`
of the same shards; the order is compared with that of Python's stable sort. The goal is 3 times `wds cat`.
"creating": a folder of the shards' members as files, `wds create` with fsync and GNU tar with sync; the goal is twice
GNU tar. "checking": `wds validate` and the index of each shard, against loading all samples; the goal is twice.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from harness import Contender, Run, compare, finish, parse, run_rounds
from report import Report, Row, Table
from shards import Shards, make_shards

IN_CHILD = """
import json, sys
from pathlib import Path
from time import perf_counter
{imports}
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024
before, start = peak(), perf_counter()
{work}
print(json.dumps([perf_counter() - start, peak() - before]))
"""
OURS = IN_CHILD.format(
    imports="""
from importlib import import_module
from torchdata_wds.cli.main import main
import_module("torchdata_wds.cli." + sys.argv[1])
""",
    work="if main(sys.argv[1:]): sys.exit('it failed')",
)
WEBDATASET = IN_CHILD.format(
    imports="import warnings\nwarnings.simplefilter('ignore')\nimport webdataset",
    work="""
with webdataset.TarWriter(sys.argv[2], encoder=False) as writer:
    for sample in webdataset.WebDataset(sys.argv[1], shardshuffle=False):
        writer.write(sample)
""",
)
LOADING = IN_CHILD.format(
    imports="""
from torch.utils.data.datapipes.iter import IterableWrapper
import torchdata_wds
def load(paths):
    for _ in IterableWrapper(paths).list_shards().load_wds_shards().group_by_key():
        pass
load([])
""",
    work="load(sys.argv[1:])",
)
INDEXING = IN_CHILD.format(
    imports="from torchdata_wds import index_shard",
    work="for path in sys.argv[1:]: index_shard(path, to=False)",
)
VALIDATING = OURS.replace("if main(", "sys.stdout = open('/dev/null', 'w')\nif main(").replace(
    "print(json.dumps", "sys.stdout = sys.__stdout__\nprint(json.dumps"
)
COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "s": "{seconds:.2f}",
    "samples/s": "{samples_per_second:,.0f}",
    "it ÷ first": "{ratio:.2f}",
    "by round": "{lowest:.2f}-{highest:.2f}",
    "peak MB": "{peak}",
}
SHOWN = 200
CAT = "ours, wds cat"
LOAD = "ours, loading all samples"

Peaks = dict[str, float]
Measured = tuple[dict[str, Callable[[], Run]], Peaks]


def run_child(name: str, peaks: Peaks, code: str, arguments: list[str], samples: int) -> Run:
    """Runs a process that measures itself, and keeps its peak."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    peaks[name] = max(peak, peaks.get(name, 0))
    return Run(seconds, samples)


def run_command(command: list[str], samples: int) -> Run:
    """Times a command from outside."""
    start = perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return Run(perf_counter() - start, samples)


def concatenating(shards: Shards, out: Path, peaks: Peaks) -> Callable[[], Run]:
    """What `wds cat` does, whose first result is looked at."""

    def concatenate() -> Run:
        is_first = not peaks
        arguments = ["cat", shards.pattern, "-o", str(out), "--force"]
        run = run_child(CAT, peaks, OURS, arguments, shards.samples)
        if is_first and classes([out]) != classes(shards.paths):
            raise RuntimeError("wds cat: samples are lost")
        return run

    return concatenate


def copying(shards: Shards, folder: Path, report: Report) -> Measured:
    """The ways to copy shards."""
    peaks: Peaks = {}
    out = str(folder / "out.tar")
    ways: dict[str, Callable[[], Run]] = {CAT: concatenating(shards, Path(out), peaks), LOAD: loading(shards, peaks)}
    try:
        import webdataset  # noqa: F401
    except ImportError:
        report.leave_out("webdataset", "it is not installed")
    else:
        theirs = [shards.pattern, out]
        ways["webdataset"] = partial(run_child, "webdataset", peaks, WEBDATASET, theirs, shards.samples)
    line = 'cp "$@" && for last; do :; done && sync "$last"/*'
    paths = [str(path) for path in shards.paths]
    ways["cp, sync"] = partial(run_command, ["sh", "-c", line, "sh", *paths, str(folder)], shards.samples)
    return ways, peaks


def loading(shards: Shards, peaks: Peaks) -> Callable[[], Run]:
    """Loading all samples in one process, and nothing else."""
    return partial(run_child, LOAD, peaks, LOADING, list(map(str, shards.paths)), shards.samples)


def creating(shards: Shards, folder: Path, report: Report) -> Measured:  # noqa: ARG001 - as all
    """The ways to make a shard of files, which are the members of the first shard."""
    files, out = folder / "files", folder / "out.tar"
    with tarfile.open(shards.paths[0]) as archive:
        archive.extractall(files, filter="data")
    count = len({path.name.partition(".")[0] for path in files.iterdir()})
    peaks: Peaks = {}
    name = "ours, wds create"
    line = 'tar cf "$1" -C "$2" . && sync "$1"'
    return {
        name: partial(run_child, name, peaks, OURS, ["create", str(files), "-o", str(out), "--force"], count),
        "GNU tar, sync": partial(run_command, ["sh", "-c", line, "sh", str(folder / "tar.tar"), str(files)], count),
    }, peaks


def checking(shards: Shards, folder: Path, report: Report) -> Measured:  # noqa: ARG001 - as all
    """Loading, validating and indexing shards."""
    peaks: Peaks = {}
    paths = list(map(str, shards.paths))
    names = "ours, wds validate", "ours, index_shard"
    return {
        LOAD: loading(shards, peaks),
        names[0]: partial(run_child, names[0], peaks, VALIDATING, ["validate", *paths], shards.samples),
        names[1]: partial(run_child, names[1], peaks, INDEXING, paths, shards.samples),
    }, peaks


def sorting(shards: Shards, folder: Path, report: Report) -> Measured:  # noqa: ARG001 - as all
    """Copying shards and sorting them, with little memory and with much."""
    peaks: Peaks = {}
    out = folder / "out.tar"
    memory = shards.size // 10
    expected = sorted(classes(shards.paths), key=lambda pair: pair[1])

    def sort(name: str, size: int) -> Run:
        arguments = ["sort", shards.pattern, "-o", str(out), "--force", "-k", "cls", "--memory", str(size)]
        is_first = name not in peaks
        run = run_child(name, peaks, OURS, arguments, shards.samples)
        if is_first and classes([out]) != expected:
            raise RuntimeError(f"{name}: samples are lost, or not in a stable order")
        return run

    small, large = f"ours, wds sort, {memory / 1e6:,.3g} MB of memory", "ours, wds sort, in memory"
    return {
        CAT: concatenating(shards, out, peaks),
        small: partial(sort, small, memory),
        large: partial(sort, large, 100 * shards.size),
    }, peaks


def showing(shards: Shards, folder: Path, report: Report) -> Measured:  # noqa: ARG001 - as all
    """Drawing samples."""
    count = min(SHOWN, shards.samples)

    def show(name: str) -> Run:
        command = [sys.executable, "-m", "torchdata_wds", "show", shards.pattern, "-c", str(count), "--force"]
        return run_command([*command, "--out", str(folder / name)], count)

    return {f"ours, wds show --out {name}": partial(show, name) for name in ("sheet.png", "page.html")}, {}


def classes(paths: list[Path]) -> list[tuple[str, bytes]]:
    """Key and class of each sample in order, by the standard library."""
    found = []
    for path in paths:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.name.endswith(".cls"):
                    stream = archive.extractfile(member)
                    assert stream is not None
                    found.append((member.name.removesuffix(".cls"), stream.read()))
    return found


KINDS = {
    "copying text": ("text", copying),
    "copying images": ("images", copying),
    "creating text": ("text", creating),
    "checking text": ("text", checking),
    "checking images": ("images", checking),
    "sorting text": ("text", sorting),
    "sorting images": ("images", sorting),
    "showing images": ("images", showing),
}


def measure(kind: str, report: Report, arguments: Namespace) -> list[Row]:
    """The rows of one kind."""
    name, prepare = KINDS[kind]
    shards = make_shards(name, arguments.folder, quick=arguments.quick)
    with TemporaryDirectory(dir=arguments.folder) as folder:
        ways, peaks = prepare(shards, Path(folder), report)
        contenders = [Contender(way, run) for way, run in ways.items()]
        rows = compare(kind, run_rounds(kind, contenders, arguments.rounds))
    for row in rows:
        row["limit"] = row["contender"].startswith("cp")
        samples = min(SHOWN, shards.samples) if prepare is showing else shards.samples
        row["seconds"] = samples * row["microseconds"] / 1e6
        row["peak_megabytes"] = peaks.get(row["contender"])
        row["peak"] = "" if row["peak_megabytes"] is None else f"{row['peak_megabytes']:,.0f}"
    return rows


def main() -> None:
    """Measures each kind, or those that are asked for."""
    arguments = parse(
        __doc__, rounds=5, add=lambda parser: parser.add_argument("--kind", action="append", choices=KINDS)
    )
    report = Report("tools", quick=arguments.quick)
    rows = [row for kind in arguments.kind or KINDS for row in measure(kind, report, arguments)]
    title = "The command line: medians, ratios of medians, and memory above that of the imports"
    report.tables.append(Table(title, COLUMNS, rows, "samples_per_second", "samples/s"))
    finish(report, arguments)


if __name__ == "__main__":
    main()
