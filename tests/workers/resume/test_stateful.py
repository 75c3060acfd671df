"""StatefulPipeline: the states of a bare StatefulDataLoader are exact."""

import io
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.resume_kit import (
    SMALL,
    Cut,
    Graph,
    batched,
    batches_in_epochs,
    filtered,
    handled,
    in_epochs,
    indexed_shards_in,
    joined,
    keys_of,
    left_of,
    plain,
    resampled,
    row,
    split,
)
from tests.kits.shards import text_keys, write_text_shards
from tests.kits.torchdata import StatefulDataLoader
from tests.kits.workers_kit import logged_in
from torchdata_wds import StatefulPipeline, index_shard
from torchdata_wds.workers.resume import epoch_numbers, stateful
from torchdata_wds.workers.resume.checkpoints import UNSTARTED, Checkpoint

# StatefulDataLoader calls a function of torch that warns; and the workers of a test may be more than the cores.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

SEED = 3


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return indexed_shards_in(tmp_path_factory.mktemp("stateful"))


def as_it_is(item: Any) -> Any:
    return item


@contextmanager
def loader_of(pipe: Any, workers: int = 0, *, seed: int = SEED, **options: Any) -> Iterator[Any]:
    """A loader whose workers are ended behind the block: left to garbage collection, they would be found dead there."""
    pipeline = StatefulPipeline(pipe, seed=seed)
    loader = StatefulDataLoader(pipeline, batch_size=None, num_workers=workers, collate_fn=as_it_is, **options)
    try:
        yield loader
    finally:
        if workers and loader._iterator is not None:
            loader._iterator._shutdown_workers()


def run(pipe: Any, epochs: int, workers: int = 0, **options: Any) -> list[list[Any]]:
    """The items of the first epochs of a run that is never stopped."""
    with loader_of(pipe, workers, **options) as loader:
        return [list(loader) for _ in range(epochs)]


def stopped(pipe: Any, epoch: int, cut: Cut, workers: int = 0, **options: Any) -> Any:
    """The state of a run that is stopped after `cut` items of an epoch, as a JSON file would keep it."""
    with loader_of(pipe, workers, **options) as loader:
        for _ in range(epoch):
            list(loader)
        iterator = iter(loader)
        if cut == "between":
            list(iterator)
        else:
            for _ in range(int(cut)):
                next(iterator)
        return json.loads(json.dumps(loader.state_dict()))


def resumed(pipe: Any, state: Any, epochs: range, workers: int = 0, **options: Any) -> list[list[Any]]:
    """What a new loader gives that goes on from a state."""
    with loader_of(pipe, workers, **options) as loader:
        loader.load_state_dict(state)
        return [list(loader) for _ in epochs]


def check(graph: Graph, urls: list[str], epoch: int, cut: Cut, workers: int = 0, **options: Any) -> None:
    """Compares a run that is stopped with one that never is: the rest of the epoch and the next one."""
    whole = run(graph(urls), epoch + 2, workers, **options)
    state = stopped(graph(urls), epoch, cut, workers, **options)
    following = range(epoch + (cut == "between"), epoch + 2)
    assert resumed(graph(urls), state, following, workers, **options) == left_of(whole, epoch, cut)


# -------------------------------------------------------------------------------------------------------- it is exact
@pytest.mark.parametrize(
    ("graph", "cut"),
    [
        (in_epochs, 5),
        *(
            pytest.param(graph, cut, marks=pytest.mark.slow)
            for graph in (plain, batched, in_epochs, resampled, filtered, split)
            for cut in (0, 5, "last", "end", "between")
        ),
    ],
)
def test_stateful_pipeline_is_exact_when_it_runs_in_the_main_process(graph: Graph, cut: Any, urls: list[str]) -> None:
    """Without workers, at any place of the second epoch."""
    length = len(run(graph(urls), 2)[1])
    check(graph, urls, 1, {"last": length - 1, "end": length}.get(cut, cut))


