"""Samples per second into one tar file: this package, webdataset, and the standard library's tarfile.

    python benchmarks/write.py [--quick] [--kind KIND ...] [--json FILE] [--chart FILE]

The samples of benchmarks/read.py's shards, in memory and encoded (encoder=False), go into one new file in the page
cache. webdataset's TarWriter gives every member the current time in fractions of a second, which takes a PAX header of
two more blocks; "webdataset, mtime=0" does without, and writes the same blocks as this package. Ours replaces the file
only when it is whole: what making it durable (fsync) takes of the time is in it. "ours, ShardWriter" also computes
SHA-256 digests and writes an index. The limit is a plain write of the same archive, without fsync.
"""

from __future__ import annotations

import gc
import io
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from harness import Contender, Run, compare, measure_kinds, run_rounds
from report import Report, Row
from shards import KINDS as SHARDS

KINDS = {"text": 10_000, "images": 500}
LIMIT = "plain write"

Sample = dict[str, Any]


def write_ours(path: Path, samples: list[Sample]) -> None:
    """This package's TarWriter."""
    from torchdata_wds import TarWriter

    with TarWriter(path, encoder=False) as writer:
        for sample in samples:
            writer.write(sample)


def write_ours_shards(path: Path, samples: list[Sample]) -> None:
    """This package's ShardWriter, one shard, with its digest and index."""
    from torchdata_wds import ShardWriter

    with ShardWriter(f"{path}-%d.tar", encoder=False, index=True, overwrite=True) as writer:
        for sample in samples:
            writer.write(sample)


def write_webdataset(path: Path, samples: list[Sample], **options: Any) -> None:
    """webdataset's TarWriter."""
    import webdataset

    with webdataset.TarWriter(str(path), encoder=False, **options) as writer:
        for sample in samples:
            writer.write(sample)


def write_tarfile(path: Path, samples: list[Sample]) -> None:
    """The standard library, in ustar format."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            for field in sorted(sample):
                if field != "__key__":
                    info = tarfile.TarInfo(f"{sample['__key__']}.{field}")
                    info.size, info.mode = len(sample[field]), 0o444
                    tar.addfile(info, io.BytesIO(sample[field]))


def timed_write(write: Callable[[Path, list[Sample]], None], samples: list[Sample], folder: Path) -> Run:
    """Measures writing a new file, from opening to closing it."""
    path = folder / "written.tar"
    start = perf_counter()
    write(path, samples)
    seconds = perf_counter() - start
    for file in folder.rglob("*"):
        if file.is_file():
            file.unlink()
    gc.collect()
    return Run(seconds, len(samples))


def measure(kind: str, report: Report, arguments: Any) -> list[Row]:
    """The rows of one kind of samples."""
    count = SHARDS[kind].quick if arguments.quick else KINDS[kind]
    samples = [{"__key__": f"{number:08d}", **SHARDS[kind].fields(number)} for number in range(count)]
    writers: dict[str, Callable[[Path, list[Sample]], None]] = {
        "ours": write_ours,
        "ours, ShardWriter": write_ours_shards,
        "tarfile": write_tarfile,
    }
    try:
        import webdataset  # noqa: F401
    except ImportError:
        report.leave_out("webdataset", "it is not installed")
    else:
        writers["webdataset"] = write_webdataset
        writers["webdataset, mtime=0"] = partial(write_webdataset, mtime=0)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        archive = folder / "written.tar"
        write_ours(archive, samples)
        content = archive.read_bytes()
        writers[LIMIT] = lambda path, _: _write_plainly(path, content)
        contenders = [
            Contender(title, partial(timed_write, write, samples, folder)) for title, write in writers.items()
        ]
        rows = compare(kind, run_rounds(kind, contenders, arguments.rounds))
    for row in rows:
        row["limit"] = row["contender"] == LIMIT
        row["megabytes_per_second"] = row["samples_per_second"] * len(content) / count / 1e6
    return rows


def _write_plainly(path: Path, content: bytes) -> None:
    path.write_bytes(content)


if __name__ == "__main__":
    measure_kinds("write", __doc__, KINDS, measure, "Writing")
