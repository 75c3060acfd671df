"""What may not stand before or after an order, and states that it does not resume from."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits import order_kit
from tests.kits.order_kit import SEED, Shards, key_of, sent
from tests.kits.resume_kit import plain as streamed
from tests.kits.workers_kit import FRONTS_QUICK, loader_of
from torchdata_wds import DivisionError, WdsLoader
from torchdata_wds.errors import ShardListError
from torchdata_wds.workers.resume.checkpoints import Checkpoint

SIZES = (5, 0, 3, 7)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return order_kit.shards_in(tmp_path_factory.mktemp("refusals"), SIZES)


def pairs(items: Any) -> Any:
    return items


def is_any(_: Any) -> bool:
    return True


# ---------------------------------------------------------------------------------------------------------- after it
#: Stages that may yield more, fewer or other items than they take, with the name to be told, and the form to use.
AFTER: dict[str, tuple[Callable[[Any, Any], Any], str, str]] = {
    "filter": (lambda pipe, _: pipe.filter(is_any), "filter", r"\.wds_map\(f\).* None"),
    "shuffle": (lambda pipe, _: pipe.shuffle(), "shuffle", "drop it.*run=1"),
    "wds_shuffle": (lambda pipe, _: pipe.wds_shuffle(9), "wds_shuffle", "drop it.*run=1"),
    "flatmap": (lambda pipe, _: pipe.flatmap(list), "flatmap", r"\.map\(f\)"),
    "unbatch": (lambda pipe, _: pipe.batch(2).unbatch(), "unbatch", r"drop it, and the \.batch"),
    "wds_unbatch": (lambda pipe, _: pipe.batch(2).wds_unbatch(), "wds_unbatch", r"drop it, and the \.batch"),
    "zip": (lambda pipe, other: pipe.zip(other), "zip", r"\.map\(f\)"),
    "concat": (lambda pipe, other: pipe.concat(other), "concat", r"\.map\(f\)"),
    "mux": (lambda pipe, other: pipe.mux(other), "mux", "IndexedMix"),
    "wds_mix": (lambda pipe, other: pipe.wds_mix(other, stop="all"), "wds_mix", "IndexedMix"),
    "wds_epoch": (lambda pipe, _: pipe.wds_epoch(4), "wds_epoch", r"limit\(n\)"),
    "sharding_filter": (lambda pipe, _: pipe.sharding_filter(), "sharding_filter", "drop it"),
    "batch in the main process": (lambda pipe, _: pipe.join_workers().batch(2), "batch", r"before \.join_workers"),
    "cache_samples": (lambda pipe, _: pipe.cache_samples("x.db"), "cache_samples", "drop it.*cache="),
    "prefetch": (lambda pipe, _: pipe.prefetch(2), "prefetch", "drop it.*read_ahead="),
    "wds_compose": (lambda pipe, _: pipe.wds_compose(pairs), "wds_compose", r"\.map\(f\)"),
    "enumerate": (lambda pipe, _: pipe.enumerate(), "enumerate", r"\.map\(f\)"),
    "cycle": (lambda pipe, _: pipe.cycle(2), "cycle", r"\.map\(f\)"),
    "further down": (lambda pipe, _: pipe.filter(is_any).map(key_of).batch(2).join_workers(), "filter", "wds_map"),
}


@pytest.mark.parametrize("front", FRONTS_QUICK)
@pytest.mark.parametrize("name", AFTER)
def test_stage_after_the_order_is_refused_by_name(shards: Shards, name: str, front: str) -> None:
    """At the first iteration, with the form to use instead."""
    after, told, cure = AFTER[name]
    loader = loader_of(after(shards.pipe(), shards.pipe()), 2, front=front)
    with pytest.raises(ValueError, match=rf"^{told} .* cannot follow load_in_order.*Instead, .*{cure}"):
        iter(loader)


def test_second_filter_is_an_error_elsewhere(shards: Shards) -> None:
    """It would lose samples: torch's DataLoader refuses it, and so does the order if nothing else does."""
    pipe = shards.pipe().sharding_filter()
    with pytest.raises(DivisionError, match=r"load_in_order divides its samples .* Drop \.sharding_filter\(\)"):
        next(iter(pipe))
    with pytest.raises(RuntimeError, match="Sharding twice"):
        next(iter(DataLoader(pipe, batch_size=None)))


