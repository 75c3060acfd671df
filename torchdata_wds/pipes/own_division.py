"""Finds user code that divides work by the worker's number itself, or does not simply pass items on."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch.utils.data import Dataset, get_worker_info
from torch.utils.data.dataloader import _sharding_worker_init_fn

from torchdata_wds.pipes.running import frames_of_threads, own_frames

# Functions called by code that divides by the worker's number, or also by the rank; the second is WebDataset's.
_WORKER_NAMES = {"get_worker_info", "pytorch_worker_info"}
_PLACE_NAMES = {*_WORKER_NAMES, "get_rank", "get_world_size"}
#: Packages whose functions look up the worker's number for other purposes.
_KNOWN = ("torch", "torchdata", "torchdata_wds")
_SEEDERS = (*_KNOWN, "accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")
_FETCHER = "torch.utils.data._utils.fetch"
_DEPTH = 3  # how many calls deep functions are searched


def divides_itself() -> bool:
    """Returns whether user code looks up the worker's number, to choose shards by it."""
    # That code may be running, or have run earlier in torch's worker: a dataset may return the iterator of a pipe that
    # it made, and ``worker_init_fn`` may change the dataset.
    if _asks(getattr(type(getattr(get_worker_info(), "dataset", None)), "__iter__", None)):
        return True
    for frame in own_frames(sys._getframe(1)):
        if frame.f_code.co_name == "_worker_loop" and _asks(frame.f_locals.get("init_fn")):
            return True
        # A module may only import the name.
        is_known = _package(frame.f_globals) in _KNOWN
        if not is_known and frame.f_code.co_name != "<module>" and not _WORKER_NAMES.isdisjoint(frame.f_code.co_names):
            return True
    return False


def may_divide() -> bool:
    """Returns whether it is possible that user code divides the work of its datasets by the worker's number."""
    # Any function for the loader may: that of a forked worker can change a dataset that it finds in a global variable.
    dataset = getattr(get_worker_info(), "dataset", None)
    if any(_leads_to(function, type(held)) for held in _held_by(dataset) for function in _methods(type(held))):
        return True
    for frame in own_frames(sys._getframe(1)):
        if frame.f_code.co_name == "_worker_loop":
            function = _user_function(frame.f_locals.get("init_fn"))
            if function is not None and str(getattr(function, "__module__", "")).partition(".")[0] not in _SEEDERS:
                return True
        if _package(frame.f_globals) not in _KNOWN and frame.f_code.co_name != "<module>":
            owner = type(frame.f_locals.get("self"))
            if _code_leads_to(frame.f_code, frame.f_globals, owner, _DEPTH, set()):
                return True
    return False


def flows_to_loader() -> bool:
    """Returns whether torch's loader certainly gets each item of the running pipe, one by one."""
    # A dataset may also read them into a table in each worker, which needs all of them.
    found = _flows_through(sys._getframe(1))
    if found is None and threading.current_thread() is not threading.main_thread():
        with frames_of_threads() as frames:
            found = _flows_through(frames.get(threading.main_thread().ident or 0))
    return bool(found)


def _flows_through(innermost: FrameType | None) -> bool | None:
    """Returns whether each item flows through a stack to torch's loader; None if that is further out."""
    for frame in own_frames(innermost):
        if frame.f_globals.get("__name__") == _FETCHER:
            return True
        if _package(frame.f_globals) not in (*_KNOWN, "threading", "concurrent") and not _passes_on(frame):
            return False
    return None


def _passes_on(frame: FrameType) -> bool:
    """Returns whether a frame is that of a generator which waits for an item in order to yield it or a part."""
    if not frame.f_code.co_flags & inspect.CO_GENERATOR:
        return False
    found = [part for part in dis.get_instructions(frame.f_code) if part.offset <= frame.f_lasti]
    if not found or found[-1].opname == "SEND":  # it waits in a ``yield from``
        return bool(found)
    loop = found[-1]
    return loop.opname == "FOR_ITER" and any(
        part.opname == "YIELD_VALUE" and loop.offset < part.offset < loop.argval
        for part in dis.get_instructions(frame.f_code)
    )


def calls_for_place(function: Any) -> bool:
    """Returns whether a function looks up its worker's number or rank."""
    return _calls(_PLACE_NAMES, function)


def _calls(names: set[str], function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and not names.isdisjoint(code.co_names)


def _package(names: dict[str, Any]) -> str:
    return str(names.get("__name__")).partition(".")[0]


def _asks(function: Any) -> bool:
    function = _user_function(function)
    return callable(function) and _calls(_WORKER_NAMES, inspect.unwrap(function))


def _user_function(function: Any) -> Any:
    """Returns the function inside a partial, or None."""
    while isinstance(function, functools.partial):
        # torch's own function looks it up to divide a pipe's work, and holds the user's function, if there is one.
        function = function.args[0] if function.func is _sharding_worker_init_fn else function.func
    return function


def _methods(kind: type) -> Iterator[Any]:
    for parent in kind.__mro__:
        if parent.__module__.partition(".")[0] not in (*_KNOWN, "builtins", "typing"):
            yield from (value for value in vars(parent).values() if isinstance(value, FunctionType))


def _leads_to(function: Any, owner: type) -> bool:
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    return code is not None and _code_leads_to(code, function.__globals__, owner, _DEPTH, set())


def _code_leads_to(code: CodeType, names: dict[str, Any], owner: type, depth: int, seen: set[CodeType]) -> bool:
    """Returns whether code looks up the worker's number, itself or in functions that it names."""
    if code in seen:
        return False
    seen.add(code)
    if not _WORKER_NAMES.isdisjoint(code.co_names):
        return True
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    if any(_code_leads_to(part, names, owner, depth, seen) for part in inner):
        return True
    if not depth:
        return False
    for name in code.co_names:
        for found in (names.get(name), getattr(owner, name, None)):
            function = inspect.unwrap(found) if isinstance(found, FunctionType) else None
            if not isinstance(function, FunctionType) or _package(function.__globals__) in _KNOWN:
                continue
            if _code_leads_to(function.__code__, function.__globals__, owner, depth - 1, seen):
                return True
    return False


def is_held(root: Any, holder: Any) -> bool:
    """Returns whether a dataset holds a graph, at any depth; if so, the graph was made before the workers."""
    return any(found is root for found in _held_by(holder))


def _held_by(holder: Any) -> Iterator[Any]:
    """Yields a dataset and everything that it holds, in datasets, lists and tuples."""
    held, seen = [holder], set[int]()
    while held:
        value = held.pop()
        yield value
        if id(value) not in seen and isinstance(value, (Dataset, list, tuple)):
            seen.add(id(value))
            held.extend(vars(value).values() if isinstance(value, Dataset) else value)
