"""Names for shards that are made of shards: one output for each input, none for two."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from torchdata_wds.errors import ShardListError
from torchdata_wds.format.index import shard_name
from torchdata_wds.storage.compression import SHARD_SUFFIXES
from torchdata_wds.storage.urls import STDIN, is_local, local_path, mask_url, scheme_of

_PLACE = re.compile(r"\{name\}|\{shard(?::(0?\d{0,2})d?)?\}")

#: What stands in braces in a name.
BRACES = re.compile(r"\{[^{}]*\}")

#: What an output's name may have in braces, for messages.
PLACES = "{name} for the input's name without its suffix, and {shard} or {shard:06d} for its number"


def is_target_pattern(output: str) -> bool:
    """Returns whether an output stands for one file a shard: a folder, or a name with something in braces."""
    if output in (STDIN, "") or scheme_of(output) == "pipe":
        return False
    return _is_folder(output) or BRACES.search(output) is not None


def name_targets(urls: Sequence[str], pattern: str, *, in_place: bool = False) -> list[str]:
    """Returns the name of the output for each shard; a ShardListError if two would have one, or replace an input.

    The pattern is a folder, one that exists or ends in ``/``, for outputs with the base names of the inputs. Or a name
    with ``{name}`` (the base name without ``.tar``, ``.tar.gz`` and the like) or ``{shard}`` (the number among the
    inputs, as ``{shard:06d}`` with zeros). With `in_place` an output may replace the input that it is made of.

    Example:
        >>> name_targets(["a/x.tar", "s3://bucket/y.tar.gz"], "out/{name}-{shard:02d}.tar")
        ['out/x-00.tar', 'out/y-01.tar']
    """
    if pattern == STDIN or scheme_of(pattern) == "pipe" or not pattern:
        shown = mask_url(pattern)
        raise ShardListError(f"outputs are files or URLs of a store, not {shown!r}: name a folder or {PLACES}")
    other = BRACES.search(_PLACE.sub("", pattern))
    if other is not None and not _is_folder(pattern.rstrip("/")):  # one that exists may have braces in its name
        raise ShardListError(f"output {mask_url(pattern)!r} has an unknown place {other[0]}: there are {PLACES}")
    is_folder = _is_folder(pattern)
    inputs = {_identity(url): url for url in urls}
    makers: dict[str, str] = {}
    targets = []
    for number, url in enumerate(urls):
        target = _PLACE.sub(lambda place: _fill(place, number, url), pattern)  # noqa: B023 - called at once
        if is_folder:
            target = f"{target.rstrip('/')}/{_base_name(url)}"
        targets.append(target)
        place = _identity(target)
        if place in inputs and not (in_place and inputs[place] == url):
            raise ShardListError(
                f"output {mask_url(target)} of input {mask_url(url)} would replace the input "
                f"{mask_url(inputs[place])}; name another folder"
            )
        if place in makers:
            raise ShardListError(
                f"inputs {mask_url(makers[place])} and {mask_url(url)} would both become {mask_url(target)}; "
                f"an output's name takes {PLACES}"
            )
        makers[place] = url
    return targets


def _is_folder(pattern: str) -> bool:
    return pattern.endswith("/") or (is_local(pattern) and os.path.isdir(local_path(pattern)))  # noqa: PTH112 - a str


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
    return name[: len(name) - len(suffix)] or name


def _identity(url: str) -> str:
    """The same for all names of one file."""
    return os.path.realpath(local_path(url)) if is_local(url) else url
