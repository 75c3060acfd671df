"""limit(n) and resume() of an iterator, as DataLoader2 has them with torchdata's own services."""

import warnings
from collections.abc import Iterator

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.workers_kit import FRONTS, SIZES, items_of, loader_of, resumed_loader, time_limit, uneven_pipe


@pytest.fixture(autouse=True)
def _never_hang() -> Iterator[None]:
    with time_limit(60), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_iterator_stops_and_goes_on_when_it_is_limited(workers: int, front: str) -> None:
    """Each resume gives as many items again, until the limit is taken away or the epoch ends."""
    with loader_of(IterableWrapper(range(20)).sharding_filter(), workers, front=front) as loader:
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


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_prefetch_goes_on_when_it_was_paused(workers: int, front: str) -> None:
    """A thread of the main process loses nothing by a pause."""
    pipe = IterableWrapper(range(30)).sharding_filter().join_workers().prefetch(4)
    with loader_of(pipe, workers, front=front) as loader:
        items = iter(loader)
        items.limit(5)
        found = list(items)
        while len(found) < 30:
            items.resume()
            found += list(items)
        assert found == [*range(30)]


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_state_is_exact_when_it_is_taken_at_a_limit(workers: int, front: str) -> None:
    """The items after the limit come after resuming, in the same loader and in another one."""
    with loader_of(uneven_pipe(), workers, front=front, seed=1) as loader:
        items = iter(loader)
        items.limit(7)
        first = list(items)
        state = loader.state_dict()
        items.limit(None)
        items.resume()
        rest = list(items)
    assert sorted([*first, *rest]) == items_of(SIZES)
    with resumed_loader(state, uneven_pipe(), workers, front=front, seed=1) as again:
        assert list(again) == rest


@pytest.mark.parametrize("front", FRONTS)
def test_loader_says_so_when_an_epoch_begins_in_a_pause(front: str) -> None:
    """Torchdata would end it at once, without an item."""
    with loader_of(IterableWrapper(range(5)).sharding_filter(), front=front) as loader:
        items = iter(loader)
        items.limit(1)
        assert list(items) == [0]
        with pytest.raises(RuntimeError, match="call resume"):
            iter(loader)
        items.resume()
        assert list(loader) == [*range(5)]


@pytest.mark.parametrize("front", FRONTS)
def test_loader_goes_on_after_a_limit_when_a_stage_knows_another_resume(front: str) -> None:
    """`wds_shuffle` has a method of that name, which is about states."""
    pipe = IterableWrapper(range(10)).join_workers().wds_shuffle(3)
    with loader_of(pipe, 0, front=front) as loader:
        iterator = iter(loader)
        iterator.limit(3)
        found = list(iterator)
        iterator.limit(None)
        iterator.resume()
        assert sorted(found + list(iterator)) == list(range(10))