# --------------------------------------------------------------------------------------------------------- before it
BEFORE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shuffle": (lambda urls: urls.shuffle(), "drop it.*shuffles all samples"),
    "wds_shuffle": (lambda urls: urls.wds_shuffle(9), "drop it.*shuffles all samples"),
    "sharding_filter": (lambda urls: urls.sharding_filter(), "drop it.*divides the samples"),
    "split_shards": (lambda urls: urls.split_shards(), "drop it.*divides the samples"),
    "resample_shards": (lambda urls: urls.resample_shards(9), "drop it.*divides the samples"),
    "load_in_order": (lambda urls: urls.load_in_order(), "drop it.*divides the samples"),
    "cache_shards": (lambda urls: urls.cache_shards("cache"), r"write load_in_order\(cache=folder\)"),
    "join_workers": (lambda urls: urls.join_workers(), "put it after"),
    "cycle": (lambda urls: urls.cycle(), "drop it.*each iteration is an epoch"),
}


@pytest.mark.parametrize("name", BEFORE)
@pytest.mark.parametrize("is_next", [True, False])
def test_stage_before_the_order_is_refused_by_name(name: str, is_next: bool) -> None:
    """When the graph is built."""
    before, cure = BEFORE[name]
    pipe = before(IterableWrapper(["a.tar"]))
    with pytest.raises(ValueError, match=f"^{name} cannot come before load_in_order: {cure}"):
        (pipe if is_next else pipe.map(str)).load_in_order()


@pytest.mark.parametrize("stage", ["load_wds_shards", "list"])
def test_items_other_than_urls_are_refused(shards: Shards, stage: str) -> None:
    """By the form that they should come through."""
    urls = IterableWrapper([shards.urls]) if stage == "list" else IterableWrapper(shards.urls).load_wds_shards()
    with pytest.raises(ShardListError, match=r"it takes URLs .* go through \.list_shards\(\) first"):
        next(iter(urls.load_in_order(index=shards.index)))


# ------------------------------------------------------------------------------------------------------------ states
def batches(shards: Shards, **options: Any) -> Any:
    return shards.pipe(**{"run": 2, **options}).map(key_of).batch(2)


def state_of(graph: Any, count: int = 2, **options: Any) -> Any:
    """The state of a loader that has delivered so many items."""
    with WdsLoader(graph, 0, **options) as loader:
        iterator = iter(loader)
        for _ in range(count):
            next(iterator)
        return sent(loader.state_dict())


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "run": ({"run": 1}, {"seed": SEED}, "shards, index, or run= and shuffle="),
    "shuffle": ({"shuffle": False}, {"seed": SEED}, "shards, index, or run= and shuffle="),
    "seed of the loader": ({}, {"seed": 6}, f"seed: {SEED} then, 6 now"),
    "seed of the order": ({"seed": 7}, {"seed": SEED}, f"seed: {SEED} then, 7 now"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_state_of_another_order_is_refused(shards: Shards, name: str) -> None:
    """With what differs; the loader then resumes from the right state."""
    graph, options, difference = OTHERS[name]
    state = state_of(batches(shards), seed=SEED)
    rest = shards.order(run=2)[4:]
    with WdsLoader(batches(shards, **graph), 0, **options) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match=f"belongs to a different run.*Differences: {difference}"):
            iter(loader)
        assert loader.state_dict() == state
        own = state_of(batches(shards, **graph), **options)
        loader.load_state_dict(own)
        assert [key for batch in loader for key in batch] != rest


def test_state_of_other_shards_is_refused(shards: Shards, tmp_path: Path) -> None:
    """Though there are as many, of the same sizes."""
    other = order_kit.shards_in(tmp_path, SIZES[::-1])
    with WdsLoader(batches(other), 0, seed=SEED) as loader:
        loader.load_state_dict(state_of(batches(shards), seed=SEED))
        with pytest.raises(ValueError, match="Differences: shards, index"):
            iter(loader)


def test_state_fits_shards_that_have_moved(shards: Shards, tmp_path: Path) -> None:
    """To another folder."""
    moved = order_kit.shards_in(tmp_path / "moved", SIZES)
    with WdsLoader(batches(moved), 0, seed=SEED) as loader:
        loader.load_state_dict(state_of(batches(shards), seed=SEED))
        assert [key for batch in loader for key in batch] == shards.order(run=2)[4:]


