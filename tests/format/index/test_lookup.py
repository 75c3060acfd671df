"""The index of a list of shards, from wherever it lies."""

import gzip
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.kits.fault_server import Fault, Site, serve_site
from tests.kits.processes import in_child, wait_until
from tests.kits.servers import QuietHandler, serve_folder
from tests.kits.shards import tar_bytes, text_samples, write_tar, write_text_shards
from torchdata_wds import (
    ShardFormatError,
    ShardIndex,
    ShardListError,
    ShardOpenError,
    TarWriter,
    index_shard,
    wids_index,
)
from torchdata_wds.errors import ChangedShardError
from torchdata_wds.format.index import lookup, search
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.lookup import find_index
from torchdata_wds.format.index.scan import scan_shard
from torchdata_wds.format.index.sidecars import index_url, old_index_url
from torchdata_wds.storage import StorageOptions

SIZES = (3, 0, 4)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for one test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "torchdata_wds" / "index"


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    return write_text_shards(tmp_path, SIZES)


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards that have been scanned."""
    urls: list[str] = []

    def note(url: str, *options: Any) -> ShardIndex:
        urls.append(url)
        return scan_shard(url, *options)

    monkeypatch.setattr(search, "scan_shard", note)
    return urls


def expected(urls: list[str]) -> DatasetIndex:
    """The index of shards, made from their headers."""
    return DatasetIndex.of((url, index_shard(url, to=False)) for url in urls)


def resize(url: str, count: int = 9) -> None:
    """Writes a shard anew, with another number of samples."""
    write_tar(Path(url), text_samples("new", count))


def touch(url: str) -> None:
    """Gives a shard another modification time."""
    os.utime(url, ns=(1, 1))


# --------------------------------------------------------------------------------------------------------- index="auto"
def test_auto_scans_once_and_keeps_what_it_finds(
    urls: list[str], scanned: list[str], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second time one file is opened; nothing is written beside the shards, and one line tells what was done."""
    caplog.set_level(logging.INFO)
    before = sorted(Path(urls[0]).parent.rglob("*"))
    first = find_index(urls)
    assert first == expected(urls)
    assert scanned == sorted(urls)
    assert find_index(urls) == first
    assert len(scanned) == len(urls)
    assert sorted(Path(urls[0]).parent.rglob("*")) == before
    (record,) = [record for record in caplog.records if record.name.startswith("torchdata_wds")]
    assert record.levelname == "INFO"
    assert "scanned 3 of 3 shards for their index: 7 samples in " in record.message
    assert str(cache) in record.message
    assert len(pickle.dumps(first)) < 4000
    assert pickle.loads(pickle.dumps(first)) == first


def test_auto_takes_lists_in_any_order_from_one_kept_file(urls: list[str], scanned: list[str], cache: Path) -> None:
    """The epochs of a shuffled list have the same shards; one may come twice."""
    find_index(urls)
    for listed in (urls[::-1], [urls[2], urls[0], urls[1]]):
        assert find_index(listed) == expected(listed)
    twice = [*urls, urls[0]]
    assert find_index(twice) == expected(twice)
    assert len(find_index([])) == 0
    assert len(scanned) == 3
    assert len(list((cache / "lists").glob("*.pack"))) == 1


def test_digest_is_that_of_the_listed_names_where_rules_lead_elsewhere(urls: list[str]) -> None:
    """One file under two names has two digests, whichever is kept first."""
    options = StorageOptions(rewrite={"s3://bucket/other": urls[0].removesuffix(".tar")})
    listed = ["s3://bucket/other.tar"]
    assert find_index(urls[:1]).digest == expected(urls[:1]).digest
    renamed = DatasetIndex.of([("other.tar", index_shard(urls[0], to=False))])
    assert find_index(listed, storage_options=options).digest == renamed.digest


def test_auto_scans_only_shards_that_are_new_or_have_changed(urls: list[str], scanned: list[str]) -> None:
    """By size or modification time."""
    find_index(urls[:2])
    assert find_index(urls) == expected(urls)
    resize(urls[1])
    touch(urls[2])
    scanned.clear()
    assert find_index(urls) == expected(urls)
    assert scanned == urls[1:]


