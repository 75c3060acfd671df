"""Expands patterns into shard URLs: lists, braces, variables, and globs and folders on local disks and in stores."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from torchdata_wds.environment import pattern_variable, rewriting_variables
from torchdata_wds.errors import ShardListError, ShardOpenError, UnsafeDataError, WdsError
from torchdata_wds.storage.byte_streams import naming
from torchdata_wds.storage.compression import SHARD_SUFFIXES
from torchdata_wds.storage.globs import find_files
from torchdata_wds.storage.places import Place, RewriteRules, StorageOptions, resolve
from torchdata_wds.storage.retrying import error_words
from torchdata_wds.storage.secrets.masking import mask_text, masked_cause
from torchdata_wds.storage.sources.aistore import no_listing
from torchdata_wds.storage.sources.fsspec import connect, protocol_of
from torchdata_wds.storage.urls import (
    AIS,
    HIDDEN_FOLDER,
    STDIN,
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

# In a web address "?" begins the query; in a command "*" is for the shell.
_NEVER_SEARCHED = (STDIN, "pipe", "http", "https")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_IPV6_HOST = re.compile(r"://([^/@]*@)?\[[0-9A-Fa-f:.]*$")
_SHOWN_SUFFIXES = ", ".join(SHARD_SUFFIXES)
_MAGIC = re.compile(r"[*?[]")
_QUERY = re.compile(r"\?[\w.-]+=[^*[]*$")

# A text with one of these may stand for several shards, unless there is a file of exactly that name.
_MARKS = re.compile(r"[{}*?[$]|::")

# Names of shards by their look, perhaps with braces, about which no file system is asked: web addresses; URLs without a
# wildcard or final slash; and paths without those, a ":" or a "~" that end in the suffix of a shard.
_SHARD_NAMES = re.compile(
    r"(?!file:)(?!.*(?:::|:\{|\}:))"
    r"(?:https?://[^{}$]*|[a-z][a-z0-9+.-]+://[^*?\[$]*[^*?\[$}/]|"
    rf"[^*?\[$~:]*(?:{'|'.join(map(re.escape, SHARD_SUFFIXES))}))",
    re.IGNORECASE | re.DOTALL,
)


def list_urls(
    pattern: object,
    *,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    rewrite: str | Mapping[str, str] | RewriteRules | None = None,
    variables: bool = False,
) -> Iterator[str]:
    """Expands patterns into shard URLs, in order; keeps duplicates.

    A pattern is a str, a path, or a list or tuple of patterns, nested to any depth. Braces (``{000..146}``, ``{a,b}``)
    and ``a::b`` are expanded in all of them; globs and folders (local, or an fsspec URL that ends in ``/``) become the
    shards found there, sorted. A path that exists locally is used verbatim. A name that ends in a shard's suffix is
    not looked up: a folder of such a name needs its ``/``. Rewriting rules decide where globs and folders are searched;
    results are named like the pattern, so that the same rules find them when they are opened.

    With `variables`, ``${name}`` is replaced by the environment variable ``WDS_name``; in a command only if that is
    set, because the shell has variables too. Do not use it for untrusted patterns: they could read the environment.

    Example:
        >>> list(list_urls(["train-{0..1}.tar", ("https://host/{a,b}.tar?x=1", "pipe:cat x.tar")]))
        ['train-0.tar', 'train-1.tar', 'https://host/a.tar?x=1', 'https://host/b.tar?x=1', 'pipe:cat x.tar']
    """
    return list_each((pattern,), StorageOptions(storage_options, rewrite=rewrite), variables=variables)


def list_each(patterns: Iterable[object], options: StorageOptions, *, variables: bool = False) -> Iterator[str]:
    """Expands each of the patterns, as `list_urls` does; reads the environment once."""
    is_direct = not options.rewrite and not rewriting_variables()
    for pattern in patterns:
        for text in (pattern,) if type(pattern) is str and len(pattern) > 1 else _flatten(pattern):
            if not is_direct or not _SHARD_NAMES.fullmatch(text):
                yield from _list_one(text, options, variables=variables, is_direct=is_direct)
            elif "{" not in text and "}" not in text:
                yield text
            else:
                yield from _list_braces(text, options)


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


def _list_braces(text: str, options: StorageOptions) -> Iterator[str]:
    """Expands the braces of `_SHARD_NAMES`, unless the text itself is the name of a file."""
    place = _existing(text, options)
    if place is not None:
        return _search(place)
    return expand_clear_braces(text) if scheme_of(text) in _NEVER_SEARCHED else expand_braces(text)


def _list_one(text: str, options: StorageOptions, *, variables: bool, is_direct: bool) -> Iterator[str]:
    has_marks = _MARKS.search(text) is not None
    place = _existing(text, options) if has_marks else None
    if variables and has_marks and place is None and (full := _substituted(text)) != text:
        text = full
        place = _existing(text, options)
    if place is not None:
        yield from _named_as_given(place)
        return
    for part in _split(text):
        clear_only = scheme_of(part) in _NEVER_SEARCHED
        for url in expand_clear_braces(part) if clear_only else expand_braces(part):
            if is_direct and _SHARD_NAMES.fullmatch(url):
                yield url
                continue
            try:
                place = _resolve(url, options)
            except UnsafeDataError as error:
                if not _is_pattern(url):
                    raise
                what = "a rewriting rule makes a command of it; write braces, which are expanded first"
                raise cannot_list(url, what) from error
            yield from _named_as_given(place)


def _existing(text: str, options: StorageOptions) -> Place | None:
    """Returns the place of an existing local file or folder; None if the text is still to be expanded."""
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
    """Replaces ``${name}`` by environment variables, whose values may contain further ones."""

    def value_of(found: re.Match[str]) -> str:
        value = pattern_variable(found[1])
        if value is None and scheme_of(text) != "pipe":
            what = f"{found[0]} stands for the environment variable WDS_{found[1]}, which is not set"
            raise cannot_list(text, what, "expand")
        return found[0] if value is None else value

    for _ in range(10):
        before, text = text, _VARIABLE.sub(value_of, text)
        if text == before:
            return text
    raise cannot_list(text, "the variables in it stand for each other", "expand")


def _named_as_given(place: Place) -> Iterator[str]:
    if not place.is_moved:
        yield from _search(place)
        return
    with naming(place.name, "where a rewriting rule looks for"):
        found = list(_search(place))
    for url in found:
        yield _given_name(place, url)


def _given_name(place: Place, found: str) -> str:
    """Returns a name that the rules rewrite to the shard found, if possible one like the pattern.

    If a rule rewrites ``s3://b/*.tar`` to ``/data/b/*.tar``, the two share the end ``/b/*.tar``, and differ in ``s3:/``
    and ``/data``. So ``/data/b/x.tar``, which was found, is named ``s3:/`` + ``/b/x.tar``.
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
        "Make the rule match only the part before the pattern",
    )


