"""The base class of all pipes, and the registration of functional names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.utils.data import IterDataPipe

from torchdata_wds.pipes.form_names import argument_hint, check_owner
from torchdata_wds.pipes.forms import WdsPipe
from torchdata_wds.pipes.pickling import Held

__all__ = ["Held", "Pipe", "WdsPipe", "in_order", "register", "functional_forms"]

Pipe = IterDataPipe[Any]  # a stage or source of any items
P = TypeVar("P", bound=type[IterDataPipe[Any]])

#: The functional names of the package whose pipes have been imported, with those.
functional_forms: dict[str, type[IterDataPipe[Any]]] = {}


def _construct(pipe: type[Any], source: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Makes a pipe for its functional form; torch's own function does not allow a field called ``cls``."""
    try:
        return pipe(source, *args, **kwargs)
    except TypeError as error:
        name = next((form for form, cls in functional_forms.items() if cls is pipe), "")
        if "unexpected keyword" in str(error) and (hint := argument_hint(name, kwargs)):
            raise TypeError(f"{error}: {hint}") from None
        raise


def register(name: str) -> Callable[[P], P]:
    """Registers a pipe under a functional name, a verb; a RuntimeError if another package has the name."""

    # Unlike torch's own decorator, it may run twice for the same class: a second import, importlib.reload and an import
    # that failed half-way all define the class again, and the newer one takes over the name.
    def decorate(cls: P) -> P:
        check_owner(name, cls)
        function = functools.partial(_construct, cls)
        functools.update_wrapper(function, cls, assigned=("__module__", "__name__", "__doc__"))
        IterDataPipe.register_function(name, function)
        functional_forms[name] = cls
        return cls

    return decorate


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Returns names as a tuple; those of a set are sorted, so that their order is the same in every process."""
    return tuple(sorted(names) if isinstance(names, (set, frozenset)) else names)
