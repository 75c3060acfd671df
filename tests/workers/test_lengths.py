"""How many items a loader yields in an epoch, and what .set_length(n) promises: more than that is said once."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper, Zipper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding

from tests.kits.shards import write_text_shards
from tests.kits.workers_kit import loader_of
from torchdata_wds import WdsLoader, handlers, ignore_and_continue, index_shard, load_dataset, wds_collate
from torchdata_wds.process_place import Place
from torchdata_wds.workers.lengths import items_per_epoch


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "said", set())


def batches(samples: int) -> Any:
    return IterableWrapper(range(samples)).sharding_filter().batch(4)


@pytest.mark.parametrize(
    ("workers", "length", "warns"), [(2, 5, True), (2, 6, False), (2, 7, False), (0, 5, False), (0, 4, True)]
)
def test_set_length_warns_once_when_an_epoch_gives_more(
    workers: int, length: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Twenty samples in batches of four are five batches of one process, and six of two."""
    with loader_of(batches(20).set_length(length).map(tuple), workers) as loader:
        for _ in range(2):
            assert len(list(loader)) == (6 if workers else 5)
    assert len(caplog.messages) == warns
    assert all(f"length is set to {length}" in message for message in caplog.messages)


def test_set_length_is_exact_when_it_follows_the_border(caplog: pytest.LogCaptureFixture) -> None:
    """Batches that are made in the main process are those of one process, and its length may be set there."""
    pipe = IterableWrapper(range(20)).sharding_filter().join_workers().batch(4).set_length(5)
    with loader_of(pipe) as loader:
        assert len(list(loader)) == len(pipe) == 5
    assert not caplog.messages


def test_set_length_warns_when_less_is_set_after_the_border(caplog: pytest.LogCaptureFixture) -> None:
    with loader_of(IterableWrapper(range(20)).sharding_filter().join_workers().batch(4).set_length(3)) as loader:
        assert len(list(loader)) == 5
    assert len(caplog.messages) == 1


def test_set_length_is_silent_when_the_epoch_is_left_early(caplog: pytest.LogCaptureFixture) -> None:
    with loader_of(batches(20).set_length(3), 0) as loader:
        next(iter(loader))
    assert not caplog.messages


def test_wds_epoch_has_its_length_by_itself_when_workers_run_it(caplog: pytest.LogCaptureFixture) -> None:
    """Also in front of a set_length that says the same."""
    pipe = batches(20).wds_epoch(5)
    with loader_of(pipe.set_length(5)) as loader:
        assert len(list(loader)) == len(pipe) == 5
    assert not caplog.messages


# ------------------------------------------------------------------------------------------------------ items_per_epoch
def identity(item: Any) -> Any:
    return item


def pair(item: Any) -> tuple[str, int]:
    return str(item), 1


class HalfAsMany(IterDataPipe):
    """A user's stage with a length."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self.source):
            if number % 2:
                yield item

    def __len__(self) -> int:
        return len(self.source) // 2


def counted(pipe: Any, ranks: Place, workers: int, epochs: int = 2) -> list[int]:
    """How many items a rank's loader yields in each of some epochs."""
    divided = copy.deepcopy(pipe)
    if ranks.consumers > 1:
        apply_sharding(divided, *ranks, SHARDING_PRIORITIES.DISTRIBUTED)
    with loader_of(divided, workers, multiprocessing_context="fork") as loader:
        return [sum(1 for _ in loader) for _ in range(epochs)]


class Folders(NamedTuple):
    """Shards of equal and of unequal size, with and without indexes."""

    even: list[str]
    uneven: list[str]
    bare: list[str]

    @classmethod
    def made_in(cls, folder: Path) -> Folders:
        found = cls(
            write_text_shards(folder / "even", [3] * 5),
            write_text_shards(folder / "uneven", (4, 3, 6, 0, 2, 5)),
            write_text_shards(folder / "bare", (2, 3)),
        )
        for url in (*found.even, *found.uneven):
            index_shard(url)
        return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders.made_in(tmp_path_factory.mktemp("shards"))


