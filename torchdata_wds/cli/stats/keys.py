"""The keys of samples: kept compressed, with their hashes, and what is odd about them."""

import zlib
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import numpy as np

from torchdata_wds.cli.stats.tallies import Examples, Place

UNSORTED = "unsorted"
LONGEST_KEY = 200  # characters; more do not fit into a file's name everywhere

Hashes = np.ndarray[Any, np.dtype[np.uint64]]


class KeyTally:
    """The keys of one shard, in order.

    Keys that repeat in other shards are found by 64 bits of their hash, those that differ only by case by that of their
    folded form. The keys themselves are only for examples, and are kept compressed.
    """

    def __init__(self, shard: str) -> None:
        self.shard = shard
        self.hashes: Hashes = np.empty(0, np.uint64)
        self.folded: Hashes | None = None  # None where all keys are their own folded form
        self.unsorted = 0  # keys that sort before the one that they follow
        self.odd: Counter[str] = Counter()
        self.examples: dict[str, Examples] = {}
        self._packed = b""

    def take(self, keys: list[str]) -> None:
        """Takes all keys of the shard."""
        folded = [key.casefold() for key in keys]
        self.hashes = _hashes(keys)
        if folded != keys:
            self.folded = _hashes(folded)
        # keys have no NUL: it ends a name in a header
        text = "\0".join(keys)
        self._packed = zlib.compress(text.encode(errors="surrogatepass"), 1)
        longest = max(map(len, keys), default=0)
        last = ""
        for key in keys:
            if key < last:
                self.unsorted += 1
                self._note(UNSORTED, key)
            last = key
        if not text.replace("\0", "").isprintable() or "\\x" in text or " " in text or longest > LONGEST_KEY:
            for key in keys:
                self._look_at(key)

    def keys(self) -> list[str]:
        """Returns the keys."""
        return zlib.decompress(self._packed).decode(errors="surrogatepass").split("\0")

    def _look_at(self, key: str) -> None:
        for reason in odd_reasons(key):
            self.odd[reason] += 1
            self._note(reason, key)

    def _note(self, reason: str, key: str) -> None:
        self.examples.setdefault(reason, Examples()).note(Place(self.shard, key))


def odd_reasons(key: str) -> Iterator[str]:
    """Yields a word for each thing that is odd about a key in itself."""
    if "\\x" in key:
        yield "key-not-utf-8"  # the reader writes other bytes as \\xNN
    if not key.isprintable():
        yield "key-not-printable"
    if key != key.strip():
        yield "key-blank-ends"
    if len(key) > LONGEST_KEY:
        yield "key-long"


def _hashes(keys: list[str]) -> Hashes:
    digests = [sha256(key.encode(errors="surrogatepass")).digest()[:8] for key in keys]
    return np.frombuffer(b"".join(digests), np.uint64)
