"""StatefulPipeline over a global order: exact under StatefulDataLoader, and a position for any other grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kits import order_kit
from tests.kits.order_kit import Grid, Job, Shards, by_position, flat, key_of, sent
from tests.kits.torchdata import StatefulDataLoader
from torchdata_wds import StatefulPipeline
from torchdata_wds.workers.resume.worker_order import states_in

# StatefulDataLoader calls a function of torch that warns; and the workers of a test may be more than the cores.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

RUN = 4


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return order_kit.shards_in(tmp_path_factory.mktemp("order"), (7, 0, 20, 1, 15))


class Holder:
    """Keeps a state under one key, as trainers do that save with torch.distributed.checkpoint."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"data": self.held.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.held.load_state_dict(state_dict["data"])


def as_it_is(item: Any) -> Any:
    return item


def ended(*iterators: Any) -> None:
    """Ends the workers of loaders now: garbage collection would wait 5 seconds for each of them."""
    for items in iterators:
        for _ in items:
            pass


def keys_in(items: Any) -> list[str]:
    """The keys in items, which may be batches, or batches of those."""
    return [items] if isinstance(items, str) else [key for item in items for key in keys_in(item)]


def loader_of(
    shards: Shards,
    workers: int,
    *,
    loader_batch: int | None = None,
    batch: int = 0,
    block: int = 1,
    ranks: tuple[int, int] = (0, 1),
    sought: tuple[int, int] | None = None,
    **options: Any,
) -> Any:
    """A StatefulDataLoader whose graph, or which itself, makes batches."""
    pipe = shards.pipe(run=RUN, block=block, **options).map(key_of)
    pipeline = StatefulPipeline(pipe.batch(batch) if batch else pipe, seed=order_kit.SEED, ranks=ranks)
    if sought is not None:
        pipeline.seek(sought[1], epoch=sought[0])
    return StatefulDataLoader(pipeline, batch_size=loader_batch, num_workers=workers, collate_fn=as_it_is)


BATCHED: list[dict[str, Any]] = [{}, {"batch": 5}, {"loader_batch": 5, "block": 5}, {"loader_batch": 5}]


@pytest.mark.parametrize(
    ("workers", "options"), [*((0, options) for options in BATCHED), *((2, one) for one in BATCHED[1:])]
)
def test_stateful_order_resumes_in_the_middle_of_an_epoch(
    shards: Shards, workers: int, options: dict[str, Any]
) -> None:
    """Exactly, whoever makes the batches; the length is right, and the order is that of the job where blocks fit."""
    order = shards.order(run=RUN)
    whole = list(loader_of(shards, workers, **options))
    loader = loader_of(shards, workers, **options)
    assert len(loader) == len(whole)
    assert sorted(keys_in(whole)) == sorted(order)
    is_in_order = workers == 0 or "loader_batch" not in options or "block" in options
    assert (keys_in(whole) == order) == is_in_order
    items = iter(loader)
    begun = [next(items) for _ in range(4)]
    state = loader.state_dict()
    ended(items)
    again = loader_of(shards, workers, **options)
    again.load_state_dict(state)
    assert begun + list(again) == whole
    if is_in_order:
        assert StatefulPipeline.position_in(state) == (0, len(keys_in(begun)))


