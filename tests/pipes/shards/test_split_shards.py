"""Splitting shards: every consumer its share, whatever the index, and what happens when there is none."""

import copy
import io
import itertools
import json
import pickle
import random
import re
import tarfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from tests.kits.ranks import ranks_of
from tests.kits.servers import QuietHandler, serve_folder
from tests.kits.shards import keys_of, tar_bytes, text_keys, text_samples, write_tar, write_text_shards
from tests.kits.workers_kit import consumers_of, loader_of, seeded, time_limit
from torchdata_wds import (
    ShardFormatError,
    ShardIndex,
    ShardListError,
    ShardSlice,
    TarWriter,
    handlers,
    ignore_and_continue,
    index_shard,
    reraise_exception,
    warn_and_continue,
)
from torchdata_wds.format.index import sidecars
from torchdata_wds.format.index.sidecars import index_url, old_index_url
from torchdata_wds.handlers import Asked
from torchdata_wds.pipes.resume_facts import Watch
from torchdata_wds.pipes.shards import shard_counts
from torchdata_wds.storage import StorageOptions, meters

MODES = (None, "drop", "pad")


def write_indexed(folder: Path, sizes: Sequence[int]) -> list[str]:
    """Text shards with an index beside each."""
    urls = write_text_shards(folder, sizes)
    for url in urls:
        index_shard(url)
    return urls


def graph_of(urls: Sequence[str], index: Any = None, even: Any = None, **options: Any) -> IterDataPipe[Any]:
    """Shards shuffled, split, loaded and grouped."""
    shards = IterableWrapper(list(urls)).shuffle().split_shards(index, even=even)
    return shards.load_wds_shards(**options).group_by_key(keys=options.get("keys", "first_dot"))


def check_shares(shares: list[list[dict[str, Any]]], sizes: Sequence[int], even: str | None) -> None:
    """The promise of each mode, over the samples that all consumers got in an epoch."""
    everything = text_keys(sizes)
    found = Counter(itertools.chain.from_iterable(map(keys_of, shares)))
    lengths = {len(share) for share in shares}
    if even is None:
        assert found == Counter(everything)
        assert max(lengths) - min(lengths) <= 1
        return
    assert len(lengths) == 1
    if even == "drop":
        assert set(found.values()) == {1}
        assert set(found) <= set(everything)
        assert len(everything) - len(found) < len(shares)
        return
    own = Counter(sample["__key__"] for share in shares for sample in share if "__pad__" not in sample)
    assert own == Counter(everything)
    padding = [sample for share in shares for sample in share if "__pad__" in sample]
    assert len(padding) < len(shares)
    assert all(sample["__pad__"] is True for sample in padding)


def check_all(folder: Path, shards: int, consumers: int) -> None:
    """All modes over shards of uneven sizes, some of them empty."""
    rng = random.Random(shards)
    sizes = [rng.choice((0, 1, 2, 3, 9)) for _ in range(shards)]
    urls = [str(folder / f"shard-{number:06d}.tar") for number in range(shards)]
    if not folder.exists() or not list(folder.iterdir()):
        assert write_indexed(folder, sizes) == urls
    counts = {Path(url).name: size for url, size in zip(urls, sizes, strict=True)}
    for even in MODES:
        pipe = graph_of(urls, index=rng.choice((True, counts)), even=even)
        copies = consumers_of(pipe, consumers, seed=shards)
        if sum(sizes) == 0 or (even == "drop" and sum(sizes) < consumers):
            with pytest.raises(ShardListError, match="would get nothing"):
                list(copies[0])
            continue
        for epoch in range(2):
            check_shares(list(map(list, seeded(copies, epoch))), sizes, even)
    shares = list(map(list, consumers_of(graph_of(urls), consumers, seed=shards)))
    assert Counter(itertools.chain.from_iterable(map(keys_of, shares))) == Counter(text_keys(sizes))


@pytest.mark.parametrize(("shards", "consumers"), [(1, 1), (1, 9), (2, 5), (3, 2), (5, 12), (7, 3), (12, 5)])
def test_split_shards_keeps_its_promise(shards: int, consumers: int, tmp_path: Path) -> None:
    """Each sample once, all shares equal, or each sample once and the rest marked; without an index each once."""
    check_all(tmp_path, shards, consumers)


@pytest.mark.slow
@pytest.mark.parametrize("shards", range(1, 9))
def test_split_shards_keeps_its_promise_everywhere(shards: int, tmp_path: Path) -> None:
    """The same for all numbers of shards and consumers up to eight."""
    for consumers in range(1, 9):
        check_all(tmp_path, shards, consumers)


# ------------------------------------------------------------------------------------------------------ who gets what
def slices_of(urls: Sequence[str], consumers: int, **options: Any) -> list[list[ShardSlice]]:
    """What each consumer gets of shards in this order."""
    return list(map(list, consumers_of(IterableWrapper(list(urls)).split_shards(**options), consumers)))


