"""Entries of a shard that hold no content: counted, and warned about where that would otherwise be silent loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchdata_wds.format.samples.names import split_name
from torchdata_wds.format.tar.entries import TarEntry
from torchdata_wds.format.tar.headers import DIRECTORY, HEADER_WORDS, VOLUME_LABEL
from torchdata_wds.handlers import warn_seldom

_NEVER_FIELDS = frozenset({DIRECTORY, VOLUME_LABEL})
_SYMBOLIC_LINK = HEADER_WORDS[ord("2")]
_CURE = "Write the shard with tar --dereference (-h), which stores what links point to."


class SkippedEntries:
    """What is skipped of one shard, and a warning about it.

    Attributes:
        has_files: Whether there has been a member; set by the reader.
    """

    def __init__(self, shard: str, counts: Counter[str], *, is_whole: bool = True) -> None:
        self.has_files = False
        self._shard = shard
        self._counts = counts
        self._is_whole = is_whole
        self._kinds: Counter[str] = Counter()
        self._fields: Counter[str] = Counter()  # those with the name of a field
        self._first = ""

    def add(self, entry: TarEntry, name: str, wanted: Callable[[str], bool] | None = None) -> None:
        """Counts an entry."""
        kind = HEADER_WORDS.get(entry.kind, f"entry of type {chr(entry.kind)!r}")
        self._counts[kind] += 1
        self._kinds[kind] += 1
        if entry.kind in _NEVER_FIELDS or split_name(name) is None or not (wanted is None or wanted(name)):
            return
        self._fields[kind] += 1
        if not self._first:
            self._first = f"{name} -> {entry.link}" if entry.link else name

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Logs at most one warning, at the shard's end or where its reading ends."""
        is_whole = False
        try:
            yield
            is_whole = self._is_whole
        finally:
            gives_nothing = is_whole and not self.has_files
            cure = f" {_CURE}" if _SYMBOLIC_LINK in (self._fields or self._kinds) else ""
            if self._fields:
                more = " It has no other members." if gives_nothing else ""
                what = (
                    f"shard {self._shard}: skipped {_listed(self._fields)} named like fields, whose content it does "
                    f"not hold; the first is {self._first}.{more}{cure}"
                )
                warn_seldom("skipped links and devices", what)
            elif gives_nothing and self._kinds:
                what = f"shard {self._shard} gives no member: it only has {_listed(self._kinds)}.{cure}"
                warn_seldom("shards without members", what)


def _listed(kinds: Counter[str]) -> str:
    texts = []
    for kind, count in sorted(kinds.items()):
        plural = kind.replace("directory", "directories").replace("entry", "entries")
        texts.append(f"{count:,} {kind if count == 1 else plural if plural != kind else kind + 's'}")
    return ", ".join(texts)
