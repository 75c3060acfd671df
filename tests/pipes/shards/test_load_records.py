"""Record shards through storage, handlers and workers."""

import gzip
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cbor2
import msgpack
import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.servers import serve_folder
from torchdata_wds import (
    CachedShard,
    ShardFormatError,
    ShardListError,
    ShardOpenError,
    ShardSlice,
    ignore_and_continue,
    ignore_and_stop,
)

KINDS: dict[str, Callable[[Any], bytes]] = {"cbor": cbor2.dumps, "msgpack": msgpack.packb}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """Each format in turn."""
    return str(request.param)


def records_of(number: int, count: int = 4) -> list[dict[str, Any]]:
    return [{"__key__": f"s{number}-{place}", "cls": place, "data": b"x" * place} for place in range(count)]


def write_shards(folder: Path, kind: str, counts: tuple[int, ...] = (4, 0, 3)) -> list[str]:
    """Shards of so many records; the second of three is empty."""
    paths = [folder / f"{number}.{kind}" for number in range(len(counts))]
    for number, (path, count) in enumerate(zip(paths, counts, strict=True)):
        path.write_bytes(b"".join(map(KINDS[kind], records_of(number, count))))
    return [str(path) for path in paths]


def load(urls: list[Any], kind: str, **options: Any) -> IterDataPipe[Any]:
    return getattr(IterableWrapper(urls, deepcopy=False), f"load_{kind}_shards")(**options)


EXPECTED = [*records_of(0, 4), *records_of(2, 3)]


def test_records_come_in_the_order_of_the_shards(kind: str, tmp_path: Path) -> None:
    """Both str and Path, and an empty shard between two others."""
    urls = write_shards(tmp_path, kind)
    assert list(load([Path(urls[0]), *urls[1:]], kind)) == EXPECTED


def test_records_come_from_open_streams_and_copies(kind: str, tmp_path: Path) -> None:
    """Pairs of torchdata's openers are closed; local copies are opened by themselves."""
    urls = write_shards(tmp_path, kind)
    streams = [io.BytesIO(Path(url).read_bytes()) for url in urls]
    assert list(load(list(zip(urls, streams, strict=True)), kind)) == EXPECTED
    assert all(stream.closed for stream in streams)
    assert list(load([CachedShard("https://host/x", url) for url in urls], kind)) == EXPECTED


def test_records_come_from_a_server_and_compressed(kind: str, tmp_path: Path) -> None:
    """The storage of tar shards serves them too."""
    for url in write_shards(tmp_path, kind):
        Path(url + ".gz").write_bytes(gzip.compress(Path(url).read_bytes()))
    with serve_folder(tmp_path) as server:
        assert list(load([f"{server}/{number}.{kind}" for number in range(3)], kind)) == EXPECTED
        assert list(load([f"{server}/{number}.{kind}.gz" for number in range(3)], kind)) == EXPECTED


def test_records_come_from_copies_of_a_server(kind: str, tmp_path: Path) -> None:
    """Behind cache_shards: while they are downloaded, and from the copies when the server is gone."""
    (tmp_path / "shards").mkdir()
    write_shards(tmp_path / "shards", kind)
    with serve_folder(tmp_path / "shards") as server:
        urls = [f"{server}/{number}.{kind}" for number in (0, 2)]
        pipe = getattr(IterableWrapper(urls).cache_shards(tmp_path / "cache"), f"load_{kind}_shards")()
        assert list(pipe) == EXPECTED
    assert list(pipe) == EXPECTED


def test_a_cut_compressed_shard_is_an_error_behind_its_records(kind: str, tmp_path: Path) -> None:
    """A cut between two records shows where the compression has an end."""
    (url,) = write_shards(tmp_path, kind, (4,))
    Path(url).write_bytes(gzip.compress(Path(url).read_bytes())[:-5])
    iterator = iter(load([url], kind))
    assert [next(iterator) for _ in range(4)] == records_of(0)
    with pytest.raises(ShardFormatError, match="cut off"):
        next(iterator)


