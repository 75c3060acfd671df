"""Peak memory of reading a shard of very many members against a small one: a local file, over HTTP, from S3.

    python benchmarks/memory.py [--quick] [--kind KIND] [--json FILE] [--chart FILE]

Each shard is read by a process of its own through list_shards().load_wds_shards().group_by_key(), three members a
sample; the peak is the process's VmHWM, so it runs on Linux only. One round is enough. The servers are other processes,
on the loopback address: Python's own for HTTP, and moto for S3, which keeps its objects in memory, so that its large
shard is a tenth as large.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any

from harness import finish, parse
from report import Report, Row, Table, note
from shards import write_whole

READ = """
import json, sys
from pathlib import Path
from torch.utils.data.datapipes.iter import IterableWrapper
import torchdata_wds
options = json.loads(sys.argv[2])
listed = IterableWrapper([sys.argv[1]]).list_shards(storage_options=options)
count = sum(1 for _ in listed.load_wds_shards(storage_options=options).group_by_key())
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(count, peak.split()[1])
"""
COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "members": "{members:,}",
    "samples": "{samples:,}",
    "peak MB": "{peak_megabytes:.1f}",
    "above the first": "{above_first:.1f}",
}
_SECONDS = 60

Place = Callable[[Path], tuple[str, dict[str, Any]]]


def write_shard(samples: int, file: IO[bytes]) -> None:
    """Writes a shard of samples of txt, json and cls."""
    for number in range(samples):
        for field, data in (("cls", b"7"), ("json", b'{"a": 1}'), ("txt", b"some text")):
            info = tarfile.TarInfo(f"{number:09d}.{field}")
            info.size = len(data)
            file.write(info.tobuf(tarfile.USTAR_FORMAT) + data.ljust(512, b"\0"))
    file.write(bytes(1024))


@contextmanager
def local_files(folder: Path) -> Iterator[Place]:  # noqa: ARG001 - as all
    """The shards as they lie."""
    yield lambda path: (str(path), {})


@contextmanager
def over_http(folder: Path) -> Iterator[Place]:
    """The shards on a web server."""
    arguments = ["-m", "http.server", "--bind", "127.0.0.1", "--directory", str(folder)]
    with child(arguments) as address:
        yield lambda path: (f"{address}/{path.name}", {})


@contextmanager
def from_s3(folder: Path) -> Iterator[Place]:  # noqa: ARG001 - as all
    """The shards as objects of an S3 server, put there one after the other."""
    import s3fs

    with child(["-m", "moto.server", "-H", "127.0.0.1", "-p"]) as address:
        options = {"key": "key", "secret": "secret", "endpoint_url": address}
        store = s3fs.S3FileSystem(**options)
        store.mkdir("shards")

        def put(path: Path) -> tuple[str, dict[str, Any]]:
            store.put_file(str(path), f"shards/{path.name}")
            return f"s3://shards/{path.name}", {"s3": options}

        yield put


#: Kind -> how its shards are reached, and how many times smaller its large one is.
KINDS: dict[str, tuple[Callable[[Path], Any], int]] = {
    "local file": (local_files, 1),
    "HTTP": (over_http, 1),
    "S3": (from_s3, 10),
}


@contextmanager
def child(arguments: list[str]) -> Iterator[str]:
    """Runs a server, whose last argument is its port, as a process of its own, and gives its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, *arguments, str(port)]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(address)
            yield address
        finally:
            server.kill()


def wait_for(address: str) -> None:
    """Waits until a server answers."""
    end = time.monotonic() + _SECONDS
    while True:
        try:
            with urllib.request.urlopen(address, timeout=_SECONDS):
                return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def peak_of(url: str, options: dict[str, Any]) -> tuple[int, float]:
    """Samples read and peak memory in MB."""
    command = [sys.executable, "-c", READ, url, json.dumps(options)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    count, kilobytes = map(int, run.stdout.split())
    return count, kilobytes / 1024


def measure(kind: str, rounds: int, *, quick: bool) -> list[Row]:
    """A row per shard, with the difference."""
    reach, fewer = KINDS[kind]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, reach(Path(folder)) as place:
        for members in (1_000, 30_000 if quick else 1_000_000 // fewer):
            note(f"{kind}: {members:,} members")
            path = Path(folder) / f"{members}.tar"
            write_whole(path, partial(write_shard, members // 3))
            url, options = place(path)
            peaks = [peak_of(url, options) for _ in range(rounds)]
            peak = median(megabytes for _, megabytes in peaks)
            row: Row = {"kind": kind, "contender": f"ours, {members:,} members", "members": members}
            row |= {"samples": peaks[0][0], "peak_megabytes": peak}
            rows.append(row | {"above_first": peak - rows[0]["peak_megabytes"] if rows else 0.0})
    return rows


def main() -> None:
    """Measures each kind, or those that are asked for."""
    arguments = parse(
        __doc__, rounds=1, add=lambda parser: parser.add_argument("--kind", action="append", choices=KINDS)
    )
    report = Report("memory", quick=arguments.quick)
    rows: list[Row] = []
    for kind in arguments.kind or KINDS:
        missing = [name for name in ("moto", "s3fs") if kind == "S3" and not importlib.util.find_spec(name)]
        if missing:
            report.leave_out(kind, f"{' and '.join(missing)} not installed")
        else:
            rows += measure(kind, arguments.rounds, quick=arguments.quick)
    report.tables.append(
        Table("Peak memory of the process, torch included", COLUMNS, rows, "peak_megabytes", "peak MB")
    )
    finish(report, arguments)


if __name__ == "__main__":
    main()
