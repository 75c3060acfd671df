"""IndexedShards: the samples of shards by number, slice and key."""

import copy
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    MapDataPipe,
    RandomSampler,
    Subset,
    random_split,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph import traverse_dps

from tests.kits.processes import in_child, open_files
from tests.kits.shards import image_samples, keys_of, sample_members, text_keys, write_tar, write_text_shards
from tests.kits.torchdata import StatefulDataLoader, needs_torchdata
from torchdata_wds import (
    IndexedShards,
    ReappearingKeyError,
    ShardFormatError,
    ShardListError,
    ShardOpenError,
    WdsLoader,
    index_shard,
    wds_collate,
)
from torchdata_wds.storage.ranges import ShardRanges

SIZES = (4, 0, 9, 3, 5)
TOTAL = sum(SIZES)


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps indexes that are made here away from the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "indexes"))


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Five text shards of uneven length, the second one empty."""
    return write_text_shards(tmp_path_factory.mktemp("indexed"), SIZES)


@pytest.fixture
def data(urls: list[str]) -> Iterator[IndexedShards]:
    """The data set of these shards."""
    with IndexedShards(urls) as opened:
        yield opened


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The ranges that are read: URL, start, stop."""
    found: list[tuple[str, int, int]] = []
    read = ShardRanges.read

    def noted(self: ShardRanges, url: str, start: int, stop: int, *rest: Any) -> bytes:
        found.append((url, start, stop))
        return read(self, url, start, stop, *rest)

    monkeypatch.setattr(ShardRanges, "read", noted)
    return found


def streamed(urls: Any, **options: Any) -> list[dict[str, Any]]:
    """The samples as the pipes read them."""
    return list(IterableWrapper([urls]).list_shards().load_wds_shards().group_by_key(**options))


def key_of(sample: dict[str, Any]) -> str:
    """A function of a module, for `.map`."""
    key: str = sample["__key__"]
    return key


class EndlessMapDataPipe(MapDataPipe):
    """A source without a length."""

    def __getitem__(self, number: int) -> int:
        return number


def as_list(samples: list[Any]) -> list[Any]:
    """A collate function that keeps a batch."""
    return samples


def upper(key: str, data: bytes) -> Any:
    """A decoder of the user's."""
    return data.decode().upper() if key == ".txt" else None


# ------------------------------------------------------------------------------------------------- numbers and slices
def test_samples_equal_those_of_the_pipes(urls: list[str], data: IndexedShards) -> None:
    """By number, in a loop, in a batch, and from the end."""
    expected = streamed(urls)
    assert len(data) == TOTAL == len(expected)
    assert [data[number] for number in range(TOTAL)] == expected
    assert list(data) == expected
    assert data.__getitems__(range(TOTAL)) == expected
    assert [data[number] for number in range(-TOTAL, 0)] == expected


@pytest.mark.parametrize("make", [int, np.int64, torch.tensor, np.array], ids=["int", "numpy", "tensor", "array"])
def test_numbers_may_be_of_any_integer_type(data: IndexedShards, make: Any) -> None:
    """Samplers give ints, and loops over arrays numpy's."""
    assert data[make(7)] == data[7]
    assert data.__getitems__([make(7), make(3)]) == [data[7], data[3]]
    assert data.key_of(make(7)) == text_keys(SIZES)[7]


@pytest.mark.parametrize("number", [TOTAL, -TOTAL - 1, 10**30])
def test_numbers_out_of_range_raise_an_index_error(data: IndexedShards, number: int) -> None:
    """The message has the number and the length."""
    with pytest.raises(IndexError, match=f"no sample {number:,}: the data set has {TOTAL} samples"):
        data[number]
    with pytest.raises(IndexError):
        data.__getitems__([0, number])
    with pytest.raises(IndexError):
        data.key_of(number)


@pytest.mark.parametrize("item", [1.5, None, (1, 2), b"key", True, [1, "key"], [True, False], np.array([1.5, 2.5])])
def test_other_types_raise_a_type_error(data: IndexedShards, item: Any) -> None:
    """The message says what is taken; a mask is not taken for numbers."""
    with pytest.raises(TypeError, match=r"a number, a slice, a key \(str\) or a list of numbers, not by"):
        data[item]


