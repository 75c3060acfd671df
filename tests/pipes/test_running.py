"""Looks at the frames of other threads: what they must not do to the program."""

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterDataPipe

from torchdata_wds.pipes import running
from torchdata_wds.pipes.running import HOOK, frames_of_threads, pipe_of_hook


class Item:
    """Something that a weak reference may refer to."""


class Items(IterDataPipe[Item]):
    """Gives three items, and keeps none."""

    def __iter__(self) -> Iterator[Item]:
        for _ in range(3):
            yield Item()


def hook_frame(iterator: Any) -> Any:
    """The frame that torch has put around a pipe's iterator."""
    frame = iterator.gi_frame
    assert frame.f_globals["__name__"] == HOOK
    return frame


def test_frames_are_those_of_all_threads() -> None:
    started, ends = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        ends.wait(60)

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait(60)
    with frames_of_threads() as frames:
        found = frames[thread.ident or 0]
        names = set()
        while found is not None:
            names.add(found.f_code.co_name)
            found = found.f_back  # type: ignore[assignment]
        assert threading.get_ident() in frames
    ends.set()
    thread.join()
    assert "wait" in names


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="garbage is collected elsewhere then")
def test_no_garbage_is_collected_while_frames_are_looked_at() -> None:
    """It could run functions of the program, during which the thread leaves the frame that is being looked at."""
    assert gc.isenabled()
    with frames_of_threads():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_look_drops_no_item_while_it_copies_the_variables() -> None:
    """Dropping it may run functions of the program: that happens once the next item is known, or with its stage."""
    pipe = Items()
    iterator = iter(pipe)
    first = weakref.ref(next(iterator))
    frame = hook_frame(iterator)
    assert pipe_of_hook(frame) is pipe
    second = weakref.ref(next(iterator))
    frame.f_locals  # noqa: B018  (the copy alone)
    assert first() is not None or sys.version_info >= (3, 13)
    assert pipe_of_hook(frame) is pipe
    assert first() is None
    assert second() is not None
    del frame
    iterator.close()
    assert second() is None
    assert not any(found is None for found in running._held.values())


def test_other_frames_of_torch_have_no_pipe() -> None:
    assert pipe_of_hook(sys._getframe()) is None
