"""Patterns -> shard URLs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torchdata_wds.environment import pattern_variable
from torchdata_wds.errors import ShardListError, ShardOpenError, UnsafeDataError
from torchdata_wds.storage.braces import expand_braces, expand_clear_braces
from torchdata_wds.storage.naming import naming
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.rewriting import RewriteRules, rewritten
from torchdata_wds.storage.searching import is_pattern, search_local, search_remote
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.sources.aistore import is_in_aistore, no_listing
from torchdata_wds.storage.urls import STDIN, is_chaining, local_path, mask_item, mask_url, scheme_of

__all__ = ["list_urls"]


# "?" is a query in a web address, "*" is the shell's in a command.
_NEVER_SEARCHED = (STDIN, "pipe", "http", "https")

_VARIABLE = re.compile(r"\$\{(\w+)\}")

_DEEPEST = 10

_WHY = "where a rewriting rule looks for"

_IPV6_HOST = re.compile(r"://([^/@]*@)?\[[0-9A-Fa-f:.]*$")


def list_urls(
    pattern: object,
    *,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    rewrite: str | Mapping[str, str] | RewriteRules | None = None,
    variables: bool = False,
) -> Iterator[str]:
    """Lists the shards that patterns stand for, in order, duplicates kept.

    Args:
        pattern: A str, a path, or a list or tuple of them, nested as you like. Braces (``{000..146}``, ``{a,b}``) and
            ``a::b`` are expanded everywhere; globs and folders (local, or an fsspec URL that ends in ``/``) become the
            shards found there, sorted. What exists under exactly this name is taken verbatim.
        storage_options: Options by protocol, as for `open_shard`.
        rewrite: Rules that send URLs elsewhere, as for `open_shard`: globs and folders are looked for there, and what
            is found is named as it was asked for, so that opening it by the same rules finds it.
        variables: Whether ``${name}`` stands for the environment variable ``WDS_name``; in a command only where that is
            set, as the shell has variables too. Not for patterns of a stranger, who would read them.

    Raises:
        ShardListError: if a glob or folder gives nothing, braces are wrong, a variable is not set, or an item is no
            pattern.
        UnsafeDataError: if a rule would make a command of a URL that holds what a shell would run.
        TypeError: if the options are no mapping of mappings.
        ValueError: if a rule is malformed.

    Example:
        >>> list(list_urls(["train-{0..1}.tar", ("https://host/{a,b}.tar?x=1", "pipe:cat x.tar")]))
        ['train-0.tar', 'train-1.tar', 'https://host/a.tar?x=1', 'https://host/b.tar?x=1', 'pipe:cat x.tar']
    """
    options = StorageOptions(storage_options, rewrite=rewrite)
    return (url for text in _flatten(pattern) for url in _list_one(text, options, variables))


def _flatten(pattern: object) -> Iterator[str]:
    if isinstance(pattern, (list, tuple)):
        if not pattern:
            raise ShardListError("a list of shard patterns is empty: did a glob match nothing?")
        for item in pattern:
            yield from _flatten(item)
    elif isinstance(pattern, str):
        yield _checked(str(pattern))
    elif isinstance(pattern, os.PathLike) and isinstance(path := os.fspath(pattern), str):
        yield path
    else:
        raise ShardListError(
            f"a shard pattern must be a str, a path, or a list of them, not {type(pattern).__name__}: "
            f"{mask_item(pattern)}"
        )


def _checked(text: str) -> str:
    if len(text) > 1 or text == STDIN:
        return text
    raise ShardListError(
        f"a shard pattern cannot be {text!r}: did a str stand where a list belongs? Write "
        'IterableWrapper(["train-{000..146}.tar"]), not IterableWrapper("train-{000..146}.tar")'
    )


def _list_one(text: str, options: StorageOptions, variables: bool) -> Iterator[str]:
    if variables and not _exists(text, options):
        text = _substituted(text)
    if _exists(text, options):
        yield from _resolve(text, options)
        return
    for part in _split(text):
        clear_only = scheme_of(part) in _NEVER_SEARCHED
        for url in expand_clear_braces(part) if clear_only else expand_braces(part):
            yield from _resolve(url, options)


def _exists(url: str, options: StorageOptions) -> bool:
    try:
        place = _place(url, options)
    except (ShardListError, UnsafeDataError):  # of what is yet to be split and expanded
        return False
    return scheme_of(place) in ("", "file") and os.path.exists(local_path(place))  # noqa: PTH110 - long names


def _substituted(text: str) -> str:
    """Puts in the environment's variables, whose values may have more of them."""
    for _ in range(_DEEPEST):
        before, text = text, _VARIABLE.sub(partial(_value_of, text), text)
        if text == before:
            return text
    shown = mask_url(text)
    raise ShardListError(f"cannot expand {shown}: the variables in it stand for each other", shard=shown)


