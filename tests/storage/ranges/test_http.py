"""Ranges of shards on web servers: one request each, on a few connections, of the expected version or an error."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from threading import Barrier
from typing import Any

import pytest

from tests.kits.fault_server import OLD, Fault, Site, serve_site
from tests.kits.processes import in_child
from torchdata_wds.errors import ChangedShardError, ShardFormatError, ShardOpenError
from torchdata_wds.storage.byte_streams import StoredVersion
from torchdata_wds.storage.ranges import ShardRanges, find_version
from torchdata_wds.storage.sources.http_client import Answer

DATA = bytes(range(256)) * 200
OTHER = DATA[::-1]
OPTIONS: dict[str, Any] = {"http": {"retries": 3, "read_timeout": 0.3}}


def site(**how: Any) -> Site:
    return Site({"/a.tar": DATA}, replacements={"/a.tar": OTHER}, **how)


def test_read_gives_exactly_the_bytes_of_a_range_on_one_connection() -> None:
    """Each range is one bounded request, and connections are kept."""
    web = site()
    with serve_site(web) as address, ShardRanges() as ranges:
        url = f"{address}/a.tar"
        version = find_version(url)
        assert version is not None
        assert (version.size, version.tag[0], version.tag[-1]) == (len(DATA), '"', '"')
        for start, stop in ((0, 1), (5, 900), (0, len(DATA)), (len(DATA) - 3, len(DATA)), (9, 9)):
            assert ranges.read(url, start, stop, version) == DATA[start:stop]
        assert not ranges.is_local(url)
    asked = [headers.get("Range") for _, headers in web.requests]
    assert asked == ["bytes=0-0", "bytes=0-0", "bytes=5-899", "bytes=0-51199", "bytes=51197-51199"]
    assert web.connections == 1


def test_threads_read_in_parallel() -> None:
    """A server that answers only once all have asked gets all requests."""
    everyone = Barrier(6, timeout=30)

    class Meeting(Site):
        def fault(self, path: str) -> None:  # type: ignore[override]
            everyone.wait()

    with serve_site(Meeting({"/a.tar": DATA})) as address, ShardRanges() as ranges, ThreadPoolExecutor(6) as pool:
        starts = [number * 1000 for number in range(6)]
        found = pool.map(lambda start: ranges.read(f"{address}/a.tar", start, start + 500), starts)
        assert list(found) == [DATA[start : start + 500] for start in starts]


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ({"validators": "etag"}, "ETag"),
        ({"validators": "date"}, "date"),
        ({"validators": "weak"}, "date"),
        ({"validators": "etag", "heeds_condition": False}, "ETag"),
    ],
)
def test_read_raises_when_the_shard_was_replaced(how: dict[str, Any], kind: str) -> None:
    """By its tag or date, with no request but the read's own; reading it as the new version works."""
    web = site(**how)
    with serve_site(web) as address, ShardRanges() as ranges:
        url = f"{address}/a.tar"
        version = find_version(url)
        assert version is not None
        web.plans["/a.tar"] = iter([None, Fault("change")])
        assert ranges.read(url, 5, 9, version) == DATA[5:9]
        with pytest.raises(ChangedShardError, match=f"it has the {kind} .*, expected ") as caught:
            ranges.read(url, 5, 9, version)
        assert caught.value.shard == url
        assert len(web.requests) == 3
        assert ranges.read(url, 5, 9, find_version(url)) == OTHER[5:9]
        assert ranges.read(url, 5, 9) == OTHER[5:9]


@pytest.mark.parametrize("validators", ["etag", "none"])
def test_read_raises_when_the_length_changed(validators: str) -> None:
    """Which every server tells."""
    web = site(validators=validators)
    with serve_site(web) as address, ShardRanges() as ranges:
        url = f"{address}/a.tar"
        version = find_version(url)
        web.objects["/a.tar"] = DATA[:1000]
        with pytest.raises(ChangedShardError, match="it has 1,000 bytes, expected 51,200"):
            ranges.read(url, 5, 9, version)
        with pytest.raises(ShardFormatError, match="ends at byte 1,000, before the offset 2,000"):
            ranges.read(url, 2000, 2010, version)


