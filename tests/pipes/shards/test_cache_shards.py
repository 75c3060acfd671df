"""The stage that gives shards their local copies, in graphs."""

import hashlib
import io
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.cache_server import CacheServer, cache_server
from tests.kits.processes import open_files
from tests.kits.shards import keys_of, sample_members, tar_bytes, text_samples, without_meta
from tests.kits.workers_kit import loader_of, time_limit
from torchdata_wds import (
    CachedShard,
    CacheError,
    ShardFormatError,
    ShardListError,
    ShardMember,
    ShardOpenError,
    ShardSlice,
    WebDataset,
    ignore_and_continue,
    ignore_and_stop,
    index_shard,
)
from torchdata_wds.pipes.shards.cache_shards import check_copy
from torchdata_wds.storage.cache.names import copy_name

SIZES = (4, 3, 5, 1)
SHARDS = [tar_bytes(text_samples(f"s{number}-", size)) for number, size in enumerate(SIZES)]
KEYS = [f"s{number}-{sample:05d}" for number, size in enumerate(SIZES) for sample in range(size)]


@pytest.fixture(scope="module")
def one_server() -> Iterator[CacheServer]:
    with cache_server() as running:
        yield running


@pytest.fixture
def server(one_server: CacheServer) -> CacheServer:
    """A server that starts afresh."""
    one_server.requests.clear()
    one_server.objects.clear()
    return one_server


@pytest.fixture
def urls(server: CacheServer) -> list[str]:
    """Four shards on a server."""
    return [server.put(f"{number}.tar", data) for number, data in enumerate(SHARDS)]


def samples_of(pipe: IterDataPipe[Any]) -> list[dict[str, Any]]:
    return list(pipe.load_wds_shards().group_by_key())


def key_of(sample: dict[str, Any]) -> str:
    key: str = sample["__key__"]
    return key


def test_cache_shards_gives_the_same_samples_when_read_again(
    tmp_path: Path, server: CacheServer, urls: list[str]
) -> None:
    """With their URL, and the path of the copy; only the first pass asks the server, in this run and the next."""
    folder = tmp_path / "cache"
    pipe = IterableWrapper(urls).cache_shards(folder)
    assert not folder.exists()
    first = samples_of(pipe)
    assert keys_of(first) == KEYS
    assert [without_meta(sample) for sample in first] == [
        without_meta(sample) for sample in samples_of(IterableWrapper(urls))
    ]
    server.requests.clear()
    before = open_files()
    assert samples_of(pipe) == samples_of(IterableWrapper(urls).cache_shards(str(folder))) == first
    assert open_files() <= before
    assert not server.requests
    assert {sample["__url__"] for sample in first} == set(urls)
    assert {sample["__local_path__"] for sample in first} == {str(folder / copy_name(url)) for url in urls}
    assert all(type(sample["__url__"]) is str for sample in first)


def test_cache_shards_does_nothing_when_it_is_iterated(tmp_path: Path, server: CacheServer, urls: list[str]) -> None:
    """Shards that a resumed run passes over cost nothing."""
    shards = list(IterableWrapper(urls).cache_shards(tmp_path / "cache"))
    assert [shard.url for shard in shards] == urls
    assert not server.requests
    assert not (tmp_path / "cache").exists()
    assert [shard.fetch().read_bytes() for shard in shards] == SHARDS
    assert list(IterableWrapper(urls).cache_shards(tmp_path / "cache").map(CachedShard.fetch)) == [
        Path(shard.path) for shard in shards
    ]
    assert sum(server.requests.values()) == len(urls)


def test_cache_shards_is_off_when_the_folder_is_none(urls: list[str]) -> None:
    """Everything passes as it came, whatever it is."""
    given = [*urls, 3, {"__key__": "a"}]
    assert list(IterableWrapper(given).cache_shards(None)) == given


