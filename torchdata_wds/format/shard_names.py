"""The names of the shards that a writer makes, one after the other."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torchdata_wds.storage import list_targets, mask_url
from torchdata_wds.storage.urls import scheme_of

_PLACE = re.compile(r"%(?P<old>0?\d*)d|\{(?P<name>shard|rank|worker)(?::(?P<spec>0?\d*d?))?\}|(?P<percent>%%)")
_OTHER_PLACE = re.compile(r"\{[^{}]*\}")
_PLACES = "%06d or {shard:06d} for the number, and {rank} or {worker} where several processes write"


class ShardNames:
    """A pattern of names with a place for the shard's number.

    Args:
        pattern: A path or URL with ``%06d`` or ``{shard:06d}`` in it, perhaps ``{rank}`` and ``{worker}`` too.
        rank: What ``{rank}`` stands for.
        worker: What ``{worker}`` stands for.
        writers: How many processes write shards of this pattern, so that they take turns with the numbers.
        turn: Which of them this is.

    Example:
        >>> names = ShardNames("{rank}/train-%06d.tar", rank=1)
        >>> names.name(7)
        '1/train-000007.tar'
    """

    def __init__(
        self, pattern: str | os.PathLike[str], *, rank: int = 0, worker: int = 0, writers: int = 1, turn: int = 0
    ) -> None:
        pattern = os.fspath(pattern) if isinstance(pattern, os.PathLike) else pattern
        if not isinstance(pattern, str):
            raise TypeError(f"a pattern of shards is a str with {_PLACES}, not {pattern!r}")
        self.pattern = pattern
        self._values = {"rank": rank, "worker": worker}
        self._writers = writers
        self._turn = turn
        places = sum(map(_is_number, _PLACE.finditer(pattern)))
        if places != 1:
            raise ValueError(
                f"pattern {mask_url(pattern)!r} has {places} places for the shard's number instead of one: write "
                f"{_PLACES}"
            )
        other = None if scheme_of(pattern) == "pipe" else _OTHER_PLACE.search(_PLACE.sub("", pattern))
        if other is not None:
            raise ValueError(f"pattern {mask_url(pattern)!r} has an unknown place {other[0]}: there are {_PLACES}")

    def name(self, number: int) -> str:
        """The name of the shard with a number."""
        return _PLACE.sub(lambda match: self._fill(match, number), self.pattern)

    def numbers(
        self, start: int | Literal["next"], storage_options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Iterator[int]:
        """Yields this writer's numbers, without end."""
        if start != "next":
            return itertools.count(start + self._turn, self._writers)
        number = self.next_number(storage_options)
        # each writer may see another highest number, but keeps to its own turn
        return itertools.count(number + (self._turn - number) % self._writers, self._writers)

    def check_listable(self) -> None:
        """Checks that there is a folder to look for existing shards in."""
        if scheme_of(self.pattern) == "pipe" or any(map(_is_number, _PLACE.finditer(self.pattern.rpartition("/")[0]))):
            raise ValueError(
                f"'next' looks for shards in one folder or bucket, which {mask_url(self.pattern)!r} does not have"
            )

    def next_number(self, storage_options: Mapping[str, Mapping[str, Any]] | None = None) -> int:
        """The number behind the highest that a shard of this pattern has."""
        self.check_listable()
        folder, slash, last = self.pattern.rpartition("/")
        folder = _PLACE.sub(lambda match: self._fill(match, 0), folder)
        parts: list[str] = []
        position = 0
        for match in _PLACE.finditer(last):
            parts.append(re.escape(last[position : match.start()]))
            parts.append(r"(\d+)" if _is_number(match) else re.escape(self._fill(match, 0)))
            position = match.end()
        matcher = re.compile("".join(parts) + re.escape(last[position:]))
        existing = list_targets(folder + slash or ".", storage_options=storage_options)
        numbers = [int(found[1]) for name in existing if (found := matcher.fullmatch(name))]
        return max(numbers, default=-1) + 1

    def _fill(self, match: re.Match[str], number: int) -> str:
        if match["percent"]:
            return "%" if any(other["old"] is not None for other in _PLACE.finditer(self.pattern)) else "%%"
        value = self._values.get(match["name"], number)
        spec = match["old"] if match["old"] is not None else (match["spec"] or "")
        return format(value, spec.rstrip("d") + "d")


def _is_number(match: re.Match[str]) -> bool:
    return match["old"] is not None or match["name"] == "shard"
