"""Renames fields of samples, and makes tuples of fields."""

from collections.abc import Iterable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any, Literal

from torchdata_wds.checks import check_choice
from torchdata_wds.errors import DuplicateFieldError
from torchdata_wds.format.samples.field_items import matches_glob
from torchdata_wds.handlers import Handler, reraise_exception
from torchdata_wds.option_types import Spec
from torchdata_wds.pipes.base import Pipe, register
from torchdata_wds.pipes.samples import field_specs
from torchdata_wds.pipes.samples.field_specs import alternatives, expect_sample, find_field, missing_field, name_sample
from torchdata_wds.pipes.samples.map import ItemMapper


@register("wds_rename")
class FieldRenamerIterDataPipe(ItemMapper):
    """Renames fields of samples (functional name: ``wds_rename``).

    Args:
        keep: Whether to keep fields that no spec names; ``__key__`` and other ``__x__`` are always kept.
        handler: Called with a MissingFieldError for each sample that has none of a spec's alternatives.
        **specs: New name = old name or alternatives: ``image="jpg;png"`` takes the first that exists. Names with
            dots are passed as ``**{"seg.png": "png"}``.

    Yields:
        dict: Samples.

    Raises:
        TypeError: if `keep` or `handler` is the new name of a field.
        ValueError: if a spec is not a name.
        MissingFieldError: through the handler.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"png": b"", "cls": 1}]).wds_rename(image="jpg;png"))
        [{'cls': 1, 'image': b''}]
    """

    def __init__(
        self, source_datapipe: Pipe, /, *, keep: bool = True, handler: Handler = reraise_exception, **specs: Spec
    ) -> None:
        if not isinstance(keep, bool):
            raise TypeError(
                f"keep must be True or False, not {keep!r}; a field gets that name from "
                "wds_rename_keys(('keep', ...), keep_unselected=True)"
            )
        super().__init__(source_datapipe, handler)
        self.keep = keep
        self.specs = {new: alternatives(spec) for new, spec in specs.items()}

    def apply(self, item: Any) -> dict[str, Any]:
        """Renames the fields of one sample."""
        sample = expect_sample(item, "wds_rename")
        replaced = {name for names in self.specs.values() for name in names}
        kept = {name: sample[name] for name in sample if name.startswith("__") or (self.keep and name not in replaced)}
        for new, names in self.specs.items():
            if (old := find_field(sample, names)) is None:
                raise missing_field(sample, names)
            kept[new] = sample[old]
        return kept


@register("wds_rename_keys")
class KeyRenamerIterDataPipe(ItemMapper):
    """Renames fields by globs (functional name: ``wds_rename_keys``).

    Args:
        *renames: Pairs ``(new, glob)``; if several match a field, the last one applies.
        keep_unselected: Whether to keep fields that no glob matches; ``__key__`` and other ``__x__`` are always kept.
        must_match: Whether each sample must have a field for each new name.
        duplicate_is_error: Whether two fields with the same new name are an error; otherwise the first is used.
        handler: Called for each MissingFieldError and DuplicateFieldError.
        **globs: ``new=glob``, as further pairs.

    Yields:
        dict: Samples.

    Raises:
        ValueError: if a rename is not a pair of str, or there is none.
        MissingFieldError, DuplicateFieldError: through the handler.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"left.png": 1, "right.png": 2}]).wds_rename_keys(l="left.*", r="right.*"))
        [{'l': 1, 'r': 2}]
    """

    def __init__(
        self,
        source_datapipe: Pipe,
        /,
        *renames: tuple[str, str],
        keep_unselected: bool = False,
        must_match: bool = True,
        duplicate_is_error: bool = True,
        handler: Handler = reraise_exception,
        **globs: str,
    ) -> None:
        self._pairs = [*renames, *globs.items()]
        if not self._pairs or not all(map(_is_rename, self._pairs)):
            raise ValueError(f"wds_rename_keys takes pairs (new, glob) or new=glob, not {self._pairs!r}")
        super().__init__(source_datapipe, handler)
        self.renames, self.globs = renames, globs
        self.keep_unselected, self.must_match = keep_unselected, must_match
        self.duplicate_is_error = duplicate_is_error

    def apply(self, item: Any) -> dict[str, Any]:
        """Renames the fields of one sample by the patterns."""
        sample = expect_sample(item, "wds_rename_keys")
        renamed: dict[str, Any] = {}
        made = set()
        for field, value in sample.items():
            new = field
            if not field.startswith("__"):
                chosen = next((new for new, glob in reversed(self._pairs) if matches_glob(field, glob)), None)
                if chosen is None and not self.keep_unselected:
                    continue
                made.add(chosen)
                new = chosen or field
            if new in renamed and self.duplicate_is_error:
                name, place = name_sample(sample)
                raise DuplicateFieldError(
                    f"several fields of {name} would be renamed to {new!r}, {field!r} among them. "
                    "Narrow the globs, or pass duplicate_is_error=False to take the first.",
                    **place,
                    field=field,
                )
            renamed.setdefault(new, value)
        for new, glob in self._pairs if self.must_match else ():
            if new not in made:
                raise missing_field(sample, (glob,))
        return renamed


def _is_rename(pair: Any) -> bool:
    return isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(part, str) and part for part in pair)


@register("wds_to_tuple")
class FieldTuplerIterDataPipe(ItemMapper):
    """Turns samples into tuples of chosen fields (functional name: ``wds_to_tuple``).

    Args:
        *specs: Fields in order, each with optional alternatives: ``"jpg;png"`` is the first that exists. ``"__key__"``
            and ``"__url__"`` are fields too. A single str is split at blanks.
        missing: What happens to a sample without any of a spec's alternatives: ``"error"`` (a MissingFieldError that
            lists its fields), ``"skip"`` (the sample is dropped and counted) or ``"none"`` (the value is None).
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
        source_datapipe: Pipe,
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
        # The first alternative of each spec, which most samples have. A single one is taken twice, to get a tuple.
        first = [names[0] for names in self.specs]
        self._take = itemgetter(*first, *first[:1] if len(first) == 1 else ())

    def __iter__(self) -> Iterator[Any]:
        samples: Iterable[Any] = self.source_datapipe
        if self.missing != "error":
            named = {f"wds_to_tuple names {';'.join(names)!r}": partial(_has, names) for names in self.specs}
            samples = field_specs.noting_absent(samples, named)
        yield from self.map_items(samples, self.apply, self.dropped)

    def apply(self, item: Any) -> tuple[Any, ...] | None:
        """Takes the fields out of one sample; None drops it."""
        sample = expect_sample(item, "wds_to_tuple")
        try:
            values: tuple[Any, ...] = self._take(sample)
        except KeyError:
            return self._choose(sample)
        self._latest.sample = sample
        return values if len(self.specs) > 1 else values[:1]

    def _choose(self, sample: dict[str, Any]) -> tuple[Any, ...] | None:
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


@register("wds_extract_keys")
class KeyExtractorIterDataPipe(ItemMapper):
    """Turns samples into tuples of the fields that match globs (functional name: ``wds_extract_keys``).

    Args:
        *patterns: A glob per value, or alternatives such as ``"*.jpg;*.png"``; a leading dot is optional. Metadata is
            matched only by its full name, such as ``"__key__"``.
        duplicate_is_error: Whether two fields that match one pattern are an error; otherwise the first is used.
        ignore_missing: Whether a pattern without a match is left out of the tuple instead of being an error.
        handler: Called for each MissingFieldError and DuplicateFieldError.

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
        source_datapipe: Pipe,
        *patterns: Spec,
        duplicate_is_error: bool = True,
        ignore_missing: bool = False,
        handler: Handler = reraise_exception,
    ) -> None:
        if not patterns:
            raise ValueError("wds_extract_keys needs at least one pattern, as wds_extract_keys('*.jpg', '*.cls')")
        super().__init__(source_datapipe, handler)
        self.patterns = tuple(alternatives(pattern) for pattern in patterns)
        self.duplicate_is_error, self.ignore_missing = duplicate_is_error, ignore_missing

    def apply(self, item: Any) -> tuple[Any, ...]:
        """Takes the fields that match out of one sample."""
        sample = expect_sample(item, "wds_extract_keys")
        values = []
        for globs in self.patterns:
            fields = [
                field
                for field in sample
                if field in globs or (not field.startswith("__") and any(matches_glob(field, glob) for glob in globs))
            ]
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
