"""Peak memory of reading a shard of very many members against a small one.

    python benchmarks/memory.py [--quick] [--json FILE] [--chart FILE]

Each shard is read by a process of its own through list_shards().load_wds_shards().group_by_key(), three members a
sample; the peak is the process's VmHWM, so it runs on Linux only. One round is enough.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO

from harness import finish, parse
from report import Report, Row, Table, note
from shards import write_whole

READ = """
import sys
from pathlib import Path
from torch.utils.data.datapipes.iter import IterableWrapper
import torchdata_wds
pipe = IterableWrapper([sys.argv[1]]).list_shards().load_wds_shards().group_by_key()
count = sum(1 for _ in pipe)
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


def write_shard(samples: int, file: IO[bytes]) -> None:
    """Writes a shard of samples of txt, json and cls."""
    for number in range(samples):
        for field, data in (("cls", b"7"), ("json", b'{"a": 1}'), ("txt", b"some text")):
            info = tarfile.TarInfo(f"{number:09d}.{field}")
            info.size = len(data)
            file.write(info.tobuf(tarfile.USTAR_FORMAT) + data.ljust(512, b"\0"))
    file.write(bytes(1024))


def peak_of(path: Path) -> tuple[int, float]:
    """Samples read and peak memory in MB."""
    run = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    count, kilobytes = map(int, run.stdout.split())
    return count, kilobytes / 1024


def main() -> None:
    """Measures a row per shard and the difference."""
    arguments = parse(__doc__, rounds=1)
    report = Report("memory", quick=arguments.quick)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for members in (1_000, 30_000 if arguments.quick else 1_000_000):
            note(f"{members:,} members")
            path = Path(folder) / f"{members}.tar"
            write_whole(path, partial(write_shard, members // 3))
            peaks = [peak_of(path) for _ in range(arguments.rounds)]
            peak = median(megabytes for _, megabytes in peaks)
            row: Row = {"kind": "reading", "contender": f"ours, {members:,} members", "members": members}
            row |= {"samples": peaks[0][0], "peak_megabytes": peak}
            rows.append(row | {"above_first": peak - rows[0]["peak_megabytes"] if rows else 0.0})
    report.tables.append(
        Table("Peak memory of the process, torch included", COLUMNS, rows, "peak_megabytes", "peak MB")
    )
    finish(report, arguments)


if __name__ == "__main__":
    main()
