"""Samples to tuples, and tuples through functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

from torch.utils.data import IterDataPipe

from torchdata_wds.checks import check_choice
from torchdata_wds.errors import DuplicateFieldError
from torchdata_wds.handlers import Handler, reraise_exception
from torchdata_wds.option_types import Spec
from torchdata_wds.pipes.base import Held, register
from torchdata_wds.pipes.samples.field_specs import (
    alternatives,
    expect_sample,
    find_field,
    matching_fields,
    missing_field,
    name_sample,
    noting_absent,
)
from torchdata_wds.pipes.samples.map import ItemMapper, check_function, map_items


@register("wds_to_tuple")
class FieldTuplerIterDataPipe(ItemMapper):
    """Turns samples into tuples of chosen fields (functional name: ``wds_to_tuple``).

    Args:
        source_datapipe: Yields samples.
        *specs: Fields in order, each with alternatives: ``"jpg;png"`` is the first that is there. ``"__key__"`` and
            ``"__url__"`` are fields too. One str with blanks is split there.
        missing: What happens to a sample without any of a spec's alternatives: ``"error"``, ``"skip"`` (it is dropped
            and counted) or ``"none"`` (None stands in its place).
        handler: Called for each sample that fails.

    Yields:
        tuple: One value per spec.

    Raises:
        ValueError: if there is no spec, or an option is wrong.
        MissingFieldError: through the handler; it lists the fields that are there.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"__key__": "a", "png": b"", "cls": 1}]).wds_to_tuple("__key__", "jpg;png", "cls"))
        [('a', b'', 1)]
    """

    dropped = "MissingFieldError"

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        *specs: Spec,
        missing: Literal["error", "skip", "none"] = "error",
        handler: Handler = reraise_exception,
    ) -> None:
        if len(specs) == 1 and isinstance(specs[0], str):
            specs = tuple(specs[0].split())
        if not specs:
            raise ValueError("wds_to_tuple needs at least one field, as wds_to_tuple('jpg;png', 'cls')")
        check_choice("missing", missing, ("error", "skip", "none"))
        super().__init__(source_datapipe, handler)
        self.specs = tuple(alternatives(spec) for spec in specs)
        self.missing = missing

    def __iter__(self) -> Iterator[Any]:
        samples: Iterable[Any] = self.source_datapipe
        if self.missing != "error":
            named = {f"wds_to_tuple names {';'.join(names)!r}": partial(_has, names) for names in self.specs}
            samples = noting_absent(samples, named)
        yield from map_items(samples, self.apply, self.handler, self.skipped, self.dropped, self)

    def apply(self, item: Any) -> tuple[Any, ...] | None:
        """Takes the fields out of one sample."""
        sample = expect_sample(item, "wds_to_tuple")
        values = []
        for names in self.specs:
            field = find_field(sample, names)
            if field is None and self.missing == "error":
                raise missing_field(sample, names)
            if field is None and self.missing == "skip":
                return None
            values.append(None if field is None else sample[field])
        self._latest.sample = sample
        return tuple(values)

    def __len__(self) -> int:
        if self.missing == "skip":
            raise TypeError("wds_to_tuple(missing='skip') may drop samples: its length is not known")
        return super().__len__()


def _has(names: tuple[str, ...], sample: Any) -> bool | None:
    return find_field(sample, names) is not None if isinstance(sample, dict) else None


@register("wds_map_tuple")
class TupleMapperIterDataPipe(ItemMapper):
    """Maps the values of tuples through one function each (functional name: ``wds_map_tuple``).

    Args:
        source_datapipe: Yields tuples or lists.
        *fns: A function per place; None leaves the value as it is, as happens after the last function.
        handler: Called for each item for which a function raises.

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
        self,
        source_datapipe: IterDataPipe[Any],
        *fns: Callable[[Any], Any] | None,
        handler: Handler = reraise_exception,
    ) -> None:
        for function in fns:
            if function is not None:
                check_function("wds_map_tuple", function, "functions or None")
        super().__init__(source_datapipe, handler)
        self.fns = Held(fns)

    def apply(self, item: Any) -> tuple[Any, ...]:
        """Maps the values of one tuple."""
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


@register("wds_extract_keys")
class KeyExtractorIterDataPipe(ItemMapper):
    """Turns samples into tuples of the fields that match globs (functional name: ``wds_extract_keys``).

    Args:
        source_datapipe: Yields samples.
        *patterns: A glob per place, or alternatives as ``"*.jpg;*.png"``; a leading dot is optional. Metadata is
            matched only by its full name, as ``"__key__"``.
        duplicate_is_error: Whether two fields that match one pattern are an error; otherwise the first counts.
        ignore_missing: Whether a pattern without a match is left out of the tuple, rather than an error.
        handler: Called for each sample that fails.

    Yields:
        tuple: One value per pattern.

    Raises:
        ValueError: if there is no pattern, or one is not a str.
        MissingFieldError, DuplicateFieldError: through the handler.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"left.png": 1, "cls": 2}]).wds_extract_keys("*.png", "cls"))
        [(1, 2)]
    """

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        *patterns: Spec,
        duplicate_is_error: bool = True,
        ignore_missing: bool = False,
        handler: Handler = reraise_exception,
    ) -> None:
        if not patterns:
            raise ValueError("wds_extract_keys needs at least one pattern, as wds_extract_keys('*.jpg', '*.cls')")
        super().__init__(source_datapipe, handler)
        self.patterns = tuple(alternatives(pattern) for pattern in patterns)
        self.duplicate_is_error = duplicate_is_error
        self.ignore_missing = ignore_missing

    def apply(self, item: Any) -> tuple[Any, ...]:
        """Takes the matching fields out of one sample."""
        sample = expect_sample(item, "wds_extract_keys")
        values = []
        for globs in self.patterns:
            fields = matching_fields(sample, globs)
            if not fields and not self.ignore_missing:
                raise missing_field(sample, globs)
            if len(fields) > 1 and self.duplicate_is_error:
                name, place = name_sample(sample)
                raise DuplicateFieldError(
                    f"fields {fields} of {name} all match {';'.join(globs)!r}. Narrow the pattern, or pass "
                    "duplicate_is_error=False to take the first.",
                    **place,
                )
            values += [sample[field] for field in fields[:1]]
        self._latest.sample = sample
        return tuple(values)
