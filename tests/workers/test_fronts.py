"""WdsLoader and DataLoader2 with WorkersReadingService: equal items, over random graphs, workers, ranks and cuts."""

import json
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import in_child
from tests.kits.random_graphs import random_graph
from tests.kits.resume_kit import indexed_shards_in, keys_of
from tests.kits.torchdata import is_installed
from tests.kits.workers_kit import FRONTS, loader_of, resumed_loader, run_script, time_limit
from torchdata_wds import WdsLoader


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return indexed_shards_in(tmp_path_factory.mktemp("fronts"))


def plain(value: Any) -> Any:
    """A value after a round trip through JSON."""
    return json.loads(json.dumps(value))


def epochs_of(front: str, pipe: Any, workers: int, count: int, **options: Any) -> list[list[Any]]:
    """The first epochs of a run that is never stopped."""
    with loader_of(pipe, workers, front=front, **options) as loader:
        return [list(loader) for _ in range(count)]


def epoch_with_states(loader: Any, cuts: Iterable[int]) -> tuple[list[Any], dict[int, Any]]:
    """Runs through an epoch; returns its items, and the states by the number of items delivered."""
    items, states = [], {}
    iterator = iter(loader)
    states[0] = loader.state_dict() if 0 in cuts else None
    for item in iterator:
        items.append(item)
        if len(items) in cuts:
            states[len(items)] = loader.state_dict()
    return items, {cut: state for cut, state in states.items() if state is not None}


def refuses_states(loader: Any) -> bool:
    """Whether a state in the middle of an epoch is refused."""
    next(iter(loader))
    try:
        loader.state_dict()
    except RuntimeError:
        return True
    return False


def jobs_of(urls: list[str], number: int, seed: int | None) -> list[dict[str, Any]]:
    """Checks that both fronts agree on a graph; returns states of it, and what must come after each."""
    draw = random.Random(f"run {number}")
    workers, epoch = draw.randrange(4), 0 if seed is None else draw.randrange(2)
    graph = random_graph(urls, number)
    states_are = graph.states if workers else "anywhere"  # without workers all stages are of one stream
    whole = epochs_of("loader", graph.pipe, workers, 1 if seed is None else epoch + 2, seed=number)
    if seed is not None and is_installed():
        assert (number, epochs_of("service", graph.pipe, workers, 2, seed=seed)) == (number, whole[:2])
    length = len(whole[epoch])
    cuts = draw.sample([0, length, max(length - 1, 0), draw.randrange(length + 1)], 2)
    with WdsLoader(graph.pipe, workers, seed=seed) as loader:
        before = [list(loader) for _ in range(epoch)]
        items, states = epoch_with_states(loader, cuts if states_are == "anywhere" else [])
        try:
            states[-1] = loader.state_dict()
        except RuntimeError:
            assert states_are == "never"
        assert (states_are != "anywhere") == refuses_states(loader)
    assert seed is None or (number, [*before, items]) == (number, whole[: epoch + 1])
    jobs = []
    for cut, state in states.items():
        assert len(json.dumps(state)) < 10_000
        # without a seed, the later epochs are anybody's guess
        rest = [*([] if cut < 0 else [items[cut:]]), *([] if seed is None else whole[epoch + 1 : epoch + 2])]
        stops = sorted(draw.sample(range(6), 2)) if 0 <= cut < length and not jobs else []
        job = {"number": number, "workers": workers, "seed": seed, "state": state}
        jobs.append({**job, "stops": stops, "rest": plain(rest)})
    return jobs


def resumed(urls: list[str], job: dict[str, Any]) -> list[list[Any]]:
    """Resumes from a state in another loader, and from later states of that one in others."""
    pipe, state = random_graph(urls, job["number"]).pipe, job["state"]
    items: list[Any] = []
    for stop in job["stops"]:
        with WdsLoader(pipe, job["workers"], seed=job["seed"]) as loader:
            loader.load_state_dict(state)
            left = min(stop, len(job["rest"][0])) - len(items)
            items += [item for _, item in zip(range(left), loader, strict=False)]
            state = plain(loader.state_dict())
    with WdsLoader(pipe, job["workers"], seed=job["seed"]) as loader:
        loader.load_state_dict(state)
        epochs = [list(loader) for _ in job["rest"]]
    return [items + epochs[0], *epochs[1:]] if epochs else []


RESUMER = """
import json, logging, sys
from pathlib import Path
from tests.kits.workers_kit import time_limit
from tests.workers.test_fronts import resumed

if __name__ == "__main__":
    logging.disable()  # that items of some graphs are made again up to the cut
    urls, jobs = json.loads(Path(sys.argv[1]).read_text())
    with time_limit(int(sys.argv[2])):
        print(json.dumps([resumed(urls, job) for job in jobs]))
"""


