"""Results come in the order of the items, whoever makes them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest

from torchdata_wds.cli.jobs import map_in_order


def work(number: int) -> tuple[int, int]:
    """Takes longer for the first ones."""
    if number == 13:
        raise ValueError("no luck")
    time.sleep(0.02 if number < 2 else 0)
    return number, os.getpid()


def die(number: int) -> int:
    """Kills its process."""
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_map_in_order_starts_no_process_for_one() -> None:
    """One process, one item or none."""
    for items, processes in (([1, 2], 1), ([3], 8), ([], 8)):
        assert list(map_in_order(work, items, processes)) == [(item, os.getpid()) for item in items]


@pytest.mark.slow
def test_map_in_order_keeps_the_order_on_several_processes() -> None:
    """More items than are handed out at once; an error comes in its turn, and nothing is left running."""
    threads = threading.active_count()
    items = [*range(10), *range(20, 40)]
    results = list(map_in_order(work, items, 2))
    assert [number for number, _ in results] == items
    assert os.getpid() not in {process for _, process in results}
    given = []
    with pytest.raises(ValueError, match="no luck"):
        for number, _ in map_in_order(work, [0, 1, 13, 2], 2):
            given.append(number)
    assert given == [0, 1]
    assert threading.active_count() == threads


@pytest.mark.slow
def test_map_in_order_raises_when_a_process_is_killed() -> None:
    """And does not wait for ever."""
    with pytest.raises(RuntimeError, match=r"item 1 of 3 .* SIGKILL"):
        list(map_in_order(die, [1, 2, 3], 2))
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_map_in_order_ends_its_processes_when_it_is_closed() -> None:
    """Also those that are at a long item."""
    results = map_in_order(time.sleep, [0, 3600, 3600], 2)
    assert next(results) is None
    assert len(multiprocessing.active_children()) == 2
    results.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []
