"""Pauses of garbage collection."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.kits.processes import in_child
from torchdata_wds import garbage
from torchdata_wds.garbage import collection_held, leave_garbage


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()
    assert not garbage._pauses


@contextmanager
def held_by_another_thread() -> Iterator[threading.Event]:
    """Another thread is in such a block; setting the event lets it leave, which it has at the end."""
    inside, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with collection_held():
            inside.set()
            ends.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    try:
        yield ends
    finally:
        ends.set()
        thread.join()


@pytest.mark.parametrize("is_on", [True, False])
def test_collection_is_as_before_at_the_end_of_the_outermost_block(is_on: bool) -> None:
    (gc.enable if is_on else gc.disable)()
    with pytest.raises(KeyError), collection_held():
        with collection_held():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() is is_on


def test_collection_goes_on_when_the_last_thread_has_left() -> None:
    with held_by_another_thread() as ends:
        with collection_held():
            ends.set()
            while len(garbage._pauses) == 2:
                pass
            assert not gc.isenabled()
        assert gc.isenabled()


def test_forked_child_collects_where_only_another_thread_held_it() -> None:
    """That thread does not exist there, and would never let it go on."""

    def check() -> None:
        assert gc.isenabled()
        with collection_held():
            assert not gc.isenabled()
        assert gc.isenabled()

    with held_by_another_thread():
        assert in_child(check) == 0
        assert not gc.isenabled()


def test_forked_child_collects_where_another_thread_was_about_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has left its block, and the fork comes before its next instruction."""

    def check() -> None:
        assert gc.isenabled()

    monkeypatch.setattr(garbage, "_was_on", True)
    garbage._pauses[-1] = 0
    gc.disable()
    assert in_child(check) == 0
    del garbage._pauses[-1]


def test_child_that_is_forked_in_a_block_collects_only_once_it_has_left_its_garbage() -> None:
    """Also if another thread is in such a block then."""

    def check() -> None:
        assert not gc.isenabled()
        leave_garbage()
        assert gc.isenabled()
        with collection_held():
            assert not gc.isenabled()
        assert gc.isenabled()

    with held_by_another_thread(), collection_held():
        assert in_child(check) == 0
