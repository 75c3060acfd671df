"""Finds the graph that runs, from inside: its pipes that wait for an item, and what called them.

A pipe does not know what follows it. But while it makes an item, everything that waits for that item is on the stack,
and torch wraps each pipe's iterator in a frame of its own. So the running graph can be found from inside, under torch's
DataLoader, a dataset around the pipe, a reading service or a plain loop.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.utils.data import IterDataPipe, get_worker_info

from torchdata_wds.consumers import upstream

#: The last pipe of the graph noted last: that of threads, whose stacks begin in the middle of a graph.
_noted: weakref.ReferenceType[Any] | None = None


def note_root(root: Any) -> None:
    """Notes the last pipe of the graph that this process runs."""
    global _noted
    _noted = weakref.ref(root)


def running_pipes() -> list[Any]:
    """Returns the pipes that wait for an item from this thread, from the nearest to the last of the graph."""
    pipes = pipes_on(sys._getframe(1))
    if threading.current_thread() is threading.main_thread():
        return pipes
    # The pipes that wait for a thread of prefetch, or of a stage that calls functions in threads, are not on its stack.
    # The last pipe of the graph that this process runs takes their place, if it is known.
    root = None if _noted is None else _noted()
    if isinstance(dataset := getattr(get_worker_info(), "dataset", None), IterDataPipe):
        root = vars(dataset).get("_datapipe", dataset)
    outer = [] if root is None else [root]
    outer += pipes_on(main_frame())[-1:]
    within = [root for root in outer if any(pipe is pipes[-1] for pipe in upstream(root))] if pipes else []
    return pipes + [root for root in (within or outer)[:1] if not pipes or root is not pipes[-1]]


def pipes_on(frame: FrameType | None) -> list[Any]:
    """Returns the pipes whose iterators a stack is in, innermost first."""
    pipes: list[Any] = []
    hook = "torch.utils.data.datapipes._hook_iterator"
    for found in (outer.f_locals for outer in own_frames(frame) if outer.f_globals.get("__name__") == hook):
        pipe = found["args"][0] if found.get("args") else getattr(found.get("self"), "datapipe", None)
        is_stage = isinstance(pipe, IterDataPipe) and type(pipe).__name__ != "_IterDataPipeSerializationWrapper"
        if is_stage and not any(pipe is other for other in pipes):
            pipes.append(pipe)
    return pipes


def main_frame() -> FrameType | None:
    """Returns the innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def own_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields the frames of a stack that this process itself entered, innermost first."""
    # A forked worker's stack has its parent's at its base; pipes that wait there are not waiting for this process.
    while frame is not None and not is_border(frame):
        yield frame
        frame = frame.f_back


def all_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields the frames of a stack, innermost first, with those of the processes that forked this one."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_border(frame: FrameType) -> bool:
    """Returns whether a frame is where ``multiprocessing`` starts a process, or where a forked one began."""
    return frame.f_globals.get("__name__") == "multiprocessing.process"