def sources(folders: Folders) -> list[Any]:
    def listed(urls: list[str]) -> Any:
        return IterableWrapper([urls]).list_shards()

    def loaded(shards: Any, **options: Any) -> Any:
        return shards.load_wds_shards(**options).group_by_key()

    return [
        lambda: IterableWrapper(range(17)).shuffle().sharding_filter(),
        lambda: IterableWrapper(range(3)).sharding_filter(),
        lambda: IterableWrapper(range(7)),
        lambda: IterableWrapper(range(11)).batch(2).sharding_filter().unbatch(),
        lambda: loaded(listed(folders.even).shuffle().sharding_filter()),
        lambda: loaded(listed(folders.uneven).shuffle().sharding_filter(), interleave=2),
        lambda: loaded(listed(folders.uneven).sharding_filter().shuffle()),
        lambda: loaded(listed(folders.bare).sharding_filter()),
        lambda: loaded(listed(folders.uneven).shuffle().split_shards(index=True)),
        lambda: loaded(listed(folders.uneven).shuffle().split_shards(index=True, even="drop")),
        lambda: loaded(listed(folders.uneven).shuffle().split_shards(index=True, even="pad").shuffle()),
        lambda: loaded(listed(folders.even[:2]).shuffle().split_shards()),
        lambda: loaded(listed(folders.uneven[:2]).split_shards()),
        lambda: loaded(listed(folders.uneven[:2]).shuffle().split_shards()),
        lambda: loaded(IterableWrapper(folders.uneven).shuffle().sharding_filter()),
        lambda: loaded(listed(folders.even).resample_shards()).wds_epoch(13),
        lambda: loaded(listed(folders.uneven)).sharding_filter(),
        lambda: loaded(IterableWrapper([folders.even, folders.uneven]).sharding_filter().list_shards()),
        lambda: load_dataset({"dataset": [{"shards": folders.even}, {"shards": folders.uneven}]}),
        lambda: load_dataset(
            {"dataset": [{"shards": folders.even, "weight": 1}, {"shards": folders.uneven, "weight": 2}]}
        ),
        lambda: load_dataset({"datasets": [{"shards": folders.even, "choose": 2, "name": "e"}], "prefix": ""}),
        lambda: HalfAsMany(IterableWrapper(range(9))).sharding_filter(),
        lambda: IterableWrapper(range(11)).set_length(11).sharding_filter(),
        lambda: loaded(listed(folders.uneven).shuffle().cycle(2).sharding_filter()),
    ]


STAGES: list[Any] = [
    lambda pipe: pipe.map(identity),
    lambda pipe: pipe.shuffle(),
    lambda pipe: pipe.wds_shuffle(5, initial=2),
    lambda pipe: pipe.wds_map(identity),
    lambda pipe: pipe.batch(3),
    lambda pipe: pipe.batch(2, drop_last=True),
    lambda pipe: pipe.batch(2).unbatch(),
    lambda pipe: pipe.batch(4).wds_shuffle(3).join_workers().unbatch(),
    lambda pipe: pipe.map(pair).batch(4).collate(wds_collate).join_workers().wds_unbatch(),
    lambda pipe: pipe.map(pair).batch(3, drop_last=True).collate(wds_collate).wds_unbatch().shuffle(),
    lambda pipe: HalfAsMany(pipe),
    lambda pipe: Zipper(*pipe.fork(2)),
    lambda pipe: pipe.demux(2, bool)[0],
    lambda pipe: pipe.join_workers(),
    lambda pipe: pipe.wds_epoch(9),
    lambda pipe: pipe.wds_epoch(8),
    lambda pipe: pipe.header(2),
    lambda pipe: pipe.cycle(2),
    lambda pipe: pipe.repeat(2),
    lambda pipe: pipe.enumerate(),
    lambda pipe: pipe.prefetch(2),
    lambda pipe: pipe.in_memory_cache(),
    lambda pipe: pipe.filter(bool),
    lambda pipe: pipe.zip(IterableWrapper(range(9)).sharding_filter()),
    lambda pipe: pipe.mux(IterableWrapper(range(9)).sharding_filter()),
    lambda pipe: pipe.concat(IterableWrapper(range(5)).sharding_filter()),
    lambda pipe: pipe.wds_mix(IterableWrapper(range(12)).sharding_filter().wds_epoch(8), stop="all"),
    lambda pipe: pipe.zip(IterableWrapper(range(12)).sharding_filter().wds_epoch(10)),
    lambda pipe: pipe.zip_longest(IterableWrapper(range(4)).sharding_filter()),
]


