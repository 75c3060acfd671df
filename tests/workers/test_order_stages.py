"""What follows an order: nested batches, random functions, samples that are skipped; and where a loader is in it."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe

from tests.kits import order_kit
from tests.kits.order_kit import (
    SEED,
    Grid,
    Job,
    Shards,
    by_position,
    drawn,
    flat,
    key_of,
    local_workers,
    sent,
    share_of,
)
from tests.kits.workers_kit import FRONTS, loader_of, resumed_loader
from torchdata_wds import ShardFormatError, WdsLoader, ignore_and_continue, ignore_and_stop, wds_collate
from torchdata_wds.workers.lightning import Position, checkpoint_at
from torchdata_wds.workers.resume import signatures
from torchdata_wds.workers.resume.checkpoints import Checkpoint

SIZES = (9, 0, 14, 3, 6)

GRIDS = [Grid(1, 0, 4), Grid(2, 3, 4), Grid(3, 1, 5), Grid(4, 2, 1), Grid(1, 4, 7)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return order_kit.shards_in(tmp_path_factory.mktemp("stages"), SIZES)


@pytest.fixture(scope="module", autouse=True)
def _in_this_process() -> Iterator[None]:
    with local_workers():
        yield


def batches(shards: Shards, batch: int = 4, **options: Any) -> Any:
    return shards.pipe(run=2, **options).map(key_of).batch(batch)


# ------------------------------------------------------------------------------------------------ where the loader is
@pytest.mark.parametrize("workers", [0, 3])
def test_position_counts_the_samples_of_all_ranks(shards: Shards, workers: int) -> None:
    """From 0 between epochs to all of them at the end."""
    with WdsLoader(batches(shards), workers, seed=SEED, ranks=(1, 2)) as loader:
        assert loader.position == 0
        found = []
        for batch in loader:
            found.append((len(batch), loader.position))
        assert found == [(4, 8), (4, 16), (4, 24), (4, 32)]
        assert loader.position == 0
        next(iter(loader))
        assert loader.position == 8
        assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("position", [0, 7, 32])
def test_seek_begins_anywhere(shards: Shards, position: int, workers: int) -> None:
    """In the next epoch before the first and between two, in the running one after an early end; also with no seed."""
    order = partial(shards.order, run=2)
    with WdsLoader(batches(shards), workers, seed=SEED) as loader:
        loader.seek(position)
        assert loader.position == position
        assert flat(loader) == order()[position:]
        loader.seek(position)
        assert flat(loader) == order(epoch=1)[position:]
        iterator = iter(loader)
        next(iterator)
        loader.seek(position)
        assert loader.position == position
        with pytest.raises(RuntimeError, match="loaded a state"):
            next(iterator)
        assert flat(loader) == order(epoch=2)[position:]
        assert flat(loader) == order(epoch=3)
    with WdsLoader(batches(shards), workers) as loader:
        first = flat([next(iter(loader))])
        loader.seek(2)
        again = flat(loader)
        assert again[:2] == first[2:]
        assert {*again, *first} == {*shards.keys}


def test_seek_and_set_epoch_agree(shards: Shards) -> None:
    """Whichever is called first; another epoch drops the position, with a warning."""
    with WdsLoader(batches(shards), 0, seed=SEED) as loader:
        loader.set_epoch(4)
        loader.seek(5)
        assert loader.state_dict()["epoch"] == 4
        assert flat(loader) == shards.order(run=2, epoch=4)[5:]
        loader.seek(6)
        loader.set_epoch(5)
        assert flat(loader) == shards.order(run=2, epoch=5)[6:]
        next(iter(loader))
        loader.set_epoch(9)
        loader.seek(3)
        assert flat(loader) == shards.order(run=2, epoch=9)[3:]


@pytest.mark.parametrize("epoch", [1, 3, 5])
def test_set_epoch_drops_a_position_with_a_warning(
    shards: Shards, epoch: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The seed of the state stays, though the loader has none."""
    with WdsLoader(batches(shards), 0) as loader:
        loader.load_state_dict({"version": 2, "index": "", "seed": 77, "epoch": 2, "position": 5})
        loader.set_epoch(epoch)
        assert flat(loader) == shards.order(run=2, epoch=epoch, seed=77)
    assert f"that position is dropped, and epoch {epoch} begins with its first item" in caplog.text


