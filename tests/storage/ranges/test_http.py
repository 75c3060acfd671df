"""Ranges of shards on web servers: one request each, on a few connections, of the expected version or an error."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from tests.kits.fault_server import Site, serve_site
from torchdata_wds.storage.ranges import ShardRanges, find_version

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