def check_graph(seed: int, folders: Folders, most_workers: int) -> bool:
    """Compares the number for a random graph with what loaders yield; returns whether it is known."""
    rng = random.Random(seed)
    pipe = rng.choice(sources(folders))()
    for _ in range(rng.randint(0, 4)):
        pipe = rng.choice(STAGES)(pipe)
    ranks = rng.choice([Place(), Place(2, 0), Place(2, 1), Place(3, 1)])
    workers = rng.randint(0, most_workers)
    try:
        known = items_per_epoch(pipe, ranks, workers)
    except TypeError as error:
        assert str(error).startswith("the number of items in an epoch is not known: ")
        return False
    try:
        found = counted(pipe, ranks, workers)
    except ValueError as error:  # wds_epoch that gets nothing, or too little for its ranks
        assert "wds_epoch" in str(error) or "gave nothing" in str(error), (seed, pipe)
        return False
    assert found == [known] * len(found), (seed, ranks, workers, pipe)
    return True


@pytest.mark.slow
def test_items_per_epoch_is_what_a_loader_yields_when_graphs_are_random(folders: Folders) -> None:
    """The number, if it is known, is exact and the same in each epoch."""
    assert sum(check_graph(seed, folders, most_workers=0) for seed in range(60)) > 30


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some child DataPipes are not exhausted")  # of a fork that a stage leaves early
@pytest.mark.parametrize("first", [1000, 1020, 1040, 1060, 1080])
def test_items_per_epoch_is_what_workers_yield_when_graphs_are_random(folders: Folders, first: int) -> None:
    assert sum(check_graph(seed, folders, most_workers=3) for seed in range(first, first + 20)) > 5


def test_items_per_epoch_is_known_for_all_workers_together_when_shares_vary(folders: Folders) -> None:
    """Which shards a worker reads changes from epoch to epoch, but not how many samples all have."""
    pipe = IterableWrapper([folders.uneven]).list_shards().shuffle().sharding_filter().load_wds_shards().group_by_key()
    assert items_per_epoch(pipe, Place(), 3) == sum(counted(pipe, Place(), 3, 1)) == 20
    assert items_per_epoch(pipe.join_workers().batch(3), Place(), 3) == 7
    with pytest.raises(TypeError, match=r"each of the 3 workers has its own batch"):
        items_per_epoch(pipe.batch(3), Place(), 3)
    with pytest.raises(TypeError, match=r"from 0 to 6 samples, .*\. Write \.split_shards\(index=True\) instead of"):
        items_per_epoch(pipe, Place(2, 1), 3)


def test_items_per_epoch_raises_when_an_index_is_missing_stale_or_of_other_keys(tmp_path: Path) -> None:
    urls = write_text_shards(tmp_path, [2, 2])
    shards = IterableWrapper(urls).sharding_filter()
    pipe = shards.load_wds_shards().group_by_key()
    index_shard(urls[0])
    with pytest.raises(TypeError, match=r"shard .*000001\.tar has no index beside it\. Make one with index_shard"):
        items_per_epoch(pipe, Place(), 2)
    index_shard(urls[1])
    assert items_per_epoch(pipe, Place(), 2) == 4
    with pytest.raises(TypeError, match=r"is one of keys='first_dot', not 'last_dot'"):
        items_per_epoch(shards.load_wds_shards().group_by_key(keys="last_dot"), Place(), 2)
    with Path(urls[1]).open("ab") as shard:
        shard.write(bytes(1024))
    with pytest.raises(TypeError, match="bytes, and the index says"):
        items_per_epoch(pipe, Place(), 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda pipe: pipe.filter(bool), "filter may yield any number of items"),
        (lambda pipe: pipe.flatmap(list), "flatmap may yield any number of items"),
        (lambda pipe: pipe.wds_compose(list), "wds_compose may yield any number of items"),
        (lambda pipe: pipe.cycle(), r"cycle\(\) without a count never ends"),
        (lambda pipe: pipe.wds_mix(IterableWrapper([1]), stop="first"), r"stop='all' yields all items"),
        (lambda pipe: IterableWrapper(iter([1])), "holds a list_iterator, whose length is not known"),
    ],
)
def test_items_per_epoch_names_the_stage_when_it_is_not_known(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"{message}.*\. End the graph with \.wds_epoch\(n\), or pass the loader"):
        items_per_epoch(make(IterableWrapper(range(9)).sharding_filter()), Place(), 2)


