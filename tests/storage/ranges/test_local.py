"""Ranges of local shards: exact bytes of the expected version, from any thread and process, or an error."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from threading import Event

import pytest

from tests.kits.processes import open_files
from torchdata_wds.errors import ChangedShardError, ShardOpenError
from torchdata_wds.storage import StorageOptions
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.ranges import ShardRanges, find_version

DATA = bytes(range(256)) * 64


@pytest.fixture
def shard(tmp_path: Path) -> str:
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    os.utime(path, ns=(1, 1_000))
    return str(path)


def test_read_gives_exactly_the_bytes_of_a_range(shard: str) -> None:
    """Paths, Path objects and file: URLs are the same shard."""
    version = find_version(shard)
    assert version == StoredVersion(len(DATA), "mtime-1000")
    with ShardRanges() as ranges:
        for start, stop in ((0, len(DATA)), (7, 900), (5, 5), (len(DATA), len(DATA)), (len(DATA) - 1, len(DATA))):
            for url in (shard, Path(shard), f"file://{shard}"):
                assert ranges.read(url, start, stop, version) == DATA[start:stop]
        assert ranges.is_local(shard)
        assert not ranges.is_local("s3://b/a.tar")


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 4)])
def test_read_refuses_a_range_that_is_none(shard: str, start: int, stop: int) -> None:
    """A wrong index does not read from the end."""
    with ShardRanges() as ranges, pytest.raises(ValueError, match="0 <= start <= stop"):
        ranges.read(shard, start, stop)


def test_read_raises_beyond_the_end(shard: str) -> None:
    """A short result never comes back."""
    with ShardRanges() as ranges, pytest.raises(ChangedShardError, match="ends at byte 16,384, inside or before"):
        ranges.read(shard, len(DATA) - 5, len(DATA) + 5)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("size", [len(DATA), len(DATA) + 512, 100])
def test_read_raises_when_an_open_shard_changes(shard: str, replace: bool, size: int) -> None:
    """Rewritten in place or replaced by a rename, with the same size or another: never the other bytes."""
    version = find_version(shard)
    with ShardRanges() as ranges:
        assert ranges.read(shard, 0, 10, version) == DATA[:10]
        new = Path(shard + ".new") if replace else Path(shard)
        new.write_bytes(b"x" * size)
        new.replace(shard)
        for _ in range(2):
            with pytest.raises(ChangedShardError, match="is not the version that its index describes") as caught:
                ranges.read(shard, 0, 10, version)
            assert caught.value.shard == shard
        assert ranges.read(shard, 0, 10, find_version(shard)) == b"x" * 10
        assert ranges.read(shard, 0, 10) == b"x" * 10


def test_read_raises_when_an_open_shard_is_removed(shard: str) -> None:
    """The deleted file's bytes are not read for ever."""
    with ShardRanges() as ranges:
        ranges.read(shard, 0, 10)
        Path(shard).unlink()
        with pytest.raises(ShardOpenError, match="does not exist"):
            ranges.read(shard, 0, 10)


def test_versions_of_different_kinds_compare_by_size(shard: str) -> None:
    """An index made in a bucket is good for a local copy of the shards."""
    with ShardRanges() as ranges:
        assert ranges.read(shard, 0, 9, StoredVersion(len(DATA), '"0123"')) == DATA[:9]
        with pytest.raises(ChangedShardError, match="16,384 bytes, expected 1"):
            ranges.read(shard, 0, 9, StoredVersion(1, '"0123"'))


def test_open_files_are_bounded_and_closed(tmp_path: Path) -> None:
    """The least recently used is closed first; close() closes all, and reading goes on after it."""
    shards = [tmp_path / f"{number}.tar" for number in range(20)]
    for number, path in enumerate(shards):
        path.write_bytes(b"%02d" % number * 10)
    before = open_files()
    ranges = ShardRanges(max_open=4)
    for path in (*shards, *reversed(shards)):
        assert ranges.read(path, 0, 2) == path.stem.zfill(2).encode()
        assert open_files(collect=False) <= before + 4
    ranges.close()
    assert open_files() <= before
    assert ranges.read(shards[3], 0, 2) == b"03"
    ranges.close()


def test_threads_share_ranges(tmp_path: Path) -> None:
    """Files are closed under readers' feet, and each gets its own bytes."""
    shards = [tmp_path / f"{number}.tar" for number in range(12)]
    for number, path in enumerate(shards):
        path.write_bytes(bytes([number]) * 5000)
    versions = [find_version(path) for path in shards]

    def read(step: int) -> bool:
        number = step * 7 % 12
        return ranges.read(shards[number], step % 100, 5000, versions[number]) == bytes([number]) * (5000 - step % 100)

    with ShardRanges(max_open=2) as ranges, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(3000)))