def test_a_list_of_numbers_gives_a_list(data: IndexedShards) -> None:
    """As a sampler of batches gives them to a loader that makes no batches itself."""
    expected = [data[number] for number in (7, 2, -1)]
    for numbers in ([7, 2, -1], np.array([7, 2, -1]), torch.tensor([7, 2, -1])):
        assert data[numbers] == expected
    assert data[range(3)] == list(data[:3])
    assert data[[]] == []
    loader = DataLoader(data, batch_size=None, sampler=BatchSampler(range(TOTAL), 4, drop_last=False))
    assert [keys_of(batch) for batch in loader][-1] == text_keys(SIZES)[20:]


@pytest.mark.parametrize(
    "part", [slice(3), slice(5, 11), slice(-4, None), slice(None, None, 3), slice(None, None, -1), slice(9, 2, -2)]
)
def test_a_slice_is_a_data_set(urls: list[str], data: IndexedShards, part: slice) -> None:
    """It has numbers from 0, and slices of its own, as a list would."""
    expected = streamed(urls)[part]
    view = data[part]
    assert (len(view), list(view), view[-1]) == (len(expected), expected, expected[-1])
    assert [view[number] for number in range(len(view))] == expected
    assert list(view[1:]) == expected[1:]
    assert list(view[::-2]) == expected[::-2]
    with pytest.raises(IndexError):
        view[len(view)]


def test_a_slice_reads_nothing_until_it_is_asked(urls: list[str], reads: list[Any]) -> None:
    """It costs the same for ten samples and for ten million, and shares what is open."""
    data = IndexedShards(urls)
    view = data[2:18][::3]
    assert (len(view), reads) == (6, [])
    assert view[1]["__key__"] == text_keys(SIZES)[5]
    assert len(reads) == 1
    assert len(data[5:5]) == 0 == len(list(data[5:5]))


# --------------------------------------------------------------------------------------------------------------- keys
def test_keys_find_samples(data: IndexedShards) -> None:
    """[key], find, key_of and `in`; numbers of a slice are its own."""
    keys = text_keys(SIZES)
    assert [data.key_of(number) for number in range(TOTAL)] == keys
    assert [data[key]["__key__"] for key in keys] == keys
    assert [data.find(key) for key in keys] == [[number] for number in range(TOTAL)]
    assert keys[3] in data
    assert keys[3] + ".txt" not in data
    assert 3 not in data
    view = data[2:8]
    assert (view.find(keys[3]), view.find(keys[9]), view.key_of(1)) == ([1], [], keys[3])
    assert keys[9] not in view


@pytest.mark.parametrize("key", ["missing", "s0-00000.txt", "", "\udcff", "s0-00000\0"])
def test_a_missing_key_is_a_key_error(data: IndexedShards, key: str) -> None:
    """As in a dict."""
    assert data.find(key) == []
    with pytest.raises(KeyError, match="no sample has the key"):
        data[key]


def test_a_key_in_several_shards_is_an_error_that_says_how_to_choose(tmp_path: Path) -> None:
    """The numbers of all are in the message, and in find()."""
    for name in ("a.tar", "b.tar"):
        write_tar(tmp_path / name, [*sample_members("one", txt=name.encode()), *sample_members(name[0], txt=b"")])
    data = IndexedShards(str(tmp_path / "{a,b}.tar"))
    assert data.find("one") == [0, 2]
    with pytest.raises(ReappearingKeyError, match=r"the numbers 0 \(in .*a.tar\), 2 \(in .*b.tar\). Choose one by its"):
        data["one"]
    assert data[data.find("one")[1]]["txt"] == b"b.tar"
    assert data[:2]["one"]["txt"] == b"a.tar"
    assert data[2:]["one"]["txt"] == b"b.tar"
    assert "one" in data


