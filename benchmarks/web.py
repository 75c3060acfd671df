"""Reading from a web server on the loopback address, which sends files from the page cache, in another process.

    python benchmarks/http.py [--quick] [--kind KIND ...] [--json FILE] [--chart FILE]

"stream": the bytes of one shard, `open_shard` read to its end against curl, which writes to a pipe that this process
empties, and to /dev/null. A server that tells neither a tag nor whether it gives parts costs a checksum of all bytes.
"latency": samples out of small shards, from a server that waits 50 ms before each answer, against one that does not.
"cache": samples read without a cache, through an empty folder of `cache_shards`, and from its copies.
"""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any

from harness import Contender, Run, compare, measure_kinds, run_rounds, timed
from report import Report, Row
from serving import serve
from shards import KINDS, Kind, Shards, make_shards, text_fields
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import ShardLoader
from torchdata_wds.storage import open_shard

__all__ = ["main"]

BLOCK = 1 << 20
LATENCY = 0.05
AHEAD = 8
SMALL = "small shards"  # 6 MB each
KINDS[SMALL] = Kind(text_fields, 48, 2_000, 20)


def read_ours(url: str, shards: Shards) -> Run:
    """Reads a shard to its end."""
    buffer = bytearray(BLOCK)
    size, start = 0, perf_counter()
    with open_shard(url) as stream:
        while count := stream.readinto(buffer):
            size += count
    return _run(start, size, shards)


def read_curl(url: str, shards: Shards) -> Run:
    """Lets curl write a shard to a pipe, and reads that."""
    buffer = memoryview(bytearray(BLOCK))
    size, start = 0, perf_counter()
    with subprocess.Popen(["curl", "-s", "--noproxy", "*", url], stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        while count := process.stdout.readinto(buffer):  # type: ignore[attr-defined]
            size += count
    return _run(start, size, shards)


def discard_curl(url: str, shards: Shards) -> Run:
    """Lets curl write a shard to /dev/null: nobody gets to see it."""
    start = perf_counter()
    subprocess.run(["curl", "-s", "--noproxy", "*", "-o", "/dev/null", url], check=True)
    return _run(start, shards.size, shards)


def _run(start: float, size: int, shards: Shards) -> Run:
    seconds = perf_counter() - start
    assert size == shards.size, f"read {size} bytes of {shards.size}"
    return Run(seconds, shards.samples)


def stream_contenders(stack: ExitStack, shards: Shards, report: Report) -> list[Contender]:
    """Who reads the bytes of one shard."""
    path = shards.paths[0]
    url = f"{stack.enter_context(serve(path.parent))}/{path.name}"
    bare = f"{stack.enter_context(serve(path.parent, bare=True))}/{path.name}"
    contenders = [
        Contender("ours", partial(read_ours, url, shards)),
        Contender("ours, no tag, no parts", partial(read_ours, bare, shards)),
    ]
    if shutil.which("curl") is None:
        report.leave_out("curl", "is not installed")
        return contenders
    return [
        *contenders,
        Contender("curl to a pipe", partial(read_curl, url, shards)),
        Contender("curl to /dev/null", partial(discard_curl, url, shards)),
    ]


def latency_contenders(stack: ExitStack, shards: Shards, report: Report) -> list[Contender]:
    """Who reads samples."""
    folder = shards.paths[0].parent
    near, far = (stack.enter_context(serve(folder, latency=latency)) for latency in (0.0, LATENCY))
    contenders = [Contender("ours, no latency", partial(timed, partial(_chain, near, shards)))]
    if "read_ahead" in inspect.signature(ShardLoader).parameters:
        ahead = partial(_chain, far, shards, read_ahead=AHEAD)
        contenders.append(Contender(f"ours, 50 ms, read_ahead={AHEAD}", partial(timed, ahead)))
    else:
        report.leave_out(f"ours, 50 ms, read_ahead={AHEAD}", "the loader has no such option")
    return [*contenders, Contender("ours, 50 ms", partial(timed, partial(_chain, far, shards)))]


def cache_contenders(stack: ExitStack, shards: Shards, _: Report) -> list[Contender]:
    """Who reads samples with a cache, or without; the folder is in the temporary folder of the system."""
    address = stack.enter_context(serve(shards.paths[0].parent))
    folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="cache-")) for _ in range(2)]

    def first_pass() -> Run:
        shutil.rmtree(folders[0])
        os.sync()
        return timed(partial(_chain, address, shards, folder=folders[0]))

    return [
        Contender("ours, no cache", partial(timed, partial(_chain, address, shards))),
        Contender("ours, first pass", first_pass),
        Contender("ours, second pass", partial(timed, partial(_chain, address, shards, folder=folders[1]))),
    ]


def _chain(address: str, shards: Shards, folder: str | None = None, **options: Any) -> Any:
    urls = [f"{address}/{path.name}" for path in shards.paths]
    return IterableWrapper(urls).cache_shards(folder).load_wds_shards(**options).group_by_key()


CONTENDERS: dict[str, tuple[str, Callable[[ExitStack, Shards, Report], list[Contender]]]] = {
    "stream": ("1 GB", stream_contenders),
    "latency": (SMALL, latency_contenders),
    "cache, text": ("text", cache_contenders),
    "cache, images": ("images", cache_contenders),
}


def measure(kind: str, report: Report, arguments: Namespace) -> list[Row]:
    """The rows of one kind."""
    name, find_contenders = CONTENDERS[kind]
    shards = make_shards(name, arguments.folder, quick=arguments.quick)
    with ExitStack() as stack:
        contenders = find_contenders(stack, shards, report)
        for contender in contenders:
            samples = contender.run().samples
            assert samples == shards.samples, f"{contender.name}: {samples} samples of {shards.samples}"
        rows = compare(kind, run_rounds(kind, contenders, arguments.rounds))
    for row in rows:
        row["limit"] = row["contender"].startswith("curl")
        row["megabytes_per_second"] = row["samples_per_second"] * shards.size / shards.samples / 1e6
    return rows


def main() -> None:
    """Measures all kinds."""
    measure_kinds("http", __doc__, CONTENDERS, measure, "From a web server")
