"""Profiles of graphs: times by stage that are true, runs by the number of workers, and everything closed."""

import hashlib
import importlib
import json
import logging
import multiprocessing
import signal
import threading
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import write_text_shards
from tests.kits.torchdata import needs_torchdata
from torchdata_wds import WdsLoader, WebDataset, profile_pipe, wds_collate
from torchdata_wds.workers.profile.stage_times import StageClock
from torchdata_wds.workers.profile.ticks import ticking

DATA = bytes(40_000)


def sleep(number: int) -> int:
    """Waits a little."""
    time.sleep(0.004)
    return number


def count_up(number: int) -> int:
    """Keeps the interpreter, in Python code."""
    for _ in range(4_000):
        number += 1
    return number


def hash_data(number: int) -> int:
    """Lets go of the interpreter, as decoders do."""
    hashlib.sha256(DATA).digest()
    return number


def fail(number: int) -> int:
    """Fails at the 50th item."""
    if number == 50:
        raise ZeroDivisionError("a user's mistake")
    return number


def interrupt(number: int) -> int:
    """Is interrupted by Ctrl-C at the 50th item."""
    if number == 50:
        raise KeyboardInterrupt
    return number


def shares(profile: Any) -> dict[str, float]:
    """The share of the time of each stage."""
    return {stage.stage: stage.share for stage in profile.stages}


def leftovers() -> tuple[Any, ...]:
    """What a profile must leave as it was."""
    names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("wds-profile"))
    timer = signal.getitimer(signal.ITIMER_REAL)[0] > 1, signal.getsignal(signal.SIGALRM)
    return names, timer, multiprocessing.active_children()


# ------------------------------------------------------------------------------------------------------- the stages
def test_a_slow_stage_is_named_with_its_true_time() -> None:
    """Four milliseconds of sleep are that, and the graph up to there has that rate."""
    before = leftovers()
    profile = profile_pipe(IterableWrapper(range(1000)).wds_map(sleep).batch(5), 0.25, workers=())
    assert leftovers() == before
    slowest = profile.slowest
    assert slowest.stage == "wds_map(sleep)"
    assert slowest.share > 0.5
    assert slowest.seconds_per_item is not None
    assert slowest.seconds_per_item > 0.0035
    assert [stage.items > 0 for stage in profile.stages] == [True] * 3
    assert "wds_map(sleep) takes" in profile.report()


@pytest.mark.slow
def test_times_agree_with_clocks_in_the_functions() -> None:
    """A stage that keeps the interpreter, one that lets go of it, and one that waits each get what they took."""
    spent: Counter[str] = Counter()

    def timed(function: Any) -> Any:
        def run(number: int) -> int:
            begin = time.perf_counter()
            result: int = function(number)
            spent[function.__name__] += time.perf_counter() - begin  # type: ignore[assignment]
            return result

        return run

    pipe: Any = IterableWrapper(range(100_000))
    functions = (count_up, hash_data, sleep)
    for function in functions:
        pipe = pipe.wds_map(timed(function))
    clock = StageClock(pipe)
    with ticking(clock.tick):
        for _ in islice(pipe, 250):
            pass
        clock.stop()
    found = [stage.seconds for stage in clock.figures()[1:]]
    for function, seconds in zip(functions, found, strict=True):
        assert seconds == pytest.approx(spent[function.__name__], rel=0.1, abs=0.1 * clock.total)


def test_loading_and_grouping_are_one_stage(tmp_path: Path) -> None:
    """They run as one loop, in which nothing passes between them."""
    write_text_shards(tmp_path, [40, 40])
    pipe = WebDataset(str(tmp_path / "*.tar")).wds_decode().batch(8).collate(wds_collate)
    profile = profile_pipe(pipe, 0.1, workers=())
    names = [stage.stage for stage in profile.stages]
    assert names[-4:] == [
        "load_wds_shards().group_by_key()",
        "wds_decode()",
        "batch(8)",
        "collate(conversion=wds_collate)",
    ]
    assert profile.samples_per_item == pytest.approx(8, rel=0.1)
    assert [stage.items for stage in profile.stages[-4:-2]] == [profile.stages[-3].items] * 2