@pytest.mark.slow
def test_stateful_order_goes_on_with_other_numbers(shards: Shards) -> None:
    """By the position in its state: 2 ranks of 2 workers stop, and 3 ranks of one worker go on, then one WdsLoader."""
    order = shards.order(run=RUN)
    loaders = [loader_of(shards, 2, batch=3, ranks=(rank, 2)) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    begun = flat(next(items) for _ in range(3) for items in iterators)
    states = [sent(json.loads(json.dumps(loader.state_dict(), default=str))) for loader in loaders]
    place = StatefulPipeline.position_in(states[0])
    assert [StatefulPipeline.position_in(state) for state in states] == [place, place] == [(0, 18)] * 2
    assert begun == order[:18]
    ended(*iterators)

    loaders = [loader_of(shards, 1, batch=2, ranks=(rank, 3), sought=place) for rank in range(3)]
    iterators = [iter(loader) for loader in loaders]
    begun += flat(next(items) for _ in range(2) for items in iterators)
    state = loaders[2].state_dict()
    epoch, position = StatefulPipeline.position_in(state)
    assert (epoch, position) == (0, 30)
    ended(*iterators)

    plain = next(states_in(state))
    rest = by_position(Job(lambda batch: shards.pipe(run=RUN).map(key_of).batch(batch), Grid(batch=4), plain).epoch())
    assert begun + flat(rest) == order


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("is_alone", [pytest.param(True, marks=pytest.mark.slow), False])
def test_stateful_order_resumes_from_a_distributed_checkpoint(shards: Shards, tmp_path: Path, is_alone: bool) -> None:
    """Such a checkpoint loads only the keys that the new object's state already has."""
    from torch.distributed import checkpoint  # takes more than a second

    loaders = [loader_of(shards, 0, batch=4) for _ in range(2)]
    first, again = (Holder(loader.dataset if is_alone else loader) for loader in loaders)
    items = iter(first.held)
    for _ in range(3):
        next(items)
    checkpoint.save({"loader": first}, checkpoint_id=tmp_path)
    checkpoint.load({"loader": again}, checkpoint_id=tmp_path)
    assert list(again.held) == list(items)


def test_stateful_order_begins_with_the_state_of_one_that_has_not_begun(shards: Shards) -> None:
    """It changes nothing, not even where the next epoch is to begin."""
    pipeline, other = (StatefulPipeline(shards.pipe(run=RUN).map(key_of), seed=order_kit.SEED) for _ in range(2))
    pipeline.load_state_dict(other.state_dict())
    assert list(pipeline) == shards.order(run=RUN)
    other.seek(9, epoch=3)
    other.load_state_dict(sent(other.state_dict()))
    assert list(other) == shards.order(run=RUN, epoch=3)[9:]


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_order_seeks_once(shards: Shards, workers: int) -> None:
    """The next epoch is whole, and has its own order."""
    loader = loader_of(shards, workers, batch=4, sought=(2, 12))
    assert keys_in(loader) == shards.order(run=RUN, epoch=2)[12:]
    assert keys_in(loader) == shards.order(run=RUN, epoch=3)


@pytest.mark.slow
def test_stateful_order_counts_epochs_after_resuming(shards: Shards) -> None:
    """Without persistent workers; a state at the end of an epoch gives nothing more of it."""
    loader = loader_of(shards, 2, batch=4)
    list(loader)
    items = iter(loader)
    next(items)
    state = loader.state_dict()
    ended(items)
    again = loader_of(shards, 2, batch=4)
    again.load_state_dict(state)
    assert keys_in(again) == shards.order(run=RUN, epoch=1)[4:]
    assert keys_in(again) == shards.order(run=RUN, epoch=2)


def test_stateful_order_refuses_a_state_of_other_steps(shards: Shards) -> None:
    """A worker's state says only where that worker is."""
    loader = loader_of(shards, 2, batch=3)
    items = iter(loader)
    next(items)
    state = loader.state_dict()
    ended(items)
    pipeline = StatefulPipeline(shards.pipe(run=RUN).map(key_of).batch(4), seed=order_kit.SEED)
    pipeline.load_state_dict(next(states_in(state)))
    with pytest.raises(ValueError, match="one of several workers, in steps of 3 samples"):
        list(pipeline)


def test_stateful_order_refuses_blocks_that_cut_items(shards: Shards) -> None:
    """Each block holds whole batches."""
    with pytest.raises(ValueError, match="block=5 of load_in_order must be a multiple of the 3 samples"):
        list(loader_of(shards, 0, batch=3, block=5))


def test_stateful_order_has_no_state_inside_a_block(shards: Shards) -> None:
    """With several ranks, the samples of a block come one after the other on one of them."""
    pipeline = StatefulPipeline(shards.pipe(run=RUN, block=4).map(key_of), seed=1, ranks=(1, 2))
    items = iter(pipeline)
    next(items)
    with pytest.raises(RuntimeError, match="in the middle of a block of 4 samples, after 1 of them"):
        pipeline.state_dict()
    for _ in range(3):
        next(items)
    assert pipeline.state_dict()["position"] == 8


def test_stateful_order_skips_without_moving_the_rest(shards: Shards) -> None:
    """A sample that a function drops makes its batch shorter, and states count it."""
    order = shards.order(run=RUN)
    dropped = set(order[1:20:3])

    def graph() -> StatefulPipeline:
        kept = shards.pipe(run=RUN).map(key_of).wds_map(lambda key: None if key in dropped else key)
        return StatefulPipeline(kept.batch(2), seed=order_kit.SEED)

    pipeline = graph()
    items = iter(pipeline)
    begun = [next(items) for _ in range(6)]
    assert begun == [[key for key in order[first : first + 2] if key not in dropped] for first in range(0, 12, 2)]
    again = graph()
    again.load_state_dict(sent(pipeline.state_dict()))
    assert flat(begun) + flat(again) == [key for key in order if key not in dropped]


def test_position_in_refuses_other_states() -> None:
    """A state without a global order has no position."""
    with pytest.raises(ValueError, match="not the state of a loader whose graph begins with load_in_order"):
        StatefulPipeline.position_in({"_snapshot": {"item": 3}})
