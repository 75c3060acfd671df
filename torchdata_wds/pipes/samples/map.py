"""One item in, one item out, and a handler for what fails: the loop under most pipes."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import IterDataPipe

from torchdata_wds.handlers import Handler, SkipCounts, check_handler, count_loss, keep_going, reraise_exception
from torchdata_wds.pipes.base import WdsPipe, register
from torchdata_wds.pipes.notes import Latest, note_failure, note_source_failure

S = TypeVar("S")
T = TypeVar("T")


def map_items(
    items: Iterable[S],
    function: Callable[[S], T | None],
    handler: Handler,
    skipped: Counter[str],
    dropped: str = "None",
    pipe: IterDataPipe[Any] | None = None,
) -> Iterator[T]:
    """Applies a function to each item; drops None, calls the handler for exceptions, counts both.

    `skipped` counts failures by exception type, dropped ones by the name `dropped`; a note on exceptions names `pipe`.

    Example:
        >>> skipped = Counter()
        >>> list(map_items([1, 2], lambda item: None if item == 1 else item, reraise_exception, skipped)), skipped
        ([2], Counter({'None': 1}))
    """
    try:
        for item in items:
            try:
                result = function(item)
            except Exception as error:  # noqa: BLE001  (the handler decides)
                if pipe is not None:
                    note_failure(error, pipe, item)
                if not keep_going(handler, error, skipped):
                    return
                continue
            if result is None:
                if dropped == "None":
                    skipped[dropped] += 1  # on purpose
                else:
                    count_loss(skipped, dropped)
            else:
                yield result
    except Exception as error:
        note_source_failure(error)
        raise


def check_function(form: str, function: Any, what: str = "a function") -> None:
    """Raises a TypeError unless a function is one, and returns a value for each call, not a generator or coroutine."""
    if not callable(function):
        raise TypeError(f"{form} takes {what}, not {function!r}")
    calls = (function, getattr(type(function), "__call__", None))  # noqa: B004  (of a callable object, its method)
    if any(map(inspect.isgeneratorfunction, calls)):
        raise TypeError(
            f"{form} takes a function that returns a value, and {function!r} is a generator function. If it goes over "
            "the whole stream write .wds_compose(f), if it makes several items of one .flatmap(f)"
        )
    if any(map(inspect.iscoroutinefunction, calls)):
        raise TypeError(f"{form} takes a function that returns a value, and {function!r} is a coroutine function")


class ItemMapper(WdsPipe[Any]):
    """Base of the pipes that turn each item into one other: a subclass says how in `apply`."""

    one_to_one = True

    dropped = "None"  # the name that items are counted by for which `apply` returns None

    def __init__(self, source_datapipe: IterDataPipe[Any], handler: Handler = reraise_exception) -> None:
        self.source_datapipe = source_datapipe
        self.handler = check_handler(handler)
        self.skipped = SkipCounts()
        self._latest = Latest()

    @abstractmethod
    def apply(self, item: Any) -> Any:
        """Turns one item into another; None drops it."""

    def __iter__(self) -> Iterator[Any]:
        yield from map_items(self.source_datapipe, self.apply, self.handler, self.skipped, self.dropped, self)

    def __len__(self) -> int:
        if self.handler is not reraise_exception:
            raise TypeError(f"{type(self).__name__} may skip items: its length is not known; .set_length(n) sets one")
        return len(self.source_datapipe)


@register("wds_map")
class WdsMapperIterDataPipe(ItemMapper):
    """Maps items through a function (functional name: ``wds_map``).

    Unlike the native ``map`` it has a handler, and drops items for which the function returns None. Order is kept.
    When a sample (a dict with ``__key__``) becomes a dict without ``__key__``, that is put back, so that later stages
    and errors can name the sample; for batches that go to ``model(**batch)`` leave it out with ``.map(f)``.

    Args:
        source_datapipe: Yields samples, tuples or anything else.
        fn: ``callable(item) -> item``, or None to drop the item. Under DataLoader2 it must be picklable: a function
            of a module, not a lambda.
        handler: Called for each item for which the function raises.

    Yields:
        What the function returns.

    Raises:
        TypeError: if `fn` is not callable, or a generator function.
        Exception: through the handler, what the function raises.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper(["1", "2"]).wds_map(int))
        [1, 2]
    """

    def __init__(
        self, source_datapipe: IterDataPipe[Any], fn: Callable[[Any], Any], *, handler: Handler = reraise_exception
    ) -> None:
        check_function("wds_map", fn)
        super().__init__(source_datapipe, handler)
        self.fn = fn

    def apply(self, item: Any) -> Any:
        """Calls the function, and puts the key back."""
        result = self.fn(item)
        if isinstance(item, dict) and isinstance(result, dict) and "__key__" in item and "__key__" not in result:
            return {"__key__": item["__key__"], **result}  # a copy: the function may return one dict for many samples
        if not isinstance(result, dict) and isinstance(item, dict):
            self._latest.sample = item
        return result

    def __len__(self) -> int:
        raise TypeError("wds_map may drop items: its length is not known; .set_length(n) sets one")
