"""Samples with other fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import IterDataPipe

from torchdata_wds.errors import DuplicateFieldError
from torchdata_wds.format.samples.field_items import matches_glob
from torchdata_wds.handlers import Handler, reraise_exception
from torchdata_wds.option_types import Spec
from torchdata_wds.pipes.base import Held, register
from torchdata_wds.pipes.chain_text import value_text
from torchdata_wds.pipes.notes import note_failure
from torchdata_wds.pipes.samples.field_specs import alternatives, expect_sample, find_field, missing_field, name_sample
from torchdata_wds.pipes.samples.map import ItemMapper, check_function


@register("wds_rename")
class FieldRenamerIterDataPipe(ItemMapper):
    """Renames fields of samples (functional name: ``wds_rename``).

    Args:
        source_datapipe: Yields samples.
        keep: Whether fields that no spec names stay; ``__key__`` and other ``__x__`` always do.
        handler: Called for each sample that has none of a spec's alternatives.
        **specs: New name = old name or alternatives: ``image="jpg;png"`` takes the first that is there. Names with
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
        self,
        source_datapipe: IterDataPipe[Any],
        /,
        *,
        keep: bool = True,
        handler: Handler = reraise_exception,
        **specs: Spec,
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
        kept = {
            field: value
            for field, value in sample.items()
            if field.startswith("__") or (self.keep and field not in replaced)
        }
        for new, names in self.specs.items():
            if (old := find_field(sample, names)) is None:
                raise missing_field(sample, names)
            kept[new] = sample[old]
        return kept


@register("wds_map_dict")
class FieldMapperIterDataPipe(ItemMapper):
    """Maps single fields of samples through functions (functional name: ``wds_map_dict``).

    Args:
        source_datapipe: Yields samples.
        handler: Called for each sample that lacks a field or for which a function raises.
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
        self,
        source_datapipe: IterDataPipe[Any],
        /,
        *,
        handler: Handler = reraise_exception,
        **fns: Callable[[Any], Any],
    ) -> None:
        if not fns:
            raise ValueError("wds_map_dict needs at least one function, as wds_map_dict(jpg=augment)")
        for field, function in fns.items():
            check_function(f"wds_map_dict({field}=)", function)
        super().__init__(source_datapipe, handler)
        self.fns = Held(fns)

    def apply(self, item: Any) -> dict[str, Any]:
        """Maps the fields of one sample."""
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


@register("wds_rename_keys")
class KeyRenamerIterDataPipe(ItemMapper):
    """Renames fields by globs (functional name: ``wds_rename_keys``).

    Args:
        source_datapipe: Yields samples.
        *renames: Pairs ``(new, glob)``; of several that match a field the last counts.
        keep_unselected: Whether fields that no glob matches stay; ``__key__`` and other ``__x__`` always do.
        must_match: Whether each sample must get each new name.
        duplicate_is_error: Whether two fields for one new name are an error; otherwise the first counts.
        handler: Called for each sample that fails.
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
        source_datapipe: IterDataPipe[Any],
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
        self.renames = renames
        self.globs = globs
        self.keep_unselected = keep_unselected
        self.must_match = must_match
        self.duplicate_is_error = duplicate_is_error

    def apply(self, item: Any) -> dict[str, Any]:
        """Renames the fields of one sample."""
        sample = expect_sample(item, "wds_rename_keys")
        renamed: dict[str, Any] = {}
        made: set[str] = set()
        for field, value in sample.items():
            new = field
            if not field.startswith("__"):
                chosen = next((new for new, glob in reversed(self._pairs) if matches_glob(field, glob)), None)
                if chosen is not None:
                    new = chosen
                    made.add(new)
                elif not self.keep_unselected:
                    continue
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
