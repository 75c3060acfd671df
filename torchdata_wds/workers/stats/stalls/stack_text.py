"""Stacks as ``faulthandler`` writes them: which threads matter, and which of their frames."""

from __future__ import annotations

import linecache
import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch.utils.data

_LINE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_HEADER = re.compile(r"(Current thread|Thread) 0x")
_PACKAGE = str(Path(__file__).parents[3]) + "/"
_STORAGE = _PACKAGE + "storage/"
_WORKERS = _PACKAGE + "workers/"
_TORCH_DATA = str(Path(torch.utils.data.__file__).parent) + "/"
_LIBRARIES = (*{sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<frozen")
#: Outside a worker's own frames, or in the training loop.
_BASES = ("/multiprocessing/process.py", "/ray/_private/", "/torchdata/dataloader2/", _WORKERS + "running_epoch.py")
#: Where threads of the package wait when they have nothing to do.
_IDLE = {("messages.py", "_send_late"), ("worker.py", "_guard")}
_MOST_FRAMES = 20
_MOST_PLUMBING = 6


class Frame(NamedTuple):
    """One call on a stack."""

    file: str
    line: int
    function: str

    @property
    def is_own(self) -> bool:
        """Whether it is this package's."""
        return self.file.startswith(_PACKAGE)

    @property
    def is_stage(self) -> bool:
        """Whether it is of torch's DataPipes, which call each other through a hook."""
        return self.file.startswith(_TORCH_DATA)

    @property
    def is_user(self) -> bool:
        """Whether it is the program's own."""
        return not self.is_own and not self.file.startswith(_LIBRARIES) and "-packages/" not in self.file

    def lines(self) -> list[str]:
        """Returns it as in a traceback, with its line of source if that is the program's."""
        source = linecache.getline(self.file, self.line).strip() if self.is_user else ""
        return [f'  File "{self.file}", line {self.line}, in {self.function}', *([f"    {source}"] if source else [])]


Stack = list[Frame]  # innermost first


def stacks_in(dump: str) -> list[Stack]:
    """Returns the stacks in what ``faulthandler`` has written, each up to where its process or thread began."""
    stacks: list[Stack] = []
    for line in dump.splitlines():
        if _HEADER.match(line):
            stacks.append([])
        elif stacks and (found := _LINE.fullmatch(line)):
            number = found["line"]
            stacks[-1].append(Frame(found["file"], int(number) if number.isdigit() else 0, found["function"]))
    return [_within(stack) for stack in stacks]


def _within(stack: Stack) -> Stack:
    # A forked worker's stack has its parent's at its base.
    ends = (number for number, frame in enumerate(stack) if any(base in frame.file for base in _BASES))
    return stack[: next(ends, len(stack))]


def working(stacks: list[Stack], *, in_main: bool = False) -> list[Stack]:
    """Returns the stacks that run the program's functions or stages; first the main thread, unless it only waits.

    In the main process, other threads of the program do not belong to the loader.
    """
    is_work = _is_of_graph if in_main else _is_work
    found = [stack for stack in reversed(stacks) if any(map(is_work, stack)) and not any(map(_is_idle, stack))]
    return sorted(found, key=lambda stack: not any(frame.is_user for frame in stack))


def _is_work(frame: Frame) -> bool:
    return frame.is_user or _is_of_graph(frame)


def _is_of_graph(frame: Frame) -> bool:
    return frame.is_stage or (frame.is_own and not frame.file.startswith(_WORKERS))


def _is_idle(frame: Frame) -> bool:
    return frame.is_own and (Path(frame.file).name, frame.function) in _IDLE


def place_in(stacks: list[Stack]) -> str:
    """Returns what stacks are in: the program's innermost function, or a source, or a function of a library."""
    frames = [frame for stack in stacks for frame in stack]
    if not frames:
        return "is not making an item"
    if (frame := next((frame for frame in frames if frame.is_user), None)) is None:
        if any(frame.file.startswith(_STORAGE) for frame in frames):
            return "waits for its source"
        frame = frames[0]
    return f'in {frame.function}, line {frame.line} of "{frame.file}"'


def shortened(stack: Stack) -> list[str]:
    """Returns the lines of a stack, innermost first: the program's functions, and what the innermost stage is in."""
    stop = next((number for number, frame in enumerate(stack) if frame.is_stage), len(stack))
    users = [number for number in range(stop) if stack[number].is_user]
    inner = users[-1] + 1 if users else min(stop, _MOST_PLUMBING)
    kept = [*stack[:inner], *(frame for frame in stack[inner:] if frame.is_user)][:_MOST_FRAMES]
    left = len(stack) - len(kept)
    lines = [line for frame in kept for line in frame.lines()]
    return [*lines, f"  ... and {left} calls of torch and torchdata_wds outside"] if left else lines