@pytest.mark.parametrize(
    ("graph", "snapshot"),
    [
        (batched, 1),
        (in_epochs, 4),
        (batches_in_epochs, 1),
        (resampled, 4),
        (split, 1),
        (joined, 4),
    ],
)
@pytest.mark.slow
def test_stateful_pipeline_is_exact_when_workers_live_on(graph: Graph, snapshot: int, urls: list[str]) -> None:
    """Whether workers send their state with each item or with each fourth; they count epochs themselves."""
    options: dict[str, Any] = {"persistent_workers": True, "snapshot_every_n_steps": snapshot}
    for cut in (5,) if graph is batched else (5, "between"):
        check(graph, urls, 1, cut, 2, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "snapshot"), [(batched, 4), (handled, 1)])
def test_stateful_pipeline_is_exact_when_workers_end_with_the_epoch(
    graph: Graph, snapshot: int, urls: list[str]
) -> None:
    """Epochs are counted over all of them, also from one that goes on."""
    for cut in (5, "between"):
        check(graph, urls, 1, cut, 2, snapshot_every_n_steps=snapshot)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_pipeline_is_exact_when_resumed_twice(workers: int, urls: list[str]) -> None:
    """A state of a run that was itself resumed."""
    options = {"persistent_workers": True} if workers else {}
    whole = run(batched(urls), 3, workers, **options)
    with loader_of(batched(urls), workers, **options) as loader:
        loader.load_state_dict(stopped(batched(urls), 1, 2, workers, **options))
        iterator = iter(loader)
        assert [next(iterator) for _ in range(3)] == whole[1][2:5]
        state = loader.state_dict()
    assert resumed(batched(urls), state, range(1, 3), workers, **options) == left_of(whole, 1, 5)


def test_stateful_pipeline_goes_on_when_an_epoch_was_left_early(urls: list[str]) -> None:
    """The epoch behind it is whole, and its state is that of the run that goes on."""
    whole = run(batched(urls), 3)
    with loader_of(batched(urls)) as loader:
        next(iter(loader))
        iterator = iter(loader)
        assert [next(iterator) for _ in range(4)] == whole[1][:4]
        state = loader.state_dict()
        assert [list(iterator), list(loader)] == left_of(whole, 1, 4)
    assert resumed(batched(urls), state, range(1, 3)) == left_of(whole, 1, 4)


@pytest.mark.parametrize("graph", [pytest.param(batched, marks=pytest.mark.slow), in_epochs])
@pytest.mark.slow
def test_stateful_pipeline_stays_as_it_is_when_states_are_taken(graph: Graph, urls: list[str]) -> None:
    """A state may be taken at each item: it changes nothing, and is a few hundred bytes."""
    whole = run(graph(urls), 2)
    with loader_of(graph(urls)) as loader:
        for items in whole:
            found = []
            for item in loader:
                found.append(item)
                assert len(pickle.dumps(loader.state_dict())) < 4000
            assert found == items