def test_items_per_epoch_follows_set_length_where_it_stands() -> None:
    """It is the number of all workers together; batches after it are known only if one process makes them."""
    pipe = IterableWrapper(range(20)).sharding_filter().filter(bool).set_length(19)
    assert items_per_epoch(pipe, Place(), 3) == items_per_epoch(pipe.map(identity), Place(2, 1), 3) == 19
    assert items_per_epoch(pipe.batch(4), Place(), 0) == items_per_epoch(pipe.join_workers().batch(4), Place(), 3) == 5
    with pytest.raises(TypeError, match=r"each of the 3 workers has its own batch"):
        items_per_epoch(pipe.batch(4), Place(), 3)


def test_items_per_epoch_of_wds_epoch_is_the_same_in_every_epoch() -> None:
    """Of 7 items, three workers have 3, 2 and 2, each of them 3 in turn: always four batches of two."""
    pipe = IterableWrapper(range(100)).sharding_filter().wds_epoch(7)
    assert items_per_epoch(pipe, Place(), 3) == items_per_epoch(pipe, Place(2, 0), 3) + 4 == 7
    assert counted(pipe.batch(2), Place(), 3, 4) == [items_per_epoch(pipe.batch(2), Place(), 3)] * 4 == [4] * 4
    with pytest.raises(TypeError, match=r"it changes from epoch to epoch, between 6 and 7 items"):
        items_per_epoch(pipe.zip(IterableWrapper(range(7)).sharding_filter()), Place(), 3)


def test_items_per_epoch_is_an_upper_bound_when_functions_or_handlers_drop_items() -> None:
    pipe = IterableWrapper("12x45").sharding_filter().wds_map(int, handler=ignore_and_continue)
    assert items_per_epoch(pipe, Place(), 2) == 5
    assert counted(pipe, Place(), 2, 1) == [4]


def test_items_per_epoch_changes_nothing(folders: Folders) -> None:
    """Neither the graph nor any random state."""
    pipe = IterableWrapper([folders.uneven]).list_shards().shuffle().split_shards(True, even="drop")
    pipe = pipe.load_wds_shards().group_by_key().wds_shuffle(9).batch(2)
    states = torch.get_rng_state(), random.getstate(), pickle.dumps(pipe)
    assert items_per_epoch(pipe, Place(2, 1), 2) == 6
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), pickle.dumps(pipe))


