"""The names of stages: for people, and for states, which must tell classes of the same name apart."""

from __future__ import annotations

from torch.utils.data.graph import DataPipe

__all__ = ["full_name", "short_name"]


def short_name(pipe: DataPipe) -> str:
    """The name of a pipe's class as people know it.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> short_name(IterableWrapper([1]).shuffle())
        'Shuffler'
    """
    return type(pipe).__name__.removeprefix("_").removesuffix("IterDataPipe")


def full_name(pipe: DataPipe) -> str:
    """The name of a pipe's class with its module; it is the same in a spawned worker."""
    return f"{type(pipe).__module__.replace('__mp_main__', '__main__')}.{type(pipe).__qualname__}"
