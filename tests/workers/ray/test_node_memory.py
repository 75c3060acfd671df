"""Large data between an actor and the main process on one node: in memory that both map."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import in_child, open_files
from torchdata_wds import RayPool, WdsLoader
from torchdata_wds.workers.processes.shared_memory import Limits, Segment
from torchdata_wds.workers.ray.node_memory import ActorMemory, MappedMemory, MeetingPoint, told

LIMITS = Limits(4, 2)
SIZE = 100_000


def piece(value: int) -> memoryview:
    return memoryview(bytes([value]) * SIZE)


def leased(mapped: MappedMemory, place: tuple[int, int, int], segments: list[Segment]) -> memoryview:
    """What the main process sees at a place of some segments of an actor, which is this process."""
    number, start, stop = place
    return mapped.lease(os.getpid(), told(segments))[number][start:stop]


def test_data_is_seen_where_the_actor_has_put_it_and_may_be_changed() -> None:
    """Once nothing refers to it any more, its memory is used again, under the same descriptor."""
    memory, mapped = ActorMemory(LIMITS), MappedMemory(LIMITS)
    [place], segments = memory.store([piece(1)])
    view = leased(mapped, place, segments)
    assert view == piece(1)
    view[0] = 7
    first = told(segments)
    [other], others = memory.store([piece(2)])
    assert told(others) != first
    assert view[0] == 7
    assert leased(mapped, other, others) == piece(2)
    del view
    [again], segments = memory.store([piece(3)])
    assert told(segments) == first
    assert leased(mapped, again, segments) == piece(3)


def test_batches_that_were_stacked_in_lent_memory_are_not_copied() -> None:
    """A piece that lies in a segment is sent as its place."""
    memory, mapped = ActorMemory(LIMITS), MappedMemory(LIMITS)
    lent = memory.lend(SIZE)
    assert lent is not None
    lent[:] = 5
    [place], segments = memory.store([memoryview(lent)])
    view = leased(mapped, place, segments)
    lent[0] = 6
    assert view[0] == 6


def test_memory_of_messages_that_do_not_arrive_is_replaced() -> None:
    """Whoever had got one of them after all still sees its data; the others see the new memory under its number."""
    memory, mapped = ActorMemory(LIMITS), MappedMemory(LIMITS)
    [place], segments = memory.store([piece(1)])
    view = leased(mapped, place, segments)
    [_], never = memory.store([piece(2)])
    memory.begin([segments, never])
    mapped.trim()
    for value in range(3, 3 + LIMITS.most):
        [place], segments = memory.store([piece(value)])
        assert leased(mapped, place, segments) == piece(value)
    assert view == piece(1)


def test_data_is_sent_by_ray_when_all_memory_is_in_use() -> None:
    """Then a piece stays as it is."""
    memory, mapped = ActorMemory(LIMITS), MappedMemory(LIMITS)
    views = []
    for value in range(LIMITS.most):
        [place], segments = memory.store([piece(value)])
        views.append(leased(mapped, place, segments))
    last = piece(LIMITS.most)
    assert memory.store([last]) == ([last], [])


def test_segments_of_an_unusual_epoch_are_dropped_on_both_sides() -> None:
    """Their files are closed, and new ones under their numbers are opened."""
    before = open_files()
    memory, mapped = ActorMemory(LIMITS), MappedMemory(LIMITS)
    views = []
    for _ in range(2):
        for value in range(LIMITS.most):
            [place], segments = memory.store([piece(value)])
            views.append(leased(mapped, place, segments))
        assert views == [piece(value) for value in range(LIMITS.most)]
        views.clear()
        del segments
        memory.begin([])
        mapped.trim()
    assert open_files() - before <= 3 * LIMITS.kept  # the actor's two each, and this process's one
    del memory, mapped
    assert open_files() <= before


def test_memory_of_a_process_that_has_ended_cannot_be_mapped() -> None:
    """That is an OSError, as if this process may not open its files."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(OSError, match="No such file"):
        MappedMemory(LIMITS).lease(process.pid, [(0, 0, 3)])


def test_meeting_tells_who_is_on_the_same_node() -> None:
    """Only a process that reads the token in that file on that node is."""
    point = MeetingPoint("node")
    meeting = point.meeting
    assert meeting.is_here("node")
    assert not meeting.is_here("another")
    assert not meeting._replace(token=b"guessed").is_here("node")
    assert not meeting._replace(process=os.getppid()).is_here("node")
    receiver, sender = os.pipe()  # reading it would wait, and take from it what is meant for another
    assert not meeting._replace(descriptor=receiver).is_here("node")
    os.close(receiver)
    os.close(sender)

    def check() -> None:
        assert meeting.is_here("node")

    assert in_child(check) == 0
    point.close()
    assert not meeting.is_here("node")


def graph() -> IterDataPipe[np.ndarray]:
    """Arrays that are large enough to be shared."""
    return IterableWrapper(range(40)).sharding_filter().map(filled)


def filled(number: int) -> np.ndarray:
    return np.full(SIZE, number)


def is_mapped_file(array: np.ndarray) -> bool:
    """Whether an array lies in the memory that actors of this node share."""
    start = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= start < last:
            return "memfd:torchdata_wds" in line
    return False


@pytest.mark.slow
def test_actors_on_this_node_share_memory_until_it_cannot_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """After epochs that are left early, items are right and writable; then others take the place of these actors."""
    pool = RayPool()
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        with WdsLoader(graph(), 2, pool=pool) as loader:
            held = []
            for _ in range(5):
                items = iter(loader)
                held.append([next(items) for _ in range(3)])
            for epoch in held:
                assert [is_mapped_file(array) for array in epoch] == [True] * 3
                assert [(array == number).all() for number, array in enumerate(epoch)] == [True] * 3
                epoch[0][:] = -1
            assert [int(array[0]) for array in loader] == list(range(40))
            assert pool.restarts == 0

            def refused(_: MappedMemory, process: int, segments: list[object]) -> dict[int, memoryview]:
                if segments:
                    raise PermissionError(errno.EACCES, "not yours")
                return {}

            monkeypatch.setattr(MappedMemory, "lease", refused)
            found = list(loader)
            assert [int(array[0]) for array in found] == list(range(40))
            assert not any(map(is_mapped_file, found))
            assert pool.restarts == 2
