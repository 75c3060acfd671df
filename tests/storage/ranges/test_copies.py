"""Ranges of remote shards through a cache: one download for all reads, of the expected version."""

import logging
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.kits.cache_server import CacheServer, cache_server
from tests.kits.processes import in_child, open_files
from torchdata_wds.errors import ChangedShardError, ShardFormatError, ShardOpenError
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.cache import ShardCache
from torchdata_wds.storage.cache.locked_files import tag_of
from torchdata_wds.storage.ranges import ShardRanges, find_version

DATA = bytes(range(256)) * 200
OTHER = DATA[::-1]


@pytest.fixture
def web() -> Any:
    with cache_server() as server:
        server.tags = True
        yield server


def copies(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".tar")


def test_a_shard_is_copied_once_and_then_read_locally(web: CacheServer, tmp_path: Path) -> None:
    """By all threads, processes and later objects; the server need not send parts."""
    url = web.put("a.tar", DATA)
    version = find_version(url)
    web.requests.clear()
    before = open_files()
    with ShardRanges(cache=tmp_path) as ranges, ThreadPoolExecutor(4) as pool:
        starts = range(0, 4000, 100)
        found = pool.map(lambda start: ranges.read(url, start, start + 500, version), starts)
        assert list(found) == [DATA[start : start + 500] for start in starts]
        assert open_files(collect=False) >= before

        def read() -> None:
            assert ranges.read(url, 5, 9, version) == DATA[5:9]

        assert in_child(read) == 0
        assert not ranges.is_local(url)
        with pickle.loads(pickle.dumps(ranges)) as copy:
            assert copy.read(url, 5, 9, version) == DATA[5:9]
    with ShardRanges(cache=str(tmp_path)) as ranges:
        assert ranges.read(url, 7, 9) == DATA[7:9]
    assert web.requests["/a.tar"] == 1
    assert open_files() <= before
    assert len(copies(tmp_path)) == 1


@pytest.mark.parametrize("other", [OTHER, DATA[:900]])
def test_a_copy_of_another_version_is_made_again(web: CacheServer, tmp_path: Path, other: bytes) -> None:
    """It shows by size or ETag; an index of the old version is an error."""
    url = web.put("a.tar", DATA)
    old = find_version(url)
    with ShardRanges(cache=tmp_path) as ranges:
        assert ranges.read(url, 5, 9, old) == DATA[5:9]
    web.put("a.tar", other)
    new = find_version(url)
    with ShardRanges(cache=tmp_path) as ranges:
        assert ranges.read(url, 5, 9, old) == DATA[5:9]
        assert ranges.read(url, 5, 9) == DATA[5:9]
    with ShardRanges(cache=tmp_path) as ranges:
        if (file := copies(tmp_path)[0].open("rb")) and not tag_of(file.fileno()) and len(other) == len(DATA):
            file.close()
            pytest.skip("this file system has no extended attributes")
        file.close()
        assert ranges.read(url, 5, 9, new) == other[5:9]
    with ShardRanges(cache=tmp_path) as ranges, pytest.raises(ShardFormatError, match="is not the one that its index"):
        ranges.read(url, 5, 9, old)


def test_a_copy_that_is_removed_or_changed_is_made_again(web: CacheServer, tmp_path: Path) -> None:
    """While it is open."""
    url = web.put("a.tar", DATA)
    with ShardRanges(cache=tmp_path) as ranges:
        for spoil in (Path.unlink, lambda path: path.write_bytes(b"x"), lambda path: os.truncate(path, 100)):
            assert ranges.read(url, 200, 900) == DATA[200:900]
            spoil(copies(tmp_path)[0])
        assert ranges.read(url, 200, 900) == DATA[200:900]


def test_a_copy_that_is_read_is_not_evicted(web: CacheServer, tmp_path: Path) -> None:
    """Room for the next is made of those that are closed; without room, the source is read, with a warning."""
    urls = [web.put(f"{name}.tar", DATA) for name in "abc"]
    cache = ShardCache(str(tmp_path), max_bytes=len(DATA) * 2)
    with ShardRanges(cache=cache, max_open=1) as ranges:
        for url in urls:
            assert ranges.read(url, 5, 9) == DATA[5:9]
        assert len(copies(tmp_path)) == 2


def test_the_source_is_read_when_the_cache_cannot_store(
    web: CacheServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning; this server sends no parts, which is then an error."""
    url = web.put("a.tar", DATA)
    cache = ShardCache(str(tmp_path), max_bytes=10)
    with (
        caplog.at_level(logging.WARNING),
        ShardRanges(cache=cache) as ranges,
        pytest.raises(ShardOpenError, match="cannot be read in parts"),
    ):
        ranges.read(url, 5, 9)
    assert "is read from its source, not from the cache folder" in caplog.text


def test_commands_can_be_read_through_a_cache(tmp_path: Path) -> None:
    """Their output is a file then."""
    (tmp_path / "a.tar").write_bytes(DATA)
    with ShardRanges(cache=tmp_path / "copies") as ranges:
        assert ranges.read(f"pipe:cat {tmp_path}/a.tar", 5, 9) == DATA[5:9]
        with pytest.raises(ShardOpenError, match="standard input can only be read"):
            ranges.read("-", 5, 9)
        assert ranges.read(tmp_path / "a.tar", 5, 9, StoredVersion(len(DATA))) == DATA[5:9]
    assert len(copies(tmp_path / "copies")) == 1


def test_errors_of_the_source_are_raised(web: CacheServer, tmp_path: Path) -> None:
    """A shard that is missing or cut is not kept."""
    web.put("a.tar", DATA)
    url = web.put("b.tar", DATA)
    web.cut.add("/b.tar")
    options = {"http": {"retries": 1}}
    with ShardRanges(options, cache=tmp_path) as ranges:
        with pytest.raises(ShardOpenError, match="404"):
            ranges.read(url.replace("b.tar", "c.tar"), 5, 9)
        with pytest.raises(ShardOpenError, match="broke off"):
            ranges.read(url, 5, 9)
    assert not copies(tmp_path)


def test_errors_of_a_copy_name_the_shard(web: CacheServer, tmp_path: Path) -> None:
    """And the file."""
    url = web.put("a.tar?sig=hidden", DATA)
    message = r"copies.*ends at byte 51,200.*\(the copy in the cache of shard http://.*a.tar\?sig=\*\*\*\)"
    with (
        ShardRanges(cache=tmp_path / "copies") as ranges,
        pytest.raises(ChangedShardError, match=message) as caught,
    ):
        ranges.read(url, 5, len(DATA) + 9)
    assert caught.value.shard == url.replace("hidden", "***")


@pytest.mark.parametrize("cache", [1, "", ShardCache("/tmp/x", is_named_by_digest=False)])
def test_cache_is_checked(cache: Any) -> None:
    """Copies must have names of their own."""
    with pytest.raises(TypeError, match="cache must be a folder"):
        ShardRanges(cache=cache)
