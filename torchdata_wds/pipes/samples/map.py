"""Stages that call a function of an item or of the whole stream, and the base of all stages with a handler."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import IterDataPipe, MapDataPipe

from torchdata_wds.handlers import Asked, Handler, SkipCounts, check_handler, count_loss, keep_going, reraise_exception
from torchdata_wds.pipes.base import Held, Pipe, WdsPipe, register
from torchdata_wds.pipes.chain_text import form_name, value_text
from torchdata_wds.pipes.notes import Latest, note_failure, note_source_failure
from torchdata_wds.pipes.samples.field_specs import expect_sample, missing_field

S = TypeVar("S")
T = TypeVar("T")


class HandlingPipe(WdsPipe[T]):
    """Base of the pipes that call a handler for errors, and count what they skip in `skipped`."""

    def __init__(self, source_datapipe: Pipe, handler: Handler = reraise_exception) -> None:
        self.source_datapipe = source_datapipe
        self.handler = check_handler(handler)
        self.skipped = SkipCounts()

    def asked(self) -> Asked:
        """Returns the handler for one iteration."""
        return Asked(self.handler, self.skipped, partial(note_source_failure, pipe=self))

    def map_items(self, items: Iterable[S], function: Callable[[S], Any], dropped: str = "None") -> Iterator[Any]:
        """Applies a function to each item; drops None, counted as `dropped`, and calls the handler for exceptions."""
        try:
            for item in items:
                try:
                    result = function(item)
                except Exception as error:  # noqa: BLE001  (the handler decides)
                    note_failure(error, self, item)
                    if not keep_going(self.handler, error, self.skipped):
                        return
                    continue
                if result is not None:
                    yield result
                elif dropped == "None":
                    self.skipped[dropped] += 1  # on purpose
                else:
                    count_loss(self.skipped, dropped)
        except Exception as error:
            note_source_failure(error)
            raise

    def source_length(self) -> int:
        """Returns the length of the source; a TypeError if items may be skipped."""
        if self.handler is not reraise_exception:
            raise TypeError(f"{form_name(self)} may skip items: its length is not known; .set_length(n) sets one")
        return len(self.source_datapipe)


class ItemMapper(HandlingPipe[Any]):
    """Base of the pipes that turn each item into one item; a subclass defines `apply`."""

    one_to_one = True
    dropped = "None"  # how items are counted for which `apply` returns None

    def __init__(self, source_datapipe: Pipe, handler: Handler = reraise_exception) -> None:
        super().__init__(source_datapipe, handler)
        self._latest = Latest()

    @abstractmethod
    def apply(self, item: Any) -> Any:
        """Returns what this stage makes of one item, which need not come from its source; None drops the item."""

    def __iter__(self) -> Iterator[Any]:
        yield from self.map_items(self.source_datapipe, self.apply, self.dropped)

    def __len__(self) -> int:
        return self.source_length()


def check_function(form: str, function: Any, what: str = "a function") -> None:
    """Raises TypeError unless `function` is callable and returns values, not generators or coroutines."""
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


@register("wds_map")
class WdsMapperIterDataPipe(ItemMapper):
    """Maps items through a function (functional name: ``wds_map``).

    Unlike the native ``map``, it has a handler, and drops items for which the function returns None. Order is kept. If
    the function turns a sample (a dict with ``__key__``) into a dict without ``__key__``, the key is added again, so
    that later stages and errors can name the sample. For batches that go to ``model(**batch)``, use ``.map(f)``.

    Args:
        fn: ``callable(item) -> item``, or None to drop the item. Under DataLoader2 it must be picklable: a function
            defined in a module, not a lambda.
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
        self, source_datapipe: Pipe, fn: Callable[[Any], Any], *, handler: Handler = reraise_exception
    ) -> None:
        check_function("wds_map", fn)
        super().__init__(source_datapipe, handler)
        self.fn = fn

    def apply(self, item: Any) -> Any:
        """Calls the function with one item."""
        result = self.fn(item)
        if isinstance(item, dict) and isinstance(result, dict) and "__key__" in item and "__key__" not in result:
            return {"__key__": item["__key__"], **result}  # a copy: the function may return one dict for many samples
        if not isinstance(result, dict) and isinstance(item, dict):
            self._latest.sample = item
        return result

    def __len__(self) -> int:
        raise TypeError("wds_map may drop items: its length is not known; .set_length(n) sets one")


