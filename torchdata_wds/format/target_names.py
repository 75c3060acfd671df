"""Names for shards that are made of shards: one output for each input, none for two."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from torchdata_wds.errors import ShardListError
from torchdata_wds.format.index import shard_name
from torchdata_wds.storage.searching import SHARD_SUFFIXES
from torchdata_wds.storage.urls import STDIN, local_path, mask_url, scheme_of

__all__ = ["name_targets"]

_PLACE = re.compile(r"\{name\}|\{shard(?::(0?\d{0,2})d?)?\}")
_OTHER_PLACE = re.compile(r"\{[A-Za-z_]\w*(?::[^{}]*)?\}")
_PLACES = "{name} for the input's name without its suffix, and {shard} or {shard:06d} for its number"


def name_targets(urls: Sequence[str], pattern: str) -> list[str]:
    """Names what is made of each shard.

    Args:
        urls: The shards.
        pattern: A folder, one that exists or ends in ``/``, for outputs with the base names of the inputs. Or a name
            with ``{name}`` (the base name without ``.tar``, ``.tar.gz`` and the like) or ``{shard}`` (the number among
            the inputs, as ``{shard:06d}`` with zeros).

    Returns:
        A name for each.

    Raises:
        ShardListError: if the pattern has an unknown place or is no name, an input has no base name where one is
            needed, two outputs would have one name, or an output would be one of the inputs.

    Example:
        >>> name_targets(["a/x.tar", "s3://bucket/y.tar.gz"], "out/{name}-{shard:02d}.tar")
        ['out/x-00.tar', 'out/y-01.tar']
        >>> name_targets(["a/x.tar", "s3://bucket/y.tar.gz"], "out/")
        ['out/x.tar', 'out/y.tar.gz']
    """
    _check_pattern(pattern)
    if _is_folder(pattern):
        targets = [pattern.rstrip("/") + "/" + _base_name(url) for url in urls]
    else:
        targets = [_PLACE.sub(lambda place: _fill(place, number, url), pattern) for number, url in enumerate(urls)]  # noqa: B023 - called at once
    _check_apart(urls, targets)
    return targets


def _check_pattern(pattern: str) -> None:
    if pattern == STDIN or scheme_of(pattern) == "pipe" or not pattern:
        raise ShardListError(
            f"outputs are files or URLs of a store, not {mask_url(pattern)!r}: name a folder or {_PLACES}"
        )
    other = _OTHER_PLACE.search(_PLACE.sub("", pattern))
    if other is not None:
        raise ShardListError(f"output {mask_url(pattern)!r} has an unknown place {other[0]}: there are {_PLACES}")


def _is_folder(pattern: str) -> bool:
    if pattern.endswith("/"):
        return True
    return scheme_of(pattern) in ("", "file") and os.path.isdir(local_path(pattern))  # noqa: PTH112 - a str


def _base_name(url: str) -> str:
    name = "" if scheme_of(url) in (STDIN, "pipe") else shard_name(url)
    if name in ("", ".", ".."):
        raise ShardListError(
            f"input {mask_url(url)} has no base name to name its output by; write {{shard:06d}} into the output's name"
        )
    return name


def _fill(place: re.Match[str], number: int, url: str) -> str:
    if place[0] != "{name}":
        return format(number, (place[1] or "") + "d")
    name = _base_name(url)
    suffix = max((end for end in SHARD_SUFFIXES if name.lower().endswith(end)), key=len, default="")
    return name.removesuffix(name[len(name) - len(suffix) :]) or name


def _check_apart(urls: Sequence[str], targets: Sequence[str]) -> None:
    inputs = {_identity(url): url for url in urls}
    makers: dict[str, str] = {}
    for url, target in zip(urls, targets, strict=True):
        place = _identity(target)
        if place in inputs:
            raise ShardListError(
                f"output {mask_url(target)} of input {mask_url(url)} would replace the input "
                f"{mask_url(inputs[place])}; name another folder"
            )
        if place in makers:
            raise ShardListError(
                f"inputs {mask_url(makers[place])} and {mask_url(url)} would both become {mask_url(target)}; "
                f"an output's name takes {_PLACES}"
            )
        makers[place] = url


def _identity(url: str) -> str:
    """What is the same for two names of one file."""
    return os.path.realpath(local_path(url)) if scheme_of(url) in ("", "file") else url