def test_keys_are_compared_whole(data: IndexedShards, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index knows hashes, which two keys may share."""
    keys = text_keys(SIZES)
    monkeypatch.setattr(type(data._opened.index), "find", lambda *_: [3, 7])
    assert data.find(keys[7]) == [7]
    assert data[keys[7]]["__key__"] == keys[7]
    assert data.find("other") == []


def test_the_same_shard_may_be_listed_twice(urls: list[str]) -> None:
    """Its samples come twice, with numbers of their own."""
    data = IndexedShards([urls[0], urls[0]])
    assert keys_of(data) == text_keys(SIZES[:1]) * 2
    assert data.find("s0-00001") == [1, 5]


# ------------------------------------------------------------------------------------------------------------- batches
def test_batches_come_in_the_order_asked(urls: list[str], data: IndexedShards) -> None:
    """Whatever the order, with repeats and numbers from the end."""
    expected = streamed(urls)
    random = Random(0)
    for _ in range(20):
        numbers = random.choices(range(-TOTAL, TOTAL), k=random.randint(1, 30))
        assert data.__getitems__(numbers) == [expected[number] for number in numbers]
    assert data.__getitems__([]) == []


def test_neighbours_are_one_read_in_any_order(data: IndexedShards, reads: list[Any]) -> None:
    """Samples 4 to 12 are those of one shard; repeats are not read again."""
    data.__getitems__([9, 4, 6, 5, 8, 7, 12, 10, 11, 5])
    assert len(reads) == 1
    reads.clear()
    data.__getitems__([2, 3, 4, 5, 20, 18])
    assert len(reads) == 4  # two shards, and two samples that are not neighbours


def test_repeats_are_samples_of_their_own(data: IndexedShards) -> None:
    """A transform may change one in place."""
    one, other = data.__getitems__([5, 5])
    one.clear()
    assert other == data[5]


def test_loops_hold_few_samples(data: IndexedShards, reads: list[Any]) -> None:
    """A loop reads a few neighbours at a time, not the whole set."""
    next(iter(data))
    assert len(reads) <= len(SIZES)
    assert len({url for url, *_ in reads}) < 4


# ------------------------------------------------------------------------------------------------------------- options
def test_fields_and_lower_case(tmp_path: Path) -> None:
    """As in group_by_key; a sample without the fields keeps its number."""
    url = write_tar(tmp_path / "x.tar", [("a.TXT", b"A"), ("a.cls", b"1"), ("b.Cls", b"2"), ("c.txt", b"C")])
    for options in ({}, {"lowercase": False}):
        assert list(IndexedShards(url, **options)) == streamed(url, **options)
    chosen = list(IndexedShards(url, fields="txt"))
    assert [sample for sample in chosen if len(sample) > 2] == streamed(url, fields="txt")
    assert keys_of(chosen) == ["a", "b", "c"]
    assert list(IndexedShards(url, fields=["TXT", "cls"])) == streamed(url, fields=["TXT", "cls"])


def test_decode_takes_what_wds_decode_takes(tmp_path: Path) -> None:
    """One decoder, several, or none but the table; None leaves bytes."""
    url = write_tar(tmp_path / "x.tar", [*image_samples("i", 2), ("z.txt", b"text")])
    assert IndexedShards(url)[0]["cls"] == b"0"
    assert (IndexedShards(url, decode=())[0]["cls"], IndexedShards(url, decode=[])[-1]["txt"]) == (0, "text")
    assert IndexedShards(url, decode="rgb8")[0]["jpg"].shape == (12, 16, 3)
    assert IndexedShards(url, decode=upper)[-1]["txt"] == "TEXT"
    both = IndexedShards(url, decode=[upper, "torchrgb"])
    assert (both[-1]["txt"], both["i00001"]["jpg"].shape) == ("TEXT", (3, 12, 16))
    assert [sample["__key__"] for sample in both] == keys_of(streamed(url))
    assert both[:1][0]["json"] == {"number": 0}


def test_shards_are_listed_at_once(tmp_path: Path) -> None:
    """Shards that come later are of no data set that is there; errors of the list come from the constructor."""
    with pytest.raises(ShardOpenError, match=r"later\.tar"):
        IndexedShards(tmp_path / "later.tar")
    with pytest.raises(ShardListError, match="no shard matches"):
        IndexedShards(tmp_path / "*.tgz")
    write_tar(tmp_path / "a.tar", sample_members("a", txt=b"A"))
    data = IndexedShards(tmp_path / "*.tar")
    write_tar(tmp_path / "A.tar", sample_members("b", txt=b"B"))
    assert keys_of(data) == keys_of(pickle.loads(pickle.dumps(data))) == ["a"]
    assert keys_of(IndexedShards(tmp_path / "*.tar")) == ["b", "a"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keys": len}, ValueError, "keys must be one of 'first_dot', 'last_dot'"),
        ({"lowercase": 1}, TypeError, "lowercase must be True or False"),
        ({"fields": []}, ValueError, "fields must name at least one field"),
        ({"decode": "no spec"}, ValueError, "no spec"),
        ({"decode": [3]}, TypeError, "3"),
        ({"max_open": 0}, ValueError, "max_open must be a whole number from 1"),
        ({"index": None}, ValueError, "random access needs an index"),
        ({"index": False}, ValueError, "random access needs an index"),
        ({"storage_options": 3}, TypeError, "storage_options must map"),
        ({"rewrite": "x"}, ValueError, "rewrit"),
    ],
)
def test_wrong_options_raise_at_once(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """In the constructor, which opens nothing."""
    with pytest.raises(error, match=message):
        IndexedShards("x.tar", **options)


def test_repr_is_the_call_without_secrets(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Part by part."""
    monkeypatch.chdir(Path(urls[0]).parent)
    options = {"s3": {"secret": "hidden"}}
    data = IndexedShards("s3://key:word@b/shard-{000000..000004}.tar", storage_options=options, rewrite="s3://.*/=./")
    assert "word" not in repr(data)
    assert "hidden" not in repr(data)
    data = IndexedShards("shard-00000{0..4}.tar", fields="txt")
    assert repr(data) == "IndexedShards('shard-00000{0..4}.tar', fields='txt')"
    assert repr(data[1:9:2]) == "IndexedShards('shard-00000{0..4}.tar', fields='txt')[1:9:2]"
    assert "torch" in repr(IndexedShards(urls, decode=[upper, "torch"]))


# ------------------------------------------------------------------------------------------------------ torch's loaders
@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader_fetches_whole_batches(urls: list[str], workers: int, tmp_path: Path) -> None:
    """Torch puts a wrapper around map-style pipes; a batch is still one fetch, after `.map` too."""
    data = IndexedShards(urls)
    loader = DataLoader(data, batch_size=4, num_workers=workers, collate_fn=as_list)
    assert [sample for batch in loader for sample in batch] == streamed(urls)
    assert list(DataLoader(data.map(key_of), batch_size=None, num_workers=workers)) == text_keys(SIZES)
    random = DataLoader(data.map(key_of), batch_size=4, shuffle=True, num_workers=workers, collate_fn=as_list)
    assert sorted(key for batch in random for key in batch) == text_keys(SIZES)
    collated = next(iter(DataLoader(IndexedShards(urls, decode=()), 4, num_workers=workers, collate_fn=wds_collate)))
    assert collated["cls"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("stage", ["plain", "mapped", "batched", "sliced", "subset", "split"])
def test_each_stage_passes_batches_on(urls: list[str], reads: list[Any], stage: str) -> None:
    """Neighbours are one read, whatever torch has put around the data set."""
    data = IndexedShards(urls)
    dataset: Any = {
        "plain": lambda: data,
        "mapped": lambda: data.map(key_of).map(str.upper),
        "batched": lambda: data.batch(3),
        "sliced": lambda: data[1:].map(key_of),
        "subset": lambda: Subset(data, range(len(data))),
        "split": lambda: random_split(data.map(key_of), [TOTAL - 5, 5])[0],
    }[stage]()
    numbers = [6, 7, 8, 5] if stage != "batched" else [3, 2]
    expected = [dataset[number] for number in numbers]
    if stage == "split":
        dataset.indices[5:9] = [5, 6, 7, 8]
        expected = [dataset[number] for number in numbers]
    reads.clear()
    (batch,) = DataLoader(dataset, batch_sampler=[numbers], collate_fn=as_list)
    assert batch == expected
    assert len(reads) == 1


def test_stages_of_other_map_pipes_are_unchanged() -> None:
    """Torch's own sources are fetched item by item, as before; errors are theirs."""
    from torch.utils.data.datapipes.map import SequenceWrapper

    source = SequenceWrapper(list(range(10)))
    assert list(DataLoader(source.map(str), batch_size=4, collate_fn=as_list)) == [
        ["0", "1", "2", "3"],
        ["4", "5", "6", "7"],
        ["8", "9"],
    ]
    batches = source.batch(4)
    assert list(DataLoader(batches, batch_size=2, collate_fn=as_list)) == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9]]]
    with pytest.raises(IndexError):
        list(DataLoader(batches, batch_sampler=[[0, 7]], collate_fn=as_list))
    endless = EndlessMapDataPipe()
    assert list(DataLoader(endless.batch(2), batch_sampler=[[0, 50]], collate_fn=as_list)) == [[[0, 1], [100, 101]]]


