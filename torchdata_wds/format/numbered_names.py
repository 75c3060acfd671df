"""From the name that somebody gives to the pattern of numbered shards."""

from __future__ import annotations

import re

from torchdata_wds.storage.searching import SHARD_SUFFIXES
from torchdata_wds.storage.urls import STDIN, scheme_of

__all__ = ["numbered_pattern"]

_HAS_NUMBER = re.compile(r"%0?\d*d|\{shard")
_PLACE = "{shard:06d}"
_PLAIN = ".tar"


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