def test_cache_shards_passes_local_files_when_not_told_to_copy_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths, file: URLs and standard input; on a network file system cache_local=True makes copies."""
    path = tmp_path / "x.tar"
    path.write_bytes(SHARDS[0])
    given = [str(path), path, f"file://{path}", "-", ShardSlice(str(path), 1, 2)]
    passed = list(IterableWrapper(given, deepcopy=False).cache_shards(tmp_path / "cache"))
    assert all(one is other for one, other in zip(passed, given, strict=True))
    monkeypatch.chdir(tmp_path)
    given = [given[0], given[2], "x.tar", given[4]]
    copied = list(IterableWrapper(given).cache_shards(Path("cache"), cache_local=True))
    assert {type(shard) for shard in copied} == {CachedShard}
    assert len({shard.path for shard in copied}) == 1
    assert keys_of(samples_of(IterableWrapper(copied))) == [*KEYS[:4] * 3, KEYS[1]]
    assert Path(copied[0].path).parent == tmp_path / "cache"
    assert Path(copied[0].path).read_bytes() == SHARDS[0]


def test_cache_shards_copies_where_urls_are_looked_for_when_they_are_rewritten(tmp_path: Path, urls: list[str]) -> None:
    """What is remote by its name and local in truth is not copied, and the other way round."""
    base = urls[0].removesuffix("/0.tar")
    (tmp_path / "0.tar").write_bytes(SHARDS[0])
    pipe = IterableWrapper(["s3://b/0.tar"]).cache_shards(tmp_path / "cache", rewrite={"s3://b": base})
    assert keys_of(samples_of(pipe)) == KEYS[:4]
    assert (tmp_path / "cache" / copy_name(urls[0])).read_bytes() == SHARDS[0]
    assert list(IterableWrapper(urls[:1]).cache_shards(tmp_path, rewrite={base: str(tmp_path)})) == urls[:1]


@pytest.mark.parametrize(
    "item", [3, None, {"__key__": "a"}, ("x.tar", io.BytesIO()), ShardMember("x", "a", b""), b"x", []]
)
def test_cache_shards_says_where_it_belongs_when_items_are_no_shards(tmp_path: Path, item: Any) -> None:
    """Each through the handler; and the stage has no length then."""
    given = [item, "http://h/x.tar"]
    with pytest.raises(ShardListError, match="put it before load_wds_shards"):
        list(IterableWrapper(given, deepcopy=False).cache_shards(tmp_path))
    pipe = IterableWrapper(given, deepcopy=False).cache_shards(tmp_path, handler=ignore_and_continue)
    assert [shard.url for shard in pipe] == ["http://h/x.tar"]
    assert pipe.skipped == {"ShardListError": 1}
    assert list(IterableWrapper(given, deepcopy=False).cache_shards(tmp_path, handler=ignore_and_stop)) == []
    with pytest.raises(TypeError, match="may skip items"):
        len(pipe)
    assert len(IterableWrapper(given, deepcopy=False).cache_shards(tmp_path)) == 2


def test_cache_shards_keeps_places_apart_when_one_url_means_several_shards(
    tmp_path: Path, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a rule of the pipe or of the environment, in one folder; samples keep the name that was given."""
    base = urls[0].removesuffix("/0.tar")
    given = IterableWrapper(["s3://b/x.tar"])
    for number in (0, 1, 0, 2):
        pipe = given.cache_shards(tmp_path, rewrite={"s3://b/x": f"{base}/{number}"})
        assert keys_of(samples_of(pipe)) == [f"s{number}-{sample:05d}" for sample in range(SIZES[number])]
        assert {sample["__url__"] for sample in samples_of(pipe)} == {"s3://b/x.tar"}
    monkeypatch.setenv("WDS_REWRITE", f"s3://b/x={base}/3")
    assert keys_of(samples_of(given.cache_shards(tmp_path))) == ["s3-00000"]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("name", ["basename", "path", lambda url: "x.tar"])
def test_cache_shards_raises_when_the_copy_of_a_name_is_from_another_place(
    tmp_path: Path, urls: list[str], name: Any
) -> None:
    """Also in another program, where the file system keeps the mark of the place."""
    base = urls[0].removesuffix("/0.tar")
    pipes = [
        IterableWrapper(["s3://b/x.tar"]).cache_shards(tmp_path, name=name, rewrite={"s3://b/x": f"{base}/{number}"})
        for number in range(2)
    ]
    assert keys_of(samples_of(pipes[0])) == KEYS[:4]
    with pytest.raises(CacheError, match="or as the same URL at another place"):
        samples_of(pipes[1])
    assert keys_of(samples_of(pipes[0])) == KEYS[:4]


# ------------------------------------------------------------------------------------------- copies and their indexes
def put_with_index(server: CacheServer, folder: Path, data: bytes, **changes: Any) -> str:
    """Puts a shard and its index on a server, or one that states something else."""
    path = folder / "x.tar"
    path.write_bytes(data)
    index = index_shard(path)
    index.header = index.header._replace(**{"sha256": hashlib.sha256(data).hexdigest(), **changes})
    server.put("x.tar.index", index.dump())
    return server.put("x.tar", data)


