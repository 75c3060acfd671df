"""Shared memory between a worker and the main process: filled, read where it is, and filled again when it is free."""

import gc
import os
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from tests.kits.processes import in_child, open_files
from torchdata_wds.workers.processes.shared_memory import Limits, SegmentPool, SegmentTable, Span

SIZE = 100_000


class Pair:
    """A worker's pool and the main process's table, in one process."""

    def __init__(self, most: int = 8, kept: int = 4) -> None:
        limits = Limits(most, kept)
        self.pool, self.table = SegmentPool(limits), SegmentTable(limits)

    def send(self, *pieces: Any) -> list[memoryview | Span]:
        """What the main process gets of some data: views of shared memory, or the data as it is."""
        places, segments = self.pool.store([memoryview(piece).cast("B") for piece in pieces])
        for segment in segments:
            if segment.descriptor >= 0:
                self.table.add(segment.number, os.dup(segment.descriptor))
                segment.close_descriptor()
        leases = {segment.number: self.table.lease(segment.number) for segment in segments}
        return [leases[p.segment][p.start : p.stop] if isinstance(p, Span) else p for p in places]

    def lent(self, fill: int) -> Any:
        """An array in memory that the pool has lent."""
        array = self.pool.lend(SIZE)
        assert array is not None
        array[:] = fill
        return array


def data(fill: int, size: int = SIZE) -> bytes:
    return bytes([fill]) * size


def test_segment_is_used_again_when_nothing_refers_to_it() -> None:
    """One segment is enough for any number of batches that are dropped in turn."""
    pair = Pair(most=1)
    before = open_files()
    for fill in range(50):
        (view,) = pair.send(data(fill))
        assert bytes(view) == data(fill)
        del view
    assert open_files() <= before + 2  # that of the worker's mapping and that of the main process's


