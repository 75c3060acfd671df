"""WdsLoader: what training loops and checkpoints need from a loader."""

import copy
import gc
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import children
from tests.kits.shards import text_samples, write_tar
from torchdata_wds import WdsLoader
from torchdata_wds.workers import running_epoch


def numbers(count: int = 23) -> IterDataPipe[int]:
    return IterableWrapper(range(count)).shuffle().sharding_filter()


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Five shards of 4 to 8 samples."""
    folder = tmp_path_factory.mktemp("shards")
    return [write_tar(folder / f"{shard}.tar", text_samples(f"{shard}-", 4 + shard)) for shard in range(5)]


@pytest.fixture
def samples(urls: list[str]) -> IterDataPipe[Any]:
    """Samples of the shards, shuffled in both ways, as numbers."""
    shards = IterableWrapper(urls).list_shards().shuffle().sharding_filter()
    return shards.load_wds_shards().group_by_key().wds_shuffle(6).map(key_of)


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


# ------------------------------------------------------------------------------------------------------- iterating
def test_graph_is_not_changed_when_a_loader_runs_it() -> None:
    """One pipe may be in several loaders, with different places, and be iterated over itself."""
    pipe = numbers()
    with WdsLoader(pipe, 2, ranks=(0, 2), seed=1) as first, WdsLoader(pipe, 2, ranks=(1, 2), seed=1) as second:
        assert sorted([*first, *second]) == list(range(23))
    assert sorted(pipe) == list(range(23))


def test_data_is_shared_and_not_copied() -> None:
    """A long list stays one list, and a source that cannot be copied is read as it is."""
    values = [[number] for number in range(4)]
    loader = WdsLoader(IterableWrapper(values, deepcopy=False))
    assert all(item is value for item, value in zip(loader, values, strict=True))
    assert list(WdsLoader(IterableWrapper(iter("abc"), deepcopy=False))) == ["a", "b", "c"]


class Uncopied(IterDataPipe[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not to be copied")


def test_graph_itself_runs_when_it_cannot_be_copied() -> None:
    """Only loading a state after the first epoch would need a second copy."""
    loader = WdsLoader(Uncopied(), seed=1)
    assert list(loader) == list(range(5))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="cannot be copied: not to be copied"):
        iter(loader)


def test_second_loader_says_so_when_the_first_has_divided_its_graph() -> None:
    pipe = Uncopied().sharding_filter()
    assert list(WdsLoader(pipe, seed=1, ranks=(0, 2))) == [0, 2, 4]
    with pytest.raises(ValueError, match="If an earlier loader did, its graph cannot be copied: build the graph again"):
        list(WdsLoader(pipe, seed=1, ranks=(0, 2)))


def test_ranks_divide_alike_when_one_has_another_random_stage() -> None:
    """Rank 0 may log or augment samples in a way of its own: the common shuffle keeps its order."""
    found: list[int] = []
    for rank, pipe in enumerate([numbers().wds_shuffle(3).wds_shuffle(5), numbers()]):
        with WdsLoader(pipe, seed=1, ranks=(rank, 2)) as loader:
            found += loader
    assert sorted(found) == list(range(23))


@pytest.mark.parametrize("front", ["loader", "torch"])
def test_every_pass_of_a_cycle_has_each_item_once(front: str, samples: Any) -> None:
    """Each later pass has its own order, which all workers and ranks share."""
    pipe = samples.cycle(3)
    if front == "torch":
        found = [*DataLoader(pipe, batch_size=None, num_workers=2, collate_fn=as_it_is)]
    else:
        loaders = [WdsLoader(pipe, workers, seed=1, ranks=(rank, 2)) for workers, rank in [(2, 0), (2, 1)]]
        with loaders[0] as first, loaders[1] as second:
            found = [*first, *second]
            assert sorted([*first, *second]) == sorted(found)
            next(items := iter(first))
            state, rest = first.state_dict(), list(items)
        with WdsLoader(pipe, 2, seed=1, ranks=(0, 2)) as again:
            again.load_state_dict(state)
            assert list(again) == rest
    assert set(Counter(found).values()) == {3}
    assert set(found) == set(samples)


def as_it_is(item: Any) -> Any:
    return item


def test_passes_of_a_cycle_differ_and_repeat_with_the_seed() -> None:
    """Also if only native shuffles are random."""
    orders = [list(WdsLoader(numbers(9).cycle(3), seed=seed)) for seed in (1, 1, 2)]
    passes = {tuple(orders[0][start : start + 9]) for start in (0, 9, 18)}
    assert len(passes) == 3
    assert orders[0] == orders[1] != orders[2]


# ---------------------------------------------------------------------------------------------------------- states
@pytest.mark.parametrize("workers", [0, 2])
def test_state_is_that_of_the_last_item_when_the_loader_was_left_or_shut_down(workers: int, samples: Any) -> None:
    """A training loop breaks, and saves its checkpoint afterwards."""
    with WdsLoader(samples, workers, seed=2) as loader:
        items = iter(loader)
        begun = [next(items) for _ in range(11)]
    with WdsLoader(samples, workers, seed=2) as again:
        again.load_state_dict(loader.state_dict())
        resumed = list(again)
        assert sorted([*begun, *resumed]) == sorted(samples)
        # in place: a loader that is in the middle of an epoch goes back
        again.load_state_dict(loader.state_dict())
        items = iter(again)
        assert next(items) == resumed[0]
        again.load_state_dict(loader.state_dict())
        with pytest.raises(RuntimeError, match="loaded a state"):
            next(items)
        assert list(again) == resumed


def test_state_before_the_first_epoch_begins_it(samples: Any) -> None:
    """Also after set_epoch."""
    with WdsLoader(samples, seed=2) as loader, WdsLoader(samples, seed=2) as again:
        again.load_state_dict(loader.state_dict())
        assert list(again) == list(loader)
        loader.set_epoch(7)
        fresh = WdsLoader(samples, seed=2)
        fresh.set_epoch(7)
        again.load_state_dict(fresh.state_dict())
        assert list(again) == list(loader)
        for one, epoch in ((loader, 3), (fresh, 3), (loader, 0)):
            list(one)
            one.set_epoch(epoch)
            again.load_state_dict(one.state_dict())
            assert list(again) == list(one)
        again.load_state_dict(one.state_dict())
        again.set_epoch(5)
        loader.load_state_dict(again.state_dict())
        loader.set_epoch(5)
        assert loader.state_dict() == again.state_dict()
        assert loader.state_dict()["epoch"] == 5


def test_state_between_epochs_begins_the_next(samples: Any) -> None:
    """Taken after the last item, it belongs to the next epoch only once the end was reached."""
    with WdsLoader(samples, seed=2) as loader, WdsLoader(samples, seed=2) as again:
        list(loader)
        again.load_state_dict(loader.state_dict())
        assert list(again) == list(loader)


def test_state_is_refused_when_something_else_is_loaded(samples: Any) -> None:
    """Another graph, seed or number of workers is named at the next iteration, damage at once."""
    loader = WdsLoader(samples, seed=2)
    next(iter(loader))
    state = loader.state_dict()
    for other, match in [
        (WdsLoader(samples.batch(2), seed=2), "the graph: Mapper <- SampleShuffler"),
        (WdsLoader(samples, seed=3), "seed: 2 then, 3 now"),
        (WdsLoader(samples, 2, seed=2), "num_workers: 0 then, 2 now"),
        (WdsLoader(samples, seed=2, ranks=(0, 2)), "ranks: 1 then, 2 now"),
    ]:
        other.load_state_dict(state)
        with pytest.raises(ValueError, match=match):
            iter(other)
        other.shutdown()
    for bad in ({}, {**state, "state": "x"}, {**state, "version": 1}, None, [state]):
        with pytest.raises(ValueError, match="state"):
            loader.load_state_dict(bad)  # type: ignore[arg-type]
    assert loader.state_dict() == state


# ---------------------------------------------------------------------------------------------------------- epochs
def test_set_epoch_decides_the_order() -> None:
    """Later epochs follow from there, and the same number has the same order."""
    with WdsLoader(numbers(), seed=1) as loader, WdsLoader(numbers(), seed=1) as other:
        orders = [list(loader) for _ in range(4)]
        other.set_epoch(2)
        assert [list(other), list(other)] == orders[2:]
        iter(other)
        other.set_epoch(0)
        assert list(other) == orders[0]
        for bad, error in [(-1, ValueError), (1.5, TypeError)]:
            with pytest.raises(error, match="epoch"):
                other.set_epoch(bad)  # type: ignore[arg-type]


def test_set_epoch_keeps_a_loaded_position_of_that_epoch(samples: Any, caplog: Any) -> None:
    """A trainer calls it before each epoch, also the resumed one; another number drops the position, with a warning."""
    with WdsLoader(samples, seed=1) as loader, WdsLoader(samples, seed=1) as again:
        epochs = [list(loader) for _ in range(2)]
        items = iter(loader)
        next(items)
        state, rest = loader.state_dict(), list(items)
        again.load_state_dict(state)
        again.set_epoch(2)
        assert list(again) == rest
        assert "drop" not in caplog.text
        again.load_state_dict(state)
        again.set_epoch(1)
        assert list(again) == epochs[1]
        assert "that position is dropped" in caplog.text


@pytest.mark.parametrize(("workers", "items_per_epoch"), [(0, 30), (0, 12), (2, 12)])
def test_set_epoch_goes_on_from_a_state_after_the_last_item(
    workers: int, items_per_epoch: int, samples: Any, caplog: Any
) -> None:
    """A trainer that counts batches never asks for the end; streams of wds_epoch continue in the next epoch."""
    pipe = samples if items_per_epoch == 30 else samples.wds_epoch(12)
    with WdsLoader(pipe, workers, seed=1) as loader, WdsLoader(pipe, workers, seed=1) as again:
        epochs = [list(loader) for _ in range(2)]
        for epoch in range(2):
            again.set_epoch(epoch)
            items = iter(again)
            assert [next(items) for _ in range(items_per_epoch)] == epochs[epoch]
        state = again.state_dict()
        again.load_state_dict(state)
        again.set_epoch(2)
        assert list(again) == list(loader)
        again.load_state_dict(state)
        assert list(again) == []
    assert caplog.text == ""


def test_state_is_loaded_when_the_loader_is_paused() -> None:
    """Which ends the pause; resume() does nothing without one."""
    with WdsLoader(numbers(), seed=1) as loader:
        whole = list(loader)
        loader.set_epoch(0)
        items = iter(loader)
        items.limit(5)
        assert list(items) == whole[:5]
        state = loader.state_dict()
        items.resume()
        items.resume()
        assert list(items) == whole[5:10]
        for bad, error in [(0, ValueError), ("3", TypeError)]:
            with pytest.raises(error, match="n must be"):
                items.limit(bad)  # type: ignore[arg-type]
        loader.load_state_dict(state)
        assert list(loader) == whole[5:]


# ---------------------------------------------------------------------------------------------------------- length
def test_len_is_that_of_the_graph_or_the_one_given() -> None:
    """A TypeError says so if neither tells it; a loader is true in any case."""
    assert len(WdsLoader(numbers(23).batch(4), 2)) == 6
    assert len(WdsLoader(numbers(21).batch(4), 2, ranks=(1, 2))) == 4
    assert len(WdsLoader(numbers().filter(bool), length=7)) == 7
    with pytest.raises(TypeError, match="length="):
        len(WdsLoader(numbers().filter(bool)))
    assert WdsLoader(numbers().filter(bool))
    assert WdsLoader(numbers(), length=0)


def test_more_items_than_the_length_given_are_a_warning(caplog: Any) -> None:
    """A framework that stops at len(loader) would lose them."""
    assert len(list(WdsLoader(numbers(), length=22))) == 23
    assert "yielded 23 items, but its length is set to 22" in caplog.text


# --------------------------------------------------------------------------------------------------------- workers
def test_workers_end_when_the_loader_is_shut_down_or_forgotten() -> None:
    """By the with block, by shutdown(), and when no reference to loader and iterator is left."""
    before = set(children())
    with WdsLoader(numbers(), 2, multiprocessing_context="fork") as loader:
        next(iter(loader))
        assert len(set(children()) - before) == 2
    assert set(children()) == before
    loader.shutdown()
    for call in (lambda: iter(loader), lambda: loader.load_state_dict({})):
        with pytest.raises(RuntimeError, match="shut down"):
            call()
    items = iter(WdsLoader(numbers(), 2, multiprocessing_context="fork"))
    next(items)
    gc.disable()  # by reference counts alone
    try:
        del items
        assert set(children()) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_loader_can_be_copied_and_sent_to_another_process(make_copy: Any, samples: Any) -> None:
    """A copy has not begun an epoch, but keeps a loaded state."""
    with WdsLoader(samples, 0, seed=1) as loader:
        next(items := iter(loader))
        state = loader.state_dict()
        assert make_copy(loader).state_dict()["epoch"] == 0
        again = WdsLoader(samples, 0, seed=1)
        again.load_state_dict(state)
        assert list(make_copy(again)) == list(items)


# --------------------------------------------------------------------------------------------- memory and devices
def test_items_pass_through_pinned_memory_when_there_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, if there are workers; what it took counts as delivered only later. Without a device, not at all."""
    assert list(WdsLoader(numbers(3), pin_memory=True, seed=1)) == list(WdsLoader(numbers(3), seed=1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(running_epoch, "PinnedItems", Ahead)
    monkeypatch.setattr(running_epoch, "pin_memory", lambda item: -item)
    assert list(WdsLoader(numbers(3), pin_memory=True, seed=1)) == [-item for item in WdsLoader(numbers(3), seed=1)]
    with WdsLoader(numbers(), 2, pin_memory=True, seed=1) as loader, WdsLoader(numbers(), 2, seed=1) as again:
        items = iter(loader)
        begun = [next(items) for _ in range(4)]
        state, rest = loader.state_dict(), list(items)
        assert sorted([*begun, *rest]) == list(range(23))
        again.load_state_dict(state)
        assert list(again) == rest


class Ahead(Iterator[Any]):
    """Takes all items of a source at once."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self.items: Iterator[Any] | None = None

    def __next__(self) -> Any:
        self.items = self.items or iter(list(self.source))
        return next(self.items)

    def close(self) -> None:
        pass


def test_items_pass_through_when_the_device_is_the_cpu() -> None:
    """An epoch like any other: with states, and one iterator at a time."""
    tensors = [torch.tensor(number) for number in range(4)]
    with WdsLoader(IterableWrapper(tensors, deepcopy=False)) as loader:
        items = loader.prefetch_to_device("cpu")
        assert next(items) is tensors[0]
        state = loader.state_dict()
        assert [int(item) for item in items] == [1, 2, 3]
        loader.load_state_dict(state)
        assert [int(item) for item in loader.prefetch_to_device(torch.device("cpu"))] == [1, 2, 3]
    with pytest.raises(RuntimeError):
        WdsLoader(numbers()).prefetch_to_device("nowhere")


# ------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_workers": -1}, ValueError, "num_workers"),
        ({"num_workers": 1.5}, TypeError, "num_workers"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 2**64}, ValueError, "seed"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor"),
        ({"multiprocessing_context": "thread"}, ValueError, "multiprocessing_context"),
        ({"timeout": -1}, ValueError, "timeout"),
        ({"pin_memory": 1}, TypeError, "pin_memory"),
        ({"length": -1}, ValueError, "length"),
        ({"worker_init_fn": 3}, TypeError, "worker_init_fn"),
        ({"ranks": "all"}, TypeError, "ranks"),
        ({"ranks": (2, 2)}, ValueError, "ranks"),
        ({"ranks": (0, 1, 2)}, TypeError, "ranks"),
    ],
)
def test_wrong_option_raises_when_a_loader_is_made(arguments: dict[str, Any], error: type, match: str) -> None:
    """The message names the option."""
    with pytest.raises(error, match=match):
        WdsLoader(numbers(), **arguments)


def test_loader_takes_only_pipes() -> None:
    """A list, a dataset or another loader is an error at once."""
    for wrong in ([1, 2], None, WdsLoader(numbers())):
        with pytest.raises(TypeError, match="takes the last pipe of a graph"):
            WdsLoader(wrong)  # type: ignore[arg-type]


def test_ranks_need_a_seed_when_they_cannot_agree_on_one() -> None:
    """Otherwise each rank would read in an order of its own."""
    with pytest.raises(RuntimeError, match="pass the same seed="):
        iter(WdsLoader(numbers(), ranks=(0, 2)))
