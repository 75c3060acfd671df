"""Handles what pipes hold that cannot be pickled: hides it from graph traversal, and names it in errors."""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from types import FrameType, FunctionType
from typing import Any, Generic, TypeVar

from torch.utils.data import IterDataPipe
from torch.utils.data.graph import DataPipe

from torchdata_wds.pipes.chain_text import form_name, stages_of

#: Functions that copy graphs by plain pickle, with the variable that holds the graph. Others, such as copy, dill and
#: cloudpickle, can copy lambdas too.
_COPIERS = {
    ("torchdata.dataloader2.graph._serialization", "clone"): "obj",
    ("torch.utils.data.datapipes.datapipe", "__getstate__"): "self",
    ("multiprocessing.reduction", "dump"): "obj",
}

_MOST_PARTS = 100
T = TypeVar("T")


class Held(Generic[T]):
    """Hides a collection from graph traversal, which pickles every collection of a pipe and fails at a lambda."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def parts_of(value: Any) -> list[Any]:
    """Returns the contents of a partial, a `Held` or a collection; only the first of a long one, a list of shards."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return list(islice(value.values(), _MOST_PARTS))
    if isinstance(value, (list, tuple)):
        return list(value[:_MOST_PARTS])
    return [value.value] if isinstance(value, Held) else []


def check_functions(pipe: DataPipe, caller: FrameType) -> None:
    """Raises a PicklingError that names the stage with a lambda or inner function, if called by plain pickle."""
    variable = _COPIERS.get((caller.f_globals.get("__name__", ""), caller.f_code.co_name))
    if variable is None:
        return
    graph = caller.f_locals.get(variable)
    graph = getattr(graph, "_datapipe", graph)
    for stage in stages_of(graph if isinstance(graph, IterDataPipe) else pipe):
        for function in _functions(vars(stage).values()):
            if "<lambda>" in function.__qualname__ or "<locals>" in function.__qualname__:
                is_lambda = function.__name__ == "<lambda>"
                kind = "a lambda" if is_lambda else f"the inner function {function.__name__}"
                place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
                raise pickle.PicklingError(
                    f"{form_name(stage)} holds {kind} ({place}), which cannot be sent to another process: "
                    "DataLoader2, and workers started by spawn or forkserver, copy the graph with pickle. Use a "
                    "function of a module (functools.partial(f, x=1) keeps arguments), install dill, or, if no "
                    "DataLoader2 is used, start workers with multiprocessing_context='fork'"
                )


def _functions(values: Iterable[Any], depth: int = 4) -> Iterator[FunctionType]:
    """Yields the functions among arguments, including those in partials and collections."""
    for value in values:
        if isinstance(value, FunctionType):
            yield value
        elif depth:
            yield from _functions(parts_of(value), depth - 1)


class _MainFinder(pickle.Pickler):
    """Pickles the arguments of a stage, and notes the first object in them that is defined in ``__main__``."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
        self.found: str | None = None

    def persistent_id(self, obj: Any) -> str | None:
        return "pipe" if isinstance(obj, IterDataPipe) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and obj.__module__ == "__main__":
            self.found = self.found or obj.__qualname__
        return NotImplemented


def check_main_functions(end: IterDataPipe[Any], others: Iterable[Any] = ()) -> None:
    """Raises a RuntimeError that names the stage with a function of a main module, if workers cannot import that."""
    main = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", None) or getattr(main, "__file__", None):
        return
    for holder, values in [*((form_name(stage), vars(stage)) for stage in stages_of(end)), ("the service", others)]:
        finder = _MainFinder()
        try:
            finder.dump(values)
        except Exception:  # noqa: BLE001  (a failure to pickle is reported when the graph is sent)
            continue
        if finder.found is not None:
            raise RuntimeError(
                f"{holder} holds {finder.found}, which is defined in __main__. Here that is not a file but a "
                "notebook, python -c or the like, which workers started by spawn or forkserver cannot import. Move it "
                "to a module, a .py file of its own, and import it; or start workers with "
                "multiprocessing_context='fork'"
            )
