"""Epochs of n items: a stream that goes on from one to the next, in every way to run a graph."""

import copy
import json
import math
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding

from tests.kits.processes import open_files
from tests.kits.shards import text_keys, write_text_shards
from tests.kits.torchdata import DataLoader2, InProcessReadingService, MultiProcessingReadingService, needs_torchdata
from tests.kits.workers_kit import (
    SIZES,
    consumers_of,
    expand,
    items_of,
    loader_of,
    logged_in,
    run_script,
    seeded,
    time_limit,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class PassTeller(IterDataPipe[Any]):
    """Yields each item with the number of the pass over its source."""

    def __init__(self, source_datapipe: IterDataPipe[Any]) -> None:
        self.source_datapipe = source_datapipe
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        number, self.passes = self.passes, self.passes + 1
        for item in self.source_datapipe:
            yield number, item


class Failing(IterDataPipe[Any]):
    """Gives what its source gives; in some of its passes, counted from 1, it fails before an item."""

    def __init__(self, source_datapipe: IterDataPipe[Any], *passes: int, at: int = 3) -> None:
        self.source_datapipe = source_datapipe
        self.fails_in = passes
        self.at = at
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for number, item in enumerate(self.source_datapipe):
            if number == self.at and self.passes in self.fails_in:
                raise OSError("the disk is gone")
            yield item


class Shrinking(IterDataPipe[int]):
    """Gives 3 items in its first pass, and one fewer in each that follows."""

    def __init__(self) -> None:
        self.size = 4

    def __iter__(self) -> Iterator[int]:
        self.size -= 1
        yield from range(self.size)


#: As many sources that have items: with an empty one, a consumer among four has nothing in some of its passes.
FULL = (9, 6, 3, 2, 5, 7, 1)


def uneven(sizes: Sequence[int] = SIZES, *, shuffled: bool = True) -> IterDataPipe[Any]:
    """Sources of uneven length, shuffled and divided, whose items tell the pass they are of."""
    pipe = PassTeller(IterableWrapper(list(enumerate(sizes))).shuffle().sharding_filter().map(expand).unbatch())
    return pipe.wds_shuffle(6, initial=3) if shuffled else pipe


def epochs_of(pipes: Sequence[IterDataPipe[Any]], count: int) -> list[list[list[Any]]]:
    """What each consumer gives in each of some epochs, which are seeded anew."""
    found = []
    for epoch in range(count):
        seeded(pipes, epoch)
        found.append([list(pipe) for pipe in pipes])
    return found


def check_passes(items: Iterable[tuple[int, Any]], everything: Sequence[Any], passes: int) -> None:
    """Checks that each of so many passes gave every item once, over all consumers together."""
    found: dict[int, list[Any]] = defaultdict(list)
    for number, item in items:
        found[number].append(item)
    for number in range(passes):
        assert sorted(found[number]) == sorted(everything), f"pass {number}"
    # 7 sources, and one of them is empty: two passes may well be alike, but not many
    assert len({tuple(found[number]) for number in range(passes)}) > passes // 2


def passes_in(epochs: int, n: int, consumers: int) -> int:
    """How many passes are over in all consumers, even if one of them has all items."""
    return epochs * (n // consumers) // sum(FULL)


# --------------------------------------------------------------------------------------------------------- one stream
@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 12])
def test_wds_epoch_goes_on_when_the_next_epoch_begins(n: int) -> None:
    """Epochs are n items each, whatever the length of the source, and one behind the other they are its passes."""
    pipe = IterableWrapper("abcde").wds_epoch(n)
    epochs = ["".join(pipe) for _ in range(10)]
    assert [len(epoch) for epoch in epochs] == [n] * 10
    assert "".join(epochs) == ("abcde" * 30)[: 10 * n]


