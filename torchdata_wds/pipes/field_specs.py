"""Field specs: ``"jpg;png"`` is the first of jpg and png that the sample has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torchdata_wds.errors import MissingFieldError
from torchdata_wds.storage import mask_url

__all__ = ["Spec", "alternatives", "expect_sample", "find_field", "matching_fields", "missing_field"]

Spec = str | Sequence[str]


def alternatives(spec: Spec) -> tuple[str, ...]:
    """Splits a spec into its alternatives.

    Raises:
        ValueError: if it is neither a str nor a list of str, or is empty.

    Example:
        >>> alternatives("jpg;png")
        ('jpg', 'png')
    """
    names = tuple(spec.split(";")) if isinstance(spec, str) else tuple(spec) if isinstance(spec, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"a field spec is a name or alternatives like 'jpg;png', not {spec!r}")
    return names


def expect_sample(item: Any, stage: str) -> dict[str, Any]:
    """Gives the item back if it is a sample.

    Raises:
        TypeError: if it is no dict; says which stage got what.
    """
    if not isinstance(item, dict):
        raise TypeError(
            f"{stage} got {type(item).__name__} {str(item)[:80]!r}; it takes samples (dict by field), as "
            ".group_by_key() yields them, and stands before .wds_to_tuple()"
        )
    return item


def find_field(sample: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of the names that the sample has, None if it has none of them."""
    return next((name for name in names if name in sample), None)


def matching_fields(sample: Mapping[str, Any], globs: Sequence[str]) -> list[str]:
    """The fields that match any of the globs, written with or without a leading dot; metadata is left out."""
    return [
        field
        for field in sample
        if not field.startswith("__")
        and any(fnmatchcase(field, glob) or fnmatchcase("." + field, glob) for glob in globs)
    ]


def missing_field(sample: Mapping[str, Any], names: Sequence[str]) -> MissingFieldError:
    """Makes the error for a sample that has none of the names: it lists what is there and hints at dots in names."""
    there = [field for field in sample if not field.startswith("__")]
    key, shard = sample.get("__key__"), mask_url(str(sample.get("__url__", "")))
    message = f"sample {key!r} of shard {shard} has no field {' or '.join(map(repr, names))}; it has {there}."
    dotted = next((field for field in there if any(field.endswith("." + name) for name in names)), None)
    if dotted is not None:
        message += (
            f" Its file names have more than one dot (field {dotted!r}): ask for that field, or split names at their "
            "last dot with group_by_key(keys='last_dot')."
        )
    return MissingFieldError(message, shard=shard, key=key, field=";".join(names))
