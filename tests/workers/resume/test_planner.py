"""Which stages let items be skipped, and that streams which begin in the middle of them are exact."""

from __future__ import annotations

import functools
import json
import operator
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

import torchdata_wds  # registers the functional forms
from tests.kits.resume_kit import augment, is_odd, passed_on, row, shards_in
from torchdata_wds import image_decoder, index_shard, wds_collate
from torchdata_wds.pipes.chain_text import short_name
from torchdata_wds.pipes.order.permutation import mix
from torchdata_wds.workers.graphs import LocalIterDataPipe
from torchdata_wds.workers.resume import packed_facts
from torchdata_wds.workers.resume import stream as streams
from torchdata_wds.workers.resume.checkpoints import Streams, pack_streams, unpack_streams
from torchdata_wds.workers.resume.planner import find_chain
from torchdata_wds.workers.resume.stream import Seeds

assert torchdata_wds.ShardLister


def jpegs_only(name: str) -> bool:
    return name.endswith(".jpg")


def renamed(name: str) -> str:
    return name.lower()


def key_and_field(name: str) -> tuple[str, str]:
    key, _, field = name.partition(".")
    return key, field


def kept(item: Any) -> Any:
    return item


class Foreign(IterDataPipe):
    """A pipe of somebody else."""

    def __init__(self, source_datapipe: IterDataPipe) -> None:
        self.source_datapipe = source_datapipe

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source_datapipe)


def urls(*given: str) -> Any:
    return IterableWrapper(list(given or ("a.tar", "b.tar")))


def samples() -> Any:
    return urls().shuffle().sharding_filter().load_wds_shards().group_by_key()


# ---------------------------------------------------------------------------------------------- what can be skipped
SKIPPED: dict[str, Callable[[], Any]] = {
    "nothing behind": samples,
    "patterns": lambda: IterableWrapper(["*.tar"]).list_shards().sharding_filter().load_wds_shards().group_by_key(),
    "shards shuffled by ours": lambda: urls().wds_shuffle(9).sharding_filter().load_wds_shards().group_by_key(),
    "shards filtered": lambda: urls().filter(str).sharding_filter().load_wds_shards().group_by_key(),
    "shards concatenated": lambda: urls().concat(urls()).sharding_filter().load_wds_shards().group_by_key(),
    "shards repeated": lambda: urls().repeat(2).header(3).sharding_filter().load_wds_shards().group_by_key(),
    "resample_shards": lambda: urls().resample_shards().load_wds_shards().group_by_key(),
    "split_shards": lambda: (
        urls().split_shards({"a.tar": 1, "b.tar": 2}).load_wds_shards(select="*.jpg").group_by_key()
    ),
    "wds_shuffle": lambda: samples().wds_shuffle(10).wds_shuffle(10, initial=2),
    "fields": lambda: samples().wds_decode("rgb8").wds_rename(image="jpg;png").wds_rename_keys(("*.a", "b")),
    "tuples": lambda: samples().wds_map_dict(cls=int).wds_to_tuple("jpg", "cls").wds_map_tuple(None, kept),
    "functions behind a shuffle": lambda: samples().wds_shuffle(9).map(augment).wds_map(row).wds_map_dict(txt=kept),
    "trusted functions before a shuffle": lambda: samples().map(operator.itemgetter("txt")).map(len).wds_shuffle(9),
    "decoders of ours before a shuffle": lambda: samples().wds_decode("pil", image_decoder("rgb8")).wds_shuffle(9),
    "batches": lambda: samples().wds_to_tuple("cls").batch(4).collate(wds_collate).wds_shuffle(3).batch(2),
    "wds_epoch": lambda: samples().wds_shuffle(9).wds_epoch(10).wds_shuffle(9).map(augment).batch(2),
    "join_workers": lambda: samples().map(row).join_workers().map(kept).set_length(9),
    "handlers": lambda: samples().wds_decode(handler=kept).wds_map(row, handler=torchdata_wds.warn_and_continue),
}