def test_position_at_the_end_of_an_epoch_is_the_next_one(shards: Shards) -> None:
    """For a trainer that never asks for the end, and sets the epoch."""
    with WdsLoader(batches(shards), 2, seed=SEED) as loader, WdsLoader(batches(shards), 0, seed=SEED) as other:
        iterator = iter(loader)
        for _ in range(8):
            next(iterator)
        state = sent(loader.state_dict())
        assert state["position"] == len(shards.keys)
        other.load_state_dict(state)
        other.set_epoch(1)
        assert flat(other) == shards.order(run=2, epoch=1)
        other.load_state_dict(state)
        assert list(other) == []
        assert flat(other) == shards.order(run=2, epoch=1)


@pytest.mark.parametrize("seed", [SEED, None])
def test_states_have_the_same_keys_at_every_moment(shards: Shards, seed: int | None) -> None:
    """A distributed checkpoint loads only the keys that the state of a loader which has not begun has too."""
    with WdsLoader(batches(shards), 2, seed=seed) as loader, WdsLoader(batches(shards), 0, seed=seed) as other:
        states = [loader.state_dict()]
        for _ in range(2):
            iterator = iter(loader)
            states.append(loader.state_dict())
            next(iterator)
            states.append(loader.state_dict())
            list(iterator)
            states.append(loader.state_dict())
        loader.set_epoch(7)
        assert {tuple(state) for state in states} == {("version", "index", "seed", "epoch", "position")}
        assert states[0] == {"version": 2, "index": "", "seed": None, "epoch": 0, "position": 0}
        other.load_state_dict(states[0])
        assert sorted(flat(other)) == sorted(shards.keys)
    with WdsLoader(batches(shards), 0, seed=SEED) as loader:
        loader.set_epoch(7)
        other = WdsLoader(batches(shards), 0, seed=SEED)
        other.load_state_dict(loader.state_dict())
        assert flat(other) == shards.order(run=2, epoch=7)


def test_fresh_iterator_does_not_move(shards: Shards) -> None:
    """As frameworks begin one before they load a state."""
    with WdsLoader(batches(shards), 2, seed=SEED) as loader:
        iter(loader)
        assert loader.state_dict()["position"] == 0
        loader.load_state_dict({**loader.state_dict(), "position": 5})
        iter(loader)
        assert loader.position == 5
        assert flat(loader) == shards.order(run=2)[5:]
        assert flat(loader) == shards.order(run=2, epoch=1)