@pytest.mark.parametrize("is_reverse", [False, True])
def test_state_of_a_graph_of_the_other_kind_is_refused(shards: Shards, is_reverse: bool) -> None:
    """A position in an order for a graph that has none, and the reverse."""
    graphs = [batches(shards), streamed(shards.urls)]
    first, second = reversed(graphs) if is_reverse else graphs
    with WdsLoader(second, 0, seed=SEED) as loader:
        loader.load_state_dict(state_of(first, seed=SEED))
        told = "a graph without" if is_reverse else "a graph with"
        with pytest.raises(ValueError, match=f"it is that of {told} load_in_order"):
            iter(loader)


BAD_NUMBERS = (-1, True, 2.0, math.nan, "3", None, [1])
DAMAGED = [
    *[{"position": value} for value in BAD_NUMBERS],
    *[{"epoch": value} for value in BAD_NUMBERS],
    *[{"seed": value} for value in BAD_NUMBERS if value is not None],
    *[{"seed": 2**64}],
    *[{"index": value} for value in (None, 3, b"x", ["x"])],
    *[{"version": value} for value in (1, 3, None, "2")],
]


@pytest.mark.parametrize("damage", DAMAGED, ids=str)
def test_damaged_state_is_refused_before_anything_is_lost(shards: Shards, damage: dict[str, Any]) -> None:
    """The running iterator goes on."""
    with WdsLoader(batches(shards), 0, seed=SEED) as loader:
        iterator = iter(loader)
        begun = next(iterator)
        with pytest.raises(ValueError, match="state"):
            loader.load_state_dict({**state_of(batches(shards), seed=SEED), **damage})
        assert begun + [key for batch in iterator for key in batch] == shards.order(run=2)


@pytest.mark.parametrize("name", ["index", "epoch", "position", "seed"])
def test_state_without_a_key_is_refused(shards: Shards, name: str) -> None:
    """Each of them is needed."""
    state = state_of(batches(shards), seed=SEED)
    del state[name]
    with WdsLoader(batches(shards), 0, seed=SEED) as loader, pytest.raises(ValueError, match=f"{name!r}"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("position", [16, 10**9, 2**64, 10**40])
def test_position_behind_the_end_is_refused(shards: Shards, position: int) -> None:
    """By a state, and by seek."""
    state = {**state_of(batches(shards), seed=SEED), "position": position}
    with WdsLoader(batches(shards), 0, seed=SEED) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match=f"position: {position:,}, and an epoch has 15 samples now"):
            iter(loader)
        loader.seek(position)
        with pytest.raises(ValueError, match=f"cannot seek position {position:,}: an epoch has 15 samples"):
            iter(loader)
        loader.seek(14)
        assert [key for batch in loader for key in batch] == shards.order(run=2)[14:]


@pytest.mark.parametrize(
    "order",
    [
        [],
        ["x"],
        ["x", 1],
        [3, 1, 1],
        ["x", -1, 1],
        ["x", True, 1],
        ["x", 1, -1],
        ["x", 1, 1.0],
        ["x", 1, 1, 1],
        3,
        "xyz",
    ],
    ids=str,
)
def test_damaged_state_of_the_service_is_refused(order: Any) -> None:
    """As one of a WdsLoader."""
    checkpoint = Checkpoint({}, 1, True, None, None, None, order)
    with pytest.raises(ValueError, match="not a state of torchdata_wds"):
        Checkpoint.load(checkpoint.dump())


@pytest.mark.parametrize("position", [-1, True, 1.0, "3", None])
def test_seek_refuses_what_is_not_a_position(shards: Shards, position: Any) -> None:
    """Without moving."""
    with WdsLoader(batches(shards), 0, seed=SEED) as loader:
        next(iter(loader))
        with pytest.raises((TypeError, ValueError), match="position must be"):
            loader.seek(position)
        assert loader.position == 2


def test_position_and_seek_need_an_order(shards: Shards) -> None:
    """They say so."""
    with WdsLoader(streamed(shards.urls), 0) as loader:
        with pytest.raises(TypeError, match="position needs a graph that begins with load_in_order"):
            _ = loader.position
        with pytest.raises(TypeError, match=r"seek.* needs a graph that begins with load_in_order"):
            loader.seek(3)


def test_two_orders_may_be_zipped_under_a_plain_loader(shards: Shards) -> None:
    """Both divide their samples alike: each has its own filter, and neither divides those of the other."""
    left, right = (shards.pipe(seed=1).map(key_of) for _ in range(2))
    pairs = map(tuple, DataLoader(left.zip(right), None, num_workers=2))
    assert sorted(pairs) == sorted(zip(shards.keys, shards.keys, strict=True))
