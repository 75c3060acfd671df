"""What a loader reads from the frames of Lightning's fit loop; functions in modules of the same names play it."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits import order_kit
from torchdata_wds import WdsLoader
from torchdata_wds.process_place import Place

PACKAGE = "lightning.pytorch"
#: The methods through which a fit loop calls a loader; all other names are arguments.
FRAMES = {
    "utilities.combined_loader": "def call(function): return function()",
    "loops.fit_loop": """
def on_save_checkpoint(self, call, function): return call(function)
def setup_data(self, call, function): return call(function)
def advance(self, call, function): return call(function)
def _load_combined_loader_states(self, call, function): return call(function)
""",
}


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has imported Lightning."""
    for name in ("lightning", PACKAGE):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name, ModuleType(name)))


def called(method: str, loop: Any, function: Any) -> Any:
    """What a function returns when a method of a fit loop calls it."""
    found: dict[str, Any] = {}
    for name, source in FRAMES.items():
        module = {"__name__": f"{PACKAGE}.{name}"}
        exec(source, module)
        found |= module
    return found[method](loop, found["call"], function)


def loop_of(loader: Any, fetched: int, processed: int, ready: int = 0, **fetcher: Any) -> Any:
    """A fit loop that has fetched and trained on these numbers of batches."""
    counts = SimpleNamespace(ready=ready, processed=processed)
    return SimpleNamespace(
        _data_fetcher=SimpleNamespace(**{"fetched": fetched, "batches": [], "done": False, **fetcher}),
        epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(current=counts, is_last_batch=False)),
        epoch_progress=SimpleNamespace(current=SimpleNamespace(ready=1, processed=0)),
        max_batches=float("inf"),
        restarting=False,
        is_resuming=True,
        _combined_loader=SimpleNamespace(flattened=[loader]),
        _combined_loader_states_to_load=[],
    )


def loader_of(**options: Any) -> WdsLoader[int]:
    return WdsLoader(IterableWrapper(range(8)).shuffle().sharding_filter(), seed=1, **options)


def taken(loader: WdsLoader[int], count: int) -> list[int]:
    items = iter(loader)
    return [next(items) for _ in range(count)]


def resumed(state: dict[str, Any]) -> list[int]:
    loader = loader_of()
    loader.load_state_dict(state)
    return list(loader)


@pytest.fixture
def epochs() -> list[list[int]]:
    """The first two epochs of an unbroken run."""
    loader = loader_of()
    return [list(loader), list(loader)]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_state_does_not_count_batches_when_lightning_has_not_trained_on_them(
    ahead: int, epochs: list[list[int]]
) -> None:
    """Fetched ahead, or lost to an exception."""
    loader = loader_of()
    taken(loader, 5)
    state = called("on_save_checkpoint", loop_of(loader, 5, 5 - ahead), loader.state_dict)
    assert resumed(state) == epochs[0][5 - ahead :]
    assert resumed(loader.state_dict()) == epochs[0][5:]


@pytest.mark.parametrize("count", [5, 8])
def test_state_is_that_of_the_next_epoch_when_lightning_takes_no_more(count: int, epochs: list[list[int]]) -> None:
    """At the end of a limited epoch, or one of known length; the running iterator stays as it is."""
    loader = loader_of()
    items = iter(loader)
    begun = [next(items) for _ in range(count)]
    state = called("on_save_checkpoint", loop_of(loader, count, count, done=True), loader.state_dict)
    assert resumed(state) == epochs[1]
    assert begun + list(items) == epochs[0]