@pytest.mark.parametrize(
    ("validators", "tag"),
    [("weak", f"date-{OLD}"), ("date", f"date-{OLD}"), ("fresh", ""), ("none", ""), ("stuck", '"tag"')],
)
def test_find_version_takes_what_proves_something(validators: str, tag: str) -> None:
    """A date within the second of the answer proves nothing, and a weak tag less than a date."""
    with serve_site(site(validators=validators)) as address:
        assert find_version(f"{address}/a.tar") == StoredVersion(len(DATA), tag)


def test_a_stop_beyond_the_end_is_an_error() -> None:
    """A server sends what there is, and that is too little."""
    with serve_site(site()) as address, ShardRanges() as ranges:
        with pytest.raises(ChangedShardError, match="ends at byte 51,200, inside or before the requested bytes 51,195"):
            ranges.read(f"{address}/a.tar", len(DATA) - 5, len(DATA) + 5)
        with pytest.raises(ShardFormatError, match="ends at byte 51,200, before the offset"):
            ranges.read(f"{address}/a.tar", len(DATA) + 5, len(DATA) + 9)
        with pytest.raises(ShardFormatError, match="ends at byte 51,200"):
            ranges.read(f"{address}/a.tar", len(DATA), len(DATA) + 9)


def test_an_empty_shard_has_a_version() -> None:
    """Although no part of it can be requested."""
    with serve_site(Site({"/a.tar": b""})) as address, ShardRanges() as ranges:
        assert find_version(f"{address}/a.tar") == StoredVersion(0)
        assert ranges.read(f"{address}/a.tar", 0, 0, StoredVersion(0)) == b""


def test_a_server_without_ranges_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each sample would download its whole shard, up to the sample; the version is told all the same."""
    with serve_site(site(ranges=False)) as address, ShardRanges() as ranges:
        url = f"{address}/a.tar"
        version = find_version(url)
        assert version is not None
        assert version.size == len(DATA)
        with monkeypatch.context() as patch:
            patch.delattr(Answer, "read")
            patch.delattr(Answer, "readinto")
            with pytest.raises(ShardOpenError, match=r"cannot be read in parts: .*pass cache= to copy each shard once"):
                ranges.read(url, 40_000, 40_010, version)
        assert ranges.read(url, 0, len(DATA), version) == DATA


FAULTS = {
    "drop": Fault("drop", after=1500),
    "reset": Fault("reset", after=1500),
    "stall": Fault("stall", after=1500),
    "unavailable": Fault("status", status=503),
    "silent": Fault("silent"),
    "less": Fault("less"),
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=name, marks=pytest.mark.slow if name == "stall" else ()) for name, fault in FAULTS.items()],
)
def test_read_survives_connections_that_fail(fault: Fault) -> None:
    """It goes on at the same byte, twice in a row too."""
    web = site(plans={"/a.tar": iter([fault, fault])})
    with serve_site(web) as address, ShardRanges(OPTIONS) as ranges:
        assert ranges.read(f"{address}/a.tar", 1000, 9000) == DATA[1000:9000]
    assert len(web.requests) == 3
    assert all(headers["Range"].endswith("-8999") for _, headers in web.requests)


def test_read_raises_when_the_shard_changes_while_it_is_read() -> None:
    """Bytes of two versions are never put together."""
    web = site(plans={"/a.tar": iter([Fault("drop", after=1500), Fault("change")])})
    with serve_site(web) as address, ShardRanges(OPTIONS) as ranges:
        with pytest.raises(ShardOpenError, match="was changed while it was read"):
            ranges.read(f"{address}/a.tar", 1000, 9000)
        assert ranges.read(f"{address}/a.tar", 1000, 9000) == OTHER[1000:9000]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("status", status=404), "404"),
        (Fault("status", status=403), "403"),
        (Fault("elsewhere"), "Content-Range 'bytes 1007-8999/51200' for bytes from 1,000"),
        (Fault("status", status=503), "gave up .* after 4 attempts"),
    ],
)
def test_read_raises_when_it_is_hopeless(fault: Fault, reason: str) -> None:
    """Secrets in the address are not shown, and find_version says the same."""
    with serve_site(site(plans={"/a.tar": repeat(fault)})) as address, ShardRanges(OPTIONS) as ranges:
        url = f"{address}/a.tar?X-Amz-Signature=hidden"
        with pytest.raises(ShardOpenError, match=reason) as caught:
            ranges.read(url, 1000, 9000)
        assert "hidden" not in f"{caught.value}{caught.value.shard}"
        if fault.kind == "status":
            with pytest.raises(ShardOpenError, match=reason):
                find_version(url, storage_options=OPTIONS)


@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_content_encoding_is_an_error(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's parts are of the compressed bytes, which are not the shard's."""
    told = Site.validators_of

    def validators_of(self: Site, path: str, data: bytes) -> dict[str, str]:
        return {**told(self, path, data), "Content-Encoding": encoding}

    monkeypatch.setattr(Site, "validators_of", validators_of)
    with serve_site(site()) as address, ShardRanges() as ranges:
        assert find_version(f"{address}/a.tar") is None
        with pytest.raises(ShardOpenError, match=f"the server compresses it, with Content-Encoding '{encoding}'"):
            ranges.read(f"{address}/a.tar", 5, 9)


