"""Finds which stage of a graph a thread is in, from its stack."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

from torch.utils.data import IterDataPipe

from torchdata_wds.pipes.chain_text import is_inner, sources_of, written
from torchdata_wds.pipes.running import HOOK, is_border, pipe_of_hook

_STORAGE = "torchdata_wds.storage."
_DECODING = ("torchdata_wds.storage.decompression", "torchdata_wds.storage.zstd_frames")
_SENDING = ("torchdata_wds.workers.processes.messages", "torchdata_wds.workers.ray.item_groups")
_WAITING = "torchdata_wds.workers.stream_pool"
_OURS = "torchdata_wds.pipes."
# What a frame can tell.
_NOTHING, _TORCHS, _METHOD, _READS, _DECODES, _SENDS, _BORDER = range(7)
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
        self._numbers: dict[int, int] = {}
        self._before: list[set[int]] = []  # the numbers of the stages before each
        self._methods: dict[CodeType, list[int]] = defaultdict(list)  # the stages whose methods have this code
        for number, stage in enumerate(stages):
            sources = {
                self._numbers[id(source)] for source in written(sources_of(stage)) if id(source) in self._numbers
            }
            self._before.append(sources.union(*(self._before[source] for source in sources)))
            self._numbers[id(stage)] = number
            for code in _codes(type(stage)):
                self._methods[code].append(number)

    def spot(self, frame: FrameType | None) -> Spot | None:
        """Returns where the thread is whose innermost frame this is; None if it is in no stage."""
        reads: bool | None = None  # as the innermost frame of the storage says
        inner: Sequence[int] = ()  # stages of one type: the thread is in a method of one of them
        while frame is not None:
            role = _role(frame)
            if role in (_READS, _DECODES):
                reads = role == _READS if reads is None else reads
            elif role == _SENDS:
                return Spot(SENDING, reads=False)
            elif role == _BORDER:
                return None
            elif role == _METHOD and not inner:
                inner = self._methods.get(frame.f_code, ())
                if len(inner) == 1:
                    return Spot(inner[0], bool(reads))
            elif role == _TORCHS:
                number = self._numbers.get(id(pipe_of_hook(frame)))
                if number is not None:
                    return Spot(self._within(number, inner), bool(reads))
            frame = frame.f_back
        return None

    def _within(self, number: int, inner: Sequence[int]) -> int:
        """Returns which of some stages a thread is in that also is in a stage, from which it was called."""
        # In a loop for two stages, torch has no frame for the first one.
        if number in inner:
            return number
        return max((before for before in inner if before in self._before[number]), default=number)


def _codes(kind: type) -> set[CodeType]:
    """Returns the code of all methods of a type of stage, and of those that work for it."""
    bases = [base for owner in (kind, *getattr(kind, "helper_types", ())) for base in owner.__mro__]
    methods = (inspect.unwrap(value) for base in bases for value in vars(base).values() if callable(value))
    return {method.__code__ for method in methods if inspect.isfunction(method)}


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
    if module in _DECODING:  # works, although reading is what it was called for
        return _DECODES
    if module.startswith(_STORAGE):
        return _READS
    if module in _SENDING:
        return _SENDS
    if module == HOOK and is_function:
        return _TORCHS
    if module.startswith(_OURS) and is_function and frame.f_code.co_varnames[:1] == ("self",):
        return _METHOD
    return _NOTHING