def _value_of(text: str, found: re.Match[str]) -> str:
    name = found[1]
    value = pattern_variable(name)
    if value is not None:
        return value
    if scheme_of(text) == "pipe":
        return found[0]
    shown = mask_url(text)
    raise ShardListError(
        f"cannot expand {shown}: {found[0]} stands for the environment variable WDS_{name}, which is not set",
        shard=shown,
    )


def _place(url: str, options: StorageOptions) -> str:
    try:
        return rewritten(url, options.rewrite)
    except ShardOpenError as error:
        raise ShardListError(str(error).replace("cannot open shard", "cannot list", 1), shard=error.shard) from error


def _resolve(url: str, options: StorageOptions) -> Iterator[str]:
    try:
        place = _place(url, options)
    except UnsafeDataError as error:
        if not is_pattern(url):
            raise
        shown = mask_url(url)
        raise ShardListError(
            f"cannot list {shown}: a rewriting rule makes a command of it; write braces, which are expanded first",
            shard=shown,
        ) from error
    if place == url:
        yield from _search(place, options)
        return
    with naming(url, _WHY):
        found = list(_search(place, options))
    for name in found:
        yield _given_name(url, place, name, options)


def _search(place: str, options: StorageOptions) -> Iterator[str]:
    scheme = scheme_of(place)
    if scheme in _NEVER_SEARCHED:
        yield place
    elif is_in_aistore(scheme):
        if is_pattern(place):
            raise no_listing(place)
        yield place
    elif scheme in ("", "file"):
        yield from search_local(place)
    else:
        yield from search_remote(place, options)


def _given_name(url: str, place: str, found: str, options: StorageOptions) -> str:
    """The name under which the rules lead to what was found: that of the pattern, as far as it is possible."""
    if found == place:
        return url
    ends = zip(reversed(url), reversed(place), strict=False)
    kept = next((i for i, (a, b) in enumerate(ends) if a != b), min(len(url), len(place)))
    start, end = place[: len(place) - kept], found[len(place) - kept :]
    named = url[: len(url) - kept] + end if found.startswith(start) else found
    for name in (named, found):
        if rewritten(name, options.rewrite) == found:
            return name
    shown = mask_url(url)
    raise ShardListError(
        f"cannot list {shown}: rewriting rules lead to {mask_url(found)}, and from there to "
        f"{mask_url(rewritten(found, options.rewrite))}. Let the rule match only what stands before the pattern",
        shard=shown,
    )


def _split(text: str) -> Iterator[str]:
    """Splits at each ``::`` that stands between two patterns."""
    start = position = 0
    while (found := text.find("::", position)) >= 0:
        position = found + 2
        if _separates(text[start:found], text[position:]):
            yield _part(text[start:found], text)
            start = position
    yield _part(text[start:], text)


def _separates(left: str, right: str) -> bool:
    if left.startswith("pipe:"):
        return right.startswith("pipe:")
    last = left.rpartition("::")[2]
    return not is_chaining(last) and not _IPV6_HOST.search(left)


def _part(part: str, text: str) -> str:
    if not part:
        raise ShardListError(f"one of the patterns that '::' separates in {mask_text(text)!r} is empty")
    return part