def test_split_shards_gives_each_consumer_the_samples_that_it_promises() -> None:
    """Consumer i of N takes samples i*T//N to (i+1)*T//N of the shards in their order; empty ones are looked at too."""
    index = {"a.tar": 3, "b.tar": 0, "c.tar": 4}
    assert slices_of(["a.tar", "b.tar", "c.tar"], 3, index=index) == [
        [("a.tar", 0, 2, 1)],
        [("a.tar", 2, 3, 1), ("b.tar", 0, 0, 1), ("c.tar", 0, 1, 1)],
        [("c.tar", 1, 4, 1)],
    ]
    assert slices_of(["a.tar", "b.tar"], 2, index={"a.tar": 3, "b.tar": 3}) == [
        [("a.tar", 0, 3, 1)],
        [("b.tar", 0, 3, 1)],
    ]


def test_split_shards_gives_whole_shards_when_it_has_no_index() -> None:
    """As sharding_filter does."""
    assert slices_of(["a", "b", "c"], 2) == [[("a", 0, None, 1), ("c", 0, None, 1)], [("b", 0, None, 1)]]
    assert slices_of(["a", "b"], 3) == [
        [("a", 0, None, 3), ("b", 1, None, 3)],
        [("a", 1, None, 3), ("b", 2, None, 3)],
        [("a", 2, None, 3), ("b", 0, None, 3)],
    ]
    assert slices_of([Path("a")], 1) == [[("a", 0, None, 1)]]  # type: ignore[list-item]


def test_split_shards_leaves_others_out_each_epoch_when_dropping() -> None:
    """All consumers agree on what is left out, seeded or never seeded, and it changes."""
    pipe = IterableWrapper(["a.tar"]).split_shards({"a.tar": 103}, even="drop")
    for seed in (None, 5):
        copies = [copy.deepcopy(pipe) for _ in range(4)]
        left_out = []
        for number, one in enumerate(copies):
            apply_sharding(one, 4, number)
            if seed is not None:
                apply_random_seed(one, torch.Generator().manual_seed(seed))
            torch.manual_seed(number)  # ranks need not agree on the global generator
        for _ in range(6):
            parts = [part for one in copies for part in one]
            taken = {sample for part in parts for sample in range(part.start, part.stop)}
            assert len(taken) == sum(part.stop - part.start for part in parts) == 100
            left_out.append(tuple(set(range(103)) - taken))
        assert len(set(left_out)) > 3


def test_split_shards_has_the_same_shares_when_seeded_alike() -> None:
    """What is left out follows from the seed."""
    pipe = IterableWrapper(["a.tar"]).split_shards({"a.tar": 999}, even="drop")
    twins = [consumers_of(pipe, 2, seed=4)[0] for _ in range(2)]
    assert [list(twins[0]) for _ in range(3)] == [list(twins[1]) for _ in range(3)]
    assert list(consumers_of(pipe, 2, seed=5)[0]) != list(consumers_of(pipe, 2, seed=4)[0])


def test_split_shards_marks_repeats_when_another_stage_stands_before_grouping(tmp_path: Path) -> None:
    """The mark does not depend on the fused loop, nor does it count as a chosen field."""
    (url,) = write_indexed(tmp_path, [2])
    shards = IterableWrapper([url]).split_shards(True, even="pad")
    for source in (shards.load_wds_shards(), shards.load_wds_shards().filter(bool)):
        last = consumers_of(source.group_by_key(fields="cls"), 3)[2]
        assert list(last) == [{"__key__": "s0-00000", "__url__": url, "cls": b"0", "__pad__": True}]
        assert list(consumers_of(source.group_by_key(fields="png"), 3)[2]) == []


def test_split_shards_numbers_consumers_as_services_do() -> None:
    """Ranks and workers that a service applies one after the other are one row of consumers."""
    pipe = IterableWrapper(["a.tar"]).split_shards({"a.tar": 8})
    found = []
    for rank, worker in itertools.product(range(2), range(2)):
        one = copy.deepcopy(pipe)
        apply_sharding(one, 2, rank, SHARDING_PRIORITIES.DISTRIBUTED)
        apply_sharding(one, 2, worker, SHARDING_PRIORITIES.MULTIPROCESSING)
        found += list(one)
    assert sorted((start, stop) for _, start, stop, _ in found) == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_split_shards_lets_a_worker_be_empty_but_no_rank() -> None:
    """Three samples for two ranks of two workers do; for four ranks each rank is told, not only the empty one."""
    for ranks, workers, works in ((2, 2, True), (4, 1, False), (1, 9, True)):
        for rank, worker in itertools.product(range(ranks), range(workers)):
            pipe = IterableWrapper(["a.tar"]).split_shards({"a.tar": 3})
            apply_sharding(pipe, ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)
            apply_sharding(pipe, workers, worker, SHARDING_PRIORITIES.MULTIPROCESSING)
            if works:
                list(pipe)
                continue
            with pytest.raises(ShardListError, match=r"3 samples in 1 shards for 4 ranks of 1 workers: rank 0"):
                list(pipe)


