"""Finds which stage of a graph a thread is in, from its stack."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

from torch.utils.data import IterDataPipe

from torchdata_wds.pipes.chain_text import is_inner, sources_of
from torchdata_wds.pipes.running import is_border

_HOOK = "torch.utils.data.datapipes._hook_iterator"
_STORAGE = "torchdata_wds.storage."
_DECODING = "torchdata_wds.storage.decompression"
_SENDING = ("torchdata_wds.workers.processes.messages", "torchdata_wds.workers.ray.item_groups")
_WAITING = "torchdata_wds.workers.stream_pool"
_OURS = "torchdata_wds.pipes."
# What a frame can tell.
_NOTHING, _PIPE_OF_HOOK, _PIPE_OF_SELF, _READS, _DECODES, _SENDS, _BORDER = range(7)
_MOST_KNOWN = 50_000

SENDING: Final = -1  # in place of a stage's number: the thread packs items for the main process


class Spot(NamedTuple):
    """Where a thread is: in which stage, and whether it reads from a source for it."""

    stage: int  # its number, or `SENDING`
    reads: bool


def stages_in_order(end: IterDataPipe[Any], without: Iterable[int] = ()) -> list[IterDataPipe[Any]]:
    """Returns the stages that the program wrote, each after its sources, except those with the ids `without`."""
    found: dict[int, IterDataPipe[Any]] = {}
    hidden = set(without)
    waiting: list[tuple[IterDataPipe[Any], bool]] = [(end, False)]
    seen: set[int] = set()
    while waiting:
        pipe, is_done = waiting.pop()
        if is_done:
            found[id(pipe)] = pipe
        elif id(pipe) not in seen:
            seen.add(id(pipe))
            waiting.append((pipe, True))
            waiting += [(source, False) for source in reversed(sources_of(pipe))]
    return [pipe for key, pipe in found.items() if key not in hidden and not is_inner(pipe)]


class StageFinder:
    """Tells in which of some stages a thread is."""

    def __init__(self, stages: Iterable[IterDataPipe[Any]]) -> None:
        self._numbers = {id(stage): number for number, stage in enumerate(stages)}

    def spot(self, frame: FrameType | None) -> Spot | None:
        """Returns where the thread is whose innermost frame this is; None if it is in no stage."""
        reads: bool | None = None  # as the innermost frame of the storage says
        while frame is not None:
            role = _role(frame)
            if role in (_READS, _DECODES):
                reads = role == _READS if reads is None else reads
            elif role == _SENDS:
                return Spot(SENDING, reads=False)
            elif role == _BORDER:
                return None
            elif role != _NOTHING:
                number = self._numbers.get(id(_pipe_of(frame, role)))
                if number is not None:
                    return Spot(number, bool(reads))
            frame = frame.f_back
        return None


_roles: dict[CodeType, int] = {}


def _role(frame: FrameType) -> int:
    code = frame.f_code
    role = _roles.get(code)
    if role is None:
        if len(_roles) >= _MOST_KNOWN:  # a program that makes code as it runs
            _roles.clear()
        role = _roles[code] = _new_role(frame)
    return role


def _new_role(frame: FrameType) -> int:
    module = str(frame.f_globals.get("__name__", ""))
    is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_border(frame) or module == _WAITING:  # what waits for workers does nothing itself
        return _BORDER
    if module == _DECODING:  # works, although reading is what it was called for
        return _DECODES
    if module.startswith(_STORAGE):
        return _READS
    if module in _SENDING:
        return _SENDS
    if module == _HOOK and is_function:
        return _PIPE_OF_HOOK
    if module.startswith(_OURS) and is_function and frame.f_code.co_varnames[:1] == ("self",):
        return _PIPE_OF_SELF  # in a loop for two stages, the first one has no hook
    return _NOTHING


def _pipe_of(frame: FrameType, role: int) -> Any:
    # Up to Python 3.12 this is a copy, which keeps the frame's items alive until the next look. It must not be changed:
    # Python sets the frame's own variables from it when a debugger or profiler returns.
    values = frame.f_locals
    if role == _PIPE_OF_SELF:
        return values.get("self")
    arguments = values.get("args")
    return arguments[0] if arguments else getattr(values.get("self"), "datapipe", None)