def test_a_forked_child_makes_its_own_connections() -> None:
    """Two processes on one connection would read each other's answers."""
    web = site()
    with serve_site(web) as address, ShardRanges() as ranges:
        url = f"{address}/a.tar"
        assert ranges.read(url, 0, 5) == DATA[:5]

        def read_others() -> None:
            for start in range(5):
                assert ranges.read(url, start, 900) == DATA[start:900]

        assert in_child(read_others) == 0
        assert ranges.read(url, 7, 9) == DATA[7:9]
    assert web.connections == 2


def test_redirects_are_followed() -> None:
    """A store sends readers of a data set to another host."""
    with serve_site(site()) as there:
        here = site(plans={"/a.tar": repeat(Fault("redirect", to=there))})
        with serve_site(here) as address, ShardRanges() as ranges:
            version = find_version(f"{address}/a.tar")
            assert ranges.read(f"{address}/a.tar", 3, 99, version) == DATA[3:99]


def test_aistore_is_read_by_its_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors name the shard."""
    web = Site({"/v1/objects/bucket/a.tar": DATA})
    with serve_site(web) as address, ShardRanges() as ranges:
        monkeypatch.setenv("AIS_ENDPOINT", address)
        url = "ais://bucket/a.tar"
        assert ranges.read(url, 3, 99, find_version(url)) == DATA[3:99]
        with pytest.raises(ShardOpenError, match=r"404.*\(AIStore's address of shard ais://bucket/b.tar\)"):
            ranges.read("ais://bucket/b.tar", 3, 99)


@pytest.mark.parametrize("validators", ["etag", "date", "none"])
def test_read_gives_the_right_bytes_when_faults_are_drawn(validators: str) -> None:
    """From several threads, on servers that prove what they send, and on those that prove nothing."""
    draw = random.Random(validators)
    kinds = [("drop", 700), ("reset", 300), ("status", 0), ("less", 0), ("silent", 0), ("garbage", 0), ("more", 0)]

    class Failing(Site):
        def fault(self, path: str) -> Fault | None:
            kind, after = draw.choice(kinds)
            return Fault(kind, after=draw.randrange(after + 1)) if draw.random() < 0.4 else None

    def read(start: int) -> bool:
        stop = start + start % 3000 + 1
        return ranges.read(f"{address}/a.tar", start, stop, version) == DATA[start:stop]

    web = Failing({"/a.tar": DATA}, validators=validators)
    with serve_site(web) as address, ShardRanges({"http": {"retries": 30}}) as ranges, ThreadPoolExecutor(3) as pool:
        version = find_version(f"{address}/a.tar", storage_options={"http": {"retries": 30}})
        assert all(pool.map(read, range(0, 48000, 491)))