def in_new_process(file: Path) -> Any:
    """What the jobs of a file give in a new process, where Python hashes strings in another way."""
    done = run_script(RESUMER, str(file), "100", seconds=130)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_forked_process(file: Path) -> Any:
    """What the jobs of a file give in a fork of this process, which starts at once."""
    answer = file.with_suffix(".answer")

    def work() -> None:
        try:
            urls, jobs = json.loads(file.read_text())
            with time_limit(100):
                answer.write_text(json.dumps([resumed(urls, job) for job in jobs]))
        except BaseException:
            answer.write_text(traceback.format_exc())
            raise

    assert in_child(work) == 0, answer.read_text()
    return json.loads(answer.read_text())


def check_graphs(
    urls: list[str], runs: Iterable[tuple[int, int | None]], folder: Path, elsewhere: Callable[[Path], Any]
) -> None:
    """Checks graphs with their seeds; their states go to another process as JSON, and are resumed there."""
    jobs = [job for number, seed in runs for job in jobs_of(urls, number, seed)]
    file = folder / "jobs.json"
    file.write_text(json.dumps([urls, jobs]))
    for job, found in zip(jobs, elsewhere(file), strict=True):
        place = [job[name] for name in ("number", "workers", "seed", "stops")], job["state"]["item"]
        assert (place, found) == (place, job["rest"])


@pytest.mark.slow
def test_fronts_agree_and_states_resume_in_another_process(urls: list[str], tmp_path: Path) -> None:
    """Two graphs with 0 to 2 workers, cut before, in, at the end of and after an epoch."""
    check_graphs(urls, [(33, 33), (32, None)], tmp_path, in_forked_process)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 12])
def test_fronts_agree_and_states_resume_in_many_graphs(first: int, urls: list[str], tmp_path: Path) -> None:
    """The same with more graphs, seeded and not in turn, and 3 workers too."""
    runs = [(number, None if number % 2 else number) for number in range(first, first + 12)]
    runs.append((first + 29, first + 29))
    check_graphs(urls, runs, tmp_path, in_new_process)


@pytest.mark.parametrize(
    ("number", "ranks", "workers"),
    [
        (2, 3, 0),
        (14, 2, 1),
        *(pytest.param(number, number % 2 + 2, number % 3, marks=pytest.mark.slow) for number in range(100, 106)),
    ],
)
def test_ranks_share_each_epoch_and_resume(number: int, ranks: int, workers: int, urls: list[str]) -> None:
    """Together they have what a single rank has, in both fronts; and each resumes from its own state."""
    graph, draw = random_graph(urls, number), random.Random(number)
    alone = epochs_of("loader", graph.pipe, 0, 2, seed=number)
    shares = []
    for rank in range(ranks):
        options: dict[str, Any] = {"seed": number, "ranks": (rank, ranks)}
        shares.append(epochs_of("loader", graph.pipe, workers, 2, **options))
        if is_installed():
            assert epochs_of("service", graph.pipe, workers, 2, **options) == shares[-1]
        if graph.states == "anywhere":
            cut = draw.randrange(len(shares[-1][0]) + 1)
            with WdsLoader(graph.pipe, workers, **options) as loader:
                items, states = epoch_with_states(loader, [cut])
                loader.load_state_dict(plain(states[cut]))
                assert [[*items[:cut], *loader], list(loader)] == shares[-1]
    for epoch in range(2):
        together = Counter(key for share in shares for key in keys_of(share[epoch]))
        assert not graph.is_exact or together == Counter(keys_of(alone[epoch]))


@pytest.mark.parametrize("front", FRONTS)
def test_next_epoch_goes_on_when_a_state_was_taken_at_a_short_last_batch(front: str, urls: list[str]) -> None:
    """Streams that had ended then end here too, so that wds_epoch knows where the next epoch begins."""
    samples = IterableWrapper(urls).sharding_filter().load_wds_shards().group_by_key().map(itemgetter("__key__"))
    pipe = samples.wds_epoch(7).join_workers().batch(2)
    with loader_of(pipe, front=front, seed=1) as loader:
        list(loader)
        items, states = epoch_with_states(loader, [4])
        following = list(loader)
    assert len(items[-1]) == 1
    with resumed_loader(states[4], pipe, front=front, seed=1) as again:
        assert [list(again), list(again)] == [[], following]


@pytest.mark.parametrize("front", FRONTS)
def test_state_is_refused_when_the_main_process_cycles_over_epochs(front: str, urls: list[str]) -> None:
    """Each pass of cycle takes another epoch of wds_epoch, and the workers do not report where the last one ended."""
    samples = IterableWrapper(urls).sharding_filter().load_wds_shards().group_by_key().map(itemgetter("__key__"))
    with loader_of(samples.wds_epoch(7).join_workers().cycle(2), front=front, seed=1) as loader:
        assert len(list(loader)) == 14
        with pytest.raises(RuntimeError, match=r"\.cycle\(\), iterates over it several times"):
            loader.state_dict()
