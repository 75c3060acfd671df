"""DataLoader2.state_dict() and from_state with WorkersReadingService: what is left comes as if never stopped."""

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.resume_kit import (
    SEED,
    Cut,
    Graph,
    augment,
    batched,
    batches_in_epochs,
    fail_on_one,
    filtered,
    handled,
    in_epochs,
    indexed_shards_in,
    is_odd,
    joined,
    keys_of,
    left_of,
    loader_of,
    plain,
    resampled,
    resumed,
    row,
    run,
    samples,
    shards_in,
    states_at,
    stopped,
)
from tests.kits.shards import write_text_shards
from tests.kits.torchdata import DataLoader2, WorkersReadingService, needs_torchdata
from torchdata_wds import handlers, index_shard, storage
from torchdata_wds.handlers import ignore_and_continue
from torchdata_wds.pipes.samples.decode import SampleDecoderIterDataPipe


def named(*graphs: Graph, slow: tuple[Graph, ...] = ()) -> list[Any]:
    """Parameters that go by the names of the graphs."""
    marks = {graph: [pytest.mark.slow] if graph in slow else [] for graph in (*graphs, *slow)}
    return [pytest.param(graph, marks=found, id=graph.__name__) for graph, found in marks.items()]


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return indexed_shards_in(tmp_path_factory.mktemp("resume"))


# ------------------------------------------------------------------------------------------------------- it is exact
@pytest.mark.parametrize("graph", named(slow=(batched, in_epochs, joined, filtered)))
def test_resume_is_exact_when_resumed_again_and_again(graph: Graph, urls: list[str]) -> None:
    """A state of a run that was itself resumed, a few items further: in this epoch, in the next, and not begun."""
    whole = run(graph(urls), 0, 4)
    state = stopped(graph(urls), 0, 1, 2)
    for epoch, before, cut in [(1, 2, 2), (1, 2, 4), (1, 4, "between"), (2, 0, 1), (2, 1, 3)]:
        with DataLoader2.from_state(state, WorkersReadingService(0, seed=SEED)) as loader:
            assert loader.state_dict() is state
            iterator = iter(loader)
            items = list(iterator) if cut == "between" else [next(iterator) for _ in range(int(cut) - before)]
            assert items == whole[epoch][before : None if cut == "between" else cut]
            state = loader.state_dict()
    assert resumed(state, 0, 2) == left_of(whole, 2, 3)


