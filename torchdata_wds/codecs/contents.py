"""What is inside of nested containers: one walk, which is fast where all is plain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["CONTAINERS", "list_contents"]

CONTAINERS = (dict, list, tuple, set, frozenset)


def list_contents(value: Any, plain: frozenset[type], max_depth: int) -> tuple[list[Any], list[Any]]:
    """Lists the containers in a value, with itself, and what in them is neither a container nor plain.

    Args:
        value: Any value.
        plain: The types that nobody needs to look at; subclasses of them are not among them.
        max_depth: How many containers may be in one another.

    Returns:
        The containers, and the other values; keys of dicts are values, too.

    Raises:
        ValueError: if it is nested too deeply.

    Example:
        >>> list_contents([1, {"a": 2.5}], frozenset([int, str]), 9)
        ([[1, {'a': 2.5}], {'a': 2.5}], [2.5])
    """
    containers: list[Any] = []
    others: list[Any] = []

    def look(items: Iterable[Any], depth: int) -> None:
        for item in items:
            if type(item) in plain:
                continue
            if not isinstance(item, CONTAINERS):
                others.append(item)
                continue
            if depth > max_depth:
                raise ValueError(f"it is nested too deeply, more than {max_depth} levels, or contains itself")
            containers.append(item)
            inner: Iterable[Any] = item
            if isinstance(item, dict):
                if not plain.issuperset(map(type, item)):
                    look(item, depth + 1)
                inner = item.values()
            # most containers hold plain values only, and this finds out fastest
            if not plain.issuperset(map(type, inner)):
                look(inner, depth + 1)

    look([value], 1)
    return containers, others
