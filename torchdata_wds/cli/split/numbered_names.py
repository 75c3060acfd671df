"""From the name that somebody gives to the pattern of numbered shards."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torchdata_wds.format.shard_names import ShardNames
from torchdata_wds.storage.searching import SHARD_SUFFIXES
from torchdata_wds.storage.urls import STDIN, local_path, scheme_of

__all__ = ["number_of", "numbered_pattern"]


_HAS_NUMBER = re.compile(r"%0?\d*d|\{shard")

_PLACE = "{shard:06d}"

_PLAIN = ".tar"

_MOST_DIGITS = 30


def numbered_pattern(name: str, compress: str | None = None) -> str:
    """Makes a name a pattern for `ShardNames`.

    Args:
        name: A pattern, which stays as it is, or a name, which gets a number of six digits behind it, or before the
            suffix of shards that it ends in. A folder (``out/``) gets names that are nothing but the number.
        compress: How the shards are to be compressed, which a name without such a suffix then tells.

    Raises:
        ValueError: if it is standard output, or empty.

    Example:
        >>> numbered_pattern("out/train"), numbered_pattern("train.tar.zst"), numbered_pattern("x-%03d.tar")
        ('out/train-{shard:06d}.tar', 'train-{shard:06d}.tar.zst', 'x-%03d.tar')
        >>> numbered_pattern("train", "gz"), numbered_pattern("out/")
        ('train-{shard:06d}.tar.gz', 'out/{shard:06d}.tar')
    """
    if name in (STDIN, ""):
        raise ValueError(f"numbered shards need a name, as 'train', or a pattern, as 'train-%06d.tar', not {name!r}")
    if _HAS_NUMBER.search(name) or scheme_of(name) == "pipe":
        return name
    suffix = max((known for known in SHARD_SUFFIXES if name.endswith(known)), key=len, default="")
    stem = name.removesuffix(suffix)
    if compress is not None and suffix in ("", _PLAIN):
        suffix = f"{_PLAIN}.{compress}"
    dash = "" if not stem or stem.endswith("/") else "-"
    return f"{stem}{dash}{_PLACE}{suffix or _PLAIN}"


def number_of(names: ShardNames, url: str) -> int | None:
    """Finds the number whose shard would take the place of a file, however both are written.

    Args:
        names: The names of the shards.
        url: A path, perhaps a symbolic link, or a URL.

    Returns:
        The number; None if no shard would.

    Example:
        >>> names = ShardNames("out/x-{shard:03d}.tar")
        >>> number_of(names, "./out/../out/x-017.tar"), number_of(names, "out/x-17.tar")
        (17, None)
    """
    ones, twos = (_place(names.name(int(digit * _MOST_DIGITS))) for digit in "12")
    start = len(os.path.commonprefix([ones, twos]))  # noqa: RUF071 - of characters
    rest = len(os.path.commonprefix([ones[::-1], twos[::-1]]))  # noqa: RUF071
    for place in {_place(url), _place(str(Path(local_path(url)).resolve()) if _is_local(url) else url)}:
        digits = place[start : len(place) - rest]
        is_number = digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS
        if is_number and _place(names.name(int(digits))) == place:
            return int(digits)
    return None


def _is_local(url: str) -> bool:
    return scheme_of(url) in ("", "file")


def _place(url: str) -> str:
    """Where a file would lie: what a symbolic link in its place would point to does not matter."""
    if not _is_local(url):
        return url
    path = Path(local_path(url))
    return str(path.parent.resolve() / path.name)
