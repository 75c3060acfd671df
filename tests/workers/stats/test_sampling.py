"""The figures never end or change what they look at."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import text_samples, write_tar
from torchdata_wds import WdsLoader
from torchdata_wds.workers.stats.sampling import sampler
from torchdata_wds.workers.stats.sampling.snapshot import Snapshot, SnapshotMemory, Stage
from torchdata_wds.workers.stats.sampling.tally import Tally


def traced(_frame: FrameType, _event: str, _arg: Any) -> None:
    sum(range(20))


@pytest.mark.parametrize("start", [sys.settrace, sys.setprofile])
def test_debuggers_keep_their_variables(start: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Python sets the variables of a frame from a copy when a tracing function returns: they must be in it."""
    monkeypatch.setattr(sampler, "INTERVAL", 0.0002)
    before = {sys.settrace: sys.gettrace, sys.setprofile: sys.getprofile}[start]()
    start(traced)
    try:
        end, items = time.monotonic() + 0.3, iter(WdsLoader(IterableWrapper(range(10**7)).wds_map(abs)))
        while time.monotonic() < end:
            next(items)
    finally:
        start(before)


def test_an_error_of_the_figures_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once."""

    def publish(_: Snapshot) -> None:
        raise ValueError

    tally, pipe = Tally(publish), IterableWrapper([1])
    for _ in range(2):
        tally.begin(lambda: pipe)
        with tally.blocking():
            pass
        tally.end()
    assert len(caplog.records) == 1


def test_counts_go_on_in_a_graph_that_replaces_another() -> None:
    """As a function for resetting may return one in each epoch."""
    tally = Tally()
    for total in (3, 6):
        pipe = IterableWrapper(range(3))
        tally.begin(lambda pipe=pipe: pipe)
        assert list(pipe) == [0, 1, 2]
        tally.end()
        assert tally.snapshot().items == total


def test_a_process_without_room_for_a_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one whose interpreter ends: no thread can be started then."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fresh, switches = sampler._Sampler(), sys.getswitchinterval()
    monkeypatch.setattr(sampler, "_sampler", fresh)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert list(WdsLoader(IterableWrapper([1]).wds_map(abs))) == [1]
    assert (fresh.thread, sys.getswitchinterval()) == (None, switches)


def test_time_after_an_exception_is_no_wait() -> None:
    """The training loop does not wait any longer."""
    loader = WdsLoader(IterableWrapper(["x"]).map(int))
    with pytest.raises(ValueError, match="x"):
        list(loader)
    time.sleep(0.2)
    assert loader.stats().total.waits.waited < 0.15


def test_large_snapshots_are_cut() -> None:
    """Counts come without stages, and then without sources."""
    memory = SnapshotMemory()
    memory.write(Snapshot("a", items=3, stages=(Stage("x" * 100_000, 0, 0, 0.0),), sources={}))
    assert memory.read() == Snapshot("a", items=3)


def test_urls_may_be_of_a_subclass_of_str(tmp_path: Path) -> None:
    """Shards are named as text, in workers too."""
    url = np.str_(write_tar(tmp_path / "0.tar", text_samples("s", 3)))
    with WdsLoader(IterableWrapper([url]).load_wds_shards().group_by_key(), 1) as loader:
        assert len(list(loader)) == 3
        assert loader.stats().total.sources[0].slowest == url


class Unwatched:
    """Leaves when the garbage collector finds it, as loaders of an abandoned generator do."""

    interval = sampler.INTERVAL

    def __del__(self) -> None:
        sampler.leave(self)

    def tick(self, _frames: Any, _seconds: float) -> None:
        """Does nothing."""


def test_leaving_needs_no_lock() -> None:
    """The collector may run in the thread that holds it."""
    with sampler._sampler.lock:
        Unwatched()


def test_one_that_leaves_while_all_are_listed_does_no_harm() -> None:
    """The list is made again."""
    own = sampler._Sampler()
    attempts = iter([RuntimeError("Set changed size during iteration"), None])

    class Changing(list[Any]):
        def __iter__(self) -> Any:
            if (error := next(attempts)) is not None:
                raise error
            return super().__iter__()

    own.watched = Changing([1])  # type: ignore[assignment]
    assert own.listed() == [1]
