"""The options of grouping, checked."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from torchdata_wds.format.names import KeyRule, SplitName, key_splitter

__all__ = ["GroupingRules", "OnDuplicate", "OnReappearing", "grouping_rules"]

OnDuplicate = Literal["error", "first", "last"]
OnReappearing = Literal["error", "warn", "allow"]


class GroupingRules(NamedTuple):
    """How members become samples.

    Attributes:
        split: From name to (key, field), or None.
        lowercase: Whether fields are lower-cased.
        fields: The fields to keep, None for all.
        on_duplicate: What the same field twice in a sample does.
        on_reappearing: What a key that comes back later in its shard does.
    """

    split: SplitName
    lowercase: bool = True
    fields: frozenset[str] | None = None
    on_duplicate: OnDuplicate = "error"
    on_reappearing: OnReappearing = "error"


def grouping_rules(
    keys: KeyRule,
    lowercase: bool,
    fields: Iterable[str] | str | None,
    on_duplicate: OnDuplicate,
    on_reappearing: OnReappearing,
) -> GroupingRules:
    """Checks the options of grouping.

    Raises:
        ValueError: if an option is none of those that `group_members` lists.
    """
    if on_duplicate not in ("error", "first", "last"):
        raise ValueError(f"on_duplicate must be 'error', 'first' or 'last', not {on_duplicate!r}")
    if on_reappearing not in ("error", "warn", "allow"):
        raise ValueError(f"on_reappearing must be 'error', 'warn' or 'allow', not {on_reappearing!r}")
    return GroupingRules(key_splitter(keys), lowercase, _field_names(fields, lowercase), on_duplicate, on_reappearing)


def _field_names(fields: Iterable[str] | str | None, lowercase: bool) -> frozenset[str] | None:
    if fields is None:
        return None
    if isinstance(fields, str):
        names = re.split(r"[;\s]+", fields.strip("; \t\n"))
    else:
        names = list(fields) if isinstance(fields, Iterable) else []
    if not names or not all(isinstance(name, str) and name.strip(".") for name in names):
        raise ValueError(f"fields must name at least one field, as 'jpg cls' or ['jpg', 'cls'], not {fields!r}")
    return frozenset((name.lower() if lowercase else name).removeprefix(".") for name in names)