def test_split_shards_knows_ranks_from_torch_when_a_dataloader_numbers_consumers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under torch's DataLoader consumer w*world+r belongs to rank r."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 3)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    pipe = IterableWrapper(["a.tar"]).split_shards({"a.tar": 2})
    apply_sharding(pipe, 6, 0)
    with pytest.raises(ShardListError, match="for 3 ranks of 2 workers: rank 0"):
        list(pipe)  # consumers 2 and 5 have samples, both of rank 2
    apply_sharding(pipe, 2, 0)  # no multiple of the ranks: nobody knows who is where
    list(pipe)


@pytest.mark.parametrize("index", [None, {}, {"a.tar": 0}])
def test_split_shards_raises_when_there_is_nothing(index: Any) -> None:
    """No shards, or none with a sample, is an error that says so."""
    pipe = IterableWrapper(["a.tar"] if index else []).split_shards(index)
    with pytest.raises(ShardListError, match=r"0 samples in|has 0 shards"):
        list(pipe)


# ---------------------------------------------------------------------------------------------------- what it refuses
def test_split_shards_checks_options_when_constructed() -> None:
    """Wrong options raise at once, and say what is right."""
    source = IterableWrapper(["a.tar"])
    for even in ("drop", "pad"):
        with pytest.raises(ValueError, match="must know how many samples"):
            source.split_shards(even=even)
    for wrong in ("cut", True, 1):
        with pytest.raises(ValueError, match="even must be 'drop', 'pad' or None"):
            source.split_shards(True, even=wrong)
    for kind in (False, 5, ["a.tar"]):
        with pytest.raises(TypeError, match="index must be True"):
            source.split_shards(kind)
    with pytest.raises(TypeError, match="where a URL"):
        source.split_shards({5: 5})
    for count in (-1, "5", 2.0, True, None):
        with pytest.raises(ShardListError, match=r"a\.tar .* samples; that must be a whole number"):
            source.split_shards({"a.tar": count})
    assert list(source.split_shards({Path("a.tar"): np.int64(5)})) == [("a.tar", 0, 5, 1)]


def test_split_shards_refuses_a_second_splitter() -> None:
    """Whatever divides shards upstream is named; what does downstream is refused by torch when it is applied."""
    source = IterableWrapper(["a.tar"])
    for divided in (source.sharding_filter(), source.split_shards(), source.sharding_filter().shuffle()):
        with pytest.raises(ValueError, match="has done that already"):
            divided.split_shards()
    with pytest.raises(RuntimeError, match="Sharding twice"):
        apply_sharding(source.split_shards().sharding_filter(), 2, 0)


@pytest.mark.slow
def test_split_shards_ends_with_an_error_when_split_twice_under_workers() -> None:
    """The reading service raises torch's error and does not hang."""
    loader = loader_of(IterableWrapper(["a.tar"]).split_shards().sharding_filter())
    with time_limit(60), pytest.raises(RuntimeError, match="Sharding twice"):
        list(loader)


