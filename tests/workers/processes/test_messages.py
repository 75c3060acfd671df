"""Messages from a worker: how many items each holds, when it is sent, and what the main process gets out of it."""

import multiprocessing
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from torchdata_wds.workers.processes.messages import MOST_ITEMS, Message, Receiver, Sender
from torchdata_wds.workers.processes.shared_memory import Limits, SegmentPool


class Line:
    """Both ends of a connection in one process."""

    def __init__(self, ahead: int = 8, segments: int = 8) -> None:
        here, there = multiprocessing.Pipe()
        limits = Limits(segments, segments)
        self.credits = threading.Semaphore(ahead)
        self.sender = Sender(there, self.credits, SegmentPool(limits))
        self.end, self.other_end = multiprocessing.Pipe()  # in place of a process's sentinel
        self.receiver = Receiver(here, self.end.fileno(), self.credits, limits)
        self.sender.begin(1)

    def send(self, *items: Any, pause: float = 0) -> None:
        for item in items:
            self.sender.wait_for_room()
            time.sleep(pause)
            self.sender.add(item)

    def receive(self, timeout: float = 5) -> Message:
        message = self.receiver.receive(timeout)
        assert message is not None
        return message


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def unhurried(monkeypatch: Any) -> None:
    """Messages are sent when they are full, however long that takes."""
    monkeypatch.setattr("torchdata_wds.workers.processes.messages.LINGER", 100)
    monkeypatch.setattr("torchdata_wds.workers.processes.messages.PATIENCE", 100)


def contents(message: Message) -> list[Any]:
    found = []
    while not message.is_empty:
        found.append(message.take())
    return found


@pytest.mark.usefixtures("unhurried")
def test_small_items_go_together_when_they_come_fast(line: Line) -> None:
    """A message is sent when it has enough items, and the last one at the end."""
    line.send(*range(MOST_ITEMS + 2))
    line.sender.finish()
    first, last = line.receive(), line.receive()
    assert contents(first) == list(range(MOST_ITEMS))
    assert contents(last) == [MOST_ITEMS, MOST_ITEMS + 1]
    assert (first.is_last, last.is_last, first.turn) == (False, True, 1)


@pytest.mark.usefixtures("unhurried")
def test_messages_are_sent_when_they_have_many_bytes(line: Line) -> None:
    """Items of 10 kB go by fours, and a large one at once, with the small one before it."""
    line.send(*[bytes(10_000)] * 4, b"small", np.zeros(100_000))
    assert [len(contents(line.receive())) for _ in range(2)] == [4, 2]


@pytest.mark.usefixtures("unhurried")
def test_the_end_is_sent_when_there_are_no_items(line: Line) -> None:
    """An empty stream is one message without items."""
    line.sender.finish()
    message = line.receive()
    assert message.is_last
    assert contents(message) == []


def test_items_are_sent_at_once_when_they_come_slowly(line: Line) -> None:
    """An item that took a while does not wait for another one."""
    line.send(1, 2, pause=0.01)
    assert [contents(line.receive(0)) for _ in range(2)] == [[1], [2]]


def test_items_are_sent_soon_when_the_next_one_does_not_come(line: Line, monkeypatch: Any) -> None:
    """A worker that is held up keeps nothing back."""
    monkeypatch.setattr("torchdata_wds.workers.processes.messages.LINGER", 100)
    for _ in range(3):
        line.send(1, 2)
        begin = time.monotonic()
        found = contents(line.receive())
        while len(found) < 2:  # a busy machine may hold it up between the two
            found += contents(line.receive())
        assert found == [1, 2]
        assert time.monotonic() - begin < 30


@pytest.mark.parametrize("segments", [0, 8], ids=["without shared memory", "with shared memory"])
@pytest.mark.parametrize(
    "item",
    [
        np.arange(100_000),
        torch.arange(100_000),
        bytes(300_000),
        ["text" * 50_000, np.arange(10), {"a": torch.arange(50_000), "b": np.arange(60_000)}],
    ],
    ids=["array", "tensor", "bytes", "all of these"],
)
def test_large_items_come_whole(item: Any, segments: int) -> None:
    """Large items come equal, by whatever way."""
    line = Line(segments=segments)
    for _ in range(3):
        sending = threading.Thread(target=line.send, args=(item,))  # without shared memory it waits for the reader
        sending.start()
        (found,) = contents(line.receive())
        sending.join()
        assert str(found) == str(item)
        assert type(found) is type(item)


def test_shared_memory_is_free_when_the_items_of_a_message_are_gone(line: Line) -> None:
    """A message that was emptied holds nothing."""
    line = Line(segments=1)
    addresses = set()
    for _ in range(5):
        line.send(np.zeros(100_000))
        message = line.receive()
        addresses.add(message.take().ctypes.data)
    assert len(addresses) == 1


@pytest.mark.slow
def test_items_may_be_made_only_when_there_is_a_credit() -> None:
    """So many messages may be on their way; one that was taken in makes room for one more."""
    line, made = Line(ahead=2), []

    def work() -> None:
        for number in range(5):
            line.sender.wait_for_room()
            made.append(number)
            line.sender.add(np.zeros(100_000))

    worker = threading.Thread(target=work)
    worker.start()
    for expected in (2, 3, 4, 5, 5):
        time.sleep(0.1)
        assert len(made) == expected
        line.receive()
    worker.join()


@pytest.mark.usefixtures("unhurried")
def test_a_new_turn_drops_what_was_left_of_the_old_one(line: Line) -> None:
    """Items that were not sent yet belong to nobody any more."""
    line.send(1, 2)
    line.sender.begin(2)
    line.send(3)
    line.sender.finish()
    message = line.receive()
    assert (message.turn, contents(message)) == (2, [3])


class Unloadable:
    """Pickles, and cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


@pytest.mark.usefixtures("unhurried")
def test_items_before_a_failure_come_first(line: Line) -> None:
    """An item that cannot be rebuilt raises in its place, one that cannot be pickled in the worker."""
    line.send(1, Unloadable(), 2)
    with pytest.raises(Exception, match=r"pickle|local object"):
        line.send(lambda: 3)
    line.sender.finish()
    message = line.receive()
    assert message.take() == 1
    with pytest.raises(ValueError, match="not a number"):
        message.take()
    assert contents(message) == [2]


def test_receive_gives_none_when_there_is_nothing_in_time(line: Line) -> None:
    """Waiting ends with the timeout."""
    assert line.receiver.receive(0.05) is None


def test_receive_raises_when_the_process_has_ended(line: Line) -> None:
    """What was sent before is read first; then the end of the process is an EOFError."""
    line.send(1, pause=0.01)
    line.other_end.close()
    assert contents(line.receive()) == [1]
    with pytest.raises(EOFError):
        line.receive()