def test_states_hold_the_seed(shards: Shards) -> None:
    """That a loader without one has drawn: another goes on in its orders, in later epochs too."""
    with WdsLoader(batches(shards), 0) as loader, WdsLoader(batches(shards, 3), 2) as other:
        iterator = iter(loader)
        first = [next(iterator), next(iterator)]
        state = sent(loader.state_dict())
        other.load_state_dict(state)
        rest = flat(iterator)
        assert flat(other) == rest
        assert flat(other) == flat(loader)
        assert flat([*first, rest]) != shards.order(run=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_index_is_not_part_of_the_state(shards: Shards, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor described for it, which would take long for one of millions of samples."""
    monkeypatch.setattr(signatures, "graph_signature", None)
    with WdsLoader(batches(shards), workers, seed=SEED) as loader:
        next(iter(loader))
        assert loader.state_dict() == {
            "version": 2,
            "index": f"{shards.index.digest}-2",
            "seed": SEED,
            "epoch": 0,
            "position": 4,
        }


def test_position_counts_what_was_trained_on(shards: Shards) -> None:
    """Not what a framework has taken ahead, or what has been prepared for a device."""
    with WdsLoader(batches(shards), 2, seed=SEED) as loader:
        iterator = loader.prefetch_to_device("cpu")
        for _ in range(3):
            next(iterator)
        assert loader.position == 12
        engine = loader._engine
        assert checkpoint_at(Position(ahead=1), engine, 3).to_plain()["position"] == 8
        ended = checkpoint_at(Position(is_over=True), engine, 3).to_plain()
        assert (ended["epoch"], ended["position"]) == (1, 0)


# ---------------------------------------------------------------------------------------------------------- the fronts
@pytest.mark.parametrize("cut", [0, 3, "between"])
def test_fronts_give_the_same(shards: Shards, cut: Any) -> None:
    """DataLoader2 with our service, and WdsLoader: items, and what is left after a state."""
    pipe = shards.pipe(run=2, seed=SEED).map(drawn).batch(4)
    found = {}
    for front in FRONTS:
        loader = loader_of(pipe, 2, front=front)
        iterator = iter(loader)
        begun = list(iterator) if cut == "between" else [next(iterator) for _ in range(cut)]
        other = resumed_loader(loader.state_dict(), pipe, 0, front=front)
        rest = [list(other) for _ in range(2)]
        assert rest[0] == (list(loader) if cut == "between" else list(iterator))
        found[front] = begun, rest
    assert found["service"] == found["loader"]


def test_state_of_one_front_resumes_in_the_other(shards: Shards) -> None:
    """Both are one position."""
    checkpoint = Checkpoint.from_plain({"version": 2, "index": "", "seed": SEED, "epoch": 1, "position": 9})
    assert Checkpoint.load(checkpoint.dump()) == checkpoint
    with WdsLoader(batches(shards), 0) as loader:
        loader.load_state_dict(Checkpoint.load(checkpoint.dump()).to_plain())
        assert flat(loader) == shards.order(run=2, epoch=1)[9:]


# ------------------------------------------------------------------------------------------------------------- stages
def labelled(sample: dict[str, Any]) -> dict[str, Any]:
    return {"__key__": sample["__key__"], "cls": sample["cls"], "number": sample["json"]["number"]}


def test_stages_that_keep_items_may_follow(shards: Shards) -> None:
    """Decoding, functions, tuples, collation and the border of the workers."""
    order = shards.order(run=2)

    def graph(batch: int) -> Any:
        pipe = shards.pipe(run=2).wds_decode().wds_map(labelled).wds_to_tuple("__key__", "cls", "number")
        return pipe.batch(batch).collate(wds_collate).map(list).join_workers().map(tuple)

    for grid in GRIDS[:3]:
        found = by_position(Job(graph, grid).epoch())
        assert flat(keys for keys, *_ in found) == order
        assert [number for _, _, numbers in found for number in numbers.tolist()] == [int(key[-5:]) for key in order]


@pytest.mark.parametrize("grid", GRIDS)
def test_batches_of_batches_are_one_item(shards: Shards, grid: Grid) -> None:
    """Of as many samples as the product of their sizes."""

    def nested(batch: int) -> Any:
        return shards.pipe(run=2).map(key_of).batch(2).map(tuple).batch(batch)

    inner = grid._replace(batch=2 * grid.batch)
    order = shards.order(run=2)
    if (inner.ranks - 1) * inner.batch >= len(order):
        pytest.skip("a rank would get nothing")
    job = Job(nested, grid)
    begun = job.steps(1)
    state = job.state()
    assert state["position"] == min(inner.ranks * inner.batch, len(order))
    assert all(len(pair) == 2 for batch in begun[0] for pair in batch)
    rest = Job(lambda batch: batches(shards, batch), Grid(1, 2, 3), state).epoch()
    assert flat(flat(by_position(begun))) + flat(flat(rest)) == order


@pytest.mark.parametrize("grid", GRIDS[1:])
def test_random_functions_draw_by_position(shards: Shards, grid: Grid) -> None:
    """What a function draws for a sample follows from seed, epoch and position, and the program's draws do not."""

    def graph(batch: int) -> Any:
        return shards.pipe(run=2).map(drawn).batch(batch)

    whole = Job(graph, Grid())
    epochs = [flat(by_position(whole.epoch())) for _ in range(2)]
    assert len({draws for _, *draws in map(tuple, epochs[0]) for draws in draws}) == 3 * len(shards.keys)
    job = Job(graph, grid)
    begun = job.steps(2)
    rest = Job(graph, Grid(2, 2, 3), job.state())
    assert flat(by_position(begun)) + flat(by_position(rest.epoch())) == epochs[0]
    assert flat(by_position(rest.epoch())) == epochs[1]


def drawn_for(batch: list[str]) -> tuple[list[str], float, float, float]:
    return batch, random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_functions_of_batches_draw_by_position(shards: Shards) -> None:
    """What is drawn for a batch is the same on every grid that makes the same batches."""

    def graph(batch: int) -> Any:
        return batches(shards, batch).map(drawn_for).collate(list)

    whole = by_position(Job(graph, Grid(1, 0, 4)).epoch())
    assert len({draws for _, *draws in map(tuple, whole) for draws in draws}) == 3 * len(whole)
    for grid in (Grid(1, 3, 4), Grid(2, 2, 4), Grid(3, 0, 4)):
        job = Job(graph, grid)
        begun = by_position(job.steps(1))
        rest = Job(graph, Grid(2, 1, 4), job.state())
        assert begun + by_position(rest.epoch()) == whole


# ------------------------------------------------------------------------------------------------------ what is skipped
def damaged_shards(folder: Path, places: Sequence[int]) -> tuple[Shards, set[str]]:
    """Shards in which some samples have broken headers, since the index was made; returns their keys too."""
    shards = order_kit.shards_in(folder, SIZES)
    bounds = shards.index.bounds.tolist()
    for place in places:
        shard = max(number for number, bound in enumerate(bounds[:-1]) if bound <= place and SIZES[number])
        path = Path(shards.urls[shard])
        before = path.stat()
        offsets, _ = shards.index.rows(shard, place - bounds[shard], place - bounds[shard] + 1)
        with path.open("r+b") as file:
            file.seek(int(offsets[0]) + 148)
            file.write(b"broken!!")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return shards, {shards.keys[place] for place in places}


def fail_or_drop(sample: dict[str, Any]) -> Any:
    """Drops some samples, and raises for others."""
    number = int(sample["__key__"][-5:])
    if number % 5 == 3:
        raise ValueError("three")
    return None if number % 5 == 1 else sample


def lost_by(shards: Shards) -> set[str]:
    return {key for key in shards.keys if int(key[-5:]) % 5 in (1, 3)}


def with_damage(shards: Shards, batch: int) -> IterDataPipe:
    return shards.pipe(run=2, handler=ignore_and_continue).map(key_of).batch(batch)


def with_failures(shards: Shards, batch: int) -> IterDataPipe:
    return shards.pipe(run=2).wds_map(fail_or_drop, handler=ignore_and_continue).map(key_of).batch(batch)


@pytest.fixture(scope="module", params=["damage", "failures", "all of a batch", "no shard"])
def losses(request: pytest.FixtureRequest, shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a graph that skips some samples, for a size of batches; with the shards, and the keys that are lost."""
    if request.param == "failures":
        return partial(with_failures, shards), shards, lost_by(shards)
    if request.param == "no shard":
        damaged = order_kit.shards_in(tmp_path_factory.mktemp("gone"), SIZES)
        Path(damaged.urls[3]).unlink()
        return partial(with_damage, damaged), damaged, {key for key in damaged.keys if key.startswith("s3")}
    places = (0, 4, 9, 10, 31) if request.param == "damage" else range(32)[4:19]
    damaged, lost = damaged_shards(tmp_path_factory.mktemp("damaged"), places)
    return partial(with_damage, damaged), damaged, lost


@pytest.mark.parametrize("grid", GRIDS[:4])
def test_skipped_samples_leave_the_others_in_place(losses: Any, grid: Grid) -> None:
    """Their batch is shorter, or does not come if nothing is left of it."""
    graph, shards, lost = losses
    job = Job(graph, grid)
    for epoch in range(2):
        order = shards.order(run=2, epoch=epoch)
        assert job.epoch() == [share_of(order, 0, grid, rank, lost) for rank in range(grid.ranks)]


@pytest.mark.parametrize(("batch", "workers"), [(1, 0), (3, 3), (8, 0)])
def test_positions_count_what_was_skipped(losses: Any, batch: int, workers: int) -> None:
    """A state after any batch resumes with the sample after it, on another grid."""
    graph, shards, lost = losses
    order = shards.order(run=2)
    with WdsLoader(graph(batch), workers, seed=SEED) as loader:
        for found in loader:
            position = loader.position
            assert position == min((order.index(found[-1]) // batch + 1) * batch, len(order))
            grid = Grid(2, 2, 5)
            if position == 3 * batch:
                rest = Job(graph, grid, loader.state_dict()).epoch()
                assert rest == [share_of(order, position, grid, rank, lost) for rank in range(2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_function_may_drop_whole_batches(shards: Shards, workers: int) -> None:
    """The others stay, and positions count those that were dropped."""
    order = shards.order(run=2)
    pipe = batches(shards).wds_map(partial(without, order[9]))
    with WdsLoader(pipe, workers, seed=SEED) as loader:
        assert [(batch, loader.position) for batch in loader] == [
            (order[start : start + 4], start + 4) for start in range(0, len(order), 4) if start != 8
        ]


def without(key: str, batch: list[str]) -> list[str] | None:
    return None if key in batch else batch


@pytest.mark.parametrize("front", FRONTS)
def test_skipped_samples_are_counted(losses: Any, front: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each once."""
    graph, _, lost = losses
    loader = loader_of(graph(4), 0, front=front)
    list(loader)
    counts = (loader if front == "loader" else loader.reading_service).skipped(by_rule=True)
    assert sum(sum(reasons.values()) for reasons in counts.values()) == len(lost)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_is_raised_without_a_handler(tmp_path: Path, workers: int) -> None:
    """At its place, and a new epoch begins as the first."""
    damaged, (lost,) = damaged_shards(tmp_path, [10])
    order = damaged.order(run=2)
    place = order.index(lost)
    with WdsLoader(damaged.pipe(run=2).map(key_of), workers, seed=SEED) as loader:
        iterator = iter(loader)
        assert [next(iterator) for _ in range(place)] == order[:place]
        with pytest.raises(ShardFormatError):
            next(iterator)
        assert loader.position == place
        loader.seek(place + 1)
        assert list(loader) == order[place + 1 :]


def test_loader_goes_on_where_an_interrupt_came(shards: Shards) -> None:
    """With the batch that was being made, once it seeks its own position."""
    order = shards.order(run=2)
    PENDING.append(order[9])
    with WdsLoader(shards.pipe(run=2).map(interrupt_once).map(key_of).batch(4), seed=SEED) as loader:
        begun: list[Any] = []
        with pytest.raises(KeyboardInterrupt):
            begun.extend(loader)
        assert flat(begun) == order[:8]
        loader.seek(loader.position)
        assert flat(loader) == order[8:]
        assert flat(loader) == shards.order(run=2, epoch=1)


PENDING: list[str] = []


def interrupt_once(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__key__"] in PENDING:
        PENDING.remove(sample["__key__"])
        raise KeyboardInterrupt
    return sample


@pytest.mark.parametrize("stage", ["source", "map"])
def test_handler_ends_the_stream(tmp_path: Path, shards: Shards, stage: str) -> None:
    """With what came before, also in a batch; the next epoch is whole up to there."""
    damaged, (lost,) = damaged_shards(tmp_path, [10])
    pipe = damaged.pipe(run=2, handler=ignore_and_stop)
    if stage == "map":
        pipe = shards.pipe(run=2).wds_map(partial(refuse, lost), handler=ignore_and_stop)
    with WdsLoader(pipe.map(key_of).batch(4), 0, seed=SEED) as loader:
        for epoch in range(2):
            order = damaged.order(run=2, epoch=epoch)
            assert flat(loader) == order[: order.index(lost)]


def test_position_passes_over_a_worker_that_a_handler_ended(shards: Shards) -> None:
    """The other workers go on, and none of their samples comes again after a resume."""
    order = shards.order(run=2)
    pipe = shards.pipe(run=2).wds_map(partial(refuse, order[7]), handler=ignore_and_stop).map(key_of)
    with WdsLoader(pipe, 3, seed=SEED) as loader:
        found = []
        for key in loader:
            found.append(key)
            place = order.index(key)
            # worker 1 has ended before sample 7: samples 10, 13 and so on are passed over
            assert loader.position == place + (1 if place < 8 or place % 3 != 0 else 2)
    assert found == [key for place, key in enumerate(order) if place < 7 or place % 3 != 1]


def refuse(key: str, sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__key__"] == key:
        raise ValueError("refused")
    return sample