def test_distributed_samplers_divide_it(urls: list[str]) -> None:
    """Each rank has its part, and a random sampler draws from all."""
    data = IndexedShards(urls).map(key_of)
    parts = []
    for rank in range(3):
        sampler = DistributedSampler(data, num_replicas=3, rank=rank, shuffle=True, seed=3)
        parts += list(DataLoader(data, batch_size=None, sampler=sampler))
    assert sorted(parts) == text_keys(SIZES)
    batches = BatchSampler(RandomSampler(data), 4, drop_last=True)
    assert len({key for batch in DataLoader(data, batch_sampler=batches, collate_fn=as_list) for key in batch}) == 20


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.parametrize("is_opened", [False, True])
def test_workers_may_be_spawned(urls: list[str], context: str, is_opened: bool) -> None:
    """Before and after the first use."""
    data = IndexedShards(urls, decode=())
    if is_opened:
        list(data)
    options: dict[str, Any] = {"multiprocessing_context": context, "collate_fn": as_list}
    loader = DataLoader(data.map(key_of), 4, num_workers=2, sampler=list(range(TOTAL)), **options)
    assert [key for batch in loader for key in batch] == text_keys(SIZES)


def test_map_style_stages(urls: list[str]) -> None:
    """`.shuffle`, `.map`, `.batch` and `.zip` of map pipes."""
    data, keys = IndexedShards(urls), text_keys(SIZES)
    assert sorted(keys_of(data.shuffle())) == keys
    assert keys_of(data.shuffle().set_seed(1)) == keys_of(data.shuffle().set_seed(1)) != keys
    assert [keys_of(batch) for batch in data.batch(4)][-1] == keys[20:]
    pairs = data.map(key_of).zip(data)
    assert (len(pairs), pairs[3][0]) == (TOTAL, pairs[3][1]["__key__"])
    assert len(traverse_dps(pairs)) == 1