OBSTACLES: dict[str, tuple[Callable[[], Any], str]] = {
    "filter": (lambda: samples().filter(is_odd).map(row), "Filter may yield more, fewer or other items than it takes"),
    "native shuffle": (lambda: samples().shuffle(), "Shuffler may yield more, fewer or other items than it takes"),
    "wds_compose": (lambda: samples().wds_compose(passed_on), "Composer may yield more, fewer or other items"),
    "unbatch": (lambda: samples().batch(2).unbatch(), "UnBatcher may yield more, fewer or other items"),
    "wds_unbatch": (lambda: samples().batch(2).wds_unbatch(), "Unbatcher may yield more, fewer or other items"),
    "flatmap": (lambda: samples().flatmap(list), "FlatMapper may yield more, fewer or other items"),
    "header": (lambda: samples().header(4), "Header may yield more, fewer or other items"),
    "a pipe of somebody else": (lambda: Foreign(samples()).map(row), "Foreign may yield more, fewer or other items"),
    "wds_mix": (lambda: samples().wds_mix(samples(), stop="all"), "SampleMixer joins several streams"),
    "zip": (lambda: samples().zip(samples()).map(kept), "Zipper joins several streams"),
    "max_bytes": (lambda: samples().wds_shuffle(9, max_bytes=10**6), "SampleShuffler has max_bytes="),
    "function before a shuffle": (
        lambda: samples().map(augment).wds_decode().wds_shuffle(9),
        "a function in Mapper, before SampleShuffler, may draw random numbers",
    ),
    "function of a field before a shuffle": (
        lambda: samples().wds_map_dict(txt=functools.partial(kept)).wds_shuffle(9),
        "a function in FieldMapper, before SampleShuffler, may draw random numbers",
    ),
    "decoder before a shuffle": (
        lambda: samples().wds_decode(augment).wds_shuffle(9),
        "a function in SampleDecoder, before SampleShuffler, may draw random numbers",
    ),
    "collation before a shuffle": (
        lambda: samples().batch(2).collate(kept).wds_shuffle(9),
        "a function in Collator, before SampleShuffler, may draw random numbers",
    ),
    "no shards": (lambda: IterableWrapper([{}]).map(row), "begins with IterableWrapper, which has no shards"),
    "members filtered": (
        lambda: urls().load_wds_shards().filter(jpegs_only).group_by_key(),
        "Filter stands between load_wds_shards and group_by_key",
    ),
    "select is a function": (
        lambda: urls().load_wds_shards(select=jpegs_only).group_by_key(),
        "a function in ShardLoader may draw random numbers",
    ),
    "rename is a function": (
        lambda: urls().load_wds_shards(rename=renamed).group_by_key(),
        "a function in ShardLoader may draw random numbers",
    ),
    "keys is a function": (
        lambda: urls().load_wds_shards().group_by_key(keys=key_and_field),
        "a function in KeyGrouper may draw random numbers",
    ),
    "shards mapped by a function": (
        lambda: urls().map(renamed).load_wds_shards().group_by_key(),
        "a function in Mapper may draw random numbers",
    ),
    "shards by somebody else": (
        lambda: Foreign(urls()).load_wds_shards().group_by_key(),
        "Foreign comes before load_wds_shards",
    ),
    "shards cycled": (lambda: urls().cycle(2).load_wds_shards().group_by_key(), "Cycler comes before load_wds_shards"),
    "opened shards": (
        lambda: urls().open_files("b").load_wds_shards().group_by_key(),
        "FileOpener comes before load_wds_shards",
    ),
    "shards from a generator": (
        lambda: IterableWrapper(iter(["a.tar"]), deepcopy=False).load_wds_shards().group_by_key(),
        "the shards come from an object of type list_iterator",
    ),
}


@pytest.mark.parametrize("build", SKIPPED.values(), ids=SKIPPED)
def test_chain_has_no_obstacle_when_items_can_be_counted(build: Callable[[], Any]) -> None:
    """Listed stages behind the grouping, sources that cost nothing before the loader."""
    chain = find_chain(build())
    assert chain.obstacle is None
    assert chain.grouper is not None


@pytest.mark.parametrize(("build", "obstacle"), OBSTACLES.values(), ids=OBSTACLES)
def test_chain_names_the_stage_when_items_cannot_be_counted(build: Callable[[], Any], obstacle: str) -> None:
    """The one nearest to the end, and what about it."""
    found = find_chain(build()).obstacle
    assert found is not None
    assert obstacle in found


