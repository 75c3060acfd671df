"""The pattern of numbered shards that a name means, and which of their numbers an existing file has."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torchdata_wds.format.shard_names import ShardNames
from torchdata_wds.storage.searching import SHARD_SUFFIXES
from torchdata_wds.storage.urls import STDIN, is_local, local_path, scheme_of

_HAS_NUMBER = re.compile(r"%0?\d*d|\{shard")
_PLACE = "{shard:06d}"
_PLAIN = ".tar"
_MOST_DIGITS = 30


def numbered_pattern(name: str, compress: str | None = None) -> str:
    """Turns a name into a pattern for `ShardNames`.

    Args:
        name: A pattern, which stays as it is, or a name, which gets a number of six digits at its end, or before its
            suffix if that is one of shards. A folder (``out/``) gets names that are only the number.
        compress: How the shards are compressed, which a name without such a suffix then says.

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
    """Returns the number of the shard that would replace a file, however both are written; None if none would.

    Example:
        >>> names = ShardNames("out/x-{shard:03d}.tar")
        >>> number_of(names, "./out/../out/x-017.tar"), number_of(names, "out/x-17.tar")
        (17, None)
    """
    # what x-111...1.tar and x-222...2.tar have in common is what stands before and after the number
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
    return is_local(url)


def _place(url: str) -> str:
    """Returns where a file would be created: a symbolic link there would be replaced, not followed."""
    if not _is_local(url):
        return url
    path = Path(local_path(url))
    return str(path.parent.resolve() / path.name)