@needs_torchdata
def test_iter_datapipes(urls: list[str]) -> None:
    """What torchdata makes of it goes into any graph."""
    data, keys = IndexedShards(urls), text_keys(SIZES)
    assert keys_of(data.to_iter_datapipe()) == keys
    with pytest.raises(TypeError, match=r"data\.shuffle\(\)\.sharding_filter\(\) makes one"):
        WdsLoader(data)  # type: ignore[arg-type]
    shuffled = data.shuffle().sharding_filter().map(key_of)
    for workers in (0, 2):
        with WdsLoader(shuffled, workers, seed=3) as loader:
            first, second = list(loader), list(loader)
        assert sorted(first) == sorted(second) == keys
        assert first != second


def test_stateful_dataloader_resumes(urls: list[str]) -> None:
    """The state of a sampler is enough."""
    data = IndexedShards(urls).map(key_of)
    for workers in (0, 2):
        loader = StatefulDataLoader(data, batch_size=4, num_workers=workers, collate_fn=as_list)
        batches = iter(loader)
        first = [next(batches), next(batches)]
        state = loader.state_dict()
        list(batches)  # or garbage collection would wait 5 seconds for each worker
        again = StatefulDataLoader(data, batch_size=4, num_workers=workers, collate_fn=as_list)
        again.load_state_dict(state)
        assert [key for batch in [*first, *again] for key in batch] == text_keys(SIZES)


# ---------------------------------------------------------------------------------------------- processes and resources
@pytest.mark.parametrize("is_opened", [False, True])
def test_pickles_hold_nothing_open(urls: list[str], is_opened: bool) -> None:
    """A copy reads the same, also of a part, and opens files of its own."""
    data = IndexedShards(urls, decode="torchrgb", fields="txt cls")
    if is_opened:
        data[3]
    for copied in (pickle.loads(pickle.dumps(data)), copy.deepcopy(data), copy.copy(data)):
        assert list(copied) == list(data)
    part = pickle.loads(pickle.dumps(data[4:9]))
    assert list(part) == list(data[4:9])
    assert len(pickle.dumps(data)) < 20_000


def test_lambdas_are_named_where_workers_are_spawned(urls: list[str]) -> None:
    """Forked workers may have them, and copies too."""
    data = IndexedShards(urls, decode=[lambda _, data: len(data)])
    with pytest.raises(pickle.PicklingError, match=r"IndexedShards holds a lambda \(.*test_indexed_shards\.py:\d+\)"):
        pickle.dumps(DataLoader(data, 4).dataset)
    batch = next(iter(DataLoader(data, 4, num_workers=1, multiprocessing_context="fork", collate_fn=as_list)))
    assert batch[0]["cls"] == 1
    assert copy.deepcopy(data)[0]["cls"] == 1


def test_threads_may_share_it(urls: list[str], data: IndexedShards) -> None:
    """Files are opened and dropped under them."""
    expected = streamed(urls)
    numbers = Random(0).choices(range(TOTAL), k=200)
    small = IndexedShards(urls, max_open=1)
    with ThreadPoolExecutor(8) as pool:
        for shared in (data, small):
            assert list(pool.map(shared.__getitem__, numbers)) == [expected[number] for number in numbers]
    small.close()