@pytest.mark.parametrize(
    ("build", "draws"),
    [
        (samples, False),
        (lambda: samples().wds_shuffle(3).wds_decode("pil").wds_to_tuple("a").batch(2).collate(wds_collate), False),
        (lambda: samples().wds_map_dict(cls=int).map(operator.itemgetter("cls")), False),
        (lambda: samples().wds_decode(handler=kept), False),
        (lambda: samples().map(augment), True),
        (lambda: samples().wds_map_dict(jpg=kept), True),
        (lambda: samples().map(functools.partial(operator.add, kept)), True),
        (lambda: samples().wds_compose(passed_on), True),
        (lambda: Foreign(samples()), True),
        (lambda: samples().zip(Foreign(samples())), True),
        (lambda: samples().collate(kept), True),
        (lambda: samples().map(torch.nn.Dropout(0.5)), True),
    ],
)
def test_chain_tells_when_a_stage_may_draw(build: Callable[[], Any], draws: bool) -> None:
    """Functions and pipes of somebody else may draw from the global generators; handlers are not asked per item."""
    assert find_chain(build()).draws is draws


class Jitter:
    """A function with a random generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, item: Any) -> Any:
        return item


@pytest.mark.parametrize(
    "generator",
    [random.Random(1), np.random.default_rng(1), np.random.RandomState(1), torch.Generator()],
    ids=["random", "numpy", "old numpy", "torch"],
)
def test_chain_tells_when_a_function_has_a_generator_of_its_own(generator: Any) -> None:
    """Of any kind; functions without one are not named."""
    jitter = Jitter(generator)
    assert find_chain(samples().map(jitter).wds_map_dict(txt=kept).wds_map(row)).private == ["Mapper"]
    assert find_chain(samples().wds_map(jitter).filter(jitter)).private == ["Filter", "WdsMapper"]


@pytest.mark.parametrize(
    ("build", "follows", "ratio"),
    [
        (lambda: samples().wds_epoch(3), True, False),
        (lambda: samples().batch(2).wds_epoch(3).map(row), True, True),
        (lambda: samples().wds_epoch(3).wds_shuffle(3), False, False),
        (lambda: samples().wds_shuffle(3).batch(2), False, True),
    ],
)
def test_chain_tells_what_makes_an_item(build: Callable[[], Any], follows: bool, ratio: bool) -> None:
    """Whether each item begins with wds_epoch, which seeds the generators for each of its own; and batches."""
    chain = find_chain(build())
    assert (chain.follows_epoch, chain.ratios != (1, 1)) == (follows, ratio)


@pytest.mark.parametrize(
    ("pipe", "name"),
    [
        (samples(), "KeyGrouper"),
        (urls().map(kept), "Mapper"),
        (urls().split_shards().source_datapipe, "ShardingFilter"),
    ],
)
def test_short_name_is_the_one_that_people_know(pipe: Any, name: str) -> None:
    """Without what torch's classes all end with, and without an underscore."""
    assert short_name(pipe) == name


# --------------------------------------------------------------------------------------------- streams begin in it
def seed_graph(datapipe: Any, seeds: Seeds, _: int) -> None:
    for number, pipe in enumerate(get_all_graph_pipes(traverse_dps(datapipe))):
        if hasattr(type(pipe), "set_seed"):
            pipe.set_seed(mix(seeds[0], number))


def seeds_of(epoch: int) -> Seeds:
    return mix(1, epoch), mix(2, epoch)