def test_a_handler_goes_on_with_the_next_shard(kind: str, tmp_path: Path) -> None:
    """What lies before the damage is delivered, what is skipped is counted."""
    urls = write_shards(tmp_path, kind, (4, 4, 3))
    data = Path(urls[1]).read_bytes()
    Path(urls[1]).write_bytes(data[:-1])
    pipe = load([str(tmp_path / "missing"), *urls], kind, handler=ignore_and_continue)
    assert list(pipe) == [*records_of(0), *records_of(1, 3), *records_of(2, 3)]
    assert pipe.skipped == {"ShardOpenError": 1, "ShardFormatError": 1}
    assert list(load(urls, kind, handler=ignore_and_stop)) == [*records_of(0), *records_of(1, 3)]
    with pytest.raises(ShardFormatError, match="record 3") as caught:
        list(load(urls, kind))
    assert caught.value.shard == urls[1]


@pytest.mark.parametrize(
    "item",
    [
        ShardSlice("https://me:pw@host/x?token=abc", 1),
        CachedShard("https://me:pw@host/x?token=abc", "/x", ShardSlice("https://me:pw@host/x?token=abc", 1)),
        3,
        ["https://me:pw@host/x?token=abc"],
        ("https://me:pw@host/x?token=abc", 1, 2),
    ],
)
def test_items_that_are_no_shard_are_refused_with_masked_urls(item: Any, kind: str) -> None:
    """The message says what is taken, and shows no secret."""
    with pytest.raises(ShardListError, match=rf"load_{kind}_shards got") as caught:
        list(load([item], kind))
    assert "pw@" not in str(caught.value)
    assert "abc" not in str(caught.value)


def test_secrets_are_masked_in_errors_and_pickles_keep_options(kind: str) -> None:
    """Neither the error nor the pipe's text shows what storage_options or URLs hold."""
    pipe = load(["http://127.0.0.1:9/x?token=abc"], kind, storage_options={"http": {"headers": {"Cookie": "abc"}}})
    pipe = pickle.loads(pickle.dumps(pipe))
    assert pipe.storage_options["http"] == {"headers": {"Cookie": "abc"}}
    assert "abc" not in repr(pipe.storage_options)


def test_max_bytes_refuses_larger_records(kind: str, tmp_path: Path) -> None:
    """The limit reaches the reader."""
    urls = write_shards(tmp_path, kind)
    with pytest.raises(ShardFormatError, match="max_bytes=10"):
        list(load(urls, kind, max_bytes=10))


def test_records_are_samples_for_the_stages_behind(kind: str, tmp_path: Path) -> None:
    """Decoding and tuples take them as they are."""
    (url,) = write_shards(tmp_path, kind, (2,))
    assert list(load([url], kind).wds_to_tuple("__key__", "cls")) == [("s0-0", 0), ("s0-1", 1)]


def test_a_missing_package_is_no_matter_for_the_handler(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipping every shard would be silent loss of all data."""
    import sys

    monkeypatch.setitem(sys.modules, {"cbor": "cbor2", "msgpack": "msgpack"}[kind], None)
    with pytest.raises(ShardOpenError, match="pip install"):
        list(load(write_shards(tmp_path, kind), kind, handler=ignore_and_continue))


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_records_come_once_from_workers(kind: str, context: str, tmp_path: Path) -> None:
    """Shards are divided among workers as tar shards are; one spawned worker shows that the pipe can be sent."""
    from tests.kits.workers_kit import loader_of, time_limit

    urls = write_shards(tmp_path, kind, (4, 0, 3, 7, 1))
    pipe = getattr(IterableWrapper(urls).shuffle().sharding_filter(), f"load_{kind}_shards")()
    loader = loader_of(pipe, 2 if context == "fork" else 1, multiprocessing_context=context)
    with time_limit(60):
        for _ in range(2):
            keys = sorted(record["__key__"] for record in loader)
            assert keys == sorted(f"s{n}-{m}" for n, count in enumerate((4, 0, 3, 7, 1)) for m in range(count))
        loader.shutdown()