def _split(text: str) -> Iterator[str]:
    """Splits at each ``::`` between two patterns, but not inside a chained URL or an IPv6 address."""
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


def _search(place: Place) -> Iterator[str]:
    """Yields the shards of a folder or glob, sorted, or any other URL unchanged."""
    if place.is_local:
        yield from _search_local(place.url)
    elif place.scheme in _NEVER_SEARCHED or not any(map(_is_pattern, place.url.split("::"))):
        yield place.url
    elif place.scheme == AIS:
        raise no_listing(place.url)
    else:
        yield from _search_store(place)


def _is_pattern(part: str) -> bool:
    """Returns whether a store's URL, or one part of a chained URL, is a glob or a folder."""
    protocol, slashes, path = part.partition("://")
    return bool(slashes) and (bool(_MAGIC.search(_QUERY.sub("", path))) or (path.endswith("/") and protocol != "dir"))


def _is_shard(name: str) -> bool:
    return name.lower().endswith(SHARD_SUFFIXES) and not name.startswith(".")


def _nothing(pattern: str, hint: str) -> ShardListError:
    shown = mask_url(pattern)
    return ShardListError(f"no shard matches {shown}" + (f": {hint}" if hint else ""), shard=shown)


def _search_store(place: Place) -> Iterator[str]:
    # One part of a chained URL is the pattern: the first of "zip://*.tar::s3://b/x.zip", but the second of
    # "simplecache::s3://b/*.tar". What fsspec finds replaces this part: "zip://a.tar::s3://b/x.zip".
    parts = place.url.split("::")
    index, part = next((i, part) for i, part in enumerate(parts) if _is_pattern(part))
    is_folder = part.endswith("/")
    entries: Iterable[dict[str, Any]]
    try:
        filesystem, path = connect(place.url, place.options)
        filesystem.invalidate_cache()  # fsspec keeps listings for ever, but shards come and go between epochs
        entries = filesystem.ls(path, detail=True) if is_folder else filesystem.glob(path, detail=True).values()
        names = [entry["name"] for entry in entries if entry.get("type") != "directory"]
    except WdsError as error:
        raise ShardListError(str(error), shard=error.shard) from error
    except Exception as error:  # noqa: BLE001 - client libraries raise anything
        reason = "not found" if isinstance(error, FileNotFoundError) else error_words(error)
        raise cannot_list(place.url, reason) from masked_cause(error)
    names = [name for name in names if f"/{HIDDEN_FOLDER}/" not in name]  # a ** finds those of hidden folders too
    found = sorted(name for name in names if not is_folder or _is_shard(name.rpartition("/")[2]))
    if not found:
        raise _nothing(place.url, f"shards in a folder must end in {_SHOWN_SUFFIXES}" if is_folder else "")
    for name in found:
        yield "::".join([*parts[:index], _full_url(part, name), *parts[index + 1 :]])