@pytest.mark.parametrize("form", ["shuffle", "wds_shuffle"])
def test_wds_epoch_shuffles_anew_when_a_pass_begins(form: str) -> None:
    """Each pass is whole and in another order, although epochs end in its middle and seed the pipes then."""
    pipe = getattr(IterableWrapper(range(10)), form)().wds_epoch(7)
    items = list(chain.from_iterable(chain.from_iterable(epochs_of([pipe], 20))))
    passes = [tuple(items[start : start + 10]) for start in range(0, 140, 10)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert len(set(passes)) == 14


@pytest.mark.parametrize("form", ["shuffle", "wds_shuffle"])
def test_wds_epoch_follows_from_the_first_seed_when_seeded_each_epoch(form: str) -> None:
    """The stream keeps the seed that it began with: later ones change nothing, another first one does."""
    streams = []
    for seeds in ((1, 2, 3, 4), (1, 7, 7, 7), (1,), (2, 2, 3, 4)):
        pipe = getattr(IterableWrapper(range(10)), form)().wds_epoch(7)
        items = []
        for epoch in range(4):
            if epoch < len(seeds):
                seeded([pipe], seeds[epoch])
            items += list(pipe)
        streams.append(items)
    assert streams[0] == streams[1] == streams[2] != streams[3]


def test_wds_epoch_draws_from_torch_when_never_seeded() -> None:
    """Its passes are in an order of torch's global generator."""
    streams = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        pipe = IterableWrapper(range(10)).shuffle().wds_epoch(25)
        streams.append([*pipe, *pipe])
    assert streams[0] == streams[1] != streams[2]
    assert len({tuple(streams[0][start : start + 10]) for start in range(0, 50, 10)}) == 5


def test_wds_epoch_counts_batches_when_it_stands_behind_them() -> None:
    """An item is what comes in; the last batch of a pass is smaller, and the next begins with the next pass."""
    pipe = IterableWrapper(range(10)).batch(4).wds_epoch(5)
    assert [[len(batch) for batch in pipe] for _ in range(3)] == [[4, 4, 2, 4, 4], [2, 4, 4, 2, 4], [4, 2, 4, 4, 2]]


def test_wds_epoch_counts_samples_when_it_stands_before_batches() -> None:
    """Batches end with the epoch then."""
    pipe = IterableWrapper(range(10)).wds_epoch(7).batch(4)
    assert [list(map(list, pipe)) for _ in range(2)] == [[[0, 1, 2, 3], [4, 5, 6]], [[7, 8, 9, 0], [1, 2, 3]]]


@pytest.mark.parametrize("replacement", [True, False])
def test_wds_epoch_cuts_a_stream_when_it_has_no_end(replacement: bool) -> None:
    """Epochs of a resampled list go on in its stream of draws."""
    pipe = IterableWrapper(range(5)).resample_shards(replacement=replacement)
    expected = list(islice(pipe.set_seed(3), 60))
    pipe.set_seed(3)
    cut = pipe.wds_epoch(12)
    assert [item for _ in range(5) for item in cut] == expected


def test_wds_epoch_gives_all_of_a_mix_when_its_sources_shuffle() -> None:
    """Each pass has every item of both sources once, in another order."""
    sources = [IterableWrapper([f"{name}{number}" for number in range(8)]).shuffle() for name in "ab"]
    pipe = sources[0].wds_mix(sources[1], weights=(1, 1), stop="all").wds_epoch(10)
    items = list(chain.from_iterable(chain.from_iterable(epochs_of([pipe], 16))))
    passes = [tuple(items[start : start + 16]) for start in range(0, 160, 16)]
    assert all(len(set(one)) == 16 for one in passes)
    assert len(set(passes)) == 10


def test_wds_epoch_takes_epochs_when_it_stands_behind_another() -> None:
    """The inner one's epochs are passes of the outer one, and nothing is lost between them."""
    pipe = IterableWrapper("abcde").wds_epoch(3).wds_epoch(4)
    assert "".join(item for _ in range(5) for item in pipe) == "abcde" * 4


def test_wds_epoch_gives_nothing_twice_when_it_is_left_early() -> None:
    """In one process no item is on its way: the next epoch begins with the one that follows."""
    pipe = IterableWrapper("abcdefgh").wds_epoch(5)
    assert [*islice(iter(pipe), 2), *islice(iter(pipe), 3), *pipe] == list("abcdefghab")


def test_wds_epoch_begins_nothing_when_only_iter_is_called() -> None:
    """The stream goes on with the first item that is asked for."""
    pipe = IterableWrapper("abcde").wds_epoch(2)
    iter(pipe)
    iter(pipe)
    assert [*pipe, *pipe] == list("abcd")


def test_wds_epoch_keeps_a_shard_open_when_it_ends_in_its_middle(tmp_path: Path) -> None:
    """It goes on there; once nobody has the pipe any more, the shard is closed."""
    pipe = IterableWrapper(write_text_shards(tmp_path, [400])).load_wds_shards().group_by_key().wds_epoch(3)
    before = open_files()
    assert [sample["__key__"] for _ in range(2) for sample in pipe] == text_keys([6])
    assert open_files(collect=False) == before + 1
    del pipe
    assert open_files() <= before


# ---------------------------------------------------------------------------------------------------- several consumers
@pytest.mark.parametrize(("consumers", "shuffled"), [(1, True), (2, False), (3, True), (4, False), (4, True)])
def test_wds_epoch_gives_every_item_once_a_pass_when_consumers_share_it(consumers: int, shuffled: bool) -> None:
    """20 passes, n no multiple of them: all consumers agree on each pass, at whatever place each of them is."""
    n = 12 * 17
    pipes = consumers_of(uneven(FULL, shuffled=shuffled).wds_epoch(n), consumers)
    most = -(-len(FULL) // consumers) / len(FULL) * sum(FULL)  # what a consumer has of a pass, on the average
    epochs = epochs_of(pipes, math.ceil(23 * most / (n // consumers)))
    assert {len(share) for epoch in epochs for share in epoch} == {n // consumers}
    items = [item for epoch in epochs for share in epoch for item in share]
    check_passes(items, items_of(FULL), 20)


def test_wds_epoch_gives_every_item_once_a_pass_when_batches_are_counted() -> None:
    """Batches hold items of one pass each."""
    pipes = consumers_of(uneven().batch(4).wds_epoch(21), 3)
    batches = [batch for epoch in epochs_of(pipes, 12) for share in epoch for batch in share]
    assert all(len({number for number, _ in batch}) == 1 for batch in batches)
    check_passes(chain.from_iterable(batches), items_of(SIZES), 8)


def test_wds_epoch_counts_ranks_when_they_are_divided_as_well() -> None:
    """Two ranks of three workers are six consumers."""
    pipes = [copy.deepcopy(uneven(FULL).wds_epoch(126)) for _ in range(6)]
    for number, pipe in enumerate(pipes):
        apply_sharding(pipe, 2, number // 3, SHARDING_PRIORITIES.DISTRIBUTED)
        assert len(pipe) == 63
        apply_sharding(pipe, 3, number % 3, SHARDING_PRIORITIES.MULTIPROCESSING)
        assert len(pipe) == 21
    epochs = epochs_of(pipes, 6)
    assert {len(share) for epoch in epochs for share in epoch} == {21}
    items = [item for epoch in epochs for share in epoch for item in share]
    check_passes(items, items_of(FULL), passes_in(6, 126, 6))


def test_wds_epoch_gives_n_when_nothing_divides_the_work() -> None:
    """Without a filter there is one consumer."""
    pipes = consumers_of(IterableWrapper(range(9)).wds_epoch(4), 3)
    assert [list(pipe) for pipe in pipes] == [[0, 1, 2, 3]] * 3


def test_wds_epoch_counts_shards_when_it_stands_before_the_filter() -> None:
    """All consumers count the same n there, and divide them."""
    epochs = epochs_of(consumers_of(IterableWrapper(range(8)).shuffle().wds_epoch(5).sharding_filter(), 2), 16)
    assert all([len(share) for share in epoch] == [3, 2] for epoch in epochs)
    items = [epoch[number % 2][number // 2] for epoch in epochs for number in range(5)]
    passes = [tuple(items[start : start + 8]) for start in range(0, 80, 8)]
    assert all(sorted(one) == list(range(8)) for one in passes)
    assert len(set(passes)) > 5


def divided(pipe: IterDataPipe[Any], ranks: int, workers: int) -> list[list[IterDataPipe[Any]]]:
    """Copies of a graph for each worker of each rank."""
    found = [[copy.deepcopy(pipe) for _ in range(workers)] for _ in range(ranks)]
    for rank, copies in enumerate(found):
        for worker, one in enumerate(copies):
            apply_sharding(one, ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)
            apply_sharding(one, workers, worker, SHARDING_PRIORITIES.MULTIPROCESSING)
    return found


@pytest.mark.parametrize("n", [6, 7, 18, 23])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 4), (1, 7), (2, 3), (3, 4)])
def test_wds_epoch_gives_exactly_n_when_it_does_not_divide(n: int, ranks: int, workers: int) -> None:
    """Ranks are equal, workers differ by one, and over as many epochs as there are workers all gave the same."""
    grid = divided(uneven(FULL * 2).wds_epoch(n), ranks, workers)
    totals = [[0] * workers for _ in range(ranks)]
    for _ in range(workers):
        expected = [[len(pipe) for pipe in pipes] for pipes in grid]
        counts = [[len(list(pipe)) for pipe in pipes] for pipes in grid]
        assert counts == expected
        assert [sum(shares) for shares in counts] == [n // ranks] * ranks
        assert max(map(max, counts)) - min(map(min, counts)) <= 1
        totals = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(totals, counts, strict=True)]
    assert {total for shares in totals for total in shares} == {n // ranks}


def test_wds_epoch_gives_every_item_once_a_pass_when_shares_differ() -> None:
    """Workers that give one more in one epoch give one fewer in another: the passes stay whole."""
    epochs = epochs_of(consumers_of(uneven(FULL).wds_epoch(23), 4), 70)
    assert {sum(map(len, epoch)) for epoch in epochs} == {23}
    items = [item for epoch in epochs for share in epoch for item in share]
    check_passes(items, items_of(FULL), 20)


def test_wds_epoch_raises_when_there_are_more_ranks_than_items() -> None:
    """No rank may be left without an item: the message has the numbers and the cure."""
    for pipes in divided(uneven().wds_epoch(2), 3, 1):
        with pytest.raises(ValueError, match=r"wds_epoch\(2\) cannot give each of 3 ranks an item: use a larger n"):
            list(pipes[0])


def test_wds_epoch_warns_once_when_n_is_not_a_multiple_of_the_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """What is left over is given to no rank; two graphs with other numbers have a warning each."""
    for n in (11, 12, 14):
        grid = divided(uneven().wds_epoch(n), 3, 2)
        for _ in range(2):
            assert [sum(len(list(pipe)) for pipe in pipes) for pipes in grid] == [n // 3] * 3
    assert [record.getMessage().partition(" together")[0] for record in caplog.records] == [
        "wds_epoch(11) gives each of 3 ranks 3 items, 9",
        "wds_epoch(14) gives each of 3 ranks 4 items, 12",
    ]


# -------------------------------------------------------------------------------------------------- what cannot be cut
def test_wds_epoch_raises_when_its_source_is_empty() -> None:
    """A pass without an item would be followed by another for ever: an error instead, each time."""
    pipe = IterableWrapper([]).wds_epoch(3)
    for _ in range(2):
        with time_limit(20), pytest.raises(ValueError, match="no item in 10 passes, so that no epoch can be filled"):
            list(pipe)


def test_wds_epoch_raises_when_a_share_is_empty() -> None:
    """Two sources for three consumers: the third says who it is, and what to do."""
    *others, empty = consumers_of(IterableWrapper("ab").sharding_filter().wds_epoch(9), 3)
    assert [list(pipe) for pipe in others] == [["a"] * 3, ["b"] * 3]
    with time_limit(20), pytest.raises(ValueError, match=r"for consumer 2 of 3 .*split_shards"):
        list(empty)


def test_wds_epoch_raises_when_its_source_becomes_empty() -> None:
    """Three items, two, one, and then none."""
    pipe = Shrinking().wds_epoch(6)
    assert list(pipe) == [0, 1, 2, 0, 1, 0]
    with time_limit(20), pytest.raises(ValueError, match="no item in 10 passes"):
        list(pipe)


@pytest.mark.parametrize("at", [0, 3])
def test_wds_epoch_goes_on_with_the_next_pass_when_its_source_failed(at: int) -> None:
    """The exception passes through; what is left of that pass is lost, and the next epoch is whole."""
    pipe = Failing(IterableWrapper(range(5)), 1, 3, at=at).wds_epoch(5 if at == 0 else 7)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            list(pipe)
        assert list(pipe) == [0, 1, 2, 3, 4, 0, 1][: pipe.n]


def test_wds_epoch_goes_on_in_the_order_of_the_next_pass_when_its_source_failed() -> None:
    """The pass that failed counts: consumers in which nothing fails still agree with this one."""
    fine, failing = (
        Failing(IterableWrapper(range(20)).shuffle().set_seed(4), *passes).wds_epoch(20) for passes in ((), (1,))
    )
    with pytest.raises(OSError, match="the disk is gone"):
        list(failing)
    epochs = [list(fine) for _ in range(3)]
    assert [list(failing), list(failing)] == epochs[1:]
    assert epochs[0] != epochs[1] != epochs[2]


def test_wds_epoch_fails_again_when_its_source_always_does() -> None:
    """It neither hides the exception nor loops."""
    pipe = Failing(IterableWrapper(range(5)), *range(10)).wds_epoch(4)
    for _ in range(3):
        stream = iter(pipe)
        assert [next(stream), next(stream), next(stream)] == [0, 1, 2]
        with pytest.raises(OSError, match="the disk is gone"):
            next(stream)


# --------------------------------------------------------------------------------------------------- length, copies
def test_wds_epoch_has_a_length_when_its_source_has_none() -> None:
    """It is that of this consumer's epoch."""
    pipe = uneven().wds_epoch(13)
    assert len(pipe) == 13
    assert [len(one) for one in consumers_of(pipe, 3)] == [5, 4, 4]


def test_wds_epoch_has_the_length_of_the_rank_when_workers_are_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before DataLoader's workers divide the work, the main process has the share of its rank."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert len(uneven().wds_epoch(13)) == 3
    assert len(IterableWrapper("abc").wds_epoch(13)) == 13  # everybody reads everything


def test_wds_epoch_begins_a_stream_of_its_own_when_it_is_copied() -> None:
    """A copy does not know where the stream was, and takes nothing from it."""
    pipe = IterableWrapper("abcde").wds_epoch(3)
    copies = [pickle.loads(pickle.dumps(pipe))]
    stream = iter(pipe)
    next(stream)
    copies += [pickle.loads(pickle.dumps(pipe)), copy.deepcopy(pipe)]
    list(stream)
    copies.append(copy.deepcopy(pipe))
    for one in copies:
        assert [*one, *one] == list("abcdea")
    assert list(pipe) == list("dea")


def test_wds_epoch_begins_with_the_first_pass_when_it_is_copied() -> None:
    """A copy that is seeded has the order of a new pipe with that seed, wherever the other is."""
    pipe = IterableWrapper(range(20)).shuffle().wds_epoch(15)
    seeded([pipe], 1)
    expected = [*pipe, *pipe]
    again = pickle.loads(pickle.dumps(pipe))
    seeded([again], 1)
    assert [*again, *again] == expected


# -------------------------------------------------------------------------------------------------------- with workers
def dataloader(pipe: IterDataPipe[Any], workers: int, **options: Any) -> DataLoader[Any]:
    """A DataLoader that leaves items as they are."""
    return DataLoader(
        pipe, batch_size=None, num_workers=workers, collate_fn=as_it_is, timeout=60 if workers else 0, **options
    )


def as_it_is(item: Any) -> Any:
    return item


def run_epochs(pipe: IterDataPipe[Any], kind: str, workers: int, epochs: int) -> list[list[Any]]:
    """Epochs under the service, or under torch's DataLoader with workers that live on; always in the same order."""
    torch.manual_seed(0)
    with time_limit(60), running(pipe, kind, workers) as loader:
        return [list(loader) for _ in range(epochs)]


@contextmanager
def running(pipe: IterDataPipe[Any], kind: str, workers: int) -> Iterator[Any]:
    """A loader whose workers are ended behind the block."""
    if kind == "service":
        with loader_of(pipe, workers, timeout=60) as loader:
            yield loader
    else:
        loader = dataloader(pipe, workers, persistent_workers=workers > 0)
        try:
            yield loader
        finally:
            if loader._iterator is not None:
                loader._iterator._shutdown_workers()


def or_slow(quick: Sequence[Any], slow: Sequence[Any]) -> list[Any]:
    """Parameters, some of them for the long run only."""
    values = (case if isinstance(case, tuple) else (case,) for case in slow)
    return [*quick, *(pytest.param(*value, marks=pytest.mark.slow) for value in values)]


RUNS = or_slow(
    [("service", 2), ("dataloader", 2)],
    [("service", 0), ("service", 1), ("service", 3), ("dataloader", 0), ("dataloader", 3)],
)


@pytest.mark.parametrize(("kind", "workers"), RUNS)
def test_wds_epoch_goes_on_in_workers(kind: str, workers: int) -> None:
    """Each epoch has n items, the passes are whole, and all of it is one stream."""
    epochs = run_epochs(uneven().wds_epoch(78), kind, workers, 5)
    assert [len(epoch) for epoch in epochs] == [78] * 5
    check_passes(chain.from_iterable(epochs), items_of(SIZES), passes_in(5, 78, max(workers, 1)))


@pytest.mark.parametrize("workers", or_slow([2], [0, 1]))
def test_wds_epoch_counts_the_items_of_all_workers_when_it_stands_behind_them(workers: int) -> None:
    """In the main process there is one consumer, whose stream is that of all workers."""
    pipe = IterableWrapper(range(10)).shuffle().sharding_filter().join_workers().wds_epoch(7)
    epochs = run_epochs(pipe, "service", workers, 10)
    assert [len(epoch) for epoch in epochs] == [7] * 10
    items = list(chain.from_iterable(epochs))
    passes = [tuple(items[start : start + 10]) for start in range(0, 70, 10)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert len(set(passes)) == 7


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_wds_epoch_counts_batches_in_the_workers_when_the_main_process_takes_them_apart(workers: int) -> None:
    """The border behind it changes nothing."""
    pipe = uneven().batch(4).wds_epoch(6).join_workers().unbatch()
    items = list(chain.from_iterable(run_epochs(pipe, "service", workers, 12)))
    check_passes(items, items_of(SIZES), 2)


@pytest.mark.parametrize(("kind", "workers"), or_slow([("service", 1)], [("service", 0), ("dataloader", 1)]))
def test_wds_epoch_drops_only_items_on_their_way_when_left_early(kind: str, workers: int) -> None:
    """Epochs that are broken off, again and again: the stream goes on behind what the worker had made by then."""
    pipe = IterableWrapper(range(1000)).sharding_filter().wds_epoch(50)
    last = -1
    with time_limit(60), running(pipe, kind, workers) as loader:
        for taken in (3, 50, 1, 0, 50, 7, 50):
            items = list(islice(iter(loader), taken))
            if items:
                assert items == list(range(items[0], items[0] + taken))
                assert last < items[0] <= last + (1 if workers == 0 else 100)
                last = items[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["service", "dataloader"])
def test_wds_epoch_goes_on_in_each_source_of_a_mix(kind: str) -> None:
    """Two streams of their own, each counted before they are mixed: the shares of an epoch are as told."""
    sources = []
    for name in "ab":
        pipe = IterableWrapper([f"{name}{number}" for number in range(12)]).shuffle().sharding_filter()
        sources.append(PassTeller(pipe).wds_shuffle(4).wds_epoch(6 if name == "a" else 18))
    epochs = run_epochs(sources[0].wds_mix(sources[1], weights=(1, 2), stop="all"), kind, 2, 12)
    assert [len(epoch) for epoch in epochs] == [24] * 12
    for name, passes in (("a", 6), ("b", 18)):
        items = [(number, item) for number, item in chain.from_iterable(epochs) if item[0] == name]
        check_passes(items, [f"{name}{number}" for number in range(12)], passes)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_wds_epoch_gives_nothing_twice_when_something_reads_ahead(workers: int) -> None:
    """A prefetch behind it takes items that a break drops, of that epoch only."""
    pipe = IterableWrapper(range(1000)).sharding_filter().wds_epoch(20).prefetch(3)
    items: list[int] = []
    with time_limit(60), running(pipe, "service", workers) as loader:
        for taken in (20, 3, 20, 1, 7, 20, 0, 20):
            found = list(islice(iter(loader), taken))
            assert len(found) == taken
            items += found
    assert len(set(items)) == len(items)
    assert max(items) < 20 * 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "in process", "stock"])
def test_wds_epoch_goes_on_under_other_services(name: str) -> None:
    """Those of torchdata seed epochs alike: the stream goes on all the same."""
    services = {
        "none": lambda: None,
        "in process": InProcessReadingService,
        "stock": lambda: MultiProcessingReadingService(2, main_prefetch_cnt=0),
    }
    with time_limit(60):
        loader = DataLoader2(uneven().wds_epoch(30).join_workers(), reading_service=services[name]())
        epochs = [list(loader) for _ in range(12)]
        loader.shutdown()
    assert [len(epoch) for epoch in epochs] == [30] * 12
    check_passes(chain.from_iterable(epochs), items_of(SIZES), 5)


@pytest.mark.slow
def test_wds_epoch_is_whole_when_the_one_before_was_left_early() -> None:
    """Nothing comes twice, and no worker falls behind the others' passes."""
    items = []
    with time_limit(60), running(uneven().wds_epoch(30), "service", 2) as loader:
        for taken in (7, 30, 1, 30, 29, 30, 30, 30):
            found = list(islice(iter(loader), taken))
            assert len(found) == taken
            items += found
    assert max(Counter(items).values()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_wds_epoch_raises_in_the_service_when_workers_fail(workers: int) -> None:
    """An exception of the source arrives with its type."""
    pipe = IterableWrapper(range(8)).sharding_filter().map(not_six).wds_epoch(12)
    with time_limit(60), pytest.raises(OSError, match="six"):
        run_epochs(pipe, "service", workers, 3)


def not_six(number: int) -> int:
    if number == 6:
        raise OSError("six is broken")
    return number


@pytest.mark.parametrize("workers", or_slow([0], [2]))
def test_dataloader_has_the_length_of_the_epoch(workers: int) -> None:
    """With set_length and without; torch would warn, which is an error here, of an epoch longer than it was told."""
    for pipe in (uneven().wds_epoch(30).set_length(30), uneven().wds_epoch(30)):
        with time_limit(60), running(pipe, "dataloader", workers) as loader:
            assert [len(loader), len(list(loader)), len(list(loader))] == [30] * 3


@pytest.mark.parametrize(("kind", "workers"), RUNS)
def test_wds_epoch_gives_exactly_n_in_workers(kind: str, workers: int) -> None:
    """More and fewer items than workers, also behind an epoch that was left early."""
    for n in (1, 7):
        torch.manual_seed(0)
        with time_limit(60), running(uneven(FULL).wds_epoch(n), kind, workers) as loader:
            epochs = [list(loader) for _ in range(4)]
            next(iter(loader))
            epochs += [list(loader) for _ in range(4)]
        assert [len(epoch) for epoch in epochs] == [n] * 8
        if n == 1 and workers and kind == "service":
            assert len({number for epoch in epochs[:workers] for number, _ in epoch}) == 1  # one item of each worker


@pytest.mark.parametrize("persists", [False, True])
def test_wds_epoch_warns_when_workers_end_with_the_epoch(persists: bool, tmp_path: Path) -> None:
    """Such workers give the first items in every epoch, which is never what is wanted."""
    with logged_in(tmp_path / "log"):
        pipe = IterableWrapper(range(9)).sharding_filter().wds_epoch(4)
        loader = dataloader(pipe, 1, persistent_workers=persists, multiprocessing_context="fork")
        epochs = [list(loader), list(loader)]
        if persists:
            loader._iterator._shutdown_workers()
    assert epochs == ([[0, 1, 2, 3], [4, 5, 6, 7]] if persists else [[0, 1, 2, 3]] * 2)
    assert ("persistent_workers=True" in (tmp_path / "log").read_text()) is not persists


@pytest.mark.slow
def test_wds_epoch_warns_of_nothing_when_there_are_no_workers_or_they_live_on(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Neither in plain iteration nor in the service, in the main process or in workers."""
    with logged_in(tmp_path / "log"):
        for workers in (0, 2):
            run_epochs(uneven().wds_epoch(4), "service", workers, 2)
        run_epochs(uneven().wds_epoch(4), "dataloader", 0, 2)
        list(uneven().wds_epoch(4))
    assert (tmp_path / "log").read_text() == ""
    assert not caplog.records


# ---------------------------------------------------------------------------------------------------------- long runs
def shards_of(urls: list[str], *, batch: int = 0, native: bool = False) -> IterDataPipe[Any]:
    """Real shards, the passes told by a stage right behind the grouping, and shuffled samples."""
    pipe = IterableWrapper(urls).shuffle().sharding_filter().load_wds_shards().group_by_key()
    pipe = PassTeller(pipe).map(with_key)
    pipe = pipe.shuffle(buffer_size=7) if native else pipe.wds_shuffle(7, initial=3)
    return pipe.batch(batch) if batch else pipe


def with_key(item: tuple[int, dict[str, Any]]) -> tuple[int, str]:
    return item[0], item[1]["__key__"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "workers", "variant"),
    [
        *(("service", 2, {}), ("service", 3, {"native": True}), ("service", 2, {"batch": 4})),
        *(("dataloader", 3, {}), ("dataloader", 2, {"native": True}), ("dataloader", 3, {"batch": 4})),
    ],
)
def test_wds_epoch_shows_every_sample_40_times_in_40_passes(
    kind: str, workers: int, variant: dict[str, Any], tmp_path: Path
) -> None:
    """Real shards and workers, n no multiple of a pass: each of 40 passes has every sample once, over all workers."""
    urls = write_text_shards(tmp_path, SIZES)
    n = 18 if "batch" in variant else 42
    epochs, whole = [], 0
    torch.manual_seed(0)
    with time_limit(120), running(shards_of(urls, **variant).wds_epoch(n), kind, workers) as loader:
        while whole < 40:
            epochs.append(list(loader))
            assert len(epochs[-1]) == n
            whole = whole_passes(epochs, variant)
    items = list(flat(epochs, variant))
    check_passes(items, text_keys(SIZES), 40)
    counts = Counter(key for number, key in items if number < 40)
    assert set(counts.values()) == {40}
    assert set(counts) == set(text_keys(SIZES))


def flat(epochs: list[list[Any]], variant: dict[str, Any]) -> Iterator[tuple[int, str]]:
    items = chain.from_iterable(epochs)
    return chain.from_iterable(items) if "batch" in variant else items


def whole_passes(epochs: list[list[Any]], variant: dict[str, Any]) -> int:
    """How many passes have all their samples; more than can be are as good as whole, and found later."""
    sizes = Counter(number for number, _ in flat(epochs, variant))
    whole = 0
    while sizes[whole] >= sum(SIZES):
        whole += 1
    return whole


RANKS = """
import functools, json, os, sys
import torch
from tests.kits.ranks import run_ranks
from tests.pipes.streams.test_epoch import FULL, dataloader, uneven
from tests.kits.workers_kit import loader_of
from torchdata_wds.workers.service import WorkersReadingService
from torchdata.dataloader2 import DataLoader2, DistributedReadingService, SequentialReadingService

folder, cases = sys.argv[1], json.loads(sys.argv[2])

def run(kind, workers, n, rank):
    torch.manual_seed(0 if kind == "dataloader" else rank)
    pipe = uneven(FULL).join_workers().wds_epoch(n) if kind == "behind" else uneven(FULL).wds_epoch(n)
    if kind == "dataloader":
        loader = dataloader(pipe, workers, persistent_workers=True)
    elif kind == "sequential":
        service = SequentialReadingService(DistributedReadingService(), WorkersReadingService(workers, timeout=60))
        loader = DataLoader2(pipe, reading_service=service)
    else:
        loader = loader_of(pipe, workers, distributed=True, timeout=60)
    found = [list(loader) for epoch in range(15)]
    if kind != "dataloader":
        loader.shutdown()
    return found

if __name__ == "__main__":
    for case in cases:
        case_folder = os.path.join(folder, "-".join(map(str, case)))
        os.mkdir(case_folder)
        run_ranks(functools.partial(run, *case), case_folder)
"""
RANK_CASES = [
    ("distributed", 0, 107),
    ("distributed", 2, 100),
    ("distributed", 2, 107),
    ("behind", 2, 107),
    ("sequential", 2, 100),
    ("dataloader", 2, 100),
    ("dataloader", 2, 107),
]


@pytest.fixture(scope="module")
def rank_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a folder for each case, with what its ranks have got; one program runs them in turn."""
    folder = tmp_path_factory.mktemp("ranks")
    done = run_script(RANKS, str(folder), json.dumps(RANK_CASES), seconds=300)
    assert done.returncode == 0, done.stderr
    return folder


@needs_torchdata
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers", "n"), RANK_CASES)
def test_wds_epoch_gives_ranks_equal_epochs_of_one_stream(kind: str, workers: int, n: int, rank_folder: Path) -> None:
    """Two gloo ranks: n // 2 items an epoch each, and over both every item once a pass."""
    folder = rank_folder / f"{kind}-{workers}-{n}"
    ranks = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]
    assert {len(epoch) for epochs in ranks for epoch in epochs} == {n // 2}
    items = [(number, tuple(item)) for epochs in ranks for epoch in epochs for number, item in epoch]
    check_passes(items, items_of(FULL), passes_in(15, 100, 2 * max(workers, 1)))


@pytest.mark.slow
def test_wds_epoch_gives_n_in_each_worker_when_nothing_divides_the_work() -> None:
    """Workers of a DataLoader that all read everything are consumers of their own."""
    with running(IterableWrapper(range(9)).wds_epoch(4).map(with_worker), "dataloader", 2) as loader:
        assert Counter(worker for _, worker in loader) == {0: 4, 1: 4}


def with_worker(item: Any) -> tuple[Any, int]:
    info = get_worker_info()
    assert info is not None
    return item, info.id