@register("wds_map_tuple")
class TupleMapperIterDataPipe(ItemMapper):
    """Maps the values of tuples through one function each (functional name: ``wds_map_tuple``).

    Args:
        *fns: A function per value; None leaves the value unchanged, as are values after the last function.
        handler: Called for each item for which a function raises, or that is not a tuple or list, or too short.

    Yields:
        tuple: The results.

    Raises:
        TypeError: if a function is not callable, or through the handler if an item is not a tuple.
        ValueError: through the handler, if an item has fewer places than there are functions.
        Exception: through the handler, what a function raises.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([("3", "x")]).wds_map_tuple(int, None))
        [(3, 'x')]
    """

    def __init__(
        self, source_datapipe: Pipe, *fns: Callable[[Any], Any] | None, handler: Handler = reraise_exception
    ) -> None:
        for function in (function for function in fns if function is not None):
            check_function("wds_map_tuple", function, "functions or None")
        super().__init__(source_datapipe, handler)
        self.fns = Held(fns)

    def apply(self, item: Any) -> tuple[Any, ...]:
        """Calls the functions with the values of one tuple."""
        functions = self.fns.value
        if not isinstance(item, (tuple, list)):
            raise TypeError(f"wds_map_tuple got {type(item).__name__}; it takes tuples, as .wds_to_tuple() yields them")
        if len(item) < len(functions):
            raise ValueError(f"wds_map_tuple has {len(functions)} functions for a tuple of {len(item)} values")
        values = list(item)
        for place, function in enumerate(functions):
            if function is not None:
                values[place] = function(values[place])
        return tuple(values)


@register("wds_map_dict")
class FieldMapperIterDataPipe(ItemMapper):
    """Maps single fields of samples through functions (functional name: ``wds_map_dict``).

    Args:
        handler: Called for each sample that lacks a field (MissingFieldError) or for which a function raises.
        **fns: Field = function of its value. Names with dots are passed as ``**{"seg.png": f}``.

    Yields:
        dict: New samples with the functions' results in place.

    Raises:
        TypeError: if a function is not callable.
        ValueError: if there is no function.
        MissingFieldError: through the handler.
        Exception: through the handler, what a function raises.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"cls": "3"}]).wds_map_dict(cls=int))
        [{'cls': 3}]
    """

    def __init__(
        self, source_datapipe: Pipe, /, *, handler: Handler = reraise_exception, **fns: Callable[[Any], Any]
    ) -> None:
        if not fns:
            raise ValueError("wds_map_dict needs at least one function, as wds_map_dict(jpg=augment)")
        for field, function in fns.items():
            check_function(f"wds_map_dict({field}=)", function)
        super().__init__(source_datapipe, handler)
        self.fns = Held(fns)

    def apply(self, item: Any) -> dict[str, Any]:
        """Calls the functions with the fields of one sample."""
        sample = dict(expect_sample(item, "wds_map_dict"))
        for field, function in self.fns.value.items():
            if field not in sample:
                raise missing_field(sample, (field,))
            try:
                sample[field] = function(sample[field])
            except Exception as error:
                note_failure(error, self, sample, f"{field}={value_text(function)}")
                raise
        return sample


@register("wds_compose")
class StageComposerIterDataPipe(WdsPipe[Any]):
    """Runs a generator function over the stream (functional name: ``wds_compose``).

    The function may drop, add and reorder items: crops of an image, pairs, windows.

    Args:
        fn: ``callable(iterator, *args, **kwargs)`` that returns an iterable. Under DataLoader2 it must be picklable.
        *args: Passed to the function. Pipes among them, also inside lists and dicts, are part of the graph.
        **kwargs: Passed to the function.

    Yields:
        What the function yields.

    Raises:
        TypeError: if `fn` is not callable, or does not return an iterable.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([1, 2]).wds_compose(lambda items, times: (item * times for item in items), times=2))
        [2, 4]
    """

    def __init__(self, source_datapipe: Pipe, fn: Callable[..., Iterable[Any]], /, *args: Any, **kwargs: Any) -> None:
        if not callable(fn):
            raise TypeError(f"wds_compose takes a function of an iterator, not {fn!r}")
        self.source_datapipe = source_datapipe
        self.fn = fn
        # Graph traversal must see pipes among the arguments.
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
    values = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, tuple, list, set, frozenset)):
        return any(map(_holds_pipe, values))
    return isinstance(value, (IterDataPipe, MapDataPipe))
