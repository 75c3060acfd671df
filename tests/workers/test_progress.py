"""tqdm around a loader: a total where the length is known, and what is left of a resumed epoch."""

import io
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from tqdm import tqdm

from tests.kits.shards import text_samples, write_tar
from tests.kits.torchdata import DataLoader2, WorkersReadingService
from torchdata_wds import WdsLoader, index_shard


def numbers(count: int = 23) -> IterDataPipe[int]:
    return IterableWrapper(range(count)).shuffle().sharding_filter()


def totals(loader: Any) -> tuple[int | None, int]:
    """The total that tqdm shows, and how many items come."""
    with tqdm(loader, file=io.StringIO()) as bar:
        return bar.total, sum(1 for _ in bar)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_tqdm_has_a_total_when_the_length_is_known(workers: int) -> None:
    """In each epoch the number of items on this rank; otherwise it only counts."""
    with WdsLoader(numbers().batch(4), workers, seed=1) as loader:
        assert [totals(loader), totals(loader)] == [(6, 6), (6, 6)]
    with WdsLoader(numbers().filter(bool), workers) as loader:
        assert totals(loader) == (None, 22)
    with WdsLoader(numbers().filter(bool), workers, length=22) as loader:
        assert totals(loader) == (22, 22)


def test_tqdm_has_a_total_when_a_service_runs_the_graph() -> None:
    """Under DataLoader2, which has no length of its own."""
    with DataLoader2(numbers().batch(4), reading_service=WorkersReadingService(0)) as loader:
        assert totals(loader) == (6, 6)
    with DataLoader2(numbers().filter(bool), reading_service=WorkersReadingService(0)) as loader:
        assert totals(loader) == (None, 22)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_iterator_has_the_number_of_items_left_when_an_epoch_was_resumed(workers: int) -> None:
    """At its start, in its middle and at its end; len() of the loader stays that of whole epochs."""
    with WdsLoader(numbers(), workers, seed=1) as loader, WdsLoader(numbers(), workers, seed=1) as other:
        items = iter(loader)
        assert len(items) == 23
        for _ in range(5):
            next(items)
        other.load_state_dict(loader.state_dict())
        rest = iter(other)
        assert (len(other), len(rest), len(items)) == (23, 18, 18)
        next(rest)
        assert totals(rest) == (17, 17)
        assert len(rest) == 0
        assert rest
        assert totals(other.prefetch_to_device("cpu")) == (23, 23)


def test_iterator_has_no_length_when_the_number_is_not_known() -> None:
    """After stages of the main process, a state counts other items than the loop does."""
    pipe = numbers().join_workers().batch(4)
    with WdsLoader(pipe, seed=1) as loader, WdsLoader(pipe, seed=1) as other:
        items = iter(loader)
        next(items)
        assert len(items) == 5
        other.load_state_dict(loader.state_dict())
        with pytest.raises(TypeError, match=r"not known: its state counts the items that workers have made, of which"):
            len(iter(other))
        assert totals(iter(other)) == (None, 5)
    with WdsLoader(numbers().filter(bool)) as loader:
        assert totals(iter(loader)) == (None, 22)
        assert len(list(iter(loader))) == 22
        assert iter(loader)


def test_iterator_has_the_rest_when_a_global_order_is_resumed(tmp_path: Path) -> None:
    """The position counts the samples of all ranks; the length the batches of this one."""
    for shard in range(3):
        index_shard(write_tar(tmp_path / f"{shard}.tar", text_samples(f"{shard}-", 7)))
    pipe = IterableWrapper([str(tmp_path)]).list_shards().load_in_order(seed=1, even="pad", block=2).batch(2)
    with WdsLoader(pipe, ranks=(1, 2)) as loader, WdsLoader(pipe, ranks=(1, 2)) as other:
        items = iter(loader)
        next(items)
        other.load_state_dict(loader.state_dict())
        rest = iter(other)
        assert len(rest) == len(items) == len(loader) - 1 == len(list(rest))
