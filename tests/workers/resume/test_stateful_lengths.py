"""The length of StatefulPipeline is the number of items, or batches, that its loader yields."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.resume_kit import SMALL, batched, filtered, in_epochs, indexed_shards_in, plain, split
from tests.kits.shards import write_text_shards
from tests.kits.torchdata import StatefulDataLoader
from torchdata_wds import StatefulPipeline

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return indexed_shards_in(tmp_path_factory.mktemp("lengths"))


def as_it_is(item: Any) -> Any:
    return item


def numbers(count: int = 11) -> Any:
    return IterableWrapper(range(count)).shuffle().sharding_filter()


def loader_of(pipe: Any, workers: int, *, batch_size: int | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        StatefulPipeline(pipe, seed=1),
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=as_it_is,
        persistent_workers=workers > 0,
        **options,
    )


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("graph", [plain, in_epochs, split])
def test_length_is_what_an_epoch_yields_when_an_index_or_epoch_tells_it(
    graph: Any, workers: int, urls: list[str]
) -> None:
    """In each epoch, and whether it is requested before, during or after one."""
    loader = loader_of(graph(urls), workers)
    length = len(loader)
    for _ in range(2):
        found = 0
        for _ in loader:
            found += 1
            assert len(loader) == length
        assert found == length


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "batch_size", "drop_last"), [(1, 4, True), (2, None, False), (2, 4, False), (3, 4, True)]
)
def test_length_counts_the_batches_of_each_worker(workers: int, batch_size: int | None, drop_last: bool) -> None:
    """Whether the graph or the loader makes them: dividing would miss what each of them ends with."""
    inside = numbers() if batch_size is None else numbers().batch(batch_size, drop_last=drop_last)
    loaders = [
        loader_of(inside, workers),
        loader_of(numbers(), workers, batch_size=batch_size, drop_last=drop_last),
    ]
    for loader in loaders:
        assert len(loader) == sum(1 for _ in loader)
    assert len(loaders[0]) == len(loaders[1])


def test_length_is_a_rank_s_own_when_several_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As given by ranks=, or by the environment."""
    assert [len(StatefulPipeline(numbers(), ranks=(rank, 3))) for rank in range(3)] == [4, 4, 3]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert len(StatefulPipeline(numbers())) == 5


def test_length_is_the_given_one_when_it_is_given() -> None:
    """Copies have it too."""
    pipeline = StatefulPipeline(numbers().filter(bool), length=10)
    assert len(pipeline) == len(pickle.loads(pickle.dumps(pipeline))) == 10
    assert len(DataLoader(pipeline, batch_size=None)) == 10


@pytest.mark.parametrize(("length", "error"), [(-1, ValueError), (1.5, TypeError), ("3", TypeError), (True, TypeError)])
def test_length_is_refused_when_it_is_no_number_of_items(length: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="length must be"):
        StatefulPipeline(numbers(), length=length)


def test_length_is_a_type_error_when_nothing_tells_it(urls: list[str], tmp_path: Path) -> None:
    """It says why; an epoch can be listed all the same."""
    loader = loader_of(filtered(urls), 0)
    with pytest.raises(TypeError, match="filter may yield any number of items"):
        len(loader)
    assert len(list(loader)) == len(list(loader))
    with pytest.raises(TypeError, match="has no index beside it"):
        len(loader_of(plain(write_text_shards(tmp_path, SMALL)), 0))


def test_length_is_a_type_error_when_stages_after_the_join_run_in_each_worker(urls: list[str]) -> None:
    """Batches after .join_workers() are made of each worker's items, so a single worker has a known length."""
    pipe = numbers().join_workers().batch(4)
    assert len(loader_of(pipe, 1)) == 3
    with pytest.raises(TypeError, match=r"after \.join_workers\(\) in each worker"):
        len(loader_of(pipe, 2))


def test_length_is_in_the_state_when_a_stateful_loader_resumes(urls: list[str]) -> None:
    """Frameworks request it before and after: a resumed loader has the length of a whole epoch."""
    first, again = (StatefulDataLoader(StatefulPipeline(batched(urls), seed=1), batch_size=None) for _ in range(2))
    length = len(first)
    items = iter(first)
    next(items)
    again.load_state_dict(first.state_dict())
    assert len(again) == length
    assert len(list(again)) == length - 1
    assert len(again) == length