def _full_url(part: str, name: str) -> str:
    """Returns the URL of a file found, with the user, host or account of the pattern, which fsspec's names lack."""
    import fsspec

    protocol = protocol_of(part)
    magic = _MAGIC.search(part)
    base = part[: magic.start() if magic else None].rpartition("/")[0] + "/"
    if base.endswith("://"):
        return base + name.lstrip("/")
    inside = str(fsspec.get_filesystem_class(protocol)._strip_protocol(base)).rstrip("/")
    return base.rstrip("/") + name[len(inside) :] if name.startswith(inside + "/") else f"{protocol}://{name}"


def _search_local(url: str) -> Iterator[str]:
    path = local_path(url)
    has_magic = _MAGIC.search(path) is not None
    is_shard = not has_magic and path.lower().endswith(SHARD_SUFFIXES)  # by its look, which asks no file system
    if not is_shard and os.path.isdir(path):  # noqa: PTH112 - a name that is too long is not a folder
        names = sorted(entry.name for entry in os.scandir(path) if not entry.is_dir())
        found = [os.path.join(path, name) for name in names if _is_shard(name)]  # noqa: PTH118 - keeps "./"
        hint = f"the folder holds {len(names):,} files, none of them ends in {_SHOWN_SUFFIXES}"
    elif not has_magic or os.path.lexists(path):
        # A file that exists is not a pattern, even if its name is "a[1].tar".
        yield path if url.startswith("~") else url
        return
    else:
        found, folders = find_files(path)
        hint = f"it matches {folders:,} folders and no file"
        if not found and not folders:
            start = _MAGIC.split(path, maxsplit=1)[0].rpartition("/")[0]  # the last folder before any wildcard
            folder = start or ("/" if path.startswith("/") else ".")
            is_there = os.path.isdir(folder)  # noqa: PTH112
            holds = f"holds {len(os.listdir(folder)):,} entries" if is_there else "does not exist"  # noqa: PTH208
            where = "" if folder.startswith("/") else f" (the working directory is {os.getcwd()})"  # noqa: PTH109
            hint = f"the folder {folder!r} {holds}{where}"
    if not found:
        raise _nothing(url, hint)
    for name in found:
        yield name if scheme_of(url) != "file" else f"file:{'//' if name.startswith('/') else ''}{quote(name)}"