OLD, NEW = (tar_bytes([(f"{name}{number}.txt", name.encode()) for number in range(2)]) for name in ("o", "n"))


@pytest.mark.parametrize("while_reading", [True, False])
@pytest.mark.parametrize("stated", ["both", "size", "digest"])
def test_cache_shards_fetches_again_when_a_copy_is_not_that_of_the_index(
    tmp_path: Path, server: CacheServer, stated: str, while_reading: bool
) -> None:
    """By size or digest, once; what comes is then used, and the digest not computed anew."""
    old = tar_bytes(text_samples("o", 40)) if stated == "size" else OLD
    url = server.put("x.tar", old)
    samples_of(IterableWrapper([url]).cache_shards(tmp_path / "cache"))
    put_with_index(server, tmp_path, NEW, **{"size": {"sha256": None}, "digest": {"bytes": None}}.get(stated, {}))
    server.requests.clear()
    divided = IterableWrapper([url]).split_shards(index=True)
    pipe = divided.cache_shards(tmp_path / "cache", while_reading=while_reading)
    for _ in range(3):
        assert keys_of(samples_of(pipe)) == ["n0", "n1"]
    assert server.requests["/x.tar"] == 1
    assert [path.read_bytes() for path in (tmp_path / "cache").iterdir()] == [NEW]
    assert pickle.loads(pickle.dumps(next(iter(pipe)))).fetch().read_bytes() == NEW


@pytest.mark.parametrize("was_there", [True, False])
def test_cache_shards_raises_when_a_fresh_copy_is_not_that_of_the_index_either(
    tmp_path: Path, server: CacheServer, was_there: bool
) -> None:
    """Naming both, through the loader's handler, and without a sample of the wrong shard."""
    url = put_with_index(server, tmp_path, OLD, sha256="0" * 64)
    if was_there:
        samples_of(IterableWrapper([url]).cache_shards(tmp_path / "cache"))
    server.requests.clear()
    pipe = IterableWrapper([url]).split_shards(index=True).cache_shards(tmp_path / "cache")
    with pytest.raises(
        ShardFormatError, match=r"is not the one that its index describes: it has the SHA-256 \w+, and not 0"
    ):
        samples_of(pipe)
    assert server.requests["/x.tar"] == 1
    loader = pipe.load_wds_shards(handler=ignore_and_continue)
    assert list(loader.group_by_key()) == []
    assert loader.skipped == {"ShardFormatError": 1}
    with pytest.raises(ShardFormatError):
        next(iter(pipe)).fetch()


def test_cache_shards_keeps_files_when_they_were_put_there_by_hand_and_do_not_fit_the_index(
    tmp_path: Path, server: CacheServer
) -> None:
    """They are not used either."""
    url = put_with_index(server, tmp_path, NEW)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "x.tar").write_bytes(OLD)
    pipe = IterableWrapper([url]).split_shards(index=True).cache_shards(tmp_path / "cache", name="basename")
    with pytest.raises(ShardFormatError, match="remove the copy if it was put there by hand"):
        samples_of(pipe)
    assert (tmp_path / "cache" / "x.tar").read_bytes() == OLD


def test_cache_shards_compares_nothing_when_the_index_states_nothing(tmp_path: Path, server: CacheServer) -> None:
    """Counts alone, of an index without size and digest or of a dict, are checked by the reader."""
    url = put_with_index(server, tmp_path, OLD, bytes=None, sha256=None)
    for index in (True, {url: 2}):
        pipe = IterableWrapper([url]).split_shards(index=index).cache_shards(tmp_path / "cache")
        assert keys_of(samples_of(pipe)) == ["o0", "o1"]
        assert next(iter(pipe)).facts is None


