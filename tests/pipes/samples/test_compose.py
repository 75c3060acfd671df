"""Generator functions as stages."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper
from torch.utils.data.graph import traverse_dps

import torchdata_wds

assert torchdata_wds.StageComposer


def numbers(count: int = 4) -> IterDataPipe[int]:
    return IterableWrapper(range(count))


def pairs(items: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    for item in items:
        yield item, next(items)


def beside(items: Iterator[Any], other: Iterable[Any], scale: Callable[[Any], Any] = int) -> Iterator[tuple[Any, Any]]:
    return ((item, scale(value)) for item, value in zip(items, other, strict=True))


def mapped(items: Iterator[Any], fn: Callable[[Any], Any], source_datapipe: int = 0) -> Iterator[Any]:
    return (fn(item) + source_datapipe for item in items)


class Windows:
    """An iterable made by a class, as WebDataset's DBCache is."""

    def __init__(self, items: Iterator[Any], size: int) -> None:
        self.items = items
        self.size = size

    def __iter__(self) -> Iterator[list[Any]]:
        window: list[Any] = []
        for item in self.items:
            window = [*window[-self.size + 1 :], item]
            if len(window) == self.size:
                yield window


def graph_types(pipe: IterDataPipe[Any]) -> list[str]:
    """The types of all pipes of a graph."""
    found = []
    graphs = [traverse_dps(pipe)]
    while graphs:
        for one, sources in graphs.pop().values():
            found.append(type(one).__name__)
            graphs.append(sources)
    return found


@pytest.mark.parametrize(
    ("pipe", "expected"),
    [
        (numbers().wds_compose(pairs), [(0, 1), (2, 3)]),
        (numbers(3).wds_compose(Windows, 2), [[0, 1], [1, 2]]),
        (numbers(3).wds_compose(Windows, size=2), [[0, 1], [1, 2]]),
        (numbers(3).wds_compose(partial(map, str)), ["0", "1", "2"]),
        (numbers(3).wds_compose(sorted, reverse=True), [2, 1, 0]),
        (numbers(3).wds_compose(lambda items: (item * 2 for item in items)), [0, 2, 4]),
        (numbers(3).wds_compose(mapped, fn=float, source_datapipe=1), [1.0, 2.0, 3.0]),
        (numbers(0).wds_compose(pairs), []),
    ],
)
def test_wds_compose_yields_what_the_function_does_when_called(pipe: IterDataPipe[Any], expected: list[Any]) -> None:
    """Generators, classes, partial objects, builtins and lambdas are stages; their arguments may have any name."""
    assert list(pipe) == expected
    assert list(pipe) == expected
    assert traverse_dps(pipe)


def test_wds_compose_is_lazy_when_the_function_is_a_generator() -> None:
    """Nothing is read ahead, and an early break ends the function."""
    asked, ended = [], []

    def source() -> Iterator[int]:
        for number in range(9):
            asked.append(number)
            yield number

    def watched(items: Iterator[int]) -> Iterator[int]:
        try:
            yield from items
        finally:
            ended.append(True)

    stream = iter(IterableWrapper(source(), deepcopy=False).wds_compose(watched))
    assert (next(stream), asked) == (0, [0])
    del stream
    assert ended == [True]


@pytest.mark.parametrize("result", [None, 3])
def test_wds_compose_raises_when_the_function_returns_no_iterable(result: Any) -> None:
    """A function that forgets its return, or maps one item, is told apart from an empty stream."""
    with pytest.raises(TypeError, match="instead of an iterable"):
        list(numbers().wds_compose(lambda items: result))


@pytest.mark.parametrize(
    "pipe",
    [
        numbers().wds_compose(beside, numbers().sharding_filter()),
        numbers().wds_compose(beside, other=numbers().sharding_filter()),
        numbers().wds_compose(lambda items, others: zip(items, *others, strict=True), [numbers().sharding_filter()]),
        numbers().wds_compose(
            lambda items, others: zip(items, others["a"], strict=True), {"a": numbers().sharding_filter()}
        ),
    ],
)
def test_wds_compose_shows_pipes_among_its_arguments_when_the_graph_is_traversed(pipe: IterDataPipe[Any]) -> None:
    """Services shard and seed those pipes too, also in lists and dicts."""
    assert "ShardingFilterIterDataPipe" in graph_types(pipe)
    assert list(pipe) == [(number, number) for number in range(4)]


def test_wds_compose_shows_map_pipes_among_its_arguments() -> None:
    """A MapDataPipe is part of the graph as well."""
    assert "SequenceWrapperMapDataPipe" in graph_types(numbers().wds_compose(beside, SequenceWrapper(range(4))))


def test_wds_compose_shards_a_pipe_among_its_arguments_when_run_in_workers() -> None:
    """Two sharded branches meet item by item in each of two workers."""
    pipe = numbers(6).sharding_filter().wds_compose(beside, numbers(6).sharding_filter())
    found = list(DataLoader(pipe, batch_size=None, num_workers=2, collate_fn=tuple))
    assert sorted(found) == [(number, number) for number in range(6)]


def test_wds_compose_hides_arguments_that_cannot_be_pickled_when_the_graph_is_traversed() -> None:
    """Lambdas among the arguments work wherever nothing is sent to another process."""
    pipe = numbers().wds_compose(mapped, lambda item: item + 1)
    assert traverse_dps(pipe)
    assert list(pipe) == [1, 2, 3, 4]


def test_wds_compose_pickles_when_its_function_does() -> None:
    """A function of a module goes to spawned workers with its arguments."""
    pipe = pickle.loads(pickle.dumps(numbers().wds_compose(mapped, float, source_datapipe=1)))
    assert list(pipe) == [1.0, 2.0, 3.0, 4.0]


def test_wds_compose_has_no_length() -> None:
    """The function may drop and add items."""
    with pytest.raises(TypeError):
        len(numbers().wds_compose(pairs))
