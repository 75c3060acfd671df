"""What this process has read, by source: exact counts, secrets masked, and the threads that wait kept apart."""

import gzip
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.fault_server import Fault, Site, serve_site
from tests.kits.processes import in_child
from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage import StorageOptions, meters, open_shard, retrying, wrap_stream
from torchdata_wds.storage.cache import ShardCache
from torchdata_wds.storage.meters import SourceTally, difference, reading, snapshot, source_of, total
from torchdata_wds.storage.places import meter_for
from torchdata_wds.storage.ranges import ShardRanges
from torchdata_wds.storage.read_ahead import ReadAhead

DATA = bytes(range(251)) * 4000
DELAY = 0.02


@pytest.fixture
def began() -> dict[str, SourceTally]:
    """What the tests before this one have read."""
    meters.forget_slowest()
    return snapshot()


@pytest.fixture
def site() -> Iterator[tuple[Site, str]]:
    site = Site({"/x.tar": DATA})
    with serve_site(site) as address:
        yield site, address


class Slow:
    """A stream whose reads take a while."""

    def __init__(self, data: bytes) -> None:
        self.data, self.closed = data, False

    def read(self, size: int) -> bytes:
        threading.Event().wait(DELAY)
        piece, self.data = self.data[:size], self.data[size:]
        return piece

    def close(self) -> None:
        self.closed = True


def only(began: dict[str, SourceTally]) -> tuple[str, SourceTally]:
    """The one source that was read since."""
    ((source, tally),) = difference(snapshot(), began).items()
    return source, tally


def read(url: str | Path, **options: Any) -> bytes:
    with open_shard(url, **options) as stream:
        return stream.read()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_local_shard_counts_its_stored_bytes(tmp_path: Path, began: dict[str, SourceTally], pack: Any) -> None:
    """Compressed shards count as compressed, and every second of a thread without read-ahead is waited."""
    path = tmp_path / "x.tar"
    path.write_bytes(pack(DATA))
    assert read(path) == DATA
    source, tally = only(began)
    assert (source, tally.shards, tally.bytes, tally.first_bytes) == ("local files", 1, path.stat().st_size, 1)
    assert 0 < tally.first_seconds <= tally.seconds == pytest.approx(tally.waited)
    assert tally.slowest == str(path)
    assert tally.slowest_seconds == pytest.approx(tally.seconds)
    assert reading() == (str(path), path.stat().st_size)


def test_what_a_local_shard_reads_twice_is_counted_once(tmp_path: Path, began: dict[str, SourceTally]) -> None:
    """A seek back takes what will be read again out of the count."""
    path = tmp_path / "x.tar"
    path.write_bytes(DATA)
    with open_shard(str(path)) as stream:
        assert stream.read(len(DATA)) == DATA
        stream.seek(-300_000, io.SEEK_CUR)
        assert reading() == (str(path), len(DATA) - 300_000)
        assert stream.read() == DATA[-300_000:]
    assert difference(snapshot(), began)["local files"].bytes == len(DATA)


def test_closing_early_counts_what_was_read(tmp_path: Path, began: dict[str, SourceTally]) -> None:
    """An offset is where the byte begins, and no part of what was read."""
    path = tmp_path / "x.tar"
    path.write_bytes(DATA)
    with open_shard(path, offset=1000) as stream:
        assert reading() == (str(path), 1000)
        stream.read(10)
        shard, byte = reading() or ("", 0)
    assert only(began)[1].bytes == byte - 1000 < len(DATA)
    assert shard == str(path)