class Run:
    """A graph that runs in this process from epoch to epoch, as a reading service does it."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.local = LocalIterDataPipe(pipe, seed=seed_graph, keeps_apart=False)
        self.local.streams = Streams(1, continues=bool(find_chain(pipe).epochs))

    def epoch(self, number: int) -> Iterator[Any]:
        self.local.begin(seeds_of(number), self.local.streams)
        yield from self.local
        self.local.wait_for_facts()
        self.local.streams = self.local.streams.next_epoch()

    def packed(self, taken: int) -> Any:
        self.local.wait_for_facts()
        return json.loads(json.dumps(pack_streams(self.pipe, self.local.streams, taken)))

    def resume(self, packed: Any, epoch: int) -> Run:
        self.local.streams = unpack_streams(self.pipe, packed, seeds_of(0), epoch + 1)
        return self


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chains")


@pytest.fixture(scope="module")
def shards(folder: Path) -> list[list[str]]:
    """Sets of shards: uneven ones, many that are tiny, indexed ones."""
    sets = [(9, 6, 3, 0, 5, 7), (1, 0, 2, 1, 0, 0, 1, 1, 2, 1) * 2, (8, 8, 0, 9)]
    found = [shards_in(folder / str(number), sizes) for number, sizes in enumerate(sets)]
    for url in found[2]:
        index_shard(url)
    return found


def random_graph(draw: random.Random, given: list[str]) -> Any:
    """A chain of listed stages in any order, mostly with a wds_epoch somewhere."""
    pipe: Any = IterableWrapper(given).shuffle().sharding_filter().load_wds_shards().group_by_key()
    has_epoch = draw.random() < 0.3
    has_rows = False
    for _ in range(draw.randrange(1, 6)):
        kind = draw.choice(["shuffle", "augment", "batch", "epoch", "decode"])
        if kind == "shuffle":
            pipe = pipe.wds_shuffle(draw.choice([0, 3, 7, 20]), initial=draw.choice([0, 2, 9]))
        elif kind == "epoch" and not has_epoch:
            pipe = pipe.wds_epoch(draw.choice([4, 9, 23, 50]))
            has_epoch = True
        elif kind == "batch" and has_rows:
            pipe = pipe.batch(draw.choice([1, 3, 4]), drop_last=draw.random() < 0.3)
        elif kind in ("decode", "augment") and not has_rows:
            pipe = pipe.wds_decode() if kind == "decode" else pipe.map(augment).map(row)
            has_rows = kind == "augment"
    return pipe


@pytest.mark.parametrize("most_bytes", [6000, 0], ids=["marks kept", "marks thinned"])
@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_stream_is_exact_when_it_begins_anywhere(
    first: int, most_bytes: int, shards: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random chains of stages, cut at random: what is left of the epoch, and the next one."""
    monkeypatch.setattr(packed_facts, "_MOST_BYTES", most_bytes)
    monkeypatch.setattr(streams, "_SEEDED_ITEMS", 8)
    for seed in range(first, first + (5 if first == 0 else 30)):
        given = shards[seed % 3]
        draw = random.Random(seed)
        begun = draw.getstate()
        run = Run(random_graph(draw, given))
        epoch = draw.randrange(3)
        whole = [list(run.epoch(number)) for number in range(epoch + 2)]
        cut = draw.randrange(len(whole[epoch]) + 1)

        def build(state: Any = begun, given: list[str] = given) -> Run:
            again = random.Random()
            again.setstate(state)
            return Run(random_graph(again, given))

        run = build()
        for number in range(epoch):
            assert list(run.epoch(number)) == whole[number]
        iterator = run.epoch(epoch)
        found = [next(iterator) for _ in range(cut)]
        resumed = build().resume(run.packed(cut), epoch)
        assert (seed, found + list(resumed.epoch(epoch))) == (seed, whole[epoch])
        assert (seed, list(resumed.epoch(epoch + 1))) == (seed, whole[epoch + 1])


def batches_shuffled(given: list[str]) -> Any:
    pipe = IterableWrapper(given).shuffle().sharding_filter().load_wds_shards().group_by_key().wds_shuffle(4)
    return pipe.wds_decode().batch(2).wds_shuffle(5, initial=2).map(kept).batch(2)


def test_stream_is_exact_when_batches_are_shuffled(shards: list[list[str]]) -> None:
    """What a buffer of batches holds is wanted of the samples, batch by batch."""
    whole = list(Run(batches_shuffled(shards[0])).epoch(0))
    for cut in (1, 3, 5, 7):
        run = Run(batches_shuffled(shards[0]))
        iterator = run.epoch(0)
        found = [next(iterator) for _ in range(cut)]
        assert found + list(Run(batches_shuffled(shards[0])).resume(run.packed(cut), 0).epoch(0)) == whole


def test_stream_makes_items_again_when_the_pass_is_not_known(
    shards: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """A buffer behind wds_epoch that holds items of several passes: a warning says so, and what is left is exact."""
    pipe = functools.partial(lambda: IterableWrapper(shards[1][:4]).load_wds_shards().group_by_key())
    expected = list(Run(pipe().wds_epoch(40).wds_shuffle(15).map(row)).epoch(0))
    run = Run(pipe().wds_epoch(40).wds_shuffle(15).map(row))
    iterator = run.epoch(0)
    found = [next(iterator) for _ in range(20)]
    resumed = Run(pipe().wds_epoch(40).wds_shuffle(15).map(row)).resume(run.packed(20), 0)
    assert found + list(resumed.epoch(0)) == expected
    assert "worker 0 makes 20 items again: where their pass began is not known" in caplog.text


def test_states_refuse_when_there_are_several_epochs() -> None:
    """Where each of two wds_epoch is in its stream cannot be told from the items of the last one."""
    pipe = samples().wds_epoch(9).wds_epoch(3)
    with pytest.raises(RuntimeError, match=r"several \.wds_epoch\(\)"):
        pack_streams(pipe, Streams(1, continues=True), 0)
