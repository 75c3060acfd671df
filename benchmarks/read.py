"""Samples per second out of shards: this package, webdataset, torchdata's own pipes, litdata, and the raw read.

    python benchmarks/read.py [--quick] [--kind KIND ...] [--json FILE] [--chart FILE]

Undecoded samples, a process for each contender, shards in the page cache. A first pass of each is not timed; it counts
samples and bytes, which must be the same for all. Timed passes only count samples. MB/s are those of the tar files,
uncompressed, headers and padding included, so that all rows of a kind are of the same bytes. litdata reads its own
format, to which the samples were converted, and gives views of mapped files: what nobody looks at is never read.
Where we read .tar.zst, the others read the same samples from .tar.gz.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from harness import Apart, Contender, compare, measure_kinds, run_rounds, timed
from peers import PEERS, Epoch, find_peers, raw_limit, read_ours
from report import Report, Row
from shards import make_shards

KINDS = ("text", "text, pax", "text.tar.gz", "text.tar.zst", "images", "big")


def _count(epoch: Epoch) -> tuple[int, int]:
    """Samples, and bytes of their fields; litdata gives memoryviews."""
    number = size = 0
    for sample in epoch():
        number += 1
        size += sum(len(value) for value in sample.values() if isinstance(value, (bytes, memoryview)))
    return number, size


def measure(kind: str, report: Report, arguments: Any) -> list[Row]:
    """The rows of one kind of shards."""
    shards = make_shards(kind, arguments.folder, quick=arguments.quick)
    peers, missing = find_peers(*PEERS)
    for name, why in missing.items():
        report.leave_out(name, why)
    theirs = shards
    if shards.compression == "zst":  # which they do not read
        theirs = make_shards("text.tar.gz", arguments.folder, quick=arguments.quick)
    epochs = {"ours": read_ours(shards)} | {name: read(theirs) for name, read in peers.items()}
    limit, run = raw_limit(shards)
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(Apart(count=partial(_count, epoch), timed=partial(timed, epoch)))
            for name, epoch in epochs.items()
        }
        counts = {name: process.call("count") for name, process in processes.items()}
        if len(set(counts.values())) > 1 or counts["ours"][0] != shards.samples:
            raise RuntimeError(f"{kind}: {shards.samples} samples, but (samples, bytes) read are {counts}")
        contenders = [Contender(name, partial(process.call, "timed")) for name, process in processes.items()]
        contenders.append(Contender(limit, partial(stack.enter_context(Apart(timed=run)).call, "timed")))
        rows = compare(kind, run_rounds(kind, contenders, arguments.rounds))
    for row in rows:
        row["limit"] = row["contender"] == limit
        row["megabytes_per_second"] = row["samples_per_second"] * shards.size / shards.samples / 1e6
    return rows


if __name__ == "__main__":
    measure_kinds("read", __doc__, KINDS, measure, "Reading")
