"""Patterns -> shard URLs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torchdata_wds.errors import ShardListError
from torchdata_wds.storage.braces import expand_braces, expand_clear_braces
from torchdata_wds.storage.chaining import is_chaining
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.searching import search_local, search_remote
from torchdata_wds.storage.urls import STDIN, local_path, scheme_of

__all__ = ["list_urls"]

# "?" is a query in a web address, "*" is the shell's in a command.
_NEVER_SEARCHED = (STDIN, "pipe", "http", "https")
_IPV6_HOST = re.compile(r"://([^/@]*@)?\[[0-9A-Fa-f:.]*$")


def list_urls(pattern: object, *, storage_options: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[str]:
    """Lists the shards that patterns stand for, in order, duplicates kept.

    Args:
        pattern: A str, a path, or a list or tuple of them, nested as you like. Braces (``{000..146}``, ``{a,b}``) and
            ``a::b`` are expanded everywhere; globs and folders (local, or an fsspec URL that ends in ``/``) become the
            shards found there, sorted. What exists under exactly this name is taken verbatim.
        storage_options: Options by protocol, as for `open_shard`.

    Raises:
        ShardListError: if a glob or folder gives nothing, braces are wrong, or an item is no pattern.
        TypeError: if the options are no mapping of mappings.

    Example:
        >>> list(list_urls(["train-{0..1}.tar", ("https://host/{a,b}.tar?x=1", "pipe:cat x.tar")]))
        ['train-0.tar', 'train-1.tar', 'https://host/a.tar?x=1', 'https://host/b.tar?x=1', 'pipe:cat x.tar']
    """
    options = StorageOptions(storage_options)
    return (url for text in _flatten(pattern) for url in _list_one(text, options))


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
            f"a shard pattern must be a str, a path, or a list of them, not {type(pattern).__name__}: {pattern!r:.80}"
        )


def _checked(text: str) -> str:
    if len(text) > 1 or text == STDIN:
        return text
    raise ShardListError(
        f"a shard pattern cannot be {text!r}: did a str stand where a list belongs? Write "
        'IterableWrapper(["train-{000..146}.tar"]), not IterableWrapper("train-{000..146}.tar")'
    )


def _list_one(text: str, options: StorageOptions) -> Iterator[str]:
    if _exists(text):
        yield from search_local(text)
        return
    for part in _split(text):
        clear_only = scheme_of(part) in _NEVER_SEARCHED
        for url in expand_clear_braces(part) if clear_only else expand_braces(part):
            yield from _resolve(url, options)


def _exists(url: str) -> bool:
    return scheme_of(url) in ("", "file") and os.path.exists(local_path(url))  # noqa: PTH110 - long names are no error


def _resolve(url: str, options: StorageOptions) -> Iterator[str]:
    scheme = scheme_of(url)
    if scheme in _NEVER_SEARCHED:
        yield url
    elif scheme in ("", "file"):
        yield from search_local(url)
    else:
        yield from search_remote(url, options)


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
        raise ShardListError(f"one of the patterns that '::' separates in {text!r} is empty")
    return part
