"""The packed file of an index: damage, other processes, many samples, and what is written meanwhile."""

import contextlib
import os
import pickle
import random
import struct
import subprocess
import sys
import threading
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.processes import in_child, open_files
from tests.kits.servers import serve_folder
from torchdata_wds import ShardFormatError, ShardIndex, ShardOpenError
from torchdata_wds.format.index import IndexHeader, pack_row
from torchdata_wds.format.index.columns import Columns, ShardColumns
from torchdata_wds.format.index.dataset import DatasetIndex, key_check
from torchdata_wds.format.index.packed import CHECK_AT, HEAD_BYTES, KEYED, PackedIndex, table_check
from torchdata_wds.format.index.stores import BytesStore


def made(shards: int, samples: int, *, seed: int = 0) -> DatasetIndex:
    """An index of shards of samples of random size, with keys that are numbers."""
    generator = np.random.default_rng(seed)
    columns = []
    for shard in range(shards):
        sizes = generator.integers(2, 50, samples) * 512
        offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.uint64)
        hashes = np.array([key_check(f"{shard}/{sample}") for sample in range(samples)], np.uint64)
        columns.append(ShardColumns(f"d/{shard:06d}.tar", offsets, hashes, int(offsets[-1]) + 1024, None, KEYED))
    return DatasetIndex.of_columns(Columns.of("first_dot", columns))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A packed file of 4 shards with 100 samples each."""
    made(4, 100).save(tmp_path / "all.wdsindex")
    return tmp_path / "all.wdsindex"


# -------------------------------------------------------------------------------------------------------------- damage
def test_every_cut_file_is_refused_when_it_is_opened(path: Path) -> None:
    """And one with bytes after its end."""
    data = path.read_bytes()
    for size in [*range(0, 130, 7), 128, *range(130, len(data), 311), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ShardFormatError, match=r"cut off|not a packed index"):
            DatasetIndex.load(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(ShardFormatError, match="too long"):
        DatasetIndex.load(path)


def test_damage_in_header_or_table_is_found_when_it_is_opened(path: Path) -> None:
    """Every bit of it: a check covers them."""
    data = path.read_bytes()
    table = len(data) - (404 * 8 + 400 * (8 + 4 + 4))
    for byte in range(0, table, 7):
        damaged = bytearray(data)
        damaged[byte] ^= 1 << byte % 8
        path.write_bytes(damaged)
        with pytest.raises(ShardFormatError):
            DatasetIndex.load(path)


def test_damage_in_rows_is_found_where_they_are_checked(path: Path) -> None:
    """`verify` compares all of them with the digests of their shards; reading finds offsets that do not ascend."""
    data = path.read_bytes()
    index = DatasetIndex.load(path)
    index.verify()
    rows = 404 * 8 + 400 * (8 + 4 + 4)
    rng = random.Random(0)
    for byte in [len(data) - rows, len(data) - 1, *rng.sample(range(len(data) - rows, len(data)), 30)]:
        damaged = bytearray(data)
        damaged[byte] ^= 0x40
        path.write_bytes(damaged)
        with pytest.raises(ShardFormatError, match=r"packed index .* is damaged"):
            DatasetIndex.load(path).verify()
    damaged = bytearray(data)
    damaged[-rows : -rows + 8] = struct.pack("<Q", 1 << 50)
    path.write_bytes(damaged)
    with pytest.raises(ShardFormatError, match=r"offsets of samples 0 to 1 of shard d/000000\.tar do not ascend"):
        DatasetIndex.load(path).rows(0, 0, 1)


def test_nonsense_with_right_checks_is_refused(path: Path) -> None:
    """An index may come from a stranger, as its shard may."""
    data = path.read_bytes()
    layout = PackedIndex(BytesStore(data, "x"))._layout
    for place, value in [
        (layout.bounds, 1),
        (layout.bounds + 8, 1 << 63),
        (layout.bounds + 8, 300),
        (layout.bounds + 32, 401),
        (layout.url_ends, 1 << 40),
        (layout.url_ends + 24, 3),
        (layout.tag_ends + 24, 1),
        (layout.flags, 0),
    ]:
        changed = bytearray(data)
        changed[place : place + 8] = struct.pack("<Q", value)
        table = memoryview(changed)[HEAD_BYTES : layout.offsets]
        changed[CHECK_AT : CHECK_AT + 8] = table_check(bytes(changed[:HEAD_BYTES]), table)
        path.write_bytes(changed)
        with pytest.raises(ShardFormatError, match="table of shards makes no sense"):
            DatasetIndex.load(path)
    changed = bytearray(data)
    changed[layout.places : layout.places + 1600] = b"\xff" * 1600
    path.write_bytes(changed)
    with pytest.raises(ShardFormatError, match="a key is of sample 4,294,967,295, which there is not"):
        DatasetIndex.load(path).find("2/17")
    with pytest.raises(ShardFormatError, match="a key is of a sample that there is not"):
        DatasetIndex.load(path).select(["d/000000.tar"]).save(path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"WDSINDEY", "not a packed index of shards: its first bytes are"),
        (0, b'{"format', "not a packed index of shards"),
        (8, struct.pack("<I", 2), "its version is 2, and 1 is the one that is known here"),
        (8, struct.pack(">I", 1), "other byte order"),
        (12, struct.pack("<I", 7), "makes no sense"),
        (16, struct.pack("<Q", 1 << 63), "cut off"),
    ],
)
def test_other_files_are_refused(path: Path, place: int, value: bytes, message: str) -> None:
    """With a message that says what it is."""
    data = bytearray(path.read_bytes())
    data[place : place + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(ShardFormatError, match=message) as caught:
        DatasetIndex.load(path)
    assert caught.value.kind == "index"
    assert str(path) in str(caught.value)


def test_a_file_that_is_cut_while_it_is_open_is_an_error_and_no_signal(path: Path) -> None:
    """A mapped file would end the process."""
    index = DatasetIndex.load(path)
    os.truncate(path, 4000)
    with pytest.raises(ShardFormatError, match="cut while it was open"):
        index.rows(3, 0, 100)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    """A missing one, and a folder."""
    for place in (tmp_path / "missing", tmp_path):
        with pytest.raises(ShardOpenError):
            DatasetIndex.load(place)


# ----------------------------------------------------------------------------------------------------- where it is read
def test_remote_and_unseekable_files_are_read_whole(path: Path) -> None:
    """Over HTTP, from a store of fsspec, from a FIFO, and compressed from a command."""
    local = DatasetIndex.load(path)
    with serve_folder(path.parent) as server:
        remote = DatasetIndex.load(f"{server}/{path.name}")
    fifo = path.parent / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.write_bytes(path.read_bytes()))
    writer.start()
    piped = DatasetIndex.load(fifo)
    writer.join()
    local.save("memory://folder/all.wdsindex")
    stored = DatasetIndex.load("memory://folder/all.wdsindex")
    zipped = DatasetIndex.load(f"pipe:gzip -c {path}")
    for other in (remote, piped, stored, zipped):
        assert other == local
        assert other.find("2/17") == [217]
        assert pickle.loads(pickle.dumps(other)).find("2/17") == [217]


def test_local_file_is_pickled_by_its_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In few bytes, and found from another folder; another file in its place is refused."""
    monkeypatch.chdir(path.parent)
    index = DatasetIndex.load(path.name)
    pickled = pickle.dumps(index)
    assert len(pickled) < 500
    monkeypatch.chdir("/")
    assert pickle.loads(pickled) == index
    made(4, 100, seed=1).save(path)
    with pytest.raises(ShardFormatError, match="another has been written in its place"):
        pickle.loads(pickled)
    path.unlink()
    with pytest.raises(ShardOpenError, match="keep it where all processes and machines see it"):
        pickle.loads(pickled)
    assert index.find("2/17") == [217]


