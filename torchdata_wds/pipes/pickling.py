"""Functions that cannot be sent to other processes: an error that names the stage that holds one, and the cure."""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Iterable, Iterator
from types import FrameType, FunctionType
from typing import Any

from torch.utils.data import IterDataPipe

from torchdata_wds.pipes.chain_text import form_name
from torchdata_wds.pipes.form_names import sources_of

__all__ = ["check_functions", "check_main_functions"]


#: Where graphs are copied by plain pickle, and the variable that holds the graph there. Others, such as copy, dill and
#: cloudpickle, can do more.
_COPIERS = {
    ("torchdata.dataloader2.graph._serialization", "clone"): "obj",
    ("torch.utils.data.datapipes.datapipe", "__getstate__"): "self",
    ("multiprocessing.reduction", "dump"): "obj",
}

_DEPTH = 4

_MOST_PARTS = 100


def check_functions(pipe: IterDataPipe[Any], caller: FrameType) -> None:
    """Looks for lambdas and inner functions in a graph that is about to be pickled.

    Args:
        pipe: A pipe of the graph.
        caller: What pickles it.

    Raises:
        pickle.PicklingError: names the stage that holds one.
    """
    variable = _COPIERS.get((caller.f_globals.get("__name__", ""), caller.f_code.co_name))
    if variable is None:
        return
    graph = caller.f_locals.get(variable)
    graph = getattr(graph, "_datapipe", graph)
    for stage in _stages(graph if isinstance(graph, IterDataPipe) else pipe):
        for function in _functions(vars(stage).values()):
            name = function.__qualname__
            if "<lambda>" in name or "<locals>" in name:
                raise pickle.PicklingError(
                    f"{form_name(stage)} holds {_described(function)}, which cannot be sent to another process: "
                    "DataLoader2, and workers that are started by spawn or forkserver, copy the graph by pickle. Use a "
                    "function of a module (functools.partial(f, x=1) keeps arguments), or install dill"
                )


def _stages(end: IterDataPipe[Any]) -> Iterator[IterDataPipe[Any]]:
    waiting, seen = [end], set()
    while waiting:
        stage = waiting.pop(0)
        if id(stage) not in seen:
            seen.add(id(stage))
            yield stage
            waiting += sources_of(stage)


def _described(function: FunctionType) -> str:
    place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    if function.__name__ == "<lambda>":
        return f"a lambda ({place})"
    return f"the inner function {function.__name__} ({place})"


def _functions(values: Iterable[Any], depth: int = _DEPTH) -> Iterator[FunctionType]:
    """Finds the functions among arguments, in partials and small collections too."""
    for value in values:
        if isinstance(value, FunctionType):
            yield value
        elif depth:
            yield from _functions(_parts(value), depth - 1)


def _parts(value: Any) -> Iterable[Any]:
    """What an argument of a stage is made of, where that may be functions."""
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, dict):
        return list(value.values())[:_MOST_PARTS]
    if isinstance(value, (list, tuple)):
        return value[:_MOST_PARTS]
    return (value.value,) if type(value).__name__ == "Held" else ()


class _MainFinder(pickle.Pickler):
    """Pickles the arguments of a stage, and notes what it finds that is defined in ``__main__``."""

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
    """Looks for functions that new processes cannot find, because the main module is not a file that they can import.

    Args:
        end: The last pipe of the graph that they are to run.
        others: What else they get.

    Raises:
        RuntimeError: names the stage that holds one.
    """
    main = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", None) or getattr(main, "__file__", None):
        return
    for holder, values in [*((form_name(stage), vars(stage)) for stage in _stages(end)), ("the service", others)]:
        finder = _MainFinder()
        try:
            finder.dump(values)
        except Exception:  # noqa: BLE001  (whatever cannot be pickled is said when it is sent)
            continue
        if finder.found is not None:
            raise RuntimeError(
                f"{holder} holds {finder.found}, which is defined in __main__. That is not a file here, but a "
                "notebook, python -c or the like, and workers started by spawn or forkserver cannot import it. Put it "
                "into a module, a .py file of its own, and import it; or start workers with "
                "multiprocessing_context='fork'"
            )