def test_auto_uses_indexes_beside_the_shards_and_in_a_folder(
    urls: list[str], scanned: list[str], tmp_path: Path
) -> None:
    """At the new and the old place; what they lack is scanned."""
    index_shard(urls[0])
    index_shard(urls[1], to=old_index_url(urls[1]))
    find_index(urls)
    assert scanned == urls[2:]
    (tmp_path / "elsewhere").mkdir()
    index_shard(urls[2], to=tmp_path / "elsewhere" / f"{Path(urls[2]).name}.index")
    scanned.clear()
    assert find_index(urls, True, index_dir=tmp_path / "elsewhere") == expected(urls)
    assert scanned == []
    with pytest.raises(ShardListError, match="has no index beside it"):
        find_index(urls, True)


def test_auto_writes_what_it_scans_to_a_folder_of_indexes(
    urls: list[str], scanned: list[str], tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is made if it is missing; where it cannot be, indexes are kept as without it."""
    folder = tmp_path / "a" / "b"
    assert find_index(urls, index_dir=folder) == expected(urls)
    assert sorted(path.name for path in folder.iterdir()) == [f"{Path(url).name}.index" for url in urls]
    assert list((cache / "shards").iterdir()) == []
    assert find_index(urls, index_dir=folder) == find_index(urls, folder) == expected(urls)
    resize(urls[0])
    assert find_index(urls, index_dir=folder) == expected(urls)
    assert find_index(urls, True, index_dir=folder) == expected(urls)
    assert scanned == [*urls, urls[0]]
    (tmp_path / "file").touch()
    assert find_index(urls, index_dir=tmp_path / "file") == expected(urls)
    assert caplog.text.count("indexes cannot be written to") == 1
    store = "memory://index-folder"
    assert find_index(urls, index_dir=store) == find_index(urls, store + "/") == expected(urls)


@pytest.mark.parametrize("change", ["resize", "touch", "other shard", "cut", "other keys"])
def test_auto_scans_shards_whose_index_does_not_fit(
    change: str, urls: list[str], scanned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """An index that was true once is never used; True refuses it, and says what to do."""
    for url in urls:
        index_shard(url)
    place = Path(index_url(urls[0]))
    if change in ("resize", "touch"):
        (resize if change == "resize" else touch)(urls[0])
    elif change == "other shard":
        shutil.copy(index_url(urls[2]), place)
    elif change == "cut":
        place.write_bytes(place.read_bytes()[:-20])
    else:
        index_shard(urls[0], keys="last_dot")
    caplog.set_level(logging.INFO)
    assert find_index(urls) == expected(urls)
    assert scanned == urls[:1]
    told = "of which had an index of another version" in caplog.text
    assert told == (change in ("resize", "touch"))
    error = ChangedShardError if told else ShardFormatError
    with pytest.raises(error, match=r"shard-000000\.tar.* Make it again") as caught:
        find_index(urls, True)
    assert caught.value.kind == "index"


def test_copied_shard_is_hashed_if_its_index_must_be_used_and_has_the_digest(
    tmp_path: Path, scanned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Copying changes the time and not the bytes; bytes that changed are found out. A scan costs less than a hash."""
    url = str(tmp_path / "x.tar")
    with TarWriter(url, index=True) as writer:
        writer.write({"__key__": "a", "txt": "text"})
    touch(url)
    for source, scans in ((True, []), (True, []), ("auto", [url])):
        index = find_index([url], source)
        assert index.shards[0].version is not None
        assert index.shards[0].version.tag == "mtime-1"
        assert scanned == scans
    assert caplog.text.count("Run `wds index` on such shards") == 1
    data = bytearray(Path(url).read_bytes())
    data[512] ^= 1
    Path(url).write_bytes(data)
    with pytest.raises(ChangedShardError, match="another version"):
        find_index([url], True)
    find_index([url])
    assert scanned == [url, url]


def test_index_made_again_is_noticed(urls: list[str]) -> None:
    """What is kept depends on the indexes beside the shards too, which may have been wrong."""
    for url in urls:
        index_shard(url)
    wrong = index_shard(urls[0], to=False)
    wrong.header = wrong.header._replace(samples=2)
    ShardIndex(wrong.header, wrong._rows[:2]).save(index_url(urls[0]))
    assert len(find_index(urls, True)) == 6
    index_shard(urls[0])
    assert len(find_index(urls, True)) == 7


# ------------------------------------------------------------------------------------------------------- remote shards
class Counting(QuietHandler):
    """Notes what is asked for."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:  # noqa: N802
        self.asked.append(self.path)
        super().do_GET()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Counting, "asked", [])
    for path in tmp_path.rglob("*"):
        os.utime(path, (1, 1))  # a date of this second says nothing
    with serve_folder(tmp_path, Counting) as url:
        yield url


def test_remote_shards_are_scanned_once(urls: list[str], server: str, scanned: list[str]) -> None:
    """In threads; afterwards a request for each shard asks for its version."""
    remote = [f"{server}/{Path(url).name}" for url in urls]
    first = find_index(remote)
    assert first.digest == expected(urls).digest
    assert sorted(scanned) == remote
    Counting.asked.clear()
    assert find_index(remote) == first
    assert sorted(Counting.asked) == [f"/{Path(url).name}" for url in urls]
    resize(urls[0])
    os.utime(urls[0], (2, 2))
    assert find_index(remote).digest == expected(urls).digest
    assert len(scanned) == 4


def test_remote_indexes_are_used(urls: list[str], server: str, scanned: list[str]) -> None:
    """Beside the shards, at both places; also with local shards in one list."""
    for url, place in zip(urls, (index_url, old_index_url, index_url), strict=True):
        index_shard(url, to=place(url))
    remote = [f"{server}/{Path(url).name}" for url in urls]
    for source in ("auto", True):
        assert find_index([*remote, urls[0]], source).digest == expected([*urls, urls[0]]).digest
    assert scanned == []
    with pytest.raises(ShardOpenError, match="404"):
        find_index([*remote, f"{server}/no.tar"])


def test_remote_index_is_of_a_shard_whose_name_is_quoted(server: str, tmp_path: Path) -> None:
    """It was made where the shard lay, under its own name."""
    shard = write_tar(tmp_path / "x y.tar", text_samples("s", 2))
    index_shard(shard)
    assert len(find_index([f"{server}/x%20y.tar"], True)) == 2


def test_scans_in_threads_end_when_one_fails() -> None:
    """Nobody waits for shards that are half read; Ctrl-C ends them likewise."""
    data = tar_bytes([("a.bin", bytes(3_000_000))])
    site = Site({"/a.tar": data, "/b.tar": data[:1_000_000]})

    def after_the_other() -> Iterator[None]:
        yield from (None, None)
        wait_until(lambda: bool(site.stalled), 60)

    site.plans = {"/a.tar": iter([None, None, Fault("stall", until=2_000_000)]), "/b.tar": after_the_other()}
    with serve_site(site) as server:
        with pytest.raises(ShardFormatError, match="cut off"):
            find_index([f"{server}/a.tar", f"{server}/b.tar"])
        assert site.stalled
        assert wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("ThreadPool")], 5)


def test_kept_files_hold_no_secret(urls: list[str], server: str, cache: Path) -> None:
    """They are of the shard however its URL is signed, and others cannot read them."""
    for signature in "ab":
        remote = f"{server}/{Path(urls[0]).name}?X-Amz-Signature=secret{signature}"
        assert find_index([remote]).shards[0].url == remote
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert not [path for path in files if b"secret" in path.read_bytes() or "secret" in path.name]
    assert len([path for path in files if path.suffix == ".pack"]) == 2
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in cache.iterdir())


# ------------------------------------------------------------------------------------------------------- the kept files
def test_folder_that_cannot_be_written_is_no_error(
    urls: list[str],
    scanned: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Indexes stay in memory, with one warning."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        index = find_index(urls)
        assert index == expected(urls)
        assert pickle.loads(pickle.dumps(index)) == index
    assert len(scanned) == 6
    assert caplog.text.count("cannot be kept") == 1


def test_user_without_a_home_has_indexes_in_memory(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert find_index(urls) == expected(urls)
    assert not Path("relative").exists()


@pytest.mark.parametrize("damage", [b"", b"WDSINDEX", b"precious"])
def test_damaged_kept_files_are_made_again(damage: bytes, urls: list[str], scanned: list[str], cache: Path) -> None:
    """Those of lists and those of shards."""
    find_index(urls)
    for path in cache.rglob("*.pack"):
        path.write_bytes(damage or path.read_bytes()[:-1])
    assert find_index(urls) == expected(urls)
    assert len(scanned) == 6
    assert find_index(urls) == expected(urls)
    assert len(scanned) == 6


def test_kept_files_that_nobody_uses_are_removed(urls: list[str], cache: Path) -> None:
    """After a month, when another is made."""
    find_index(urls[:1])
    old = set(cache.rglob("*.*"))
    for path in old:
        os.utime(path, (1, 1))
    find_index(urls[1:])
    assert not old & set(cache.rglob("*.*"))


def test_processes_that_need_the_same_index_make_it_once(
    urls: list[str], scanned: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second waits for the first; threads have locks as processes do."""
    caplog.set_level(logging.INFO)
    begun, goes_on = threading.Event(), threading.Event()
    scan = search.scan_shard

    def slow(url: str, *options: Any) -> ShardIndex:
        begun.set()
        assert goes_on.wait(60)
        return scan(url, *options)

    monkeypatch.setattr(search, "scan_shard", slow)
    found: list[DatasetIndex] = []
    threads = [threading.Thread(target=lambda: found.append(find_index(urls))) for _ in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    assert wait_until(lambda: "waiting for it" in caplog.text, 60)
    goes_on.set()
    for thread in threads:
        thread.join(60)
    assert found == [expected(urls)] * 2
    assert len(scanned) == 3


def test_next_process_goes_on_when_one_is_killed_while_it_scans(
    urls: list[str], scanned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system releases its lock; what it has scanned is kept."""

    def scan_two() -> None:
        scan = search.scan_shard

        def die(url: str, *options: Any) -> ShardIndex:
            if url == urls[2]:
                os.kill(os.getpid(), signal.SIGKILL)
            return scan(url, *options)

        search.scan_shard = die
        find_index(urls)

    assert in_child(scan_two) == -signal.SIGKILL
    assert find_index(urls) == expected(urls)
    assert scanned == urls[2:]


@pytest.mark.slow
def test_many_processes_find_the_same_index(urls: list[str], tmp_path: Path) -> None:
    """They begin at once, with nothing kept, and each shard is scanned once."""
    log = tmp_path / "log"
    log.touch()

    def find() -> str:
        scan = search.scan_shard

        def note(url: str, *options: Any) -> ShardIndex:
            with log.open("a") as file:
                file.write(f"{url}\n")
            return scan(url, *options)

        search.scan_shard = note
        return find_index(urls).digest

    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=find) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
        worker.close()
    assert sorted(log.read_text().split()) == urls
    assert find_index(urls) == expected(urls)


# -------------------------------------------------------------------------------------------------------- other sources
def test_packed_index_and_index_in_memory_are_selected_from(urls: list[str], tmp_path: Path) -> None:
    """By whole URL or base name."""
    index = expected(urls)
    index.save(tmp_path / "all.pack")
    for source in (index, str(tmp_path / "all.pack"), tmp_path / "all.pack"):
        assert find_index(urls[::-1], source) == expected(urls[::-1])
    with pytest.raises(ShardListError, match="no entry for shard"):
        find_index(["other.tar"], index)
    with pytest.raises(ShardListError, match=r"keys='first_dot'.*keys='last_dot'"):
        find_index(urls, index, keys="last_dot")


def test_mapping_has_indexes_or_their_paths(urls: list[str]) -> None:
    index_shard(urls[2])
    source = {urls[0]: index_shard(urls[0], to=False), "shard-000001.tar": index_shard(urls[1], to=False)}
    source |= {Path(urls[2]): index_url(urls[2])}  # type: ignore[dict-item]
    assert find_index(urls, source) == expected(urls)
    with pytest.raises(TypeError, match=r"has 3 for shard .* where a ShardIndex"):
        find_index(urls, {**source, urls[0]: 3})
    with pytest.raises(ShardListError, match=r"has no index for shard .*shard-000000\.tar"):
        find_index(urls, {url: index for url, index in source.items() if url != urls[0]})


def test_folder_has_an_index_for_each_shard(urls: list[str], tmp_path: Path) -> None:
    """Which are checked like those beside the shards; two shards of one name cannot be told apart."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for url in urls:
        index_shard(url, to=folder / f"{Path(url).name}.index")
    assert find_index(urls, folder) == find_index(urls, f"{folder}/") == expected(urls)
    (folder / Path(urls[0]).name).write_bytes(Path(urls[0]).read_bytes())
    with pytest.raises(ShardListError, match=r"has no index in .*of one base name"):
        find_index([*urls, str(folder / Path(urls[0]).name)], folder)
    resize(urls[0])
    with pytest.raises(ChangedShardError, match=r"another version of the shard, which has .* bytes"):
        find_index(urls, folder)


def test_wids_list_must_have_the_counts_of_the_shards(urls: list[str], tmp_path: Path) -> None:
    """Shards are indexed as without it."""
    path = tmp_path / "list.json"
    content = wids_index({Path(url).name: index_shard(url, to=False) for url in urls})
    path.write_text(content)
    assert find_index(urls, path) == expected(urls)
    path.write_text(content.replace('"nsamples": 4', '"nsamples": 5'))
    with pytest.raises(ShardListError, match=r"shard-000002\.tar 5 samples, and it has 4"):
        find_index(urls, path)
    path.write_text(json.dumps({Path(url).name: size for url, size in zip(urls, SIZES, strict=True)}))
    assert find_index(urls, path) == expected(urls)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"precious", b'{"shardlist": 3}'])
def test_file_that_is_not_an_index_is_refused(content: bytes, urls: list[str], tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ShardFormatError, match="is not a packed index"):
        find_index(urls, tmp_path / "x")


@pytest.mark.parametrize("index", [None, False, 3, ["a"]])
def test_index_of_a_wrong_type_is_refused(index: object) -> None:
    with pytest.raises(TypeError, match="index must be 'auto', True"):
        find_index([], index)
    with pytest.raises(ValueError, match="'first_dot' or 'last_dot'"):
        find_index([], keys="other")


# --------------------------------------------------------------------------------------------------------------- shards
def test_compressed_shards_are_indexed_and_marked(tmp_path: Path) -> None:
    """Offsets are those of the decompressed archive."""
    plain = tar_bytes(text_samples("s", 3))
    url = str(tmp_path / "x.tar.gz")
    Path(url).write_bytes(gzip.compress(plain))
    index = find_index([url])
    assert index.shards[0].compressed
    assert index.shards[0].version is not None
    assert index.shards[0].version.size == Path(url).stat().st_size
    assert int(index.rows(0, 0, 3)[0][-1]) <= len(plain)


def test_output_of_a_command_is_scanned_each_time(urls: list[str], scanned: list[str]) -> None:
    """Nothing says whether it is still the same."""
    for _ in range(2):
        assert len(find_index([f"pipe:cat {urls[0]}"])) == 3
    assert len(scanned) == 2
    with pytest.raises(ShardListError, match="has no index"):
        find_index([f"pipe:cat {urls[0]}"], True)


def test_shard_that_is_missing_or_damaged_is_an_error(urls: list[str]) -> None:
    with pytest.raises(ShardOpenError, match="does not exist"):
        find_index([*urls, "no.tar"])
    Path(urls[0]).write_bytes(Path(urls[0]).read_bytes()[:2000])
    with pytest.raises(ShardFormatError, match="cut off"):
        find_index(urls)


def test_shard_written_while_it_is_scanned_is_an_error(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def change(url: str, *options: Any) -> ShardIndex:
        resize(url)
        return scan_shard(url, *options)

    monkeypatch.setattr(search, "scan_shard", change)
    with pytest.raises(ChangedShardError, match="while its index was made"):
        find_index(urls)


def test_foreign_indexes_are_used_where_one_is_asked_for(urls: list[str], scanned: list[str]) -> None:
    """Beside the shards or in a folder of them; they know no keys or no versions, so that "auto" scans instead."""
    for url in urls:
        index = index_shard(url, to=False)
        offsets = [row.start for row in index] + ([index[len(index) - 1].stop] if len(index) else [0])
        Path(f"{url}.idx").write_bytes(b"".join(offset.to_bytes(8, "little") for offset in offsets))
    folder = Path(urls[0]).parent
    for source in (True, folder):
        found = find_index(urls, source)
        assert [found.rows(shard, 0, size)[0].tolist() for shard, size in enumerate(SIZES)] == [
            expected(urls).rows(shard, 0, size)[0].tolist() for shard, size in enumerate(SIZES)
        ]
    assert scanned == []
    assert lookup.find_index(urls) == expected(urls)
    assert scanned == urls
    with pytest.raises(ShardFormatError, match="keys='first_dot', expected 'last_dot'"):
        find_index(urls, True, keys="last_dot")