def test_open_files_are_closed_with_the_index(path: Path) -> None:
    """One for an index and all its selections."""
    before = open_files()
    index = DatasetIndex.load(path)
    chosen = [index.select([f"d/{number:06d}.tar"]) for number in range(4)]
    assert open_files() == before + 1
    del index
    assert chosen[2].find("2/17") == [17]
    del chosen
    assert open_files() == before


def look(index: DatasetIndex) -> tuple[list[int], list[int]]:
    """What a process sees of an index."""
    return index.find("3/99"), index.rows(3, 90, 100)[0].tolist()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_other_processes_read_the_same(path: Path, method: str, kind: str) -> None:
    """Whether they inherit it or get it by a pickle."""
    index = DatasetIndex.load(path) if kind == "file" else made(4, 100)
    index = index.select([f"e/{number:06d}.tar" for number in (3, 1, 2, 3 - 3)]).select(
        ["e/000001.tar", *["e/000003.tar"] * 3]
    )
    with get_context(method).Pool(2) as pool:
        assert pool.map(look, [index] * 4) == [look(index)] * 4


def test_forked_children_read_by_the_inherited_file(path: Path) -> None:
    """At the same time as their parent: a position in the file, which they share, is not used."""
    index = DatasetIndex.load(path)
    expected = [index.rows(shard, 0, 100)[0].tolist() for shard in range(4)]

    def work() -> None:
        for _ in range(200):
            assert [index.rows(shard, 0, 100)[0].tolist() for shard in range(4)] == expected

    threads = [threading.Thread(target=in_child, args=(work,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()


# ------------------------------------------------------------------------------------------------------------- writing
def test_readers_see_whole_files_while_others_write(path: Path) -> None:
    """A new file replaces the old one atomically; processes that have the old one open keep reading it."""
    versions = {made(4, 100, seed=seed).digest: seed for seed in range(3)}
    old = DatasetIndex.load(path)
    stop = threading.Event()

    def write(seed: int) -> None:
        index = made(4, 100, seed=seed)
        while not stop.is_set():
            with contextlib.suppress(ShardOpenError):  # another one is writing just now
                index.save(path)

    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(3)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(60):
            index = DatasetIndex.load(path)
            index.verify()
            assert index.digest in versions
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert old.find("2/17") == [217]
    assert {file.name for file in path.parent.iterdir()} <= {path.name, f"{path.name}.partial"}


def test_saving_makes_the_hidden_folder_and_no_other(path: Path) -> None:
    """As a sidecar does."""
    index = DatasetIndex.load(path)
    index.save(path.parent / ".wds-index" / "all.wdsindex")
    assert DatasetIndex.load(path.parent / ".wds-index" / "all.wdsindex") == index
    with pytest.raises(ShardOpenError):
        index.save(path.parent / "missing" / "all.wdsindex")


# ------------------------------------------------------------------------------------------------------------- the rest
def test_no_shards_and_empty_shards(tmp_path: Path) -> None:
    """Both are indexes like any other."""
    none = DatasetIndex.of([])
    none.save(tmp_path / "none")
    empty = ShardIndex(IndexHeader("x.tar", "last_dot", 0, 1024), [])
    empties = DatasetIndex.of([("x.tar", empty), ("y.tar", empty)])
    empties.save(tmp_path / "empties")
    for index, shards in (
        (none, 0),
        (DatasetIndex.load(tmp_path / "none"), 0),
        (DatasetIndex.load(tmp_path / "empties"), 2),
    ):
        assert len(index) == 0
        assert len(index.shards) == shards
        assert index.find("a") == []
        assert index.bounds.tolist() == [0] * (shards + 1)
        assert pickle.loads(pickle.dumps(index)) == index
    assert empties.keys == "last_dot"
    assert empties.shards[-1].url == "y.tar"
    with pytest.raises(IndexError):
        empties.shards[2]


def test_names_and_keys_that_are_not_utf_8(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 come as surrogates, and so they are kept; other lone surrogates do no harm."""
    keys = [os.fsdecode(b"a\xff"), "\ud800", "\u00fc", "a" * 5000]
    rows = [pack_row(key, 1024 * at, 1024 * (at + 1), [(f"{key}.t", 1, 1)]) for at, key in enumerate(keys)]
    url = os.fsdecode(b"d\xff/x\xfe.tar")
    index = DatasetIndex.of([(url, ShardIndex(IndexHeader("x", "first_dot", 4, 10240), rows))])
    index.save(tmp_path / "odd")
    loaded = DatasetIndex.load(tmp_path / "odd")
    assert loaded.shards[0].url == url
    assert [loaded.find(key) for key in keys] == [[0], [1], [2], [3]]
    assert loaded.select([os.fsdecode(b"e/x\xfe.tar")]).find("\u00fc") == [2]


def test_a_key_of_all_shards_has_all_numbers() -> None:
    """However many: hashes are read in blocks, and the run of one may be longer."""
    count = 20_000
    hashes = np.full(count, key_check("same"), np.uint64)
    hashes[0], hashes[-1] = key_check("first"), key_check("last")
    offsets = np.arange(count + 1, dtype=np.uint64) * 512
    index = DatasetIndex.of([("x.tar", ShardColumns("x.tar", offsets, hashes, 512 * count + 1024, None, KEYED))])
    assert index.find("same") == list(range(1, count - 1))
    assert (index.find("first"), index.find("last"), index.find("none")) == ([0], [count - 1], [])
    assert index.select(["x.tar", "x.tar"]).find("last") == [count - 1, 2 * count - 1]


def test_find_is_right_for_any_hashes() -> None:
    """For hashes that are not spread evenly as well, at both ends of their range."""
    generator = np.random.default_rng(0)
    for hashes in (
        np.array([0, 1, (1 << 64) - 1, (1 << 64) - 2], np.uint64),
        generator.integers(0, 1000, 30_000, np.uint64),
        generator.integers(0, 1 << 64, 30_000, np.uint64),
        (1 << 63) + np.arange(30_000, dtype=np.uint64),
    ):
        offsets = np.arange(len(hashes) + 1, dtype=np.uint64) * 512
        columns = ShardColumns("x.tar", offsets, hashes, int(offsets[-1]) + 1024, None, KEYED)
        packed = DatasetIndex.of([("x.tar", columns)])._packed
        values = [*generator.choice(hashes, 50).tolist(), 0, 5, (1 << 64) - 1, (1 << 63) + 40_000]
        for value in values:
            assert packed.numbers_of(value) == np.flatnonzero(hashes == np.uint64(value)).tolist()


def test_shards_with_and_without_keys_can_be_mixed(tmp_path: Path) -> None:
    """An index of another program has none; what is known is found, and what is not is not denied."""
    with_keys = made(1, 5)
    offsets = np.arange(4, dtype=np.uint64) * 512
    rows = ShardIndex(IndexHeader("b.tar", "first_dot", 1, 2048), [pack_row("0/3", 0, 1024, [("x", 1, 1)])])
    index = DatasetIndex.of([("a.tar", ShardColumns("a.tar", offsets, None, 4096)), ("b.tar", rows)])
    index.save(tmp_path / "mixed")
    loaded = DatasetIndex.load(tmp_path / "mixed")
    loaded.verify()
    assert not loaded.has_keys
    assert loaded.find("0/3") == [3]
    assert loaded.rows(0, 0, 3)[1] is None
    with pytest.raises(ShardFormatError, match="no keys"):
        loaded.find("0/4")
    assert loaded.select(["b.tar"]).has_keys
    assert loaded.select(["b.tar"]).find("0/4") == []
    assert with_keys.has_keys


KEYS = st.lists(st.sampled_from("abcdefgh") | st.text(min_size=1, max_size=3), max_size=12)


@given(data=st.data(), shards=st.lists(KEYS, max_size=6))
@settings(max_examples=40, deadline=None)
def test_any_selection_is_what_a_list_would_give(data: st.DataObject, shards: list[list[str]]) -> None:
    """Selections of selections, saved and loaded again, or pickled: numbers, keys and places are those of the lists."""
    table = {f"d/{number}.tar": keys for number, keys in enumerate(shards)}
    index = DatasetIndex.of(
        (
            url,
            ShardColumns(
                url, places(keys), np.array([key_check(key) for key in keys], np.uint64), 1 << 20, None, KEYED
            ),
        )
        for url, keys in table.items()
    )
    urls = list(table)
    for _ in range(data.draw(st.integers(0, 3))):
        urls = data.draw(st.lists(st.sampled_from(urls), max_size=8)) if urls else []
        index = index.select(urls)
        way = data.draw(st.sampled_from(["as it is", "pickled", "saved"]))
        if way == "pickled":
            index = pickle.loads(pickle.dumps(index))
        elif way == "saved":
            index.save("memory://any/index")
            index = DatasetIndex.load("memory://any/index")
    listed = [key for url in urls for key in table[url]]
    assert len(index) == len(listed)
    assert [shard.url for shard in index.shards] == urls
    assert index.bounds.tolist() == [0, *np.cumsum([len(table[url]) for url in urls]).tolist()]
    for key in {*listed, "absent"}:
        assert index.find(key) == [number for number, other in enumerate(listed) if other == key]
    for shard, url in enumerate(urls):
        offsets, checks = index.rows(shard, 0, len(table[url]))
        assert offsets.tolist() == places(table[url]).tolist()
        assert checks is not None
        assert checks.tolist() == [key_check(key) & 0xFFFFFFFF for key in table[url]]


def places(keys: list[str]) -> np.ndarray[Any, Any]:
    """Where samples lie that are as long as their keys say."""
    return np.concatenate(([0], np.cumsum([512 * (1 + len(key)) for key in keys]))).astype(np.uint64)


# -------------------------------------------------------------------------------------------------------- many samples
_MANY = """
import random, resource, sys
import numpy as np
from torchdata_wds.format.index.dataset import DatasetIndex

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

index = DatasetIndex.load(sys.argv[1])
before = rss()
random.seed(0)
for _ in range(100_000):
    shard = random.randrange(len(index.shards))
    index.rows(shard, first := random.randrange(9_000), first + 16)
for number in range(1000):
    index.find(str(number))
print(rss() - before)
"""


@pytest.mark.slow
def test_reading_all_over_a_large_index_keeps_memory_bounded(tmp_path: Path) -> None:
    """Ten million samples, 240 MB: a process that has read everywhere has grown by less than 8 MB."""
    shards, samples = 1000, 10_000
    offsets = np.tile(np.arange(samples + 1, dtype=np.uint64) * 512, shards)
    size = np.full(shards, samples * 512 + 1024)
    hashes = np.random.default_rng(0).integers(0, 1 << 64, shards * samples, np.uint64)
    columns = Columns(
        "first_dot",
        [f"s3://bucket/folder/{number:06d}.tar" for number in range(shards)],
        np.full(shards, samples),
        size,
        size,
        ["mtime-1764444444444444444"] * shards,
        np.full(shards, KEYED, np.uint8),
        offsets,
        hashes,
    )
    path = tmp_path / "large"
    DatasetIndex.of_columns(columns).save(path)
    assert path.stat().st_size < 25 * shards * samples
    run = subprocess.run(
        [sys.executable, "-c", _MANY, str(path)], capture_output=True, text=True, check=True, timeout=300
    )
    assert int(run.stdout) < 8 << 20