def test_items_per_epoch_asks_no_server_when_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remote shards are counted by a dict, if the pattern names each of them."""

    def samples(pattern: str, index: Any = None) -> Any:
        shards = IterableWrapper([pattern]).list_shards().split_shards(index)
        return shards.load_wds_shards().group_by_key()

    monkeypatch.setenv("WDS_store", "s3://bucket")
    counts = {"s3://bucket/a.tar": 3, "s3://bucket/b.tar": 4}
    assert items_per_epoch(samples("s3://bucket/{a,b}.tar", counts), Place(2, 1), 2) == 4
    assert items_per_epoch(samples("${store}/{a,b}.tar", counts), Place(), 2) == 7
    for pattern in ("s3://bucket/*.tar", "s3://bucket/", "${store}/*.tar"):
        with pytest.raises(TypeError, match=r"only a server knows which shards s3://bucket/"):
            items_per_epoch(samples(pattern, counts), Place(), 2)
    with pytest.raises(TypeError, match=r"the remote shard s3://bucket/a\.tar does not say how many samples"):
        items_per_epoch(samples("s3://bucket/{a,b}.tar"), Place(), 2)
    with pytest.raises(TypeError, match=r"has no number of samples for shard s3://bucket/c\.tar"):
        items_per_epoch(samples("s3://bucket/{a,c}.tar", counts), Place(), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select": "*.txt"}, r"load_wds_shards\(select=\) may leave out whole samples"),
        ({"rename": str.lower}, "may make other samples than an index counts"),
        ({"concatenated": True}, "may make other samples than an index counts"),
    ],
)
def test_items_per_epoch_is_not_known_when_an_option_changes_the_samples(
    folders: Folders, options: Any, message: str
) -> None:
    pipe = IterableWrapper(folders.even).sharding_filter().load_wds_shards(**options).group_by_key()
    with pytest.raises(TypeError, match=message):
        items_per_epoch(pipe, Place(), 2)


def test_an_epoch_ends_when_a_worker_never_begins_its_wds_epoch() -> None:
    """Zip stops at its first source, which is empty in two of three workers, and never takes from the second."""
    first = IterableWrapper(range(1)).sharding_filter()
    pipe = first.zip(IterableWrapper(range(12)).sharding_filter().wds_epoch(10))
    assert counted(pipe, Place(), 3, 3) == [1, 1, 1]


def test_items_per_epoch_is_not_0_when_iterating_would_be_an_error(folders: Folders) -> None:
    """A framework would silently skip a loader of length 0."""
    with pytest.raises(TypeError, match=r"wds_epoch\(2\) cannot give each of 3 ranks an item"):
        items_per_epoch(IterableWrapper(range(9)).sharding_filter().wds_epoch(2), Place(3, 1), 2)
    shards = IterableWrapper(folders.even[:1]).split_shards(True)
    with pytest.raises(TypeError, match=r"split_shards has 3 samples, and this rank would get none of them"):
        items_per_epoch(shards.load_wds_shards().group_by_key(), Place(4, 0), 0)


def test_items_per_epoch_of_a_dataset_file_is_known_unless_it_chooses_shards(folders: Folders) -> None:
    entries = [{"shards": folders.even, "weight": 1}, {"shards": folders.uneven, "weight": 2}]
    assert items_per_epoch(load_dataset({"dataset": entries}), Place(), 2) == 35
    chosen = load_dataset({"datasets": [{"shards": folders.even, "choose": 2, "name": "e"}], "prefix": ""})
    with pytest.raises(TypeError, match="which shards SpecShards yields is not known"):
        items_per_epoch(chosen, Place(), 2)


def test_items_per_epoch_is_not_known_when_each_worker_keeps_what_its_first_epoch_gave() -> None:
    """A worker that got no batch caches nothing, and gets one in a later epoch, while another repeats its own."""
    pipe = IterableWrapper(range(40)).sharding_filter().wds_epoch(4).batch(2, drop_last=True).in_memory_cache()
    assert counted(pipe, Place(), 3, 3) == [1, 2, 3]
    with pytest.raises(TypeError, match="each of the 3 workers has its own in_memory_cache"):
        items_per_epoch(pipe, Place(), 3)
    assert items_per_epoch(pipe, Place(), 0) == 2


class Unsized(IterDataPipe[int]):
    """Its length fails like a user's may."""

    def __init__(self, length: Any = None) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length if self.length is not None else self.missing  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[int]:
        yield from range(3)


@pytest.mark.parametrize(
    "make",
    [
        Unsized,
        lambda: Unsized(-1),
        lambda: IterableWrapper(range(10**20)).header(3),
        lambda: IterableWrapper(range(3)).cycle(10**19),
    ],
)
def test_items_per_epoch_raises_a_type_error_when_a_length_fails_or_is_too_large(make: Callable[[], Any]) -> None:
    """Any other error would end ``list(loader)``, which requests the length."""
    with pytest.raises(TypeError, match="is not known"):
        items_per_epoch(make(), Place(), 0)


def test_items_per_epoch_of_many_cycles_takes_no_time_or_memory() -> None:
    pipe = IterableWrapper(range(3)).sharding_filter()
    assert items_per_epoch(pipe.cycle(10**15), Place(), 2) == 3 * 10**15


@pytest.mark.parametrize("even", [None, "drop", "pad"])
def test_length_of_a_global_order_is_that_of_the_rank(tmp_path: Path, even: Any) -> None:
    """For any number of ranks, and batches with or without a short last one; with `even`, all ranks have the same."""
    urls = write_text_shards(tmp_path, (7, 0, 20, 14))
    samples = IterableWrapper(urls).load_in_order(index={url: index_shard(url, to=False) for url in urls}, even=even)
    for ranks in (1, 3):
        for batch, drop_last in ((1, False), (4, False), (4, True), (7, False), (7, True)):
            pipe = samples.batch(batch, drop_last).batch(1)
            loaders = [WdsLoader(pipe, seed=3, ranks=(rank, ranks)) for rank in range(ranks)]
            lengths = list(map(len, loaders))
            assert lengths == [len([*map(len, loader)]) for loader in loaders]
            assert even is None or len(set(lengths)) == 1
    with pytest.raises(ValueError, match="filter may yield more, fewer or other items"):
        len(WdsLoader(samples.filter(bool)))