HOLDS = {
    "view": lambda view: view[5:],
    "array": lambda view: np.frombuffer(view, np.uint8)[5:],
    "tensor": lambda view: torch.frombuffer(view, dtype=torch.uint8)[5:6],
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_segment_is_left_alone_when_a_view_of_it_lives(hold: Any) -> None:
    """Whatever is made of the memory, as small as it may be, keeps it as it is."""
    pair = Pair()
    (view,) = pair.send(data(1))
    held = hold(view)
    del view
    for fill in range(2, 30):
        pair.send(data(fill))
    assert int(held[0]) == 1


def test_pool_gives_data_back_when_all_segments_are_in_use() -> None:
    """What finds no room goes another way, until something is free."""
    pair = Pair(most=2)
    held = [pair.send(data(fill))[0] for fill in range(4)]
    assert [bytes(view) for view in held] == [data(fill) for fill in range(4)]
    del held[0]
    (view,) = pair.send(data(9))
    assert held[-1].obj is not view.obj
    assert isinstance(view.obj, np.ndarray)


def test_pool_takes_a_larger_segment_when_the_free_ones_are_too_small() -> None:
    """A batch of unusual size replaces a segment, and what the main process holds of the old one stays."""
    pair = Pair(most=2)
    (first,) = pair.send(data(1))
    (second,) = pair.send(data(2))
    del second
    (large,) = pair.send(data(3, 50 * SIZE))
    assert (bytes(first), bytes(large)) == (data(1), data(3, 50 * SIZE))


def test_pool_copies_several_pieces_into_one_segment() -> None:
    """The pieces of a message share a segment, each aligned for any type."""
    one, two = Pair(most=1).send(data(1, 70_001), data(2, 70_003))
    assert one.obj is two.obj
    assert np.frombuffer(two, np.uint8).ctypes.data % 64 == 0
    assert (bytes(one), bytes(two)) == (data(1, 70_001), data(2, 70_003))


def test_pool_copies_nothing_when_data_lies_in_what_it_lent() -> None:
    """Data that was put into lent memory is sent as it stands."""
    pair = Pair()
    array = pair.lent(1)
    (view,) = pair.send(array)
    array[:] = 2
    assert bytes(view) == data(2)


def test_pool_copies_data_when_it_was_sent_before() -> None:
    """What the main process reads already is not sent a second time as it stands."""
    pair = Pair()
    array = pair.lent(1)
    (first,) = pair.send(array)
    (second,) = pair.send(array)
    assert first.obj is not second.obj
    del first
    gc.collect()
    for fill in range(2, 20):
        pair.send(data(fill))
    assert bytes(second) == array.tobytes() == data(1)


def test_pool_leaves_lent_memory_alone_while_the_worker_has_it() -> None:
    """A batch that a stage of the worker keeps is not written over, sent or not."""
    pair = Pair()
    kept, sent = pair.lent(1), pair.lent(2)
    pair.send(sent)
    for fill in range(3, 30):
        pair.send(data(fill))
    assert (kept.tobytes(), sent.tobytes()) == (data(1), data(2))


def test_pool_lends_nothing_when_half_of_it_is_lent() -> None:
    """A stage that keeps every batch leaves room for what is sent."""
    pair = Pair(most=8)
    lent = [pair.pool.lend(SIZE) for _ in range(20)]
    assert sum(array is not None for array in lent) == 4
    (view,) = pair.send(data(1))
    assert isinstance(view.obj, np.ndarray)


def test_pool_keeps_few_segments_when_it_is_trimmed() -> None:
    """After an epoch that needed many, both sides let go of them, and numbers begin to be given anew."""
    pair = Pair(most=8, kept=2)
    before = open_files()
    held = [pair.send(data(fill))[0] for fill in range(8)]
    pair.pool.trim()
    pair.table.trim()
    assert [bytes(view) for view in held] == [data(fill) for fill in range(8)]
    del held
    assert open_files() <= before + 4
    again = [pair.send(data(fill))[0] for fill in range(8)]
    assert [bytes(view) for view in again] == [data(fill) for fill in range(8)]


def test_pool_closes_files_when_segments_were_never_sent() -> None:
    """Memory that was lent and dropped leaves no descriptor behind."""
    before = open_files()
    pair = Pair()
    pair.pool.lend(SIZE)
    assert open_files() > before
    del pair
    assert open_files() <= before


def test_pool_does_without_when_the_system_has_no_more_files(monkeypatch: Any) -> None:
    """Too many open files are not an error: data takes another way."""

    def refuse(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    pair = Pair()
    assert pair.pool.lend(SIZE) is None
    (view,) = pair.send(data(1))
    assert bytes(view) == data(1)


def test_segments_work_when_the_system_has_no_memory_files(monkeypatch: Any) -> None:
    """Without memfd_create a temporary file is shared."""
    monkeypatch.delattr(os, "memfd_create")
    (view,) = Pair().send(data(1))
    assert isinstance(view.obj, np.ndarray)
    assert bytes(view) == data(1)


def test_segment_stays_in_use_when_a_forked_process_drops_it() -> None:
    """A copy of the reference in a process forked from the main process frees nothing."""
    pair = Pair(most=1)
    (view,) = pair.send(data(1))
    child = os.fork()
    if child == 0:
        del view
        os._exit(0)
    os.waitpid(child, 0)
    (other,) = pair.send(data(2))
    assert (bytes(view), bytes(other)) == (data(1), data(2))


class ForkedReader:
    """A process forked now, which reads a view that it has inherited when it is asked to."""

    def __init__(self, view: Any) -> None:
        self._reading, theirs = os.pipe()
        ours, self._asking = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._asking)
            os.read(ours, 1)
            os.write(theirs, bytes(view[:1]))
            os._exit(0)
        os.close(theirs)
        os.close(ours)

    def read(self) -> int:
        os.close(self._asking)
        (value,) = os.read(self._reading, 1)
        os.close(self._reading)
        os.waitpid(self._pid, 0)
        return value


def test_segment_stays_as_it_is_for_a_forked_process_when_the_main_process_drops_it() -> None:
    """What a forked process can see is never filled again; the worker takes a new segment in its place, for good."""
    pair = Pair(most=2)
    (view,) = pair.send(data(1))
    reader = ForkedReader(view)
    del view
    for fill in range(2, 30):
        (view,) = pair.send(data(fill))
        assert isinstance(view.obj, np.ndarray)
        assert bytes(view) == data(fill)
        del view
    assert reader.read() == 1


def test_segment_stays_as_it_is_for_a_process_that_the_worker_forked() -> None:
    """A child of the worker reads a batch that was lent, sent, read and dropped."""
    pair = Pair(most=2)
    array = pair.lent(1)
    reader = ForkedReader(array)
    pair.send(array)
    del array
    for fill in range(2, 30):
        pair.send(pair.lent(fill), data(fill))
    assert reader.read() == 1


def test_segment_stays_as_it_is_for_a_forked_process_when_the_worker_sends_it_again() -> None:
    """A batch that a stage of the worker keeps and repeats does not make its memory free again."""
    pair = Pair(most=4)
    array = pair.lent(1)
    (view,) = pair.send(array)
    reader = ForkedReader(view)
    del view
    pair.send(array)
    del array
    for fill in range(2, 30):
        pair.send(data(fill), data(fill, SIZE // 2))
    assert reader.read() == 1


def test_segment_is_used_again_when_the_fork_was_before_or_after_its_use() -> None:
    """A fork costs nothing where no batch was in use."""
    pair = Pair(most=1)
    pair.send(data(1))
    ForkedReader(b"1").read()
    before = pair.pool._segments[0]
    pair.send(data(2))
    assert pair.pool._segments == [before]


def test_pool_lends_nothing_to_a_forked_process() -> None:
    """A child of the worker stacks batches in memory of its own."""
    pair = Pair()

    def borrow() -> None:
        assert pair.pool.lend(SIZE) is None

    assert in_child(borrow) == 0
    assert pair.pool.lend(SIZE) is not None


def test_pool_gives_a_segment_to_one_of_two_threads() -> None:
    """Batches stacked in one thread and sent by another never meet in one place."""
    pair, failures, stop = Pair(), [], threading.Event()

    def stack() -> None:
        fill = 0
        while not stop.is_set():
            fill = fill % 100 + 1
            array = pair.pool.lend(SIZE)
            if array is not None:
                array[:] = fill
                time.sleep(0)
                if array.tobytes() != data(fill):
                    failures.append(fill)

    stacking = threading.Thread(target=stack)
    stacking.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(1000):
            (view,) = pair.send(data(100 + number % 100))
            assert bytes(view) == data(100 + number % 100)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        stacking.join()
    assert not failures