@needs_torchdata
@pytest.mark.slow
def test_stages_in_another_thread_count_beside_the_others() -> None:
    """The rate up to a stage is that of the slower thread, and waiting for the other one is nobody's work."""
    importlib.import_module("torchdata.datapipes.iter")  # its form

    pipe: Any = IterableWrapper(range(10_000)).wds_map(sleep)
    profile = profile_pipe(pipe.prefetch(3).wds_map(count_up), 1, workers=())
    _, slow, prefetch, fast = profile.stages
    assert (slow.in_thread, fast.in_thread) == (True, False)
    assert profile.slowest is slow
    assert prefetch.share < 0.05
    assert fast.rate == pytest.approx(slow.rate, rel=0.3)


@pytest.mark.slow
# --------------------------------------------------------------------------------------------------------- the runs
def test_a_graph_that_ends_early_is_repeated() -> None:
    """Nine items are few, but they come again and again."""
    profile = profile_pipe(IterableWrapper(range(9)).wds_map(sleep), 0.2, workers=[0])
    (run,) = profile.runs
    assert run.items % 9 == 0
    assert run.items / run.seconds == run.rate
    assert 0 < run.rate < 260  # less on a busy machine


@pytest.mark.slow
def test_runs_with_workers_are_measured_and_judged() -> None:
    """Memory, processors, the first item and the step's rate are known; nothing is left running."""
    before = leftovers()
    pipe = IterableWrapper(range(2000)).shuffle().sharding_filter().wds_map(sleep).batch(4)
    profile = profile_pipe(pipe, 1.2, (2, 0, 2), step=sleep, multiprocessing_context="fork")
    assert leftovers() == before
    none, two = profile.runs
    assert (none.workers, two.workers) == (0, 2)
    # an item takes four times 4 ms; less than that is impossible, and a busy machine takes longer
    assert 0 < none.rate < 63
    assert 0 < two.rate < 140
    assert 0 < none.first < two.first < 60
    assert all(size is not None and size > 1e6 for size in (none.main_memory, two.worker_memory, two.memory))
    assert two.processors is not None
    assert profile.step_rate is not None
    assert 0 < profile.step_rate < 260
    plain = json.loads(json.dumps(profile.to_plain()))
    assert plain["runs"][1]["rate"] == two.rate
    assert plain["headroom"] == profile.headroom


def test_the_graph_is_not_changed(caplog: pytest.LogCaptureFixture) -> None:
    """It has not been iterated, and yields what it would have."""
    pipe = IterableWrapper(range(20)).shuffle().sharding_filter()
    with caplog.at_level(logging.INFO, "torchdata_wds"):
        profile_pipe(pipe, 0.02, workers=[0])
    assert pipe._number_of_samples_yielded == 0
    assert sorted(WdsLoader(pipe)) == list(range(20))
    assert [record.message.partition(",")[0] for record in caplog.records if "profile" in record.message] == [
        "profile: warming up",
        "profile: the stages",
        "profile: 0 workers",
    ]


# ------------------------------------------------------------------------------------------------------- what fails
@pytest.mark.parametrize("function", [fail, interrupt])
def test_what_the_graph_raises_passes_through(function: Any) -> None:
    """Everything is closed first."""
    before = leftovers()
    with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
        profile_pipe(IterableWrapper(range(100)).wds_map(function), 0.2, workers=())
    assert leftovers() == before


class Uncopied(IterDataPipe[int]):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __iter__(self) -> Any:
        yield 1


@pytest.mark.parametrize(
    ("pipe", "options", "error", "words"),
    [
        ([1, 2], {}, TypeError, "last pipe of a graph"),
        (Uncopied(), {}, TypeError, "cannot be copied"),
        (IterableWrapper([]), {}, ValueError, "no items"),
        (IterableWrapper([]).save_wds_shards("x-%06d.tar"), {}, ValueError, "save_wds_shards"),
        (IterableWrapper([1]), {"seconds": 0}, ValueError, "above 0"),
        (IterableWrapper([1]), {"seconds": "1"}, TypeError, "a number"),
        (IterableWrapper([1]), {"workers": 2}, TypeError, "such as"),
        (IterableWrapper([1]), {"workers": [-1]}, ValueError, "number of workers"),
        (IterableWrapper([1]), {"step": 3}, TypeError, "function"),
        (IterableWrapper([1]), {"multiprocessing_context": "thread"}, ValueError, "thread"),
        (IterableWrapper([1]), {"prefetch_factor": 0}, ValueError, "prefetch_factor"),
    ],
)
def test_wrong_arguments_are_errors(
    pipe: Any,
    options: dict[str, Any],
    error: type[Exception],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is named before anything runs."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        profile_pipe(pipe, **{"seconds": 0.05, "workers": (), **options})
    assert not list(tmp_path.iterdir())
