"""Every other store, by fsspec."""

from __future__ import annotations

import gzip
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from tests.processes import in_child
from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.storage import StorageOptions, open_shard
from torchdata_wds.storage.remote import RemoteSource

DATA = os.urandom(100_000)


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """Shards in fsspec's memory filesystem."""
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe({"/shards/a.tar": DATA, "/shards/b.tar": gzip.compress(DATA), "/shards/empty.tar": b""})
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def read(url: str, offset: int = 0, **options: Any) -> bytes:
    with open_shard(url, offset=offset, **options) as stream:
        return stream.read(1 << 20) + stream.read(1)


@pytest.mark.parametrize("offset", [0, 1, 512, 100_000])
@pytest.mark.parametrize("name", ["a", "b"])
def test_open_shard_reads_when_fsspec_knows_the_scheme(name: str, offset: int) -> None:
    """Plain and compressed shards are read from any decompressed byte on."""
    assert read(f"memory://shards/{name}.tar", offset) == DATA[offset:]


@pytest.mark.parametrize("name", ["a", "b", "empty"])
def test_open_shard_raises_when_the_offset_lies_behind_the_end(name: str) -> None:
    """An offset behind the end is an error and not an empty shard."""
    with pytest.raises(ShardFormatError, match="before the offset 100,001"):
        read(f"memory://shards/{name}.tar", 100_001)
    assert read("memory://shards/empty.tar") == b""


def test_open_shard_reads_when_urls_are_chained(tmp_path: Path) -> None:
    """Archives and caches stand before the URL that they read through."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("in/a.tar", DATA)
    cache = {"simplecache": {"cache_storage": str(tmp_path / "cache")}}
    assert read(f"zip://in/a.tar::file://{tmp_path}/x.zip") == DATA
    assert read(f"zip://in/a.tar::{tmp_path}/x.zip", 7) == DATA[7:]
    assert read("simplecache::memory://shards/a.tar", 7, storage_options=cache) == DATA[7:]
    assert list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("url", ["memory://shards/no.tar", "zip://no.tar::memory://shards/no.zip"])
def test_open_shard_raises_when_not_found(url: str) -> None:
    """What is not there is said to be not found, with the original exception as the cause."""
    with pytest.raises(ShardOpenError, match="not found") as caught:
        open_shard(url)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert caught.value.shard == url


def test_open_shard_lists_the_known_when_the_scheme_is_unknown() -> None:
    """An unknown scheme is named, with those that are known."""
    with pytest.raises(ShardOpenError, match=r"unknown scheme s4; known are .*memory.*, s3, "):
        open_shard("s4://bucket/x.tar")


@pytest.mark.parametrize(("scheme", "extra"), [("gs", "gcs"), ("abfs", "azure"), ("hf", "hf"), ("s3", "s3")])
def test_open_shard_names_the_extra_when_the_package_is_missing(
    scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheme whose package is not installed is answered with the command that installs it."""
    for package in ("gcsfs", "adlfs", "huggingface_hub", "s3fs"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(_registry, scheme, raising=False)
    with pytest.raises(ShardOpenError, match=rf"pip install 'torchdata_wds\[{extra}\]'"):
        open_shard(f"{scheme}://bucket/x.tar")


class Picky(MemoryFileSystem):  # type: ignore[misc]
    """A store that keeps what it was made with, and fails as it is told."""

    protocol = ("picky", "fussy")
    made: list[dict[str, Any]]
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.partition("://")[2].lstrip("/") if "://" in path else path

    def __init__(self, *args: Any, **options: Any) -> None:
        self.made.append(options)
        if options.get("secret") == "wrong":
            raise PermissionError("no access with https://host/?X-Amz-Signature=abc")
        super().__init__(*args, **options)


@pytest.fixture
def picky() -> type[Picky]:
    Picky.made = []
    for name in Picky.protocol:
        fsspec.register_implementation(name, Picky, clobber=True)
    return Picky


@pytest.mark.parametrize("name", ["picky", "fussy"])
def test_open_shard_gives_the_store_its_options(name: str, picky: type[Picky]) -> None:
    """Options arrive under either name of the store, those of other stores do not; what was given is unchanged."""
    options = {name: {"secret": "right"}, "s3": {"key": "k"}}
    assert read("picky://shards/a.tar", storage_options=options) == DATA
    assert picky.made == [{"secret": "right"}]
    assert options == {name: {"secret": "right"}, "s3": {"key": "k"}}


def test_open_shard_masks_secrets_when_the_store_refuses(picky: type[Picky]) -> None:
    """The store's own message is passed on without signatures."""
    with pytest.raises(ShardOpenError, match=r"PermissionError: no access .*Signature=\*\*\*"):
        open_shard("picky://x.tar", storage_options=StorageOptions({"picky": {"secret": "wrong"}}))


class Shrinking:
    """A file object that says it is larger than it is, or fails in the middle."""

    size = 1000

    def __init__(self, data: bytes, failure: Exception | None = None) -> None:
        self.data, self.failure, self.closed = data, failure, False

    def read(self, size: int) -> bytes:
        if not self.data and self.failure:
            raise self.failure
        data, self.data = self.data[:size], self.data[size:]
        return data

    def seek(self, offset: int) -> None:
        self.data = self.data[offset:]

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("failure", [None, TimeoutError("too slow"), RuntimeError("client broke")])
def test_remote_source_raises_when_the_object_breaks_off(
    failure: Exception | None, picky: type[Picky], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer bytes than the store announced, or any exception of its client, come after the data before it."""
    file = Shrinking(DATA[:700], failure)
    monkeypatch.setattr(picky, "open", lambda *args, **options: file)
    with open_shard("picky://x.tar") as stream:
        assert stream.read(700) == DATA[:700]
        with pytest.raises(ShardOpenError, match="700 of 1,000" if failure is None else str(failure)):
            stream.read(1)
    assert file.closed


def test_remote_source_closes_its_file_when_closed_early() -> None:
    """An early close closes the store's file."""
    file = Shrinking(DATA)
    source = RemoteSource(file, "x", 0, None)
    source.close()
    assert file.closed


def test_open_shard_reads_in_a_forked_child_when_the_parent_has_read() -> None:
    """A child process makes its own client."""
    assert read("memory://shards/a.tar") == DATA

    def read_rest() -> None:
        assert read("memory://shards/a.tar", 10) == DATA[10:]

    assert in_child(read_rest) == 0
