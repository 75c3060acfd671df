"""A generator function as a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe

from torchdata_wds.pipes.base import Held, WdsPipe, register
from torchdata_wds.pipes.notes import note_source_failure


@register("wds_compose")
class StageComposerIterDataPipe(WdsPipe[Any]):
    """Runs a generator function over the stream (functional name: ``wds_compose``).

    The function may drop, add and reorder items: crops of an image, pairs, windows.

    Args:
        source_datapipe: Yields anything.
        fn: ``callable(iterator, *args, **kwargs)`` that returns an iterable. Under DataLoader2 it must be picklable.
        *args: Passed on to the function. Pipes among them, in lists and dicts too, are part of the graph.
        **kwargs: Passed on to the function.

    Yields:
        What the function yields.

    Raises:
        TypeError: if `fn` is not callable, or does not return an iterable.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> def pairs(items, times):
        ...     for item in items:
        ...         yield from [item] * times
        >>> list(IterableWrapper([1, 2]).wds_compose(pairs, times=2))
        [1, 1, 2, 2]
    """

    def __init__(
        self, source_datapipe: IterDataPipe[Any], fn: Callable[..., Iterable[Any]], /, *args: Any, **kwargs: Any
    ) -> None:
        if not callable(fn):
            raise TypeError(f"wds_compose takes a function of an iterator, not {fn!r}")
        self.source_datapipe = source_datapipe
        self.fn = fn
        # Traversal of the graph must see the pipes among the arguments.
        visible = _holds_pipe((args, kwargs))
        self.args = args if visible else Held(args)
        self.kwargs = kwargs if visible else Held(kwargs)

    def __iter__(self) -> Iterator[Any]:
        args = self.args.value if isinstance(self.args, Held) else self.args
        kwargs = self.kwargs.value if isinstance(self.kwargs, Held) else self.kwargs
        result = self.fn(iter(self.source_datapipe), *args, **kwargs)
        if not isinstance(result, Iterable):
            raise TypeError(f"{self.fn!r} returned {type(result).__name__} to wds_compose instead of an iterable")
        try:
            yield from result
        except Exception as error:
            note_source_failure(error, self)
            raise


def _holds_pipe(value: Any) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(map(_holds_pipe, value))
    if isinstance(value, dict):
        return any(map(_holds_pipe, value.values()))
    return isinstance(value, (IterDataPipe, MapDataPipe))
