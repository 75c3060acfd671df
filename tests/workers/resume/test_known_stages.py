"""Stages are known by their classes: a namesake, or a subclass that may do something else, is not trusted."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.utils.data.datapipes.iter as native
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import write_text_shards
from tests.kits.torchdata import Header, LengthSetter, Repeater, needs_torchdata
from torchdata_wds.pipes.samples.decode import SampleDecoderIterDataPipe
from torchdata_wds.pipes.samples.group_by_key import KeyGrouperIterDataPipe
from torchdata_wds.pipes.samples.shuffle import SampleShufflerIterDataPipe
from torchdata_wds.pipes.shards.load_shards import ShardLoaderIterDataPipe
from torchdata_wds.pipes.streams.epoch import EpochCounterIterDataPipe
from torchdata_wds.pipes.streams.join_workers import JoinWorkersIterDataPipe, _MarkedEndIterDataPipe
from torchdata_wds.workers.resume.checkpoints import taken_by
from torchdata_wds.workers.resume.planner import find_chain, gives_shards_again, is_one_to_one
from torchdata_wds.workers.resume.signatures import graph_signature

#: Classes that are known in some place of a graph, and what they take behind their source.
BEHIND: list[Any] = [
    pytest.param(LengthSetter, (9,), marks=needs_torchdata),
    (native.Mapper, (str,)),
    (native.Collator, (str,)),
    (native.Batcher, (2,)),
    (JoinWorkersIterDataPipe, ()),
    (_MarkedEndIterDataPipe, ()),
    (SampleDecoderIterDataPipe, ()),
    (SampleShufflerIterDataPipe, (3,)),
    (EpochCounterIterDataPipe, (3,)),
]

BEFORE: list[Any] = [
    pytest.param(Header, (3,), marks=needs_torchdata),
    pytest.param(Repeater, (2,), marks=needs_torchdata),
    (native.Shuffler, ()),
    (native.Filter, (bool,)),
]


def shards() -> Any:
    return IterableWrapper(["a.tar"])


def samples(source: Any = None) -> Any:
    return (source or shards()).load_wds_shards().group_by_key()


class EveryOther(IterDataPipe[Any]):
    """A stage of a user's that drops each odd item."""

    def __init__(self, source_datapipe: IterDataPipe[Any], *_: Any) -> None:
        self.source_datapipe = source_datapipe

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self.source_datapipe):
            if number % 2 == 0:
                yield item


#: Where classes that tests make can be found by pickle, which looks them up by name.
MADE = ModuleType("tests_made_stages")
sys.modules[MADE.__name__] = MADE


def made(name: str, base: Any) -> Any:
    kind = type(name, (base,), {"__module__": MADE.__name__})
    setattr(MADE, name, kind)
    return kind


def namesake(kind: Any) -> Any:
    return made(kind.__name__, EveryOther)


def subclass(kind: Any) -> Any:
    return made(f"Sub{kind.__name__}", kind)


class FirstMember(ShardLoaderIterDataPipe):
    """A loader of a user's that gives the first member only."""

    def __iter__(self) -> Iterator[Any]:
        yield next(iter(ShardLoaderIterDataPipe(self.source_datapipe)))


@pytest.mark.parametrize(("kind", "arguments"), BEHIND, ids=lambda value: getattr(value, "__name__", ""))
def test_chain_trusts_a_stage_when_it_is_the_class_itself(kind: Any, arguments: tuple[Any, ...]) -> None:
    """Neither another class of its name nor a subclass is counted through, and each has a signature of its own."""
    graphs = [found(samples(), *arguments) for found in (kind, namesake(kind), subclass(kind))]
    obstacles = [find_chain(graph).obstacle for graph in graphs]
    assert obstacles[0] is None
    assert all(obstacle and "may yield more, fewer or other items" in obstacle for obstacle in obstacles[1:])
    assert len({str(graph_signature(graph)[0]) for graph in graphs}) == 3


@pytest.mark.parametrize(("kind", "arguments"), BEFORE, ids=lambda value: getattr(value, "__name__", ""))
def test_chain_trusts_a_source_when_it_is_the_class_itself(kind: Any, arguments: tuple[Any, ...]) -> None:
    """The same for what stands before the loader."""
    obstacles = [
        find_chain(samples(found(shards(), *arguments))).obstacle for found in (kind, namesake(kind), subclass(kind))
    ]
    assert obstacles[0] is None
    assert all(obstacle and obstacle.endswith("comes before load_wds_shards") for obstacle in obstacles[1:])


@pytest.mark.parametrize("kind", [ShardLoaderIterDataPipe, KeyGrouperIterDataPipe], ids=lambda kind: kind.__name__)
def test_chain_does_not_skip_when_samples_are_made_by_a_subclass(kind: Any) -> None:
    """A reader or a grouping of a user's may give other samples."""
    loader = shards().load_wds_shards() if kind is KeyGrouperIterDataPipe else subclass(kind)(shards())
    grouper = subclass(kind)(loader) if kind is KeyGrouperIterDataPipe else loader.group_by_key()
    assert find_chain(grouper).obstacle


def test_grouping_reads_through_a_subclass_of_the_loader(tmp_path: Path) -> None:
    """What a user's loader leaves out stays out: the two do not run as one loop."""
    assert len(list(FirstMember(IterableWrapper(write_text_shards(tmp_path, [4]))).group_by_key())) == 1


@needs_torchdata
def test_states_count_through_the_main_process_when_stages_are_known() -> None:
    """A namesake of a stage that holds nothing may hold items, or drop some."""
    front = shards()
    ends = [kind(front, 9) for kind in (LengthSetter, namesake(LengthSetter))]
    assert taken_by(ends[0], front) == 0
    with pytest.raises(RuntimeError, match="LengthSetter, which runs in the main process, may hold items"):
        taken_by(ends[1], front)


def test_known_stages_are_found_when_torchdata_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchdata nothing of it is known, nor imported."""
    stage = LengthSetter(shards(), 2)
    assert is_one_to_one(stage)
    assert gives_shards_again(stage)
    monkeypatch.delitem(sys.modules, "torchdata.datapipes.iter")
    assert not is_one_to_one(stage)
    assert not gives_shards_again(stage)
    assert is_one_to_one(samples().wds_decode())