def test_retries_delays_and_secrets_of_a_web_server(
    site: tuple[Site, str], began: dict[str, SourceTally], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses are part of the seconds; the label has no user, and the shard no token."""
    monkeypatch.setattr(retrying, "seconds_to_wait", lambda *_: DELAY)
    plan, address = site
    plan.plans["/x.tar"] = iter([Fault("status")])
    plan.plans["/y.tar"] = iter([Fault("drop", until=5000), Fault("drop", until=9000)])
    plan.objects["/y.tar"] = DATA
    host = address.removeprefix("http://")
    assert read(f"http://me:hidden@{host}/y.tar?token=hidden") == DATA
    source, tally = only(began)
    assert (source, tally.shards, tally.bytes, tally.retries) == (address, 1, len(DATA), 2)
    assert "hidden" not in f"{tally}{reading()}{source}"
    assert "/y.tar" in tally.slowest
    again = snapshot()
    assert read(f"{address}/x.tar", offset=10) == DATA[10:]
    source, tally = only(again)
    assert (source, tally.bytes, tally.retries) == (address, len(DATA) - 10, 1)
    assert tally.first_seconds >= DELAY


def test_a_shard_that_does_not_open_costs_its_seconds(site: tuple[Site, str], began: dict[str, SourceTally]) -> None:
    """It is not counted as opened."""
    with pytest.raises(ShardOpenError):
        read(f"{site[1]}/none.tar")
    tally = only(began)[1]
    assert tally._replace(seconds=0, waited=0, slowest="", slowest_seconds=0) == SourceTally()
    assert tally.seconds > 0


def test_commands_and_given_streams_are_sources(began: dict[str, SourceTally]) -> None:
    """A command's text is shown without its secrets."""
    assert read("pipe:printf hello # --password hidden") == b"hello"
    with wrap_stream(Slow(b"12345"), "s3://bucket/x.tar") as stream:
        assert stream.read() == b"12345"
    tallies = difference(snapshot(), began)
    assert {source: tally.bytes for source, tally in tallies.items()} == {"commands": 5, "given streams": 5}
    assert tallies["given streams"].waited >= DELAY
    assert "hidden" not in str(tallies)


def test_a_stage_waits_less_for_what_is_read_ahead(began: dict[str, SourceTally]) -> None:
    """The thread's waiting is in the seconds; a stage that comes late has not waited."""
    url = "s3://bucket/x.tar"
    ahead = ReadAhead(lambda: (wrap_stream(Slow(b"12345"), url), None), meter=meter_for(url))
    while not ahead._is_over:
        threading.Event().wait(0.001)
    stream, _ = ahead.opened()
    with stream:
        assert stream.read() == b"12345"
        assert reading() == (url, 5)
    tallies = difference(snapshot(), began)
    assert tallies["given streams"].seconds >= 2 * DELAY
    assert tallies["given streams"].waited == 0
    assert tallies["s3://bucket"].waited < DELAY


def test_a_stage_that_waits_for_the_thread_is_counted(began: dict[str, SourceTally]) -> None:
    """The wait belongs to the server of the shard, and its place is known while it lasts."""
    url, gate = "s3://bucket/x.tar?Signature=hidden", threading.Event()

    def opening() -> tuple[Any, None]:
        assert gate.wait(20)
        return wrap_stream(Slow(b"12345"), url), None

    ahead = ReadAhead(opening, meter=meter_for(url))
    threading.Timer(DELAY, gate.set).start()
    stream, _ = ahead.opened()
    assert reading() == ("s3://bucket/x.tar?Signature=***", 0)
    stream.close()
    assert difference(snapshot(), began)["s3://bucket"].waited >= DELAY / 2


@pytest.mark.parametrize("while_reading", [True, False])
def test_cache_hits_and_misses_belong_to_the_server(
    tmp_path: Path, site: tuple[Site, str], began: dict[str, SourceTally], while_reading: bool
) -> None:
    """The bytes of a hit come from local files; a download that another thread runs is not waited for twice."""
    cache = ShardCache(str(tmp_path), while_reading=while_reading, storage_options=StorageOptions())
    for _ in range(3):
        with cache.open(f"{site[1]}/x.tar", str(tmp_path / "x.tar")) as stream:
            assert stream.read() == DATA
    tallies = difference(snapshot(), began)
    remote, local = tallies[site[1]], tallies["local files"]
    assert (remote.shards, remote.bytes, remote.misses, remote.hits) == (1, len(DATA), 1, 2)
    copies = 2 if while_reading else 3
    assert (local.shards, local.bytes, local.misses, local.hits) == (copies, copies * len(DATA), 0, 0)


def test_random_access_counts_bytes_and_readers(
    tmp_path: Path, site: tuple[Site, str], began: dict[str, SourceTally]
) -> None:
    """A reader counts as a shard when it is opened, and every range counts its bytes."""
    path = tmp_path / "x.tar"
    path.write_bytes(DATA)
    with ShardRanges() as ranges:
        for url in (path, f"{site[1]}/x.tar"):
            assert ranges.read(url, 100, 200) + ranges.read(url, 5, 7) == DATA[100:200] + DATA[5:7]
            assert reading() == (str(url), 7)
    tallies = difference(snapshot(), began)
    assert {source: (tally.shards, tally.bytes) for source, tally in tallies.items()} == {
        "local files": (1, 102),
        site[1]: (1, 102),
    }
    assert all(tally.seconds for tally in tallies.values())


def test_a_forked_child_starts_at_zero(tmp_path: Path) -> None:
    """What the parent has read is not the child's."""
    path = tmp_path / "x.tar"
    path.write_bytes(DATA)
    read(path)

    def child() -> None:
        assert snapshot() == {}
        assert reading() is None
        read(path)
        assert snapshot()["local files"].bytes == len(DATA)

    assert in_child(child) == 0
    assert snapshot()["local files"].bytes >= len(DATA)


def test_snapshots_add_up_and_subtract() -> None:
    """The slowest shard of a sum is that of the slowest worker; of a difference, a new one or none."""
    one, other = (
        SourceTally(shards=1, bytes=5, slowest="a", slowest_seconds=1),
        SourceTally(hits=2, slowest="b", slowest_seconds=0.5),
    )
    both = total([{"s": one}, {"s": other, "t": other}])
    assert both == {"s": one._replace(hits=2), "t": other}
    assert difference(both, {"s": one}) == {"s": SourceTally(hits=2), "t": other}
    assert difference(both, both) == {}


@pytest.mark.parametrize(
    ("shard", "source"),
    [
        ("HTTPS://me:***@[2001::1]:8443/x::y.tar?a=b@c", "https://[2001::1]:8443"),
        ("https://host?x=1", "https://host"),
        ("simplecache::s3://bucket/x.tar", "s3://bucket"),
        ("zip://x.tar::/data/all.zip", "local files"),
        ("abfs://box@me.dfs.core.windows.net/x.tar", "abfs://box@me.dfs.core.windows.net"),
        ("file:///data/x.tar", "local files"),
        ("-", "standard input"),
        ("pipe:cat x.tar", "commands"),
        ("ais://bucket/x.tar", "ais://bucket"),
    ],
)
def test_sources_are_named_by_server_or_kind(shard: str, source: str) -> None:
    """Nothing of a path, user or query is in a name."""
    assert source_of(shard) == source


def test_aistore_is_named_by_its_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that waits, which the gateway's address names, and hits are of one source."""
    monkeypatch.setenv("AIS_ENDPOINT", "http://gate:51080/")
    monkeypatch.setenv("USE_AIS_FOR", "s3")
    assert {source_of("ais://b/x.tar"), source_of("s3://b/x.tar")} == {"http://gate:51080"}