def test_stateful_pipeline_skips_when_items_can_be_counted(urls: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """It says what it skips, or why it cannot, as WorkersReadingService does."""
    with caplog.at_level("INFO", logger="torchdata_wds"):
        for graph in (batched, filtered):
            resumed(graph(urls), stopped(graph(urls), 1, 5), range(1, 2))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["resuming at item 5 of epoch 2"] * 2
    assert "are skipped" in caplog.messages[0]
    assert "because Shuffler may yield more, fewer or other items" in caplog.messages[1]


class Holder:
    """Keeps a loader's state under one key, as trainers do that save with torch.distributed.checkpoint."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"data": self.held.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.held.load_state_dict(state_dict["data"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    "wrap",
    [lambda pipeline: pipeline, lambda pipeline: StatefulDataLoader(pipeline, None)],
    ids=["alone", "in a loader"],
)
def test_stateful_pipeline_resumes_when_a_distributed_checkpoint_has_its_state(
    wrap: Any, urls: list[str], tmp_path: Path
) -> None:
    """Such a checkpoint loads only the keys that the new object's state already has."""
    from torch.distributed import checkpoint  # takes more than a second

    first, again = (Holder(wrap(StatefulPipeline(batched(urls), seed=SEED))) for _ in range(2))
    items = iter(first.held)
    for _ in range(3):
        next(items)
    checkpoint.save({"loader": first}, checkpoint_id=tmp_path)
    checkpoint.load({"loader": again}, checkpoint_id=tmp_path)
    assert list(again.held) == list(items)


@pytest.mark.slow
def test_stateful_pipeline_has_a_small_plain_state_at_each_step_when_workers_read_many_shards(tmp_path: Path) -> None:
    """torch.load takes each with weights_only; that of 4 workers stays below 10 KB."""
    many = write_text_shards(tmp_path, [1] * 400)
    for url in many:
        index_shard(url)
    with loader_of(plain(many), 4) as loader:
        for step, _ in enumerate(loader):
            state, file = loader.state_dict(), io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            assert torch.load(file, weights_only=True) == state
            assert len(json.dumps(state)) < 10_000, step


@pytest.mark.slow
# ------------------------------------------------------------------------------------------------------------- epochs
@pytest.mark.parametrize(
    ("persistent", "context"),
    [
        (False, None),
        *(
            pytest.param(persistent, context, marks=pytest.mark.slow)
            for persistent, context in [(True, None), (False, "spawn"), (False, "forkserver"), (True, "spawn")]
        ),
    ],
)
def test_stateful_pipeline_has_the_same_epochs_when_workers_end_or_live_on(
    persistent: bool, context: str | None, urls: list[str]
) -> None:
    """Nobody sets the epoch, and a program that seeds torch alike before each changes nothing."""
    whole = run(plain(urls), 3, 1)
    with loader_of(plain(urls), 1, persistent_workers=persistent, multiprocessing_context=context) as loader:
        found = []
        for _ in range(3):
            torch.manual_seed(0)
            found.append(list(loader))
    assert found == whole
    assert len({str(epoch) for epoch in found}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("loader_class", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [2, 5])
def test_stateful_pipeline_counts_alike_in_all_workers_when_epochs_are_left_early(
    loader_class: Any, workers: int, urls: list[str]
) -> None:
    """An iterator that was only begun is an epoch too; all workers of one epoch agree on its number."""
    with loader_of(plain(urls), workers, persistent_workers=True) as loader:
        whole = [list(loader) for _ in range(4)]
    loader = loader_class(
        StatefulPipeline(plain(urls), seed=SEED), batch_size=None, num_workers=workers, collate_fn=as_it_is
    )
    first = iter(loader)
    assert next(first) == whole[0][0]
    second = iter(loader)
    assert [list(second), list(first), list(loader)] == [whole[1], whole[0][1:], whole[2]]
    torch.manual_seed(1)
    assert list(loader) == whole[3]


@pytest.mark.slow
def test_stateful_pipeline_counts_on_when_workers_end_after_an_epoch_was_set(urls: list[str]) -> None:
    """A set number holds once, and those behind it count on; a state that is loaded sets it back."""
    with loader_of(plain(urls), 2, persistent_workers=True) as loader:
        whole = [list(loader) for _ in range(5)]
    with loader_of(plain(urls), 2) as loader:
        loader.dataset.set_epoch(2)
        assert [list(loader), list(loader)] == whole[2:4]
        loader.dataset.set_epoch(0)
        iterator = iter(loader)
        begun = [next(iterator) for _ in range(3)]
        state = loader.state_dict()
        assert begun + list(iterator) == whole[0]
        assert list(loader) == whole[1]
        loader.load_state_dict(state)
        assert [list(loader), list(loader), list(loader)] == [whole[0][3:], whole[1], whole[2]]


@pytest.mark.slow
def test_stateful_pipeline_counts_by_itself_when_it_is_copied(urls: list[str]) -> None:
    """A copy begins at its first epoch, or at the one that was set."""
    whole = run(plain(urls), 3, 1)
    with loader_of(plain(urls), 1) as loader:
        list(loader)
        copies = [pickle.loads(pickle.dumps(loader.dataset)) for _ in range(2)]
    copies[1].set_epoch(2)
    found = [list(DataLoader(copy, batch_size=None, num_workers=1, collate_fn=as_it_is)) for copy in copies]
    assert found == [whole[0], whole[2]]


@pytest.mark.parametrize("epoch", [-1, 2**31, 1.5, None])
def test_stateful_pipeline_refuses_when_an_epoch_is_no_number(epoch: Any, urls: list[str]) -> None:
    with pytest.raises((TypeError, ValueError), match="epoch must be"):
        StatefulPipeline(plain(urls)).set_epoch(epoch)


@pytest.mark.slow
@pytest.mark.parametrize(("persistent", "context"), [(True, "fork"), (False, "fork"), (False, "spawn")])
def test_stateful_pipeline_gives_each_sample_once_when_workers_share_them(
    persistent: bool, context: str, urls: list[str]
) -> None:
    """It divides the work itself, and each epoch has an order of its own, whether or not workers outlive it."""
    options = {"persistent_workers": persistent, "multiprocessing_context": context}
    epochs = [keys_of(epoch) for epoch in run(plain(urls), 2, 2, **options)]
    assert all(sorted(keys) == sorted(text_keys(SMALL)) for keys in epochs)
    assert epochs[0] != epochs[1]


def test_stateful_pipeline_follows_from_its_seed_when_it_is_made_again(urls: list[str]) -> None:
    """The same seed gives the same epochs, another one others; torch's generator has no part in it."""
    first, again, other = (run(plain(urls), 2, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first[0] != other[0] != first[1] != first[0]


def test_stateful_pipeline_gives_an_epoch_when_its_number_is_set(urls: list[str]) -> None:
    """Those behind it count on from there."""
    whole = run(plain(urls), 4)
    with loader_of(plain(urls)) as loader:
        loader.dataset.set_epoch(2)
        assert [list(loader), list(loader)] == whole[2:]
        loader.dataset.set_epoch(1)
        assert list(loader) == whole[1]


@pytest.mark.slow
def test_stateful_pipeline_tells_workers_when_an_epoch_is_set(urls: list[str]) -> None:
    """Workers that live on hear of it, and those that do not give the same epochs."""
    options: dict[str, Any] = {"persistent_workers": True}
    whole = run(plain(urls), 3, 2, **options)
    assert run(plain(urls), 3, 2) == whole
    with loader_of(plain(urls), 2, **options) as loader:
        assert list(loader) == whole[0]
        loader.dataset.set_epoch(2)
        assert list(loader) == whole[2]


def test_stateful_pipeline_is_one_worker_when_there_is_none(urls: list[str]) -> None:
    """Random augmentation included."""
    assert run(plain(urls), 1) == run(plain(urls), 1, 1)


def test_stateful_pipeline_runs_under_the_plain_dataloader(urls: list[str]) -> None:
    """It is an IterableDataset as any other."""
    pipeline = StatefulPipeline(plain(urls), seed=SEED)
    assert list(DataLoader(pipeline, batch_size=None, collate_fn=as_it_is)) == run(plain(urls), 1)[0]


@pytest.mark.parametrize("copied", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_stateful_pipeline_divides_the_work_when_it_was_looked_at_before(copied: bool, urls: list[str]) -> None:
    """Whoever looks at a sample in the main process does not make every worker read everything."""
    pipeline = StatefulPipeline(plain(urls), seed=SEED)
    next(iter(pipeline))
    if copied:
        pipeline = pickle.loads(pickle.dumps(pipeline))
    loader = StatefulDataLoader(pipeline, batch_size=None, num_workers=2, persistent_workers=True, collate_fn=keys_of)
    found = [key for keys in loader for key in keys]
    loader._iterator._shutdown_workers()
    assert sorted(found) == sorted(keys_of(run(plain(urls), 1)[0]))


def test_stateful_pipeline_begins_at_the_beginning_when_it_is_copied(urls: list[str]) -> None:
    """A pickled copy, as a spawned worker gets it, has nothing of the run of the first."""
    whole = run(batched(urls), 1)[0]
    pipeline = StatefulPipeline(batched(urls), seed=SEED)
    copies = [pickle.loads(pickle.dumps(pipeline))]
    iterator = iter(pipeline)
    assert next(iterator) == whole[0]
    assert list(copies[0]) == whole
    assert list(iterator) == whole[1:]


@pytest.mark.slow
def test_stateful_pipeline_is_exact_when_workers_are_spawned(urls: list[str]) -> None:
    """What forked workers began goes on in spawned ones."""
    options: dict[str, Any] = {"persistent_workers": True}
    whole = run(batched(urls), 2, 2, **options)
    state = stopped(batched(urls), 0, 4, 2, **options)
    found = resumed(batched(urls), state, range(2), 2, multiprocessing_context="spawn", **options)
    assert found == left_of(whole, 0, 4)


# -------------------------------------------------------------------------------------------- a state of something else
def test_stateful_pipeline_has_no_state_when_it_never_ran(urls: list[str]) -> None:
    """An empty state is that of the beginning; one that was loaded is given back until it is used."""
    pipeline = StatefulPipeline(batched(urls), seed=SEED)
    assert pipeline.state_dict() == UNSTARTED
    pipeline.load_state_dict({})
    pipeline.load_state_dict(pipeline.state_dict())
    first = next(iter(pipeline))
    state = pipeline.state_dict()
    again = StatefulPipeline(batched(urls), seed=SEED)
    again.load_state_dict(state)
    assert again.state_dict() is state
    assert [first, *again] == run(batched(urls), 1)[0]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([1], "not a state of torchdata_wds: expected a dict, got list"),
        ({"version": 1}, "made by another version"),
        ({"signature": {}, "epoch": 0, "stream_epoch": 0, "is_over": False, "streams": ()}, "made by another version"),
        ({**UNSTARTED, "item": 3}, "not a state of torchdata_wds: it is damaged"),
    ],
)
def test_stateful_pipeline_refuses_when_it_is_given_no_state(state: Any, message: str, urls: list[str]) -> None:
    """At once, before anything is read."""
    with pytest.raises(ValueError, match=message):
        StatefulPipeline(plain(urls)).load_state_dict(state)


def refusal_of(pipe: Any, state: Any, **options: Any) -> str:
    with pytest.raises(ValueError, match="the state belongs to a different run") as caught:
        resumed(pipe, state, range(1), **options)
    return str(caught.value)


def test_stateful_pipeline_refuses_when_the_state_is_of_another_run(urls: list[str]) -> None:
    """It names the seed, the graph, a stage's arguments, or the shards."""
    state = stopped(plain(urls), 0, 3)
    assert "Differences: seed: 3 then, 4 now" in refusal_of(plain(urls), state, seed=4)
    assert " then, Batcher <- Mapper <- Mapper <- SampleDecoder" in refusal_of(batched(urls), state)
    assert "shards: 8 shards (checksum " in refusal_of(plain(urls[1:]), state)
    batches = stopped(plain(urls).batch(2), 0, 3)
    assert "Differences: the arguments of Batcher" in refusal_of(plain(urls).batch(3), batches)


def test_stateful_pipeline_refuses_when_the_number_of_workers_differs(urls: list[str]) -> None:
    """Said by the dataset where the loader hands the state on to it."""
    dataset = StatefulPipeline(plain(urls), seed=SEED)
    next(iter(dataset))
    state = Checkpoint.from_plain(dataset.state_dict())
    signature = {**state.signature, "num_workers": 2, "worker": 1, "ranks": 4, "rank": 3}
    again = StatefulPipeline(plain(urls), seed=SEED)
    again.load_state_dict(state._replace(signature=signature).to_plain())
    with pytest.raises(ValueError, match="num_workers: 2 then, 0 now; worker: 1 then, 0 now; ranks: 4 then, 1 now"):
        iter(again)


def test_stateful_pipeline_refuses_when_a_folder_has_a_new_shard(tmp_path: Path) -> None:
    """A pattern is looked up again."""

    def pipe() -> Any:
        return (
            IterableWrapper([str(tmp_path)]).list_shards().sharding_filter().load_wds_shards().group_by_key().map(row)
        )

    write_text_shards(tmp_path, (3, 2))
    state = stopped(pipe(), 0, 2)
    write_text_shards(tmp_path, (3, 2, 1))
    assert " then, 3 shards" in refusal_of(pipe(), state)


@pytest.mark.parametrize("pipe", [None, [1, 2], "a.tar", range(3)])
def test_stateful_pipeline_refuses_when_it_gets_no_pipe(pipe: Any) -> None:
    """It says what it takes."""
    with pytest.raises(TypeError, match="takes the last pipe of a graph, not"):
        StatefulPipeline(pipe)


@pytest.mark.parametrize("seed", [None, "1", 1.5, True])
def test_stateful_pipeline_refuses_when_the_seed_is_no_number(seed: Any, urls: list[str]) -> None:
    """Without a seed there is no order to come back to."""
    with pytest.raises(TypeError, match="seed must be a whole number"):
        StatefulPipeline(plain(urls), seed=seed)


def test_stateful_pipeline_refuses_when_any_shard_was_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two workers remembers half of the shards."""
    many = write_text_shards(tmp_path, SMALL)

    def in_worker(number: int) -> StatefulPipeline:
        info = SimpleNamespace(num_workers=2, id=number, seed=number)
        for module in (stateful, epoch_numbers):
            monkeypatch.setattr(module, "get_worker_info", lambda: info)
        return StatefulPipeline(plain(many), seed=SEED)

    def is_refused(number: int) -> bool:
        pipeline = in_worker(number)
        pipeline.load_state_dict(states[number])
        try:
            iter(pipeline)
        except ValueError as error:
            assert "other contents then, of the same size" in str(error)
            return True
        return False

    states = []
    for number in range(2):
        pipeline = in_worker(number)
        iter(pipeline)
        states.append(pipeline.state_dict())
    for place, url in enumerate(many):
        before = Path(url).read_bytes()
        Path(url).write_bytes(b"x" + before[1:])
        assert [is_refused(0), is_refused(1)] == [place % 2 == 0, place % 2 == 1]
        Path(url).write_bytes(before)


def test_stateful_pipeline_refuses_when_there_are_several_epochs(urls: list[str]) -> None:
    """Where each of them is cannot be kept."""
    pipeline = StatefulPipeline(in_epochs(urls).wds_epoch(5))
    next(iter(pipeline))
    with pytest.raises(RuntimeError, match="several"):
        pipeline.state_dict()


def test_pipeline_warns_when_its_workers_repeat_one_another(tmp_path: Path) -> None:
    """Without a sharding filter each worker gives everything, where no reader of shards would say so."""
    with logged_in(tmp_path / "log"):
        pipeline = StatefulPipeline(IterableWrapper(range(2)))
        loader = DataLoader(pipeline, batch_size=None, num_workers=2, multiprocessing_context="fork")
        assert sorted(loader) == [0, 0, 1, 1]
    assert "no .sharding_filter()" in (tmp_path / "log").read_text()
