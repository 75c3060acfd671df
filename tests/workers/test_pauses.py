"""limit(n) and resume() of DataLoader2's iterator, as with torchdata's own services."""

import warnings
from collections.abc import Iterator

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.torchdata import DataLoader2, WorkersReadingService
from tests.kits.workers_kit import SIZES, items_of, loader_of, time_limit, uneven_pipe


@pytest.fixture(autouse=True)
def _never_hang() -> Iterator[None]:
    with time_limit(60), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("workers", [0, 2])
def test_iterator_stops_and_goes_on_when_it_is_limited(workers: int) -> None:
    """Each resume gives as many items again, until the limit is taken away or the epoch ends."""
    with loader_of(IterableWrapper(range(20)).sharding_filter(), workers) as loader:
        items = iter(loader)
        items.limit(3)
        assert list(items) == [0, 1, 2]
        assert list(items) == []
        items.resume()
        assert list(items) == [3, 4, 5]
        items.limit(None)
        items.resume()
        assert list(items) == [*range(6, 20)]
        assert list(loader) == [*range(20)]


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetch_goes_on_when_it_was_paused(workers: int) -> None:
    """A thread of the main process loses nothing by a pause."""
    pipe = IterableWrapper(range(30)).sharding_filter().join_workers().prefetch(4)
    with loader_of(pipe, workers) as loader:
        items = iter(loader)
        items.limit(5)
        found = list(items)
        while len(found) < 30:
            items.resume()
            found += list(items)
        assert found == [*range(30)]


@pytest.mark.parametrize("workers", [0, 2])
def test_state_is_exact_when_it_is_taken_at_a_limit(workers: int) -> None:
    """The items after the limit come after resuming, in the same loader and in another one."""
    with loader_of(uneven_pipe(), workers, seed=1) as loader:
        items = iter(loader)
        items.limit(7)
        first = list(items)
        state = loader.state_dict()
        items.limit(None)
        items.resume()
        rest = list(items)
    assert sorted([*first, *rest]) == items_of(SIZES)
    again = DataLoader2.from_state(state, WorkersReadingService(workers, seed=1))
    assert list(again) == rest
    again.shutdown()


def test_loader_says_so_when_an_epoch_begins_in_a_pause() -> None:
    """Torchdata would end it at once, without an item."""
    with loader_of(IterableWrapper(range(5)).sharding_filter()) as loader:
        items = iter(loader)
        items.limit(1)
        assert list(items) == [0]
        with pytest.raises(RuntimeError, match="call resume"):
            iter(loader)
        items.resume()
        assert list(loader) == [*range(5)]


def test_loader_goes_on_after_a_limit_when_a_stage_knows_another_resume() -> None:
    """`wds_shuffle` has a method of that name, which is about states."""
    pipe = IterableWrapper(range(10)).join_workers().wds_shuffle(3)
    with DataLoader2(pipe, reading_service=WorkersReadingService(0)) as loader:
        iterator = iter(loader)
        iterator.limit(3)
        found = list(iterator)
        iterator.limit(None)
        iterator.resume()
        assert sorted(found + list(iterator)) == list(range(10))
