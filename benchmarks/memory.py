"""Peak memory of reading a shard of very many members against a small one.

    python benchmarks/memory.py [--quick]

Each shard is read by a process of its own through list_shards().load_wds_shards().group_by_key(), three members a
sample; the peak is the process's VmHWM.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

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


def write_shard(path: Path, samples: int) -> None:
    """Writes a shard of samples of txt, json and cls."""
    with path.open("wb") as file:
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
    """Prints a row per shard and the difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="30,000 members instead of 1,000,000")
    many = 30_000 if parser.parse_args().quick else 1_000_000
    peaks = []
    with tempfile.TemporaryDirectory() as folder:
        for members in (1_000, many):
            path = Path(folder) / f"{members}.tar"
            write_shard(path, members // 3)
            count, peak = peak_of(path)
            peaks.append(peak)
            print(f"{members:>9,} members: {count:>7,} samples, peak {peak:6.1f} MB")
    print(f"difference: {peaks[1] - peaks[0]:.1f} MB")


if __name__ == "__main__":
    main()