# ----------------------------------------------------------------------------------------------------------- indexes
def test_split_shards_reads_every_kind_of_file(tmp_path: Path) -> None:
    """A wids shard list with relative and whole URLs, sizes.json, and an object from URL to number."""
    for name in "abc":
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{name}.tar").touch()
    urls = [str(tmp_path / "data" / f"{name}.tar") for name in "abc"]
    sizes = {"a.tar": 1, "b.tar": 2, "c.tar": 3}
    shardlist = [{"url": f"data/{name}", "nsamples": count, "filesize": 1} for name, count in sizes.items()]
    contents = {
        "wids.json": {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shardlist},
        "based.json": {"base": str(tmp_path), "shardlist": shardlist[:1], "datasets": [{"shardlist": shardlist[1:]}]},
        "sizes.json": sizes,
        "urls.json": dict(zip(urls, sizes.values(), strict=True)),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
        for index in (tmp_path / name, str(tmp_path / name), f"file://{tmp_path / name}"):
            found = list(IterableWrapper(urls).split_shards(index))
            assert [part.stop for part in found] == [1, 2, 3], name


def test_split_shards_looks_shards_up_by_url_before_base_name() -> None:
    """Two shards of one base name need their whole URLs, whichever side has them."""
    whole = {"x/a.tar": 1, "y/a.tar": 2, "b.tar": 3}
    found = list(IterableWrapper(["y/a.tar", "x/a.tar", "z/b.tar"]).split_shards(whole))
    assert [part.stop for part in found] == [2, 1, 3]
    for urls, index in ((["z/a.tar"], whole), (["x/a.tar", "y/a.tar"], {"a.tar": 1})):
        with pytest.raises(ShardListError, match="give the whole URLs"):
            list(IterableWrapper(urls).split_shards(index))
    assert len(list(IterableWrapper(["x/a.tar", "x/a.tar"]).split_shards({"a.tar": 1}))) == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}", "has no number of samples for shard a.tar"),
        ('{"b.tar": 5}', "has no number of samples for shard a.tar"),
        ('{"a.tar": -5}', "a.tar -5 samples"),
        ('{"a.tar": "5"}', "a.tar '5' samples"),
        ("[5]", "is a JSON list"),
        ("a.tar 5", "is not JSON"),
        ('{"shardlist": [{"url": "a.tar"}]}', "malformed: KeyError: 'nsamples'"),
        ('{"shardlist": 5}', "malformed"),
        ('{"shardlist": [{"url": "a.tar", "nsamples": 5}, {"url": "a.tar", "nsamples": 6}]}', "both 5 and 6"),
    ],
)
def test_split_shards_raises_when_an_index_file_is_wrong(
    content: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file, the shard and what is wrong."""
    monkeypatch.chdir(tmp_path)
    Path("index.json").write_text(content)
    with pytest.raises(ShardListError, match=re.escape(says)) as caught:
        list(IterableWrapper(["a.tar"]).split_shards("index.json"))
    assert "index.json" in str(caught.value)


def test_split_shards_raises_when_an_index_is_missing(tmp_path: Path) -> None:
    """Of a shard, the place and the cure are named; so is a file that is not there, and a damaged index."""
    url = write_tar(tmp_path / "a.tar", text_samples("s", 2))
    with pytest.raises(ShardListError, match=r"a\.tar has no readable index .*Make one with index_shard") as caught:
        list(IterableWrapper([url]).split_shards(True))
    assert caught.value.shard == url
    with pytest.raises(ShardListError, match="has no readable index"):
        list(IterableWrapper(["pipe:cat a.tar"]).split_shards(True))
    with pytest.raises(ShardListError, match="cannot be read"):
        list(IterableWrapper([url]).split_shards(tmp_path / "no.json"))
    Path(old_index_url(url)).write_text('{"format": "other"}\n')
    with pytest.raises(ShardListError, match="cannot be used"):
        list(IterableWrapper([url]).split_shards(True))


def test_split_shards_reads_local_indexes_each_epoch(tmp_path: Path) -> None:
    """Shards may be written anew between epochs."""
    (url,) = write_indexed(tmp_path, [2])
    pipe = IterableWrapper([url]).split_shards(True)
    assert [part.stop for part in pipe] == [2]
    write_indexed(tmp_path, [3])
    assert [part.stop for part in pipe] == [3]


def test_split_shards_reads_remote_indexes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept for later epochs, not for copies; all of them, and their options, go through one door."""
    opened: list[str] = []
    real = sidecars.open_shard
    for module in (shard_counts, sidecars):
        monkeypatch.setattr(module, "open_shard", lambda url, **options: opened.append(url) or real(url, **options))
    files = fsspec.filesystem("memory")
    urls = [f"memory://split/{number}.tar" for number in range(30)]
    for number in range(30):
        row = '["k", 0, 1024, []]\n' * number
        head = {"shard": f"{number}.tar", "keys": "first_dot", "samples": number, "tar_bytes": 1, "compressed": False}
        head |= {"format": "torchdata_wds index", "version": 1, "bytes": 1, "sha256": "0" * 5000}
        files.pipe_file(f"/split/.wds-index/{number}.tar.index", f"{json.dumps(head)}\n{row}".encode())
    files.pipe_file("/split/sizes.json", json.dumps({f"{number}.tar": number for number in range(30)}).encode())
    try:
        for index in (True, "memory://split/sizes.json"):
            opened.clear()
            pipe = IterableWrapper(urls).split_shards(index)
            for _ in range(3):
                assert [part.stop for part in pipe] == list(range(30))
            assert len(opened) == (30 if index is True else 1)
            assert len(pickle.dumps(pipe)) < len(pickle.dumps(IterableWrapper(urls))) + 2000
            assert [part.stop for part in pickle.loads(pickle.dumps(pipe))] == list(range(30))
            assert len(opened) == (60 if index is True else 2)
    finally:
        files.rm("/split", recursive=True)


def test_split_shards_keeps_secrets_out_of_text() -> None:
    """Neither the pipe's note in exceptions nor its errors show signed queries."""
    url = "https://me:hunter2@127.0.0.1:9/sizes.json?X-Amz-Signature=hunter2"
    options = {"https": {"headers": {"Token": "hunter2"}, "retries": 0}}
    pipe = IterableWrapper(["a.tar"]).split_shards(url, storage_options=options)
    with pytest.raises(ShardListError) as caught:
        list(pipe)
    assert "hunter2" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


def test_split_shards_warns_once_when_shards_are_too_few(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It says how much is read in vain, and what to do; the first consumer speaks for those in other processes."""
    urls = write_text_shards(tmp_path, [9])
    for one in consumers_of(graph_of(urls), 3):
        handlers.said.clear()
        list(one)
    assert len(caplog.records) == 1
    size = Path(urls[0]).stat().st_size
    assert "1 for 3: every consumer reads all of them and keeps one sample in 3, which makes 3 readings" in caplog.text
    assert f"saves {2 * size:,} bytes" in caplog.text
    handlers.said.clear()
    list(consumers_of(IterableWrapper(["s3://x.tar"]).split_shards(), 3)[0])
    assert "saves 2 of them" in caplog.text


# --------------------------------------------------------------------------------------------------- how it is loaded
class Ranged(QuietHandler):
    """Serves files, and parts of them, and notes what was asked for."""

    asked: list[tuple[str, str | None]] = []  # noqa: RUF012

    def do_GET(self) -> None:  # noqa: N802 - the name that the server calls
        asked = self.headers.get("Range")
        self.asked.append((Path(self.path).name, asked))
        path = Path(self.translate_path(self.path))
        if not path.exists():
            self.send_error(404)
            return
        data = path.read_bytes()
        first, last = 0, len(data) - 1
        if asked:
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(last, int(end)) if end else last
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        try:
            self.wfile.write(data[first : last + 1])
        except (BrokenPipeError, ConnectionResetError):  # the client has what it needs
            self.close_connection = True


def test_loader_asks_a_server_for_the_part_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an index beside the shard a slice begins with a range request at its first sample."""
    (path,) = write_indexed(tmp_path, [8])
    begin = ShardIndex.load(index_url(path))[5].start
    monkeypatch.setattr(Ranged, "asked", [])
    with serve_folder(tmp_path, Ranged) as server:
        url = f"{server}/{Path(path).name}"
        pipe = IterableWrapper([ShardSlice(url, 5, 7)]).load_wds_shards().group_by_key()
        assert keys_of(pipe) == ["s0-00005", "s0-00006"]
        assert [name for name, _ in Ranged.asked].count(f"{Path(path).name}.index") == 1
        assert (Path(path).name, f"bytes={begin}-") in Ranged.asked
        assert (Path(path).name, None) not in Ranged.asked
        Ranged.asked.clear()
        Path(index_url(path)).unlink()
        assert keys_of(pipe) == ["s0-00005", "s0-00006"]
        assert [name for name, _ in Ranged.asked].count(f"{Path(path).name}.index") == 2  # one for each place
        shares = consumers_of(graph_of([url], {Path(path).name: 8}), 3)
        assert [len(keys_of(share)) for share in shares] == [2, 3, 3]


def test_loader_seeks_in_stores(tmp_path: Path) -> None:
    """Fsspec files are read from the slice on."""
    (path,) = write_indexed(tmp_path, [6])
    files = fsspec.filesystem("memory")
    for url, place in {path: "/seek/x.tar", index_url(path): "/seek/.wds-index/x.tar.index"}.items():
        files.pipe_file(place, Path(url).read_bytes())
    try:
        shares = consumers_of(graph_of(["memory://seek/x.tar"], index=True), 4)
        assert list(itertools.chain.from_iterable(map(keys_of, shares))) == text_keys([6])
    finally:
        files.rm("/seek", recursive=True)


@pytest.mark.parametrize("compress", [None, "gz", "zst", "bz2", "xz"])
@pytest.mark.parametrize("has_index", [True, False])
def test_loader_reads_slices_of_compressed_shards(compress: str | None, has_index: bool, tmp_path: Path) -> None:
    """They are read past, with an index and without."""
    path = tmp_path / "x.tar"
    with TarWriter(path, index=has_index, compress=compress) as writer:
        for number in range(7):
            writer.write({"__key__": f"{number}", "txt": "text" * number})
    shares = consumers_of(graph_of([str(path)], {"x.tar": 7}), 3)
    assert [keys_of(share) for share in shares] == [["0", "1"], ["2", "3"], ["4", "5", "6"]]


def offsets_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes where shards are opened."""
    from torchdata_wds import storage

    real, offsets = storage.open_shard, []

    def opening(url: Any, *, offset: int = 0, **options: Any) -> Any:
        offsets.append(offset)
        return real(url, offset=offset, **options)

    monkeypatch.setattr(storage, "open_shard", opening)
    return offsets


@pytest.mark.parametrize(
    ("options", "seeks"),
    [
        ({}, True),
        ({"select": "*.cls"}, True),
        ({"keys": "last_dot"}, False),
        ({"keys": lambda name: tuple(name.rsplit(".", 1))}, False),
        ({"rename": lambda name: "x" + name}, False),
    ],
    ids=["plain", "select", "last_dot", "callable", "rename"],
)
def test_loader_uses_an_index_only_when_it_counts_alike(
    options: Any, seeks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other rules for names may make other samples: such shards are read past."""
    urls = write_indexed(tmp_path, [6])
    offsets = offsets_of(monkeypatch)
    shares = [keys_of(share) for share in consumers_of(graph_of(urls, {Path(urls[0]).name: 6}, **options), 2)]
    assert [key.removeprefix("x") for key in itertools.chain(*shares)] == text_keys([6])
    assert (offsets[-1] > 0) is seeks


def test_loader_opens_nothing_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an index to seek by a few samples, nor a shard of which all has been read."""
    (url,) = write_indexed(tmp_path, [9])
    offsets = offsets_of(monkeypatch)
    assert read_from(ShardSlice(url, 2, None, 3), 0) == ["s0-00002", "s0-00005", "s0-00008"]
    assert offsets == [0]
    assert read_from(ShardSlice(url, 2, 5), 3) == []
    assert offsets == [0]
    assert read_from(ShardSlice(url, 2, None, 3), 1) == ["s0-00005", "s0-00008"]
    assert offsets[1:] == [ShardIndex.load(index_url(url))[5].start]


def half(name: str) -> bool:
    """Chooses samples of even numbers."""
    return int(name.partition(".")[0][-1]) % 2 == 0


def test_loader_divides_alike_when_members_are_chosen(tmp_path: Path) -> None:
    """Samples that select= leaves out count in slices, so that consumers with and without an index agree."""
    urls = write_indexed(tmp_path, [7, 4])
    expected = [key for key in text_keys([7, 4]) if half(key)]
    counts = {Path(url).name: size for url, size in zip(urls, (7, 4), strict=True)}
    for index in (True, counts, None):
        shards = IterableWrapper(urls).split_shards(index).load_wds_shards(select=half).group_by_key()
        shares = map(keys_of, consumers_of(shards, 5))
        assert sorted(itertools.chain.from_iterable(shares)) == expected
    for url in urls:
        Path(index_url(url)).unlink()
    shards = IterableWrapper(urls).split_shards(counts).load_wds_shards(select=half).group_by_key()
    assert sorted(itertools.chain.from_iterable(map(keys_of, consumers_of(shards, 5)))) == expected


def stale_shard(folder: Path) -> str:
    """A shard that was written anew, of the same size, after its index."""
    (url,) = write_indexed(folder, [6])
    members = text_samples("s0-", 6)
    Path(url).write_bytes(tar_bytes([*members[3:], *members[:3]]))
    return url


def test_loader_raises_when_an_index_is_stale(tmp_path: Path) -> None:
    """Another member, another size, or no header where a slice begins: the error says what to do."""
    url = stale_shard(tmp_path)
    pipe = IterableWrapper([ShardSlice(url, 2, 4)]).load_wds_shards().group_by_key()
    with pytest.raises(ShardFormatError, match=r"sample 's0-00002' .*there is member s0-00003\.txt.*index_shard"):
        list(pipe)
    data = Path(url).read_bytes()
    Path(url).write_bytes(b"x" * len(data))
    with pytest.raises(ShardFormatError, match=r"is not a tar archive.*index_shard"):
        list(pipe)
    Path(url).write_bytes(data[:-512])
    with pytest.raises(ShardFormatError, match=r"has [\d,]+ bytes, and the index says"):
        list(pipe)
    assert list(consumers_of(graph_of([url], True, handler=ignore_and_continue), 3)[1]) == []


def test_loader_raises_when_counts_are_stale(tmp_path: Path) -> None:
    """Whoever reads a shard's end compares; an empty shard is looked at too."""
    urls = write_text_shards(tmp_path, [3, 2])
    names = [Path(url).name for url in urls]
    for counts in ((4, 2), (3, 1), (3, 0), (2, 2), (0, 2)):
        shares = consumers_of(graph_of(urls, dict(zip(names, counts, strict=True))), 2)
        with pytest.raises(ShardFormatError, match="were expected"):
            list(map(list, shares))


def read_from(item: Any, skip: int) -> list[str]:
    """The keys that are left of an item."""
    from torchdata_wds.format.samples.grouping import group_members

    loader = IterableWrapper([item]).load_wds_shards()
    shards = loader.shards(Asked(reraise_exception, Counter()), Watch(), None, {0: skip})
    return keys_of(group_members(itertools.chain.from_iterable(shards)))


@pytest.mark.parametrize("has_index", [True, False])
def test_loader_leaves_samples_out_at_the_beginning_of_an_item(has_index: bool, tmp_path: Path) -> None:
    """Of whole shards, slices and strides."""
    urls = write_indexed(tmp_path, [9]) if has_index else write_text_shards(tmp_path, [9])
    keys = text_keys([9])
    for item in (urls[0], ShardSlice(urls[0], 2, 8), ShardSlice(urls[0], 1, None, 3)):
        part = slice(*item[1:]) if isinstance(item, ShardSlice) else slice(None)
        for skip in range(len(keys[part]) + 1):
            assert read_from(item, skip) == keys[part][skip:]


def test_loader_reads_past_when_it_leaves_samples_out_and_the_index_is_stale(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A plain URL asks for no index: a wrong one costs time only, and a warning says so."""
    assert read_from(stale_shard(tmp_path), 2) == ["s0-00003", "s0-00004", "s0-00005", "s0-00000"]
    assert "read past" in caplog.text


def test_loader_says_where_damage_is_when_it_began_inside(tmp_path: Path) -> None:
    """The samples before the damage come; byte offsets are those of the shard."""
    (url,) = write_indexed(tmp_path, [6])
    data = bytearray(Path(url).read_bytes())
    bad = ShardIndex.load(index_url(url))[4].start
    data[bad + 3] ^= 1
    Path(url).write_bytes(data)
    found = []
    pipe = IterableWrapper([ShardSlice(url, 2, 6)]).load_wds_shards().group_by_key()
    with pytest.raises(ShardFormatError, match=f"at byte {bad:,}") as caught:
        found.extend(pipe)
    assert caught.value.shard == url
    skipping = IterableWrapper([ShardSlice(url, 2, 6)]).load_wds_shards(handler=warn_and_continue).group_by_key()
    assert keys_of(skipping) == ["s0-00002"]  # the next one had not been seen to end


# -------------------------------------------------------------------------------------------------------------- len
def test_group_by_key_has_a_length_when_there_is_an_index(tmp_path: Path) -> None:
    """It is what this consumer gets in the coming epoch, and asking changes nothing."""
    urls = write_indexed(tmp_path, [5, 0, 6])
    for even in MODES:
        pipe = graph_of(urls, True, even)
        assert len(pipe) == 11
        torch.manual_seed(3)
        state = torch.get_rng_state()
        assert len(pipe) == 11
        assert torch.equal(torch.get_rng_state(), state)
        for one in consumers_of(pipe, 4):
            before = len(one)
            samples = list(one)
            assert before == len(samples) == len(one)
            assert len(one.wds_decode().wds_shuffle(3)) == before
    twins = consumers_of(graph_of(urls, True), 1) + consumers_of(graph_of(urls, True), 1)
    assert [len(twins[0]) for _ in range(3)] == [11] * 3
    assert list(twins[0]) == list(twins[1])


def test_group_by_key_has_no_length_when_samples_may_be_left_out(tmp_path: Path) -> None:
    """TypeError, as for all whose length nobody knows."""
    urls = write_indexed(tmp_path, [5])
    split = IterableWrapper(urls).split_shards(True)
    for pipe, says in (
        (IterableWrapper(urls).load_wds_shards().group_by_key(), "only directly after"),
        (IterableWrapper(urls).group_by_key(), "only directly after"),
        (split.load_wds_shards().filter(bool).group_by_key(), "only directly after"),
        (IterableWrapper(urls).split_shards().load_wds_shards().group_by_key(), "has no index"),
        (split.load_wds_shards(select="*.cls").group_by_key(), "no length with select="),
        (split.load_wds_shards(handler=ignore_and_continue).group_by_key(), "no length with select="),
        (split.load_wds_shards().group_by_key(handler=ignore_and_continue), "no length with select="),
        (split.load_wds_shards().group_by_key(fields="cls"), "no length with select="),
    ):
        with pytest.raises(TypeError, match=says):
            len(pipe)


# ------------------------------------------------------------------------------------------------------- with workers
SETTINGS = [(5, [4, 0, 7]), (4, [10]), (2, [3, 3]), (3, [2, 9, 0, 1, 5, 5, 2])]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("workers", "sizes"), SETTINGS)
@pytest.mark.parametrize("kind", ["service", "dataloader"])
def test_split_shards_works_with_workers(kind: str, workers: int, sizes: list[int], tmp_path: Path) -> None:
    """More workers than shards, one shard, empty shards: each sample once, no hang."""
    urls = write_indexed(tmp_path, sizes)
    for index, even in ((None, None), (True, None), (True, "pad"), (True, "drop")):
        for samples in epochs_of(graph_of(urls, index, even), kind, workers):
            left = sum(sizes) % workers if even == "drop" else 0
            own = [sample["__key__"] for sample in samples if "__pad__" not in sample]
            assert len(own) == len(set(own)) == sum(sizes) - left
            assert len(samples) - len(own) == (-sum(sizes) % workers if even == "pad" else 0)


def epochs_of(pipe: IterDataPipe[Any], kind: str, workers: int) -> list[list[Any]]:
    """Two epochs under workers, none of which may take a minute for an item."""
    if kind == "service":
        with loader_of(pipe, workers, timeout=60) as loader:
            return [list(loader) for _ in range(2)]
    loader = DataLoader(pipe, num_workers=workers, batch_size=None, timeout=60)
    # list(loader) would ask for the length first, which in the main process is that of all samples without padding
    return [list(iter(loader)) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["service", "dataloader"])
def test_split_shards_raises_when_workers_have_no_shards(kind: str, tmp_path: Path) -> None:
    """No shard matches, or none has a sample: an error that names the numbers, and no hang."""
    urls = write_indexed(tmp_path, [0])
    empty: list[str] = []
    listed = IterableWrapper([str(tmp_path / "no-*.tar")]).list_shards().split_shards().load_wds_shards()
    for pipe, says in (
        (graph_of(empty), "for 1 ranks of 2 workers"),
        (graph_of(urls, True), "for 1 ranks of 2 workers"),
        (listed, "no-"),
    ):
        with pytest.raises(ShardListError, match=says):
            epochs_of(pipe, kind, 2)


RANKS = """
import sys
import torch
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from tests.kits.ranks import run_ranks
from tests.kits.workers_kit import consumers_of, seeded, loader_of

folder, urls = sys.argv[1], sys.argv[2:]

def run(rank):
    return {kind: epochs_of(kind, rank) for kind in ("service", "dataloader")}

def epochs_of(kind, rank):
    torch.manual_seed(rank if kind == "service" else 0)
    found = []
    for even in ("drop", "pad", None):
        pipe = IterableWrapper(urls).shuffle().split_shards(True, even=even).load_wds_shards().group_by_key()
        if kind == "service":
            loader = loader_of(pipe, 2, distributed=True)
        else:
            loader = DataLoader(pipe, num_workers=2, batch_size=None)
        for epoch in range(2):
            found.append([(sample["__key__"], "__pad__" in sample) for sample in loader])
        if kind == "service":
            loader.shutdown()
    return found

if __name__ == "__main__":
    run_ranks(run, folder)
"""


@pytest.mark.slow
def test_split_shards_makes_ranks_equal(tmp_path: Path) -> None:
    """Two ranks of two workers: equal shares with even=, every sample once or marked without loss."""
    sizes = [5, 2, 0, 6]
    urls = write_indexed(tmp_path / "shards", sizes)
    ranks = ranks_of(RANKS, tmp_path, *urls)
    for kind in ("service", "dataloader"):
        for number, epochs in enumerate(zip(*(rank[kind] for rank in ranks), strict=True)):
            even = ("drop", "pad", None)[number // 2]
            own = [key for epoch in epochs for key, is_padding in epoch if not is_padding]
            assert len(own) == len(set(own)) == (12 if even == "drop" else 13)
            assert [len(epoch) for epoch in epochs] == {"drop": [6, 6], "pad": [8, 8], None: [6, 7]}[even]


def by_folder(name: str) -> tuple[str, str]:
    """Makes a sample of each folder."""
    folder, _, field = name.partition("/")
    return folder, field


def test_slices_are_cut_between_the_samples_of_the_grouping_when_the_loader_has_another_rule(tmp_path: Path) -> None:
    """Directly behind the loader the grouping's keys= alone say what a sample is."""
    members = [(f"{folder}/{name}.txt", b"x") for folder in "abcd" for name in ("one", "two")]
    url = write_tar(tmp_path / "folders.tar", members)
    pipe = IterableWrapper([url]).split_shards({"folders.tar": 4}).load_wds_shards().group_by_key(keys=by_folder)
    shares = [list(one) for one in consumers_of(pipe, 3)]
    assert [sample["__key__"] for share in shares for sample in share] == list("abcd")
    assert all({"one.txt", "two.txt"} <= set(sample) for share in shares for sample in share)


def test_slices_have_the_content_of_hard_links_when_their_targets_lie_before(tmp_path: Path) -> None:
    """What a link stands for is looked up in the shard from its beginning, wherever reading began."""
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for number in range(6):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = 1
            link = tarfile.TarInfo(f"{number}.cls")
            link.type, link.linkname = tarfile.LNKTYPE, f"{number // 2}.txt"
            for member in (link, info) if number else (info, link):
                tar.addfile(member, io.BytesIO(b"%d" % number))
    url = str(tmp_path / "x.tar")
    index_shard(url)
    samples = [sample for share in consumers_of(graph_of([url], True), 4) for sample in share]
    assert [(sample["txt"], sample["cls"]) for sample in samples] == [
        (b"%d" % number, b"%d" % (number // 2)) for number in range(6)
    ]


def test_indexes_read_by_threads_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads' seconds are those of the source; the stage waits only as long as a clock on the wall says."""

    def read_slowly(url: str, _: object) -> SimpleNamespace:
        meters.Meter(url).read_into(lambda _: time.sleep(0.02), None)
        return SimpleNamespace(samples=1)

    monkeypatch.setattr(shard_counts, "_read_header", read_slowly)
    before, begin = meters.snapshot(), time.perf_counter()
    assert shard_counts._Sidecars().of([f"s3://many/{n}.tar" for n in range(5)], StorageOptions()) == [1] * 5
    seconds = time.perf_counter() - begin
    tally = meters.difference(meters.snapshot(), before)["s3://many"]
    assert tally.seconds >= 0.1
    assert 0 < tally.waited <= seconds
