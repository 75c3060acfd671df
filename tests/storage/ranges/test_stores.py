"""Ranges of shards in other stores, by fsspec: one request each, of the expected version or an error."""

from __future__ import annotations

import gc
import os
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.registry import _registry
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from tests.kits.processes import in_child
from tests.kits.s3_server import S3Server, s3_server
from torchdata_wds.errors import ChangedShardError, ShardOpenError
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.ranges import ShardRanges, find_version, stores

DATA = bytes(range(256)) * 200
OTHER = DATA[::-1]


class Shelf(AbstractFileSystem):  # type: ignore[misc]
    """A store whose files send one request for each range, such as Hugging Face's."""

    protocol = "shelf"
    content: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []
    failures: ClassVar[list[Exception]] = []
    tag = "etag"

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self.asked.append("info")
        if path not in self.content:
            raise FileNotFoundError(path)
        data = self.content[path]
        return {"name": path, "size": len(data), "type": "file", self.tag: f'"{hash(data)}"'}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> ShelfFile:
        return ShelfFile(self, path, mode, **options)


class ShelfFile(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        self.fs.asked.append(f"{start}-{end}")
        if self.fs.failures:
            raise self.fs.failures.pop(0)
        return bytes(self.fs.content[self.path][start:end])


@pytest.fixture
def shelf() -> Iterator[type[Shelf]]:
    """The store, with one shard."""
    fsspec.register_implementation("shelf", Shelf, clobber=True)
    Shelf.content = {"a.tar": DATA}
    Shelf.asked, Shelf.failures = [], []
    yield Shelf
    Shelf.clear_instance_cache()
    _registry.pop("shelf", None)


@pytest.fixture
def memory() -> Iterator[None]:
    fsspec.filesystem("memory").pipe_file("/shards/a.tar", DATA)
    yield
    fsspec.filesystem("memory").rm("/shards", recursive=True)


def test_read_sends_one_request_for_each_range(shelf: type[Shelf]) -> None:
    """And one for the version, when the shard is opened."""
    version = find_version("shelf://a.tar")
    assert version == StoredVersion(len(DATA), str(hash(DATA))[:40])
    shelf.asked.clear()
    with ShardRanges() as ranges:
        for start, stop in ((0, 1), (5, 900), (0, len(DATA)), (9, 9)):
            assert ranges.read("shelf://a.tar", start, stop, version) == DATA[start:stop]
    assert shelf.asked == ["info", "0-1", "5-900", f"0-{len(DATA)}"]


def test_read_raises_when_the_shard_was_replaced(shelf: type[Shelf], monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not compare versions itself is asked again after some seconds."""
    version = find_version("shelf://a.tar")
    with ShardRanges() as ranges:
        assert ranges.read("shelf://a.tar", 5, 9, version) == DATA[5:9]
        shelf.content["a.tar"] = OTHER
        monkeypatch.setattr(stores, "_TRUSTED_SECONDS", -1)
        with pytest.raises(ChangedShardError, match=r"it has the ETag .*, expected "):
            ranges.read("shelf://a.tar", 5, 9, version)
        assert ranges.read("shelf://a.tar", 5, 9, find_version("shelf://a.tar")) == OTHER[5:9]
        shelf.content["a.tar"] = DATA[:100]
        with pytest.raises(ChangedShardError, match="it has 100 bytes, expected 51,200"):
            ranges.read("shelf://a.tar", 5, 9, version)
        with pytest.raises(ChangedShardError, match="ends at byte 100, inside or before the requested bytes 50 to 200"):
            ranges.read("shelf://a.tar", 50, 200)


def test_read_survives_failures_and_raises_what_lasts(shelf: type[Shelf]) -> None:
    """Secrets are masked."""
    with ShardRanges() as ranges:
        shelf.failures[:] = [OSError("busy"), ValueError("busy")]
        assert ranges.read("shelf://a.tar", 5, 9) == DATA[5:9]
        shelf.failures[:] = [PermissionError("https://host/x?sig=hidden is not yours")]
        with pytest.raises(ShardOpenError, match=r"cannot open shard shelf://a.tar: PermissionError") as caught:
            ranges.read("shelf://a.tar", 5, 9)
        assert "hidden" not in str(caught.value)
        with pytest.raises(ShardOpenError, match=r"shelf://b.tar: not found"):
            ranges.read("shelf://b.tar", 5, 9)
        with pytest.raises(ShardOpenError, match=r"shelf://b.tar: not found"):
            find_version("shelf://b.tar")


def test_threads_read_in_parallel(shelf: type[Shelf], monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that answers only once all have asked gets all requests."""
    everyone = Barrier(5, timeout=30)
    fetch = ShelfFile._fetch_range

    def meet(self: ShelfFile, start: int, end: int) -> bytes:
        everyone.wait()
        return fetch(self, start, end)

    monkeypatch.setattr(ShelfFile, "_fetch_range", meet)
    with ShardRanges() as ranges, ThreadPoolExecutor(5) as pool:
        found = pool.map(lambda start: ranges.read("shelf://a.tar", start, start + 50), range(5))
        assert list(found) == [DATA[start : start + 50] for start in range(5)]


@pytest.mark.usefixtures("memory")
def test_stores_whose_files_send_no_ranges_are_read(tmp_path: Path) -> None:
    """Memory and archives open the shard for each read."""
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("a.tar", DATA)
    with ShardRanges() as ranges:
        for url in ("memory://shards/a.tar", f"zip://a.tar::{tmp_path}/all.zip"):
            version = find_version(url)
            assert version == StoredVersion(len(DATA))
            assert ranges.read(url, 5, 900, version) == DATA[5:900]
            with pytest.raises(ChangedShardError, match="ends at byte 51,200"):
                ranges.read(url, 5, len(DATA) + 1, version)
    gc.collect()


@pytest.mark.usefixtures("memory")
def test_what_is_not_a_shard_is_an_error() -> None:
    """A folder, an unknown scheme, a chain through the web."""
    with ShardRanges() as ranges:
        with pytest.raises(ShardOpenError, match="it is a folder"):
            ranges.read("memory://shards", 0, 9)
        with pytest.raises(ShardOpenError, match="unknown scheme nowhere"):
            ranges.read("nowhere://a.tar", 0, 9)


def test_a_forked_child_makes_its_own_client(memory: None) -> None:
    """A client of the parent's is not used there."""
    with ShardRanges() as ranges:
        assert ranges.read("memory://shards/a.tar", 5, 9) == DATA[5:9]

        def read() -> None:
            assert not len(ranges._remote)
            assert ranges.read("memory://shards/a.tar", 5, 900) == DATA[5:900]

        assert in_child(read) == 0


# ----------------------------------------------------------------------------------------------------------------- S3
@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, s3_server() as server:
        for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        yield server


@pytest.fixture
def server(running: S3Server) -> Iterator[S3Server]:
    """The server, with one shard and nothing recorded."""
    running.put("data/a.tar", DATA)
    running.asked.clear()
    yield running
    gc.collect()


@pytest.mark.slow
def test_s3_reads_ranges_of_one_version(server: S3Server) -> None:
    """The store compares the ETag with each request, so a replaced shard never gives other bytes."""
    url, options = "s3://data/a.tar", server.options
    version = find_version(url, storage_options=options)
    assert version is not None
    assert version.size == len(DATA)
    assert len(version.tag) == 32
    server.asked.clear()
    with ShardRanges(options) as ranges, ThreadPoolExecutor(4) as pool:
        assert ranges.read(url, 5, 900, version) == DATA[5:900]
        found = pool.map(lambda start: ranges.read(url, start, start + 50, version), range(20))
        assert list(found) == [DATA[start : start + 50] for start in range(20)]
        assert server.gets()[0].range == "bytes=5-899"
        assert len(server.gets()) == 21
        server.put("data/a.tar", OTHER)
        with pytest.raises(ChangedShardError, match=r"it has the ETag .*, expected"):
            ranges.read(url, 5, 900, version)
        assert ranges.read(url, 5, 900) == OTHER[5:900]
        server.put("data/a.tar", DATA)
        assert ranges.read(url, 5, 900) == DATA[5:900]
        with pytest.raises(ChangedShardError, match="ends at byte 51,200"):
            ranges.read(url, 5, len(DATA) + 5)
        with pytest.raises(ShardOpenError, match=r"s3://data/b.tar: not found"):
            ranges.read("s3://data/b.tar", 5, 900)


@pytest.mark.slow
def test_s3_has_one_client_for_all_threads(server: S3Server) -> None:
    """Each would make connections of its own, and stay after its thread."""
    with ShardRanges(server.options) as ranges:
        for number in range(5):
            server.put(f"data/{number}.tar", DATA)
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(ranges.read, f"s3://data/{number}.tar", 5, 9).result() == DATA[5:9]
        readers = [ranges._remote.get(f"s3://data/{number}.tar") for number in range(5)]
        assert len({id(reader._filesystem) for reader in readers if isinstance(reader, stores.StoreRanges)}) == 1


@pytest.mark.slow
def test_s3_is_read_in_a_forked_child(server: S3Server) -> None:
    """By a client of its own."""
    with ShardRanges(server.options) as ranges:
        assert ranges.read("s3://data/a.tar", 5, 9) == DATA[5:9]

        def read() -> None:
            assert ranges.read("s3://data/a.tar", 7, 900) == DATA[7:900]

        assert in_child(read) == 0
        assert ranges.read("s3://data/a.tar", 6, 9) == DATA[6:9]


@pytest.mark.slow
def test_s3_is_read_through_a_cache(server: S3Server, tmp_path: Path) -> None:
    """The copy remembers its ETag."""
    url, options = "s3://data/a.tar", server.options
    version = find_version(url, storage_options=options)
    server.asked.clear()
    for _ in range(2):
        with ShardRanges(options, cache=tmp_path) as ranges:
            assert ranges.read(url, 5, 900, version) == DATA[5:900]
            assert ranges.read(url, 50, 900, version) == DATA[50:900]
    assert len(server.gets()) == 1
    server.put("data/a.tar", OTHER)
    with ShardRanges(options, cache=tmp_path) as ranges:
        new = find_version(url, storage_options=options)
        assert ranges.read(url, 5, 900, new) == OTHER[5:900]