def test_load_wds_shards_reads_from_the_start_when_a_copy_is_not_that_of_the_index_that_it_seeks_by(
    tmp_path: Path, server: CacheServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A slice by hand: the counts are not those of the index, and its offsets lead into another shard."""
    url = put_with_index(server, tmp_path, NEW, sha256="0" * 64)
    pipe = IterableWrapper([ShardSlice(url, 1, 2)]).cache_shards(tmp_path / "cache")
    with pytest.raises(ShardFormatError, match="is not the one that its index describes"):
        samples_of(pipe)
    put_with_index(server, tmp_path, NEW)
    assert keys_of(samples_of(pipe)) == ["n1"]


# ---------------------------------------------------------------------------------------------------- names and folders
@pytest.mark.parametrize("name", ["basename", "path"])
def test_cache_shards_uses_folders_when_they_were_filled_by_hand(
    tmp_path: Path, server: CacheServer, urls: list[str], name: str
) -> None:
    """What is there is used as it is, what is missing is added."""
    for url, data in list(zip(urls, SHARDS, strict=True))[:2]:
        path = tmp_path / copy_name(url, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    assert keys_of(samples_of(IterableWrapper(urls).cache_shards(tmp_path, name=name))) == KEYS
    assert server.requests == {"/2.tar": 1, "/3.tar": 1}
    assert (tmp_path / copy_name(urls[3], name)).read_bytes() == SHARDS[3]


def test_cache_shards_calls_copies_as_a_function_says(tmp_path: Path, urls: list[str]) -> None:
    """Relative to the folder."""
    pipe = IterableWrapper(urls).cache_shards(tmp_path, name=lambda url: "a/" + url[-5:])
    assert keys_of(samples_of(pipe)) == KEYS
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["0.tar", "1.tar", "2.tar", "3.tar"]


@pytest.mark.parametrize("name", ["basename", lambda url: "x.tar"])
def test_cache_shards_raises_when_two_shards_have_one_name(tmp_path: Path, name: Any) -> None:
    """The second one, in each epoch; the same URL twice is the same shard."""
    given = ["s3://a/x.tar", "s3://b/x.tar", "s3://a/x.tar"]
    with pytest.raises(CacheError, match=r"s3://b/x\.tar has the same name in the cache"):
        list(IterableWrapper(given).cache_shards(tmp_path, name=name))
    pipe = IterableWrapper(given).cache_shards(tmp_path, name=name, handler=ignore_and_continue)
    for _ in range(2):
        assert [shard.url for shard in pipe] == ["s3://a/x.tar"] * 2
    assert len({shard.path for shard in IterableWrapper(given).cache_shards(tmp_path)}) == 2


def test_cache_shards_expands_home_when_the_folder_begins_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As shells do."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (shard,) = IterableWrapper(["s3://b/x.tar"]).cache_shards("~/cache", name="basename")
    assert shard.path == str(tmp_path / "cache" / "x.tar")


# ----------------------------------------------------------------------------------------------------------- the items
class TaggedUrl(str):
    """A URL that somebody has given a tag."""

    tag = 3


def test_cached_shards_keep_the_url_that_came(tmp_path: Path) -> None:
    """With whatever hangs on it; a Path becomes a str, a slice is kept beside its URL."""
    given = [TaggedUrl("s3://b/x.tar"), ShardSlice("s3://b/y.tar", 1, 3)]
    one, two = IterableWrapper(given, deepcopy=False).cache_shards(tmp_path)
    assert one.url is given[0]
    assert two.url == "s3://b/y.tar"
    assert (one.part, two.part) == (None, given[1])
    (three,) = IterableWrapper([tmp_path / "x.tar"]).cache_shards(tmp_path, cache_local=True)
    assert three.url == str(tmp_path / "x.tar")


def test_cached_shards_show_no_secret_and_pickle(tmp_path: Path) -> None:
    """Neither that of the URL, nor that of the options."""
    url = "https://me:secret@h/x.tar?sig=secret"
    options = {"https": {"headers": {"Authorization": "secret"}}}
    (shard,) = IterableWrapper([ShardSlice(url, 1)]).cache_shards(tmp_path, storage_options=options)
    assert "secret" not in repr(shard) + str(shard) + f"{shard!s}" + repr(shard.cache)
    assert pickle.loads(pickle.dumps(shard)) == shard


def test_cached_shards_open_what_is_there_when_they_have_no_cache(tmp_path: Path, urls: list[str]) -> None:
    """A tuple that a program has made by itself: the path, or else the URL."""
    path = tmp_path / "x.tar"
    shard = CachedShard(urls[0], str(path))
    with shard.open(512) as stream:
        assert stream.read() == SHARDS[0][512:]
    assert not path.exists()
    path.write_bytes(SHARDS[1])
    with shard.open() as stream:
        assert stream.read() == SHARDS[1]
    assert shard.fetch() == path


def test_load_wds_shards_asks_its_handler_when_a_shard_cannot_be_downloaded(
    tmp_path: Path, server: CacheServer, urls: list[str]
) -> None:
    """A missing one and a cut one, whose whole samples come; neither is kept."""
    given = [urls[0], urls[0].replace("0.tar", "no.tar"), server.put("cut.tar", SHARDS[1][:-1024]), urls[2]]
    pipe = IterableWrapper(given).cache_shards(tmp_path)
    for error in (ShardOpenError, ShardFormatError):
        with pytest.raises(error):
            samples_of(IterableWrapper([given[1 if error is ShardOpenError else 2]]).cache_shards(tmp_path))
    loader = pipe.load_wds_shards(handler=ignore_and_continue)
    assert keys_of(loader.group_by_key()) == [*KEYS[:4], *KEYS[4:6], *KEYS[7:12]]
    assert loader.skipped == {"ShardOpenError": 1, "ShardFormatError": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(copy_name, (urls[0], urls[2])))


def test_load_wds_shards_reads_hard_links_when_the_shard_is_still_coming(tmp_path: Path, server: CacheServer) -> None:
    """The shard is opened a second time, and not downloaded a second time."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("a.bin")
        info.size = 3_000_000
        tar.addfile(info, io.BytesIO(bytes(3_000_000)))
        for name in ("b.bin", "c.bin"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.LNKTYPE, "a.bin"
            tar.addfile(link)
    pipe = IterableWrapper([server.put("x.tar", out.getvalue())]).cache_shards(tmp_path)
    assert [len(sample["bin"]) for sample in samples_of(pipe)] == [3_000_000] * 3
    assert server.requests == {"/x.tar": 1}


def test_slices_of_a_shard_need_one_download_when_each_is_left_early(
    tmp_path: Path, server: CacheServer, urls: list[str]
) -> None:
    """Reading a slice stops behind it; the copy is completed nevertheless."""
    parts = [ShardSlice(urls[2], start, start + 1) for start in range(5)]
    assert keys_of(samples_of(IterableWrapper(parts).cache_shards(tmp_path))) == KEYS[7:12]
    assert server.requests["/2.tar"] == 1
    server.requests.clear()
    split = IterableWrapper(urls).split_shards(dict(zip(urls, SIZES, strict=True)), even="drop")
    assert keys_of(samples_of(split.cache_shards(tmp_path))) == KEYS
    assert {path for path in server.requests if path.endswith(".tar")} == {"/0.tar", "/1.tar", "/3.tar"}


def test_records_are_cached_when_they_are_no_archives(tmp_path: Path, server: CacheServer) -> None:
    """The same stage stands before load_cbor_shards."""
    import cbor2

    records = [{"__key__": str(number), "x": number} for number in range(100)]
    url = server.put("x.cbor", b"".join(map(cbor2.dumps, records)))
    pipe = IterableWrapper([url]).cache_shards(tmp_path).load_cbor_shards()
    assert [list(pipe), list(pipe)] == [records] * 2
    assert server.requests == {"/x.cbor": 1}


# ----------------------------------------------------------------------------------------------------------- check_copy
def test_check_copy_takes_all_that_the_loader_takes_when_it_is_whole(tmp_path: Path) -> None:
    """Empty archives, joined ones, long names, folders, and what is no archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x"}) as tar:
        folder = tarfile.TarInfo("d" * 200 + "/")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        info = tarfile.TarInfo("e" * 300 + ".bin")
        info.size = 100_001
        tar.addfile(info, io.BytesIO(bytes(100_001)))
    path = tmp_path / "copy"
    for data in (bytes(1024), bytes(512), SHARDS[0], SHARDS[0] + SHARDS[1], out.getvalue()):
        path.write_bytes(data)
        check_copy(str(path), "s3://b/x.tar")
    for data in (b"", b"x", b"records" * 1000):
        path.write_bytes(data)
        check_copy(str(path), "s3://b/x.mp")


def test_check_copy_looks_at_the_file_when_a_rule_would_send_its_path_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules are for shards."""
    monkeypatch.setenv("WDS_REWRITE", f"{tmp_path}=/nowhere")
    path = tmp_path / "copy"
    path.write_bytes(SHARDS[0])
    check_copy(str(path), "s3://b/x.tar")


def test_check_copy_raises_when_a_shard_is_cut_anywhere(tmp_path: Path) -> None:
    """After each block, and in its middle; the last block may be missing."""
    data = tar_bytes(sample_members("a", txt=b"x" * 700, cls=b"1"))
    path = tmp_path / "copy"
    for size in range(256, len(data) - 512, 256):
        path.write_bytes(data[:size])
        with pytest.raises(ShardFormatError):
            check_copy(str(path), "s3://b/x.tar")


# --------------------------------------------------------------------------------------------------- workers, runs
def test_cache_shards_works_in_workers_when_a_dataloader_has_them(
    tmp_path: Path, server: CacheServer, urls: list[str]
) -> None:
    """Each shard once, by whichever worker, and not at all in the second epoch."""
    pipe = IterableWrapper(urls).shuffle().sharding_filter().cache_shards(tmp_path).load_wds_shards().group_by_key()
    loader = DataLoader(pipe.map(key_of), batch_size=None, num_workers=2)
    for _ in range(2):
        assert sorted(loader) == KEYS
    assert server.requests == {f"/{number}.tar": 1 for number in range(4)}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_cache_shards_works_in_workers_when_the_service_has_them(
    tmp_path: Path, server: CacheServer, urls: list[str], method: str
) -> None:
    """As under a DataLoader."""
    pipe = IterableWrapper(urls).shuffle().sharding_filter().cache_shards(tmp_path).load_wds_shards().group_by_key()
    loader = loader_of(pipe.map(key_of), 2, multiprocessing_context=method)
    with time_limit(60):
        for _ in range(2):
            assert sorted(loader) == KEYS
        loader.shutdown()
    assert server.requests == {f"/{number}.tar": 1 for number in range(4)}


def test_cache_shards_passes_shards_over_when_a_run_is_resumed(
    tmp_path: Path, server: CacheServer, urls: list[str]
) -> None:
    """What was read before is neither downloaded nor opened again, and what follows is the same."""
    from torchdata_wds import StatefulPipeline

    def pipeline() -> Any:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        shards = IterableWrapper(urls).shuffle().sharding_filter().cache_shards(tmp_path / "cache")
        return StatefulPipeline(shards.load_wds_shards().group_by_key(), seed=3)

    whole = list(pipeline())
    one = pipeline()
    iterator = iter(one)
    begun = [next(iterator) for _ in range(8)]
    state = one.state_dict()
    del iterator
    server.requests.clear()
    two = pipeline()
    two.load_state_dict(state)
    assert begun + list(two) == whole
    assert len(list((tmp_path / "cache").iterdir())) < 4


def test_cache_shards_has_read_ahead_when_the_loader_asks_for_it(
    tmp_path: Path, server: CacheServer, urls: list[str]
) -> None:
    """Shards that are opened ahead are downloaded ahead, and an early end leaves nothing."""
    pipe = IterableWrapper(urls).cache_shards(tmp_path).load_wds_shards(read_ahead=2).group_by_key()
    before = open_files()
    for _ in pipe:
        break
    assert open_files() <= before + 4  # kept connections
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".part", ".lock")]
    assert keys_of(pipe) == KEYS


def test_webdataset_keeps_copies_when_it_has_a_cache_dir(tmp_path: Path, server: CacheServer, urls: list[str]) -> None:
    """By the names and up to the size that it is told."""
    pipe = WebDataset(urls, cache_dir=tmp_path, cache_name="basename", cache_size=10**6, shardshuffle=False)
    assert keys_of(pipe) == keys_of(pipe) == KEYS
    assert [path.name for path in sorted(tmp_path.glob("*.tar"))] == ["0.tar", "1.tar", "2.tar", "3.tar"]
    assert server.requests == {f"/{number}.tar": 1 for number in range(4)}


@pytest.mark.slow
def test_cache_shards_is_seen_to_work_when_the_variable_is_set(tmp_path: Path, urls: list[str]) -> None:
    """In a program that has not configured logging; and nothing is said without it."""
    script = (
        "import sys, torchdata_wds\nassert len(list(torchdata_wds.WebDataset(sys.argv[2], cache_dir=sys.argv[1])))\n"
    )
    for value in ("0", "1"):
        arguments = [sys.executable, "-c", script, str(tmp_path), urls[0]]
        environment = {**os.environ, "WDS_VERBOSE_CACHE": value}
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == ""
        assert ("hit" in done.stderr) == (value == "1")
