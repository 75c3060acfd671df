"""What all pipes share: registration of functional names, and the base class that editors and type checkers see."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.utils.data import IterDataPipe

__all__ = ["WdsPipe", "register", "functional_forms"]

T_co = TypeVar("T_co", covariant=True)
P = TypeVar("P", bound=type[IterDataPipe])

#: Every functional name of the package and the pipe behind it, in the order of their definition.
functional_forms: dict[str, type[IterDataPipe]] = {}


class WdsPipe(IterDataPipe[T_co]):
    """Base class of the package's pipes."""

    # Without this torch looks the attribute up, and fails to find it, for every single item: 848 ns against 189.
    _is_child_datapipe = False


def register(name: str) -> Callable[[P], P]:
    """Registers a pipe under a functional name; unlike torch's own decorator it may run twice for the same class.

    Importing a second time, ``importlib.reload`` and an import that failed half-way all define the same class again:
    the newer one takes the name over.

    Args:
        name: The functional name, a verb.

    Raises:
        RuntimeError: if another package has the name.
    """

    def decorate(cls: P) -> P:
        owner = getattr(IterDataPipe.functions.get(name), "args", (None,))[0]
        if name in IterDataPipe.functions:
            if (getattr(owner, "__module__", None), getattr(owner, "__qualname__", None)) != (
                cls.__module__,
                cls.__qualname__,
            ):
                raise RuntimeError(f"the functional name {name!r} already belongs to {owner!r}")
            del IterDataPipe.functions[name]
        IterDataPipe.register_datapipe_as_function(name, cls)
        functional_forms[name] = cls
        return cls

    return decorate
