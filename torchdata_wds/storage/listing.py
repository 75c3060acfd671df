"""Patterns -> shard URLs."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torchdata_wds.environment import pattern_variable
from torchdata_wds.errors import ShardListError, ShardOpenError, UnsafeDataError
from torchdata_wds.storage.byte_streams import naming
from torchdata_wds.storage.places import Place, RewriteRules, StorageOptions, resolve
from torchdata_wds.storage.searching import NEVER_SEARCHED, is_pattern, search
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.urls import (
    cannot_list,
    check_letter,
    expand_braces,
    expand_clear_braces,
    is_chaining,
    local_path,
    mask_item,
    mask_url,
    scheme_of,
)

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_DEEPEST = 10
_IPV6_HOST = re.compile(r"://([^/@]*@)?\[[0-9A-Fa-f:.]*$")


def list_urls(
    pattern: object,
    *,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    rewrite: str | Mapping[str, str] | RewriteRules | None = None,
    variables: bool = False,
) -> Iterator[str]:
    """Lists the shards that patterns stand for, in order, duplicates kept.

    A pattern is a str, a path, or a list or tuple of them, nested as you like. Braces (``{000..146}``, ``{a,b}``) and
    ``a::b`` are expanded everywhere; globs and folders (local, or an fsspec URL that ends in ``/``) become the shards
    found there, sorted. A name that exists exactly as given is taken verbatim. Globs and folders are searched where
    the rules send them, and what is found is named as in the pattern, so that opening it by the same rules finds it.

    With `variables`, ``${name}`` stands for the environment variable ``WDS_name``; in a command only if that is set, as
    the shell has variables too. Not for a stranger's patterns, who could read them.

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
        check_letter(pattern, "a shard pattern cannot be")
        yield str(pattern)
    elif isinstance(pattern, os.PathLike) and isinstance(path := os.fspath(pattern), str):
        yield path
    else:
        raise ShardListError(
            f"a shard pattern must be a str, a path, or a list of them, not {type(pattern).__name__}: "
            f"{mask_item(pattern)}"
        )


def _list_one(text: str, options: StorageOptions, variables: bool) -> Iterator[str]:
    place = _existing(text, options)
    if variables and place is None and (full := _substituted(text)) != text:
        text = full
        place = _existing(text, options)
    if place is not None:
        yield from _named_as_given(place)
        return
    for part in _split(text):
        clear_only = scheme_of(part) in NEVER_SEARCHED
        for url in expand_clear_braces(part) if clear_only else expand_braces(part):
            try:
                place = _resolve(url, options)
            except UnsafeDataError as error:
                if not is_pattern(url):
                    raise
                what = "a rewriting rule makes a command of it; write braces, which are expanded first"
                raise cannot_list(url, what) from error
            yield from _named_as_given(place)


def _existing(text: str, options: StorageOptions) -> Place | None:
    """The place of a text that names an existing file or folder as it is; None if it is yet to be expanded."""
    try:
        place = _resolve(text, options)
    except (ShardListError, UnsafeDataError):
        return None
    return place if place.is_local and os.path.exists(local_path(place.url)) else None  # noqa: PTH110 - long names


def _resolve(url: str, options: StorageOptions) -> Place:
    try:
        return resolve(url, options)
    except ShardOpenError as error:
        raise ShardListError(str(error).replace("cannot open shard", "cannot list", 1), shard=error.shard) from error


def _substituted(text: str) -> str:
    """Replaces ``${name}`` by the environment's variables, whose values may hold more of them."""

    def value_of(found: re.Match[str]) -> str:
        value = pattern_variable(found[1])
        if value is None and scheme_of(text) != "pipe":
            what = f"{found[0]} stands for the environment variable WDS_{found[1]}, which is not set"
            raise cannot_list(text, what, "expand")
        return found[0] if value is None else value

    for _ in range(_DEEPEST):
        before, text = text, _VARIABLE.sub(value_of, text)
        if text == before:
            return text
    raise cannot_list(text, "the variables in it stand for each other", "expand")


def _named_as_given(place: Place) -> Iterator[str]:
    if not place.is_moved:
        yield from search(place)
        return
    with naming(place.name, "where a rewriting rule looks for"):
        found = list(search(place))
    for url in found:
        yield _given_name(place, url)


def _given_name(place: Place, found: str) -> str:
    """The name by which the rules lead to what was found: that of the pattern, as far as possible.

    ``s3://b/*.tar``, which a rule sends to ``/data/b/*.tar``, ends like it from ``/b/*.tar`` on. So ``/data/b/x.tar``
    begins like the place before that, and is named ``s3:/`` + ``/b/x.tar``.
    """
    url, moved = place.name, place.url
    if found == moved:
        return url
    ends = zip(reversed(url), reversed(moved), strict=False)
    kept = next((i for i, (a, b) in enumerate(ends) if a != b), min(len(url), len(moved)))
    start, end = moved[: len(moved) - kept], found[len(moved) - kept :]
    named = url[: len(url) - kept] + end if found.startswith(start) else found
    for name in (named, found):
        if resolve(name, place.options).url == found:
            return name
    raise cannot_list(
        url,
        f"rewriting rules lead to {mask_url(found)}, and from there to {resolve(found, place.options).shown}. "
        "Let the rule match only what stands before the pattern",
    )


def _split(text: str) -> Iterator[str]:
    """Splits at each ``::`` that stands between two patterns, and not inside a chained URL or an address."""
    parts, start, position = [], 0, 0
    while (found := text.find("::", position)) >= 0:
        position = found + 2
        left = text[start:found]
        if left.startswith("pipe:"):
            separates = text.startswith("pipe:", position)
        else:
            separates = not is_chaining(left.rpartition("::")[2]) and not _IPV6_HOST.search(left)
        if separates:
            parts.append(left)
            start = position
    for part in [*parts, text[start:]]:
        if not part:
            raise ShardListError(f"one of the patterns that '::' separates in {mask_text(text)!r} is empty")
        yield part