@pytest.mark.parametrize("cut", [4, pytest.param("between", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_resume_is_exact_when_the_loader_was_seeded_once(cut: Cut, urls: list[str]) -> None:
    """After dl.seed(s), and without seed=, all epochs follow from s, also behind a resume."""
    with loader_of(batched(urls), 0, seed=None) as loader:
        loader.seed(2**64 - 1)
        whole = [list(loader) for _ in range(3)]
    with loader_of(batched(urls), 0, seed=None) as loader:
        loader.seed(2**64 - 1)
        states, _ = states_at(loader, [cut])
    expected = left_of(whole, 0, cut, more=2)
    assert resumed(states[0], 0, len(expected), seed=None) == expected


def test_resume_gives_the_rest_when_nothing_was_seeded(urls: list[str]) -> None:
    """The epoch that was begun is finished as it was drawn; the next is a new one."""
    with loader_of(batched(urls), 0, seed=None) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        rest = list(iterator)
    torch.manual_seed(torch.seed() ^ 1)  # another process is in another state
    found = resumed(state, 0, 2, seed=None)
    assert found[0] == rest
    assert sorted(keys_of(found[1])) == sorted(keys_of(run(batched(urls), 0, 1)[0]))


@needs_torchdata
def test_resume_is_exact_when_load_state_dict_is_called(urls: list[str]) -> None:
    """An existing DataLoader2 takes a state as a new one does, its graph with it."""
    whole = run(batched(urls), 0, 2)
    state = stopped(batched(urls), 0, 0, 3)
    with loader_of(plain(urls), 0) as loader:
        loader.load_state_dict(state)
        assert [list(loader), list(loader)] == left_of(whole, 0, 3)


@pytest.mark.slow
def test_resume_gives_each_sample_once_when_counted_over_both_parts(urls: list[str]) -> None:
    """The part before and the part behind together have what the shards have."""
    with loader_of(filtered(urls), 2) as loader:
        iterator = iter(loader)
        before = keys_of([next(iterator) for _ in range(7)])
        state = loader.state_dict()
    assert sorted(before + keys_of(resumed(state, 2, 1)[0])) == sorted(keys_of(run(filtered(urls), 0, 1)[0]))


def branches_of_two_depths(urls: list[str]) -> Any:
    return samples(urls).wds_decode().map(row).join_workers().zip(samples(urls[:2]).map(row).join_workers())


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_resume_is_exact_between_epochs_when_branches_differ_in_depth(workers: int, urls: list[str]) -> None:
    """The shards of several branches are compared in one order, whichever branch is the deeper one."""
    graph = branches_of_two_depths
    assert resumed(stopped(graph(urls), workers, 0, "between"), workers, 1) == run(graph(urls), workers, 2)[1:]


def fail_on_even(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] % 2 == 0:
        raise ValueError("even")
    return sample


def first_skipped(urls: list[str]) -> Any:
    pipe = samples(urls).wds_decode().wds_map(fail_on_even, handler=ignore_and_continue)
    return pipe.map(augment).map(row).wds_epoch(12)


@pytest.mark.parametrize("cut", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_resume_is_exact_when_a_worker_skips_before_its_first_item(cut: int, urls: list[str]) -> None:
    """What a handler skipped before anything was sent is told as well, with wds_epoch too."""
    whole = run(first_skipped(urls), 1, 2)
    assert resumed(stopped(first_skipped(urls), 1, 0, cut), 1, 2) == left_of(whole, 0, cut)


def many_passes(urls: list[str]) -> Any:
    return samples(urls).map(row).batch(3).wds_epoch(24)


@pytest.mark.parametrize("cuts", [(18, 22), pytest.param((10, 20), marks=pytest.mark.slow)])
@pytest.mark.slow
def test_resume_is_exact_when_resumed_twice_in_a_later_pass(cuts: tuple[int, int], tmp_path: Path) -> None:
    """A stream that was resumed in a pass tells of its shards with the number of that pass."""
    urls = shards_in(tmp_path, (2,) * 12)
    (whole,) = run(many_passes(urls), 0, 1)
    state = stopped(many_passes(urls), 0, 0, cuts[0])
    with DataLoader2.from_state(state, WorkersReadingService(0, seed=SEED)) as loader:
        iterator = iter(loader)
        assert [next(iterator) for _ in range(cuts[1] - cuts[0])] == whole[cuts[0] : cuts[1]]
        state = loader.state_dict()
    assert resumed(state, 0, 1) == [whole[cuts[1] :]]


# ---------------------------------------------------------------------------------------- the main process is a worker
@pytest.mark.parametrize("graph", named(plain, slow=(batches_in_epochs,)))
def test_main_process_equals_one_worker_when_nothing_else_differs(graph: Graph, urls: list[str]) -> None:
    """The same items in the same order, with the same draws of random augmentation, in each epoch."""
    assert run(graph(urls), 0, 2) == run(graph(urls), 1, 2)


def at_the_border(urls: list[str]) -> Any:
    return in_epochs(urls).join_workers()


@pytest.mark.parametrize("graph", named(plain, at_the_border, slow=(batched, filtered, resampled, handled)))
def test_state_moves_between_the_main_process_and_one_worker(graph: Graph, urls: list[str]) -> None:
    """Both ways, in the middle of an epoch that follows one left early, and between two epochs."""
    for workers in (0, 1):
        with loader_of(graph(urls), workers) as loader:
            next(iter(loader))
            states, items = states_at(loader, [3, "between"])
            following = [list(loader), list(loader)]
        for state, expected in zip(states, ([items[3:], *following], following), strict=True):
            assert resumed(state, 1 - workers, len(expected)) == expected


def test_state_of_the_main_process_is_refused_when_a_stage_follows_the_worker(urls: list[str]) -> None:
    """A batch after .join_workers() is one item in the main process, and several of the worker's."""
    for workers in (0, 1):
        message = refusal_of(stopped(joined(urls), workers, 0, 2), 1 - workers)
        assert f"num_workers: {workers} then, {1 - workers} now (which only fit each other if no stage" in message


def test_generators_of_the_process_stay_when_the_graph_runs_in_it(urls: list[str]) -> None:
    """num_workers=0 draws from states of its own: random, numpy and torch go on as if no data had been loaded."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    alone = [random.random(), np.random.rand(), float(torch.rand(()))]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    with loader_of(plain(urls), 0) as loader:
        iterator = iter(loader)
        next(iterator)
        found = [random.random()]
        next(iterator)
        found.append(np.random.rand())
        next(iterator)
        assert [*found, float(torch.rand(()))] == alone


def test_items_stay_when_the_process_draws_between_them(urls: list[str]) -> None:
    """What the training loop draws has no part in augmentation."""
    whole = run(plain(urls), 0, 1)
    with loader_of(plain(urls), 0) as loader:
        found = []
        for item in loader:
            found.append(item)
            augment({})
            torch.manual_seed(7)
    assert found == whole[0]


# -------------------------------------------------------------------------------------------- a state of something else
def state_of(pipe: IterDataPipe, cut: Cut = 2, **options: Any) -> Any:
    return stopped(pipe, 0, 0, cut, **options)


def refusal_of(state: Any, workers: int = 0, **options: Any) -> str:
    """What a loader says that refuses a state, which it does before it starts anything."""
    with pytest.raises(ValueError, match="the state belongs to a different run") as caught:
        resumed(state, workers, 1, **options)
    return str(caught.value)


@pytest.mark.parametrize("cut", [2, "between"])
def test_resume_refuses_when_the_number_of_workers_differs(cut: Cut, urls: list[str]) -> None:
    """Workers have parts of the shards: with another number, parts are others."""
    message = refusal_of(state_of(plain(urls), cut), workers=3)
    assert "num_workers: 0 then, 3 now" in message
    assert "shards" not in message


@pytest.mark.parametrize(("seed", "shown"), [(6, "6"), (None, "None")])
def test_resume_refuses_when_the_seed_differs(seed: int | None, shown: str, urls: list[str]) -> None:
    """seed= makes the orders: with another one what is left is not known."""
    assert f"seed: 5 then, {shown} now" in refusal_of(state_of(plain(urls)), seed=seed)


def of_other(state: Any, pipe: IterDataPipe) -> Any:
    """The state with another graph in it, as of a program that has changed since."""
    return {**state, "serialized_datapipe": state_of(pipe)["serialized_datapipe"]}


def wider(urls: list[str]) -> Any:
    return samples(urls).wds_shuffle(8, initial=3).wds_decode().map(augment).map(row)


def untouched(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def with_other_function(urls: list[str]) -> Any:
    return samples(urls).wds_shuffle(7, initial=3).wds_decode().map(untouched).map(row)


@pytest.mark.parametrize(
    ("graph", "difference"),
    [
        (wider, "Differences: the arguments of SampleShuffler"),
        (with_other_function, "Differences: the arguments of Mapper"),
        (batched, "the graph: Mapper <- Mapper <- SampleDecoder <- SampleShuffler <- KeyGrouper <- "),
        (batched, " then, Batcher <- Mapper <- Mapper <- "),
    ],
)
def test_resume_refuses_when_the_graph_differs(graph: Graph, difference: str, urls: list[str]) -> None:
    """The message names the stage, or both chains of stages."""
    assert difference in refusal_of(of_other(state_of(plain(urls)), graph(urls)))


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda urls: urls[:-1], "7 shards"),
        (lambda urls: [*urls[:-1], urls[0]], "8 shards"),
        (lambda urls: urls[::-1], "8 shards"),
    ],
    ids=["one less", "another", "another order"],
)
def test_resume_refuses_when_the_list_of_shards_differs(
    change: Callable[[list[str]], list[str]], shown: str, urls: list[str]
) -> None:
    """How many there were and are, with checksums where that is no difference."""
    message = refusal_of(of_other(state_of(plain(urls)), plain(change(urls))))
    then, now = message.partition("Differences: shards: ")[2].split(", ", 1)
    assert then.startswith("8 shards (checksum ")
    assert now.startswith(f"{shown} (checksum ")
    assert then.removesuffix(" then") != now.removesuffix(" now")


def globbed(folder: Path) -> Any:
    pipe = IterableWrapper([str(folder / "*.tar")]).list_shards().shuffle().sharding_filter()
    return pipe.load_wds_shards().group_by_key().map(row)


@pytest.mark.parametrize("cut", [2, "between"])
def test_resume_refuses_when_a_folder_has_a_new_shard(cut: Cut, tmp_path: Path) -> None:
    """A pattern is looked up again: what it stands for now must be what it stood for."""
    write_text_shards(tmp_path, (3, 2))
    state = state_of(globbed(tmp_path), cut)
    write_text_shards(tmp_path, (3, 2, 1))
    message = refusal_of(state)
    assert "shards: 2 shards (checksum " in message
    assert " then, 3 shards (checksum " in message


@needs_torchdata
def test_resume_refuses_when_the_state_is_foreign(urls: list[str]) -> None:
    """Other bytes are a ValueError; none at all are the state of a loader that never ran."""
    given = state_of(plain(urls))
    assert resumed({**given, "reading_service_state": b""}, 0, 1) == run(plain(urls), 0, 1)
    for state in (b"x", b"\x80\x04N."):
        with pytest.raises(ValueError, match="not a state of torchdata_wds"):
            resumed({**given, "reading_service_state": state}, 0, 1)


# -------------------------------------------------------------------------------- stages that run in the main process
def shuffled_behind(urls: list[str]) -> Any:
    return samples(urls).map(row).join_workers().wds_shuffle(4, initial=2)


def unbatched_behind(urls: list[str]) -> Any:
    return samples(urls).map(row).batch(2).join_workers().unbatch()


def filtered_behind(urls: list[str]) -> Any:
    return samples(urls).wds_decode().join_workers().filter(is_odd).map(row)


def skipped_behind(urls: list[str]) -> Any:
    return samples(urls).wds_decode().join_workers().wds_map(fail_on_one, handler=ignore_and_continue).map(row)


def zipped(urls: list[str]) -> Any:
    return samples(urls).map(row).join_workers().zip(samples(urls).map(row).join_workers())


def epoch_behind(urls: list[str]) -> Any:
    return samples(urls).map(row).join_workers().wds_epoch(12)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (shuffled_behind, "SampleShuffler, which runs in the main process, may hold items"),
        (unbatched_behind, "UnBatcher, which runs in the main process, may hold items"),
        (filtered_behind, "Filter, which runs in the main process, may hold items"),
        (
            skipped_behind,
            "WdsMapper, which runs in the main process, may hold items that it has not delivered, or drop",
        ),
        (zipped, "2 sets of workers"),
    ],
)
def test_state_refuses_when_the_main_process_may_hold_items(graph: Graph, reason: str, urls: list[str]) -> None:
    """In the middle of an epoch, with the stage's name; the run goes on, and has a state between epochs."""
    with loader_of(graph(urls), 1) as loader:
        iterator = iter(loader)
        begun = [next(iterator) for _ in range(8)]
        with pytest.raises(RuntimeError, match=reason):
            loader.state_dict()
        assert len({repr(item) for item in (*begun, *iterator)}) > 9
        assert loader.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("graph", named(shuffled_behind, unbatched_behind, filtered_behind, skipped_behind, zipped))
def test_resume_is_exact_when_the_main_process_holds_nothing_between_epochs(graph: Graph, urls: list[str]) -> None:
    """Whatever stands behind the workers begins anew with an epoch; also where it was left early before."""
    whole = run(graph(urls), 1, 3)
    with loader_of(graph(urls), 1) as loader:
        next(iter(loader))
        assert list(loader) == whole[1]
        state = loader.state_dict()
    assert resumed(state, 1, 1) == whole[2:]


def test_state_refuses_when_an_epoch_is_counted_behind_the_workers(urls: list[str]) -> None:
    """What the workers have made ahead for the next epoch is in nobody's state: the message says where to put it."""
    with loader_of(epoch_behind(urls), 1) as loader:
        iterator = iter(loader)
        next(iterator)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"wds_epoch\(\) after \.join_workers\(\): put it before"):
                loader.state_dict()
            assert list(iterator)[11:] == []


# ----------------------------------------------------------------------------------------------- what a resume costs
def read_in_order(urls: list[str]) -> Any:
    """A shard after the other, drawn anew each epoch, with no function in the graph."""
    return samples(urls).wds_decode().wds_to_tuple("__key__", "__url__")


class Opened:
    """Which shards are opened, and where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        self._open = storage.open_shard
        monkeypatch.setattr(storage, "open_shard", self.open)

    def open(self, url: str, *, offset: int = 0, **options: Any) -> Any:
        self.calls.append((url, offset))
        return self._open(url, offset=offset, **options)

    def take(self) -> list[tuple[str, int]]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    return Opened(monkeypatch)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the samples that are decoded."""
    keys: list[str] = []
    apply = SampleDecoderIterDataPipe.apply

    def note(stage: SampleDecoderIterDataPipe, sample: Any) -> Any:
        keys.append(sample["__key__"])
        return apply(stage, sample)

    monkeypatch.setattr(SampleDecoderIterDataPipe, "apply", note)
    return keys


def test_resume_opens_no_finished_shard_when_samples_are_counted(
    opened: Opened, decoded: list[str], tmp_path: Path
) -> None:
    """Of shards before the cut none is opened, of samples before it none is decoded, wherever the cut is."""
    urls = write_text_shards(tmp_path, (9, 6, 3, 5, 7, 1, 12))
    (whole,) = run(read_in_order(urls), 0, 1)
    order = [url for url, _ in opened.take()]
    for cut in (8, 20, 42):
        state = stopped(read_in_order(urls), 0, 0, cut)
        opened.take()
        decoded.clear()
        assert resumed(state, 0, 1) == [whole[cut:]]
        assert [url for url, _ in opened.take()] == order[order.index(whole[cut - 1][1]) :]
        assert decoded == [key for key, _ in whole[cut:]]


def test_resume_opens_nothing_when_the_epoch_is_over(opened: Opened, urls: list[str]) -> None:
    """A state after the last item knows the end, once the end was seen by the one that made items ahead."""
    state = stopped(read_in_order(urls), 0, 0, "between")
    opened.take()
    with DataLoader2.from_state(state, WorkersReadingService(0, seed=SEED)) as loader:
        iter(loader)
        assert opened.take() == []


def test_resume_seeks_to_its_sample_when_an_index_lies_beside(opened: Opened, tmp_path: Path) -> None:
    """The first shard is opened at the first byte that is wanted, others at their beginning."""
    urls = write_text_shards(tmp_path, (9, 6, 8))
    starts = {url: [sample.start for sample in index_shard(url)] for url in urls}
    (whole,) = run(read_in_order(urls), 0, 1)
    for cut in (2, 11, 21):
        key, url = whole[cut]
        number = int(key.partition("-")[2])
        state = stopped(read_in_order(urls), 0, 0, cut)
        opened.take()
        assert resumed(state, 0, 1) == [whole[cut:]]
        calls = opened.take()
        assert calls[0] == (url, starts[url][number])
        assert all(offset == 0 for _, offset in calls[1:])


def test_resume_decodes_what_the_buffer_held_when_samples_are_shuffled(decoded: list[str], urls: list[str]) -> None:
    """Samples that waited in the buffer are read again; each that is left is decoded once, and no other."""
    whole = run(batched(urls), 0, 1)
    state = stopped(batched(urls), 0, 0, 4)
    decoded.clear()
    assert resumed(state, 0, 1) == [whole[0][4:]]
    assert decoded == keys_of(whole[0][4:])


def test_resume_makes_up_to_63_items_again_when_functions_draw(decoded: list[str], tmp_path: Path) -> None:
    """The generators are seeded before each 64th item: from there on items are made to draw what they drew."""
    urls = write_text_shards(tmp_path, (50, 40, 20))
    whole = run(plain(urls), 0, 1)
    state = stopped(plain(urls), 0, 0, 100)
    decoded.clear()
    assert resumed(state, 0, 1) == [whole[0][100:]]
    assert decoded == keys_of(whole[0][64:])


def test_resume_makes_all_items_again_when_a_stage_may_drop_some(decoded: list[str], urls: list[str]) -> None:
    """Behind a filter items cannot be counted: everything before the cut is made once more, and dropped."""
    run(filtered(urls), 0, 1)
    total = len(decoded)
    state = stopped(filtered(urls), 0, 0, 9)
    decoded.clear()
    resumed(state, 0, 1)
    assert len(decoded) == total


def test_resume_makes_all_items_again_when_a_handler_has_skipped(decoded: list[str], urls: list[str]) -> None:
    """A stage that gives one item for each is counted through until it has left one out."""
    whole = run(handled(urls), 0, 1)
    total = len(decoded)
    for cut in (8, 15):
        state = stopped(handled(urls), 0, 0, cut)
        decoded.clear()
        assert resumed(state, 0, 1) == [whole[0][cut:]]
    assert len(decoded) == total


@pytest.mark.parametrize("graph", named(in_epochs, slow=(batched,)))
@pytest.mark.slow
def test_state_is_small_when_there_are_many_shards(graph: Graph, tmp_path: Path) -> None:
    """The service's part is below 10 KB with two workers and 100 shards, wherever it is taken."""
    urls = write_text_shards(tmp_path, (1, 0) * 50)
    with loader_of(graph(urls), 2) as loader:
        for _ in range(2):
            sizes = [len(loader.state_dict()["reading_service_state"]) for _ in loader]
            assert max(sizes) < 10_000


# ---------------------------------------------------------------------------------------------------- what the log says
def logged(caplog: pytest.LogCaptureFixture, state: Any) -> list[tuple[str, str]]:
    with caplog.at_level(logging.INFO, logger="torchdata_wds.workers"):
        caplog.clear()
        resumed(state, 0, 1)
    return [(record.levelname, record.getMessage()) for record in caplog.records if "resuming" in record.getMessage()]


def test_log_says_what_is_skipped_when_items_are_counted(caplog: pytest.LogCaptureFixture, urls: list[str]) -> None:
    """One line says where the run goes on, as information."""
    ((level, message),) = logged(caplog, stopped(batched(urls), 0, 1, 3))
    assert level == "INFO"
    assert message == "resuming at item 3 of epoch 2: the items before it are skipped"


def before_shuffle(urls: list[str]) -> Any:
    return samples(urls).map(augment).wds_shuffle(5).map(row)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (filtered, "Shuffler may yield more, fewer or other items than it takes"),
        (handled, "WdsMapper dropped items"),
        (before_shuffle, "a function in Mapper, before SampleShuffler, may draw random numbers"),
        (resampled, "SampleMixer joins several streams"),
    ],
)
def test_log_says_why_when_items_are_made_again(
    graph: Graph, reason: str, caplog: pytest.LogCaptureFixture, urls: list[str]
) -> None:
    """A warning names the stage that does not let items be skipped, and what about it."""
    ((level, message),) = logged(caplog, stopped(graph(urls), 0, 0, 10))
    assert level == "WARNING"
    assert message.startswith("resuming at item 10 of epoch 1: the items before it are made again and dropped")
    assert message.endswith(f"because {reason}")


class Jitter:
    """A function with a random generator of its own."""

    def __init__(self) -> None:
        self.generator = random.Random(1)

    def __call__(self, sample: dict[str, Any]) -> tuple[Any, ...]:
        return sample["__key__"], self.generator.random()


def test_log_warns_when_a_function_has_a_generator_of_its_own(
    caplog: pytest.LogCaptureFixture, urls: list[str]
) -> None:
    """Its state is nowhere: the items are those that are left, what it draws is not."""
    pipe = samples(urls).map(Jitter())
    resumed(stopped(pipe, 0, 0, 5), 0, 1)
    assert "functions of Mapper have random generators of their own, whose states are not kept" in caplog.text


def test_log_warns_when_a_function_runs_in_the_main_process(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, urls: list[str]
) -> None:
    """What it draws is not made again: the warning says where it should run."""
    monkeypatch.setattr(handlers, "said", set())
    with loader_of(joined(urls), 1) as loader:
        next(iter(loader))
        loader.state_dict()
    assert "a function of Mapper runs in the main process" in caplog.text


def test_log_says_nothing_when_an_epoch_begins(caplog: pytest.LogCaptureFixture, urls: list[str]) -> None:
    """Between two epochs nothing has to be made again."""
    assert logged(caplog, stopped(filtered(urls), 0, 0, "between")) == []


def noisy(sample: dict[str, Any]) -> tuple[str, float]:
    return sample["__key__"], float(np.random.randn())


def test_main_process_equals_one_worker_when_numbers_are_drawn_in_pairs(urls: list[str]) -> None:
    """The half of a pair of Gaussian numbers that waits is kept between two items."""
    assert run(samples(urls).map(noisy), 0, 1) == run(samples(urls).map(noisy), 1, 1)
