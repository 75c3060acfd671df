"""IndexedShards over web servers and stores: range requests, several at once, copies, and shards that change there."""

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.fault_server import Fault, Site, serve_site
from tests.kits.s3_server import s3_server
from tests.kits.shards import keys_of, tar_bytes, text_keys, text_samples
from torchdata_wds import IndexedShards, ShardFormatError, WdsLoader, index_shard

SIZES = (6, 0, 9)


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps indexes that are made here away from the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "indexes"))


@pytest.fixture
def site() -> Site:
    """A web server's shards."""
    return Site({f"/{number}.tar": tar_bytes(text_samples(f"s{number}-", size)) for number, size in enumerate(SIZES)})


@pytest.fixture
def address(site: Site) -> Iterator[str]:
    """The pattern of its shards."""
    with serve_site(site) as url:
        yield url + "/{0..2}.tar"


def streamed(pattern: str, **options: Any) -> list[dict[str, Any]]:
    """The samples as the pipes read them."""
    shards = IterableWrapper([pattern]).list_shards()
    if options:
        shards = shards.cache_shards(options["cache"])
    return list(shards.load_wds_shards().group_by_key())


def as_list(samples: list[Any]) -> list[Any]:
    """A collate function that keeps a batch."""
    return samples


def ranges_of(site: Site) -> list[str]:
    """The ranges that were asked for."""
    return [headers["Range"] for _, headers in site.requests if "Range" in headers]


def test_samples_come_by_range_requests(site: Site, address: str) -> None:
    """They equal those of the pipes; a batch is one request for neighbours."""
    expected = streamed(address)
    data = IndexedShards(address)
    assert len(data) == len(expected)
    site.requests.clear()
    assert data[7] == expected[7]
    assert len(site.requests) <= 2
    site.requests.clear()
    assert data.__getitems__([8, 6, 7, 9]) == [expected[number] for number in (8, 6, 7, 9)]
    assert len(site.requests) == 1
    assert all("-" in asked and not asked.endswith("-") for asked in ranges_of(site))
    assert list(data) == expected
    data.close()