@pytest.mark.parametrize(("position", "batch", "processed", "done"), [(20, 8, 5, 3), (20, 2, 5, 10), (20, 4, 5, 5)])
def test_batches_of_a_resumed_global_order_are_counted_as_this_run_makes_them(
    tmp_path: Path, position: int, batch: int, processed: int, done: int
) -> None:
    """Lightning goes on with the count of the run that saved, and ends the epoch at the loader's length."""
    shards = order_kit.shards_in(tmp_path, (30, 13))
    loader = WdsLoader(shards.pipe().batch(batch), seed=1)
    state = {"version": 2, "index": "", "seed": 1, "epoch": 0, "position": position}
    loop = loop_of(loader, 0, processed, ready=processed)
    counts = loop.epoch_loop.batch_progress.current
    counts.started, counts.completed = processed, processed - 1  # of a batch that was being finished
    called("_load_combined_loader_states", loop, lambda: loader.load_state_dict(state))
    assert (counts.ready, counts.started, counts.processed, counts.completed) == (done, done, done, done - 1)
    assert done + len(list(loader)) == len(loader)


def test_state_is_known_when_fit_has_ended(epochs: list[list[int]]) -> None:
    """By a number of steps, after which a batch was fetched ahead, or at the end of an epoch."""
    loader = loader_of()
    taken(loader, 5)
    loop = loop_of(loader, 0, 0)
    loop._data_fetcher = None
    assert resumed(called("on_save_checkpoint", loop, loader.state_dict)) == epochs[0][4:]
    loop.epoch_progress.current.processed = 1
    assert resumed(called("on_save_checkpoint", loop, loader.state_dict)) == epochs[1]


def test_epoch_of_which_nothing_was_taken_is_the_next_when_fit_has_ended(epochs: list[list[int]]) -> None:
    """As ``fit`` begins one before it finds that no epoch is left; a state loses none of its items."""
    loader = loader_of()
    list(loader)
    iter(loader)
    loop = loop_of(loader, 0, 0)
    loop._data_fetcher, loop.epoch_progress.current.processed = None, 1
    assert resumed(called("on_save_checkpoint", loop, loader.state_dict)) == epochs[1]
    assert list(loader) == epochs[1]


def test_state_counts_what_was_taken_when_lightning_is_of_an_unknown_version(
    epochs: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says what may be lost."""
    loader = loader_of()
    taken(loader, 5)
    state = called("on_save_checkpoint", SimpleNamespace(_data_fetcher=None), loader.state_dict)
    assert resumed(state) == epochs[0][5:]
    assert "this version of Lightning is not known" in caplog.text


def test_loader_takes_the_state_itself_when_lightning_does_not_load_it(epochs: list[list[int]]) -> None:
    """One that was saved at the end of an epoch."""
    saved = loader_of()
    list(saved)
    loader = loader_of()
    loop = loop_of(loader, 0, 0)
    loop._combined_loader_states_to_load = [saved.state_dict()]
    assert list(called("setup_data", loop, lambda: iter(loader))) == epochs[1]
    loop.is_resuming = False
    other = loader_of()
    assert list(called("setup_data", loop, lambda: iter(other))) == epochs[0]


def test_epoch_begins_again_when_lightning_drops_what_it_fetched_ahead(epochs: list[list[int]]) -> None:
    """And only then: not if a batch of the epoch was trained on, nor if it is another loader's."""
    loader, other = loader_of(), loader_of()
    (first,) = taken(loader, 1)
    loop = loop_of(loader, 1, 0, batches=[first])
    assert list(called("advance", loop, lambda: iter(loader))) == epochs[0]
    taken(other, 1)
    assert list(called("advance", loop, lambda: iter(other))) == epochs[1]


def test_state_is_this_ranks_own_when_it_holds_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank of two."""
    states = []
    for rank in range(2):
        loader = loader_of(ranks=(rank, 2))
        taken(loader, 1 + rank)
        states.append(loader.state_dict())
    monkeypatch.setattr("torchdata_wds.workers.lightning.rank_place", lambda: Place(2, 1))
    loader = loader_of(ranks=(1, 2))
    loader.load_state_dict({**states[0], "ranks": states})
    whole = list(loader_of(ranks=(1, 2)))
    assert list(loader) == whole[2:]
