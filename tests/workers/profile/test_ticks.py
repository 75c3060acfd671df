"""Ticks at regular times: by a signal that shares its timer, or from a thread."""

import signal
import sys
import threading
import time
from types import FrameType

import pytest

from torchdata_wds.workers.profile.ticks import ticking


def ring(*_: object) -> None:
    """An alarm's handler."""
    raise TimeoutError


@pytest.fixture
def _own_alarm() -> object:
    """Keeps the tests' own time limit, which is an alarm too."""
    before, left = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    yield
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *left)


def test_ticks_stand_for_the_time_when_a_call_is_long() -> None:
    """A sleep, and a call that keeps the interpreter, are counted in milliseconds."""
    counts: list[int] = []
    with ticking(lambda count, _: counts.append(count)):
        begin = time.perf_counter()
        sum(range(1_000_000))
        time.sleep(0.02)
        for _ in range(10):
            pass
        passed = (time.perf_counter() - begin) * 1000
    assert passed - 2 <= sum(counts) <= passed + 2 + 0.1 * passed


@pytest.mark.usefixtures("_own_alarm")
def test_an_alarm_rings_at_its_time_and_is_put_back() -> None:
    """Inside the context, and after it with the time that is left."""
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    with pytest.raises(TimeoutError), ticking(lambda *_: None):
        time.sleep(5)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    signal.setitimer(signal.ITIMER_REAL, 60)
    with ticking(lambda *_: None):
        time.sleep(0.01)
    assert signal.getsignal(signal.SIGALRM) is ring
    assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] < 59.995


def test_ticks_come_from_a_thread_outside_the_main_thread() -> None:
    """No frame is given, and the interval at which threads switch is put back."""
    frames: list[FrameType | None] = []
    switch = sys.getswitchinterval()

    def run() -> None:
        with ticking(lambda _, frame: frames.append(frame)):
            time.sleep(0.02)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert set(frames) == {None}
    assert sys.getswitchinterval() == switch