def test_a_forked_child_opens_its_own_files(shard: str) -> None:
    """It inherits no open file, and neither side disturbs the other."""
    ranges = ShardRanges()
    ranges.read(shard, 0, 10)
    child = os.fork()
    if not child:
        is_right = not len(ranges._local) and ranges.read(shard, 3, 9) == DATA[3:9]
        ranges.close()
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ranges.read(shard, 5, 9) == DATA[5:9]
    ranges.close()


def test_pickles_hold_no_open_files(shard: str) -> None:
    """A copy reads by itself."""
    with ShardRanges(max_open=3) as ranges:
        ranges.read(shard, 0, 10)
        with pickle.loads(pickle.dumps(ranges)) as copy:
            assert copy.max_open == 3
            assert copy.read(shard, 1, 4) == DATA[1:4]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("missing.tar", "does not exist"),
        ("", "it does not exist"),
        (".", "it is a folder"),
        ("fifo", "not a regular file"),
        ("-", "standard input can only be read from its start"),
        ("pipe:cat a.tar?token=hidden", "the output of a command can only be read from its start"),
    ],
)
def test_what_cannot_be_read_in_any_order_is_an_error(
    url: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing blocks, and nothing is read as if it were a file."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    with ShardRanges() as ranges, pytest.raises(ShardOpenError, match=reason) as caught:
        ranges.read(url, 0, 10)
    assert "hidden" not in str(caught.value)


def test_find_version_of_what_has_none(tmp_path: Path) -> None:
    """Commands, standard input and FIFOs have no version; a missing file is an error."""
    os.mkfifo(tmp_path / "fifo")
    for url in ("-", "pipe:cat x.tar", tmp_path / "fifo"):
        assert find_version(url) is None
    with pytest.raises(ShardOpenError, match="does not exist"):
        find_version(tmp_path / "missing.tar")
    with pytest.raises(ShardOpenError, match="it is a folder"):
        find_version(tmp_path)


def test_rewriting_rules_apply_and_errors_name_both(shard: str) -> None:
    """As for open_shard: the listed URL is in the error, and so is the path where it was looked for."""
    options = StorageOptions(rewrite={"s3://bucket": str(Path(shard).parent)})
    version = find_version("s3://bucket/a.tar", storage_options=options)
    assert version == find_version(shard)
    with ShardRanges(options) as ranges:
        assert ranges.is_local("s3://bucket/a.tar")
        assert ranges.read("s3://bucket/a.tar", 2, 9, version) == DATA[2:9]
        message = r"is not the version.*\(where a rewriting rule looks for shard s3://bucket/a.tar\)"
        with pytest.raises(ChangedShardError, match=message) as caught:
            ranges.read("s3://bucket/a.tar", 2, 9, StoredVersion(3))
        assert caught.value.shard == "s3://bucket/a.tar"
        with pytest.raises(ShardOpenError, match=r"b.tar.*does not exist.*looks for shard s3://bucket/b.tar"):
            ranges.read("s3://bucket/b.tar", 2, 9)


@pytest.mark.parametrize("max_open", [0, -1, True, 2.0, "many"])
def test_max_open_is_checked(max_open: object) -> None:
    """At least one file must stay open."""
    with pytest.raises(ValueError, match="max_open must be an int of at least 1"):
        ShardRanges(max_open=max_open)  # type: ignore[arg-type]


def test_readers_never_get_other_bytes_while_a_shard_is_replaced(shard: str) -> None:
    """Four threads read one version while it is rewritten, replaced and put back: its bytes, or an error."""
    version, path, other = find_version(shard), Path(shard), DATA[::-1]
    old, new = path.with_suffix(".old"), path.with_suffix(".new")
    done = Event()

    def read(seed: int) -> None:
        for start in cycle(range(seed, 9000, 401)):
            with suppress(ChangedShardError):
                assert ranges.read(shard, start, start + 4000, version) == DATA[start : start + 4000]
            if done.is_set():
                return

    with ShardRanges() as ranges, ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read, seed) for seed in range(4)]
        for number in range(40):
            if number % 2:
                new.write_bytes(other)
                new.replace(path)
            else:
                path.write_bytes(other)
            old.write_bytes(DATA)
            os.utime(old, ns=(1, 1_000))
            old.replace(path)
        done.set()
        assert [reader.result() for reader in readers] == [None] * 4
