"""The ways to read shards that are compared: this package, webdataset, torchdata's own pipes, litdata, a bare read."""

from __future__ import annotations

import functools
import importlib
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

from harness import Run
from report import note
from shards import Shards
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdata_wds  # noqa: F401  registers the functional forms

__all__ = ["Epoch", "find_peers", "import_quietly", "raw_limit", "read_ours", "read_webdataset"]

Epoch = Callable[..., Any]  # begins an epoch: an iterable of samples, with the library's own methods
MIB = 1 << 20


def import_quietly(name: str) -> Any:
    """Imports a module that has much to say; an ImportError if it is not there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def read_ours(shards: Shards) -> Epoch:
    """This package's chain."""
    return lambda: IterableWrapper([shards.pattern]).list_shards().load_wds_shards().group_by_key()


def read_webdataset(shards: Shards) -> Epoch:
    """webdataset's pipeline, undecoded."""
    wds = import_quietly("webdataset")
    return lambda: wds.WebDataset(shards.pattern, shardshuffle=False)


def read_torchdata(shards: Shards) -> Epoch:
    """torchdata's own pipes."""
    import_quietly("torchdata.datapipes.iter")
    paths = [str(path) for path in shards.paths]
    return lambda: IterableWrapper(paths).open_files(mode="rb").load_from_tar().map(_read_stream).webdataset()


def _read_stream(item: tuple[str, Any]) -> tuple[str, bytes]:
    path, stream = item
    return path, stream.read()


def read_litdata(shards: Shards) -> Epoch:
    """The same samples in litdata's own format, converted once."""
    litdata = import_quietly("litdata")
    first = shards.paths[0]
    folder = first.parent / "litdata"
    if not folder.exists():
        note(f"converting {first.parent.name} for litdata")
        with tempfile.TemporaryDirectory(dir=first.parent, prefix=".unfinished-") as unfinished:
            litdata.optimize(
                fn=functools.partial(_samples_of, shards.paths),
                inputs=list(range(len(shards.paths))),
                output_dir=f"{unfinished}/whole",
                chunk_bytes="64MB",
                num_workers=1,
                verbose=False,
            )
            Path(unfinished, "whole").rename(folder)
    return lambda **options: litdata.StreamingDataset(str(folder), **options)


def _samples_of(paths: list[Path], number: int) -> Iterator[dict[str, Any]]:
    """The samples of one shard, read by the standard library."""
    with tarfile.open(paths[number]) as archive:
        for key, members in groupby(archive, lambda member: member.name.partition(".")[0]):
            fields = {member.name.partition(".")[2]: _data_of(archive, member) for member in members}
            yield {"__key__": key, **fields}


def _data_of(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = archive.extractfile(member)
    assert stream is not None, member
    return stream.read()


PEERS: dict[str, Callable[[Shards], Epoch]] = {
    "webdataset": read_webdataset,
    "torchdata": read_torchdata,
    "litdata": read_litdata,
}


def find_peers(*names: str) -> tuple[dict[str, Callable[[Shards], Epoch]], dict[str, str]]:
    """Those of the peers that are installed, and why the others are left out."""
    found, missing = {}, {}
    for name in names:
        try:
            import_quietly(name)
        except ImportError as error:
            missing[name] = f"cannot be imported: {error}"
        else:
            found[name] = PEERS[name]
    return found, missing


def raw_limit(shards: Shards) -> tuple[str, Callable[[], Run]]:
    """Reading the bytes and doing nothing with them, in the faster of two block sizes, or decompressing them."""
    if shards.compression:
        name, open_file = _gunzip() if shards.compression == "gz" else _unzstd()
        return name, lambda: _raw_run(shards, open_file, MIB)
    best = min((MIB, 4 * MIB), key=lambda block: min(_raw_run(shards, _open_raw, block).seconds for _ in range(3)))
    return f"raw read, {best // MIB} MiB blocks", lambda: _raw_run(shards, _open_raw, best)


def _open_raw(path: Path) -> Any:
    return path.open("rb", buffering=0)


def _gunzip() -> tuple[str, Callable[[Path], Any]]:
    try:
        igzip = importlib.import_module("isal.igzip")
    except ImportError:
        return "gunzip (zlib)", importlib.import_module("gzip").open
    return "gunzip (isal)", igzip.open


def _unzstd() -> tuple[str, Callable[[Path], Any]]:
    return "zstandard", importlib.import_module("zstandard").open


def _raw_run(shards: Shards, open_file: Callable[[Path], Any], block: int) -> Run:
    buffer = memoryview(bytearray(block))
    size = 0
    start = perf_counter()
    for path in shards.paths:
        with open_file(path) as file:
            while got := file.readinto(buffer):
                size += got
    seconds = perf_counter() - start
    assert size == shards.size, f"{shards.pattern}: read {size} bytes of {shards.size}"
    return Run(seconds, shards.samples)
