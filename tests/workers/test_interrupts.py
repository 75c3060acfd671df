"""Ctrl-C, which a terminal and a notebook send to all processes of a group: the loader can be iterated again."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import children, in_child, wait_until
from tests.kits.workers_kit import FRONTS, FRONTS_QUICK, engine_of, loader_of, resumed_loader
from torchdata_wds import WdsLoader
from torchdata_wds.workers.interrupts import ignore_interrupts, interrupts_held
from torchdata_wds.workers.processes import pool as pools
from torchdata_wds.workers.processes.link import WorkerLink
from torchdata_wds.workers.processes.messages import Receiver


def press_ctrl_c(*_: Any) -> None:
    """Sends SIGINT to this process and its children, as a terminal does to a group."""
    for pid in (*children(), os.getpid()):
        os.kill(pid, signal.SIGINT)


def test_interrupts_wait_when_they_are_held() -> None:
    """What belongs together is done, and then the interrupt is raised."""
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        press_ctrl_c()
        time.sleep(0.01)
        done.append(1)
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize("handler", [signal.SIG_IGN, None], ids=["ignored", "another thread"])
def test_interrupts_are_held_when_there_is_nothing_to_hold(handler: Any) -> None:
    """A program that ignores Ctrl-C keeps doing so, and threads other than the main one are never interrupted."""
    before = signal.getsignal(signal.SIGINT)
    found = []

    def hold() -> None:
        with interrupts_held():
            found.append(signal.getsignal(signal.SIGINT))

    if handler is None:
        thread = threading.Thread(target=hold)
        thread.start()
        thread.join()
        assert found == [before]
        return
    signal.signal(signal.SIGINT, handler)
    try:
        hold()
        assert found == [handler]
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupts_are_ignored_when_a_process_that_was_started_meanwhile_says_so() -> None:
    """A signal that comes before a new process has begun to ignore it is lost."""

    def begin() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        ignore_interrupts()
        os.kill(os.getpid(), signal.SIGINT)

    with interrupts_held():
        assert in_child(begin) == 0


class Interrupting(IterDataPipe):
    """Is interrupted when it is first copied."""

    copies = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __deepcopy__(self, memo: Any) -> IterDataPipe:
        Interrupting.copies += 1
        if Interrupting.copies == 1:
            press_ctrl_c()
        return self


def test_graph_is_copied_whole_when_that_is_interrupted() -> None:
    """A shuffle that was left half copied would print an error when it is forgotten."""
    loader = WdsLoader(Interrupting().shuffle(), seed=0)
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert sorted(loader) == [0, 1, 2]


#: How long each item takes, in workers that were forked too.
pace = RawValue("d", 0.01)


@pytest.fixture(autouse=True)
def _pace() -> None:
    pace.value = 0.01


def slowly(item: int) -> int:
    time.sleep(pace.value)
    return item


def numbers(count: int = 60) -> IterDataPipe:
    return IterableWrapper(range(count)).sharding_filter().map(slowly)


def interrupt(loader: Any, taken: int = 5) -> Iterator[Any]:
    """Iterates and presses Ctrl-C while the loader waits for an item; returns what is left of the iterator."""
    items = iter(loader)
    for _ in range(taken):
        next(items)
    with pytest.raises(KeyboardInterrupt):
        timer = threading.Timer(0.02, press_ctrl_c)
        timer.start()
        for _ in items:
            pass
        timer.join()  # so that it presses here at all events
    return items


@pytest.mark.parametrize("front", FRONTS_QUICK)
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_gives_whole_epochs_when_it_was_interrupted(workers: int, front: str) -> None:
    """Workers live on, and the next epochs lack nothing."""
    with loader_of(numbers(), workers, front=front) as loader:
        for _ in range(2):
            pace.value = 0.01
            interrupt(loader)
            pace.value = 0
            assert list(loader) == [*range(60)]
    assert not children()


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_iterator_says_so_when_it_was_interrupted(workers: int, front: str) -> None:
    """What Python has ended in the middle does not look like the end of the epoch."""
    with loader_of(numbers(), workers, front=front) as loader:
        items = interrupt(loader)
        with pytest.raises(
            RuntimeError, match=r"ended by (Ctrl-C.*iterating over the loader again|KeyboardInterrupt: begin another)"
        ):
            next(items)
        pace.value = 0
        assert list(loader) == [*range(60)]


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_state_is_that_of_the_last_item_when_an_epoch_was_interrupted(workers: int, front: str) -> None:
    """A program that Ctrl-C stops saves it, and another one resumes."""
    found = []
    with loader_of(numbers(3000), workers, front=front, seed=1) as loader:
        items = iter(loader)
        found.append(next(items))
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.02, press_ctrl_c).start()
            for item in items:
                found.append(item)
        state = loader.state_dict()
    assert found == [*range(len(found))]
    with resumed_loader(state, numbers(3000), workers, front=front, seed=1) as again:
        items = iter(again)
        assert [next(items) for _ in range(3)] == [*range(len(found), len(found) + 3)]


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_loader_gives_whole_epochs_when_workers_were_interrupted_at_their_start(context: str, front: str) -> None:
    """A Ctrl-C in the first second meets workers that import what they need."""
    count = 1000  # more than workers make in a second, if their server has imported all that before
    with loader_of(numbers(count), 2, front=front, multiprocessing_context=context) as loader:
        for delay in (0.1, 0.5, 1):
            threading.Timer(delay, press_ctrl_c).start()
            with pytest.raises(KeyboardInterrupt):
                list(loader)
        assert list(loader) == [*range(count)]
    assert not children()


def stuck_once(item: Path | int) -> Path | int:
    if isinstance(item, Path) and not item.exists():
        item.touch()
        time.sleep(1000)
    return item


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS_QUICK)
@pytest.mark.parametrize("epoch", [False, True], ids=["", "wds_epoch"])
def test_loader_gives_whole_epochs_when_a_source_was_stuck(
    epoch: bool, front: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """A worker that does not come back from its item after Ctrl-C gives way to a new one."""
    monkeypatch.setattr(pools, "GRACE", 0.2)
    flag = tmp_path / "flag"
    items: list[Any] = [0, flag, *range(2, 20)]
    pipe = IterableWrapper(items).sharding_filter().map(stuck_once)
    with loader_of(pipe.wds_epoch(20) if epoch else pipe, front=front) as loader:
        presser = threading.Thread(target=lambda: wait_until(flag.exists) and press_ctrl_c())
        with pytest.raises(KeyboardInterrupt):
            presser.start()
            list(loader)
        presser.join()
        for _ in range(2):
            assert sorted(loader, key=str) == sorted(items, key=str)
    assert not children()


@pytest.mark.parametrize("front", FRONTS_QUICK)
@pytest.mark.parametrize("epoch", [False, True], ids=["", "wds_epoch"])
def test_loader_gives_whole_epochs_when_a_message_was_cut(epoch: bool, front: str, monkeypatch: Any) -> None:
    """An interrupt in the middle of a message leaves a connection that cannot be understood: its worker is replaced."""
    pipe = IterableWrapper(range(60)).sharding_filter()
    receive = Receiver.receive

    def receive_half(receiver: Any, timeout: float | None) -> Any:
        receive(receiver, timeout)
        raise KeyboardInterrupt

    with loader_of(pipe.wds_epoch(60) if epoch else pipe, front=front) as loader:
        items = iter(loader)
        next(items)
        links = engine_of(loader).graph.runs[0]._links
        pids = [link._process.pid for link in links]
        with monkeypatch.context() as patch:
            patch.setattr(Receiver, "receive", receive_half)
            with pytest.raises(KeyboardInterrupt):
                list(items)
        assert sorted(loader) == sorted(loader) == [*range(60)]
        assert sum(link._process.pid in pids for link in links) == 1
    assert not children()


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("is_seen", [True, False])
def test_loader_gives_whole_epochs_when_workers_ended_before_they_began(
    is_seen: bool, front: str, monkeypatch: Any
) -> None:
    """A forked server starts workers that Ctrl-C may end while they import; whenever that is seen, others take over."""
    with loader_of(IterableWrapper(range(20)).sharding_filter(), front=front) as loader:
        iter(loader)
        # the epoch was interrupted before its first item
        loader._reset_iter, loader._running = True, None
        for link in list(engine_of(loader).graph.runs[0]._links):
            link._process.kill()
            link._process.join()
            link._answered.value = 0
        with monkeypatch.context() as patch:
            if not is_seen:  # they are about to end
                patch.setattr(WorkerLink, "is_lost", False)
            assert list(loader) == [*range(20)]
        assert list(loader) == [*range(20)]
    assert not children()


@pytest.mark.parametrize("front", FRONTS)
def test_workers_end_when_shutdown_is_interrupted(front: str, monkeypatch: Any) -> None:
    """No process is left when Ctrl-C comes while they are waited for."""
    loader = loader_of(numbers(), front=front)
    next(iter(loader))
    join = WorkerLink.join
    monkeypatch.setattr(WorkerLink, "join", lambda link: press_ctrl_c() or join(link))
    with pytest.raises(KeyboardInterrupt):
        loader.shutdown()
    assert not children(unreaped=True)