def test_requests_of_a_batch_are_made_at_once(site: Site, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests wait for each other in the server: one after the other would never be answered."""
    data = IndexedShards(address)
    list(data)
    together = threading.Barrier(3, timeout=30)
    fault = Site.fault

    def fault_of(self: Site, path: str) -> Fault | None:
        together.wait()
        return fault(self, path)

    monkeypatch.setattr(Site, "fault", fault_of)
    assert keys_of(data.__getitems__([0, 3, 12])) == ["s0-00000", "s0-00003", "s2-00006"]
    data.close()


@pytest.mark.parametrize("validators", ["etag", "date", "none"])
def test_a_changed_object_raises_at_the_sample(site: Site, address: str, validators: str) -> None:
    """By its tag where there is one, else by what is in it."""
    site.validators = validators
    data = IndexedShards(address)
    assert data[0]["__key__"] == "s0-00000"
    site.objects["/0.tar"] = tar_bytes(text_samples("t0-", SIZES[0]))
    site.changed.add("/0.tar")
    with pytest.raises(ShardFormatError, match=r"0\.tar"):
        data[3]
    assert data[6]["__key__"] == "s2-00000"
    data.close()


def test_workers_read_a_server(address: str) -> None:
    """Connections of the parent are not shared with forked workers."""
    data = IndexedShards(address)
    assert keys_of(data[:2]) == ["s0-00000", "s0-00001"]
    loader = DataLoader(data, 4, num_workers=2, collate_fn=as_list)
    assert keys_of(sample for batch in loader for sample in batch) == text_keys([6, 0]) + text_keys([0, 0, 9])
    assert keys_of(pickle.loads(pickle.dumps(data))) == keys_of(data)
    data.close()


def test_any_store_of_fsspec() -> None:
    """By ranges of its filesystem; globs are listed there."""
    memory = fsspec.filesystem("memory")
    for number, size in enumerate(SIZES):
        memory.pipe(f"/indexed/{number}.tar", tar_bytes(text_samples(f"s{number}-", size)))
    data = IndexedShards("memory://indexed/*.tar")
    assert list(data) == streamed("memory://indexed/*.tar")
    assert data.__getitems__([14, 0, 13]) == [data[14], data[0], data[13]]
    memory.pipe("/indexed/0.tar", tar_bytes(text_samples("other", 6)))
    with pytest.raises(ShardFormatError, match=r"0\.tar"):
        data[0]
    memory.rm("/indexed", recursive=True)


def test_rewriting_rules_apply(tmp_path: Path) -> None:
    """Samples keep the URL that was listed."""
    for number, size in enumerate(SIZES):
        (tmp_path / f"{number}.tar").write_bytes(tar_bytes(text_samples(f"s{number}-", size)))
        index_shard(tmp_path / f"{number}.tar")
    data = IndexedShards("s3://b/{0..2}.tar", rewrite=f"s3://b={tmp_path}")
    assert [data[-1]["__url__"], data["s0-00001"]["__url__"]] == ["s3://b/2.tar", "s3://b/0.tar"]
    assert len(data) == 15


def test_copies_are_made_in_a_cache(site: Site, address: str, tmp_path: Path) -> None:
    """Each shard once, whole; samples have the path of the copy."""
    expected = streamed(address, cache=tmp_path / "copies")
    data = IndexedShards(address, cache=tmp_path / "other")
    assert len(data) == len(expected)
    site.requests.clear()
    found = [data[number] for number in range(len(data))]
    places = {sample.pop("__local_path__") for sample in found}
    assert found == [{name: value for name, value in sample.items() if name != "__local_path__"} for sample in expected]
    assert {Path(place).parent for place in places} == {tmp_path / "other"}
    assert len(site.requests) <= 2
    site.requests.clear()
    again = IndexedShards(address, cache=tmp_path / "other")
    assert keys_of(again) == keys_of(found)
    assert set(ranges_of(site)) <= {"bytes=0-0"}  # is it still that version?
    again.close()
    data.close()


def test_commands_are_copied_in_a_cache(tmp_path: Path) -> None:
    """What they write is read once; without a copy, no sample could be read alone."""
    (tmp_path / "x.tar").write_bytes(tar_bytes(text_samples("a", 5)))
    data = IndexedShards(f"pipe:cat {tmp_path}/x.tar", cache=tmp_path / "copies")
    assert keys_of(data.__getitems__([4, 1])) == ["a00004", "a00001"]
    (tmp_path / "x.tar").unlink()
    assert data.key_of(3) == "a00003"
    data.close()


@pytest.mark.slow
def test_s3_is_read_by_ranges() -> None:
    """One request for neighbours, others at once; an object that is replaced raises."""
    with s3_server() as server:
        for number, size in enumerate(SIZES):
            server.put(f"bucket/{number}.tar", tar_bytes(text_samples(f"s{number}-", size)))
        data = IndexedShards("s3://bucket/*.tar", storage_options=server.options)
        keys = [*text_keys([6]), *text_keys([0, 0, 9])]
        assert keys_of(data) == keys
        server.asked.clear()
        assert keys_of(data.__getitems__([7, 6, 8, 2])) == [keys[number] for number in (7, 6, 8, 2)]
        assert len(server.gets()) == 2
        assert all(asked.range.startswith("bytes=") for asked in server.gets())
        loader = DataLoader(data, 4, num_workers=2, multiprocessing_context="spawn", collate_fn=as_list)
        assert keys_of(sample for batch in loader for sample in batch) == keys
        server.put("bucket/2.tar", tar_bytes(text_samples("s2-", 9))[:-512])
        with pytest.raises(ShardFormatError, match=r"2\.tar"):
            data[6]


def test_an_order_asks_a_server_for_versions_once_an_epoch(site: Site, address: str) -> None:
    """Not a second time for its length right before; a shard that is replaced between two epochs is read anew."""
    pipe = IterableWrapper([address]).list_shards().load_in_order(run=16, seed=1)
    expected = sorted(keys_of(streamed(address)))
    loader = WdsLoader(pipe)
    assert sorted(keys_of(loader)) == expected
    asked = len(site.requests)
    assert sorted(keys_of(loader)) == expected
    each = len(site.requests) - asked
    other = WdsLoader(pipe)
    assert len(other) == sum(SIZES)
    assert len(site.requests) - asked - each == len(SIZES)
    assert sorted(keys_of(other)) == expected
    assert len(site.requests) - asked <= 2 * each
    site.objects["/2.tar"] = tar_bytes(text_samples("s9-", SIZES[2]))
    assert {key[:2] for key in keys_of(loader)} == {"s0", "s9"}