def test_forked_children_read_while_the_parent_does(urls: list[str], data: IndexedShards) -> None:
    """Positions in open files are never shared."""
    expected = list(data)

    def check() -> None:
        for _ in range(20):
            assert list(data) == expected

    def fork() -> None:
        assert in_child(check) == 0

    fork()
    check()
    fresh = IndexedShards(urls)
    assert in_child(lambda: [fresh[number] for number in range(TOTAL)]) == 0
    assert list(fresh) == expected


def test_open_files_are_bounded(tmp_path: Path) -> None:
    """The least recently used is closed."""
    urls = write_text_shards(tmp_path, [2] * 20)
    data = IndexedShards(urls, max_open=3)
    len(data)
    before = open_files()
    for number in Random(0).sample(range(40), 40):
        assert data[number]["__key__"] == f"s{number // 2}-0000{number % 2}"
        assert open_files(collect=False) <= before + 3
    data.close()
    assert open_files() <= before
    assert data[39]["__key__"] == "s19-00001"
    data.close()


def test_files_are_closed_with_the_last_part(urls: list[str]) -> None:
    """What nobody holds is not open."""
    before = open_files()
    part = IndexedShards(urls)[2:]
    part[0]
    del part
    assert open_files() <= before


# ------------------------------------------------------------------------------------------------------------- indexes


def _packed(urls: list[str], path: Path) -> Path:
    """A packed index of shards, as a file."""
    IndexedShards(urls)._opened.index.save(path)
    return path


def test_pickles_go_to_other_machines(tmp_path: Path) -> None:
    """Where the file of the index is not, the index is found again; it must be of the same shards."""
    folder = tmp_path / "shards"
    shards = write_text_shards(folder, [2, 3])
    data = IndexedShards(str(folder / "*.tar"), index="auto")
    data._opened._reader = IndexedShards(shards, index=_packed(shards, tmp_path / "one.index"))._opened.reader
    sent = pickle.dumps(data[1:])
    (tmp_path / "one.index").unlink()
    assert keys_of(pickle.loads(sent)) == text_keys([2, 3])[1:]
    write_tar(folder / "shard-000000.tar", sample_members("other", txt=b"A"))
    with pytest.raises(ShardFormatError, match="not those of the process that pickled"):
        pickle.loads(sent)[0]


# ------------------------------------------------------------------------------------------------------------- indexes
def test_the_key_rule(tmp_path: Path) -> None:
    """An index of one rule is never used for the other."""
    url = write_tar(tmp_path / "x.tar", [("a.b.txt", b"A"), ("a.c.txt", b"B")])
    for keys in ("first_dot", "last_dot", "first_dot"):
        assert list(IndexedShards(url, keys=keys)) == streamed(url, keys=keys)


def test_indexes_may_be_given(urls: list[str], tmp_path: Path) -> None:
    """A dict, a packed index and its file; True needs one beside each shard."""
    expected = streamed(urls)
    indexes = {url: index_shard(url, to=False) for url in urls}
    assert list(IndexedShards(urls, index=indexes)) == expected
    packed = IndexedShards(urls, index=indexes)._opened.index
    assert list(IndexedShards(urls, index=packed)) == expected
    packed.save(tmp_path / "packed.index")
    assert list(IndexedShards(urls[2:], index=tmp_path / "packed.index")) == expected[SIZES[0] :]
    with pytest.raises(ShardListError, match=re.escape("shard-000000.tar")):
        len(IndexedShards(urls, index={url: indexes[url] for url in urls[1:]}))


def test_true_needs_an_index_beside_each_shard(tmp_path: Path) -> None:
    """It never scans."""
    urls = write_text_shards(tmp_path, [3, 2])
    with pytest.raises((ShardListError, ShardOpenError, ShardFormatError), match="index"):
        len(IndexedShards(urls, index=True))
    for url in urls:
        index_shard(url)
    assert keys_of(IndexedShards(urls, index=True)) == text_keys([3, 2])


@pytest.mark.parametrize("url", ["-", "pipe:cat x.tar"])
def test_streams_cannot_be_read_at_random(url: str) -> None:
    """Standard input and commands are read once, front to back."""
    with pytest.raises(ShardListError, match=f"shard {re.escape(url)} can only be read from its start"):
        len(IndexedShards(url))
