"""Kinds of URLs, their local paths, the expansion of braces, and URLs in messages, with secrets masked."""

import inspect
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, product
from urllib.parse import unquote

from torchdata_wds.errors import ShardListError, ShardOpenError
from torchdata_wds.storage.secrets.masking import mask_text, masked_cause

STDIN = "-"
AIS = "ais"

#: The folder beside shards for what belongs to them and no listing shows.
HIDDEN_FOLDER = ".wds-index"

#: The schemes of local files: a path, and a ``file:`` URL.
LOCAL = ("", "file")

# At least two letters: "D:/x.tar" is a path.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_PERHAPS_A_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!//)|(?i:\bpipe:)")

# Protocols of fsspec that read through the URL after their "::"; libarchive cannot be imported to find out.
_CHAINING = frozenset(
    {"simplecache", "filecache", "blockcache", "cached", "zip", "tar", "libarchive", "reference", "dir"}
)

_RANGE = re.compile(r"\{(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(\.\.-?\d+)?\}")
_ONE_RANGE = re.compile(r"([^{}]*)\{([0-9]+)\.\.([0-9]+)\}([^{}]*)")
_ALMOST_RANGE = re.compile(r"\{[^{},]*\.\.[^{},]*\}")
_MARKS = frozenset("{*[")

# Braces that contain one of these are meant for a shell or a program, not for us.
_FOREIGN = re.compile(r"[\s'\"$`;|&()<>\\]")


def is_chaining(part: str) -> bool:
    """Returns whether the part before a ``::`` is a chaining protocol of fsspec: ``simplecache``, ``zip://a.tar``."""
    protocol = part.partition("://")[0]
    return protocol in _CHAINING or (protocol.isidentifier() and _takes_a_target(protocol))


@lru_cache(maxsize=256)
def _takes_a_target(protocol: str) -> bool:
    import fsspec

    if protocol not in fsspec.available_protocols():
        return False
    try:
        parameters = inspect.signature(fsspec.get_filesystem_class(protocol).__init__).parameters
    except (ImportError, ValueError):
        return False
    return "fo" in parameters or "target_protocol" in parameters


def url_text(url: str | os.PathLike[str]) -> str:
    """Returns a shard's URL or path as a str; raises TypeError for other types."""
    text = os.fspath(url) if isinstance(url, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise TypeError(f"a shard is a str or a path, not {type(url).__name__}")
    return text


def check_letter(text: str, what: str) -> None:
    """Refuses a single letter as a shard, unless that file exists: the user probably passed a str instead of a list."""
    if len(text) < 2 and text != STDIN and (os.path.isdir(text) or not os.path.exists(text)):  # noqa: PTH110, PTH112
        raise ShardListError(
            f"{what} {str(text)!r}: was a str passed instead of a list? Write "
            'IterableWrapper(["train-000000.tar"]), not IterableWrapper("train-000000.tar")'
        )


def scheme_of(url: str) -> str:
    """Returns the scheme of a URL in lower case, "-" for standard input, "" for a local path such as "a:b.tar"."""
    if url == STDIN:
        return STDIN
    found = _SCHEME.match(url)
    if found is None:
        return ""
    scheme, rest = found[1].lower(), url[found.end() :]
    is_url = scheme in ("pipe", "file") or rest.startswith("//") or (rest.startswith(":") and is_chaining(found[1]))
    return scheme if is_url else ""


def is_local(url: str) -> bool:
    """Returns whether a URL is a local path or a ``file:`` URL."""
    return scheme_of(url) in LOCAL


def local_path(url: str) -> str:
    """Returns the path of a local path, verbatim, or of a ``file:`` URL, percent-decoded.

    Expands a leading ``~`` or ``~user``, unless a file with this exact name exists. Raises ShardOpenError for a
    ``file:`` URL with another host.
    """
    if url.startswith("~") and not os.path.lexists(url):
        return os.path.expanduser(url)  # noqa: PTH111 - a str
    if scheme_of(url) != "file":
        return url
    rest = url[len("file:") :]
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost"):
            folder = mask_text(f"file:///{host}{slash}{path}")
            raise cannot_open(
                mask_text(url),
                f"a file: URL names a file of this machine, not of host {mask_text(host)!r}; write {folder} if that is "
                "a folder",
            )
        rest = slash + path
    return unquote(rest)


def mask_url(url: str | os.PathLike[str]) -> str:
    """Replaces secrets in a URL or command by ``***``, as `mask_text` does; leaves paths alone."""
    return _masked(url_text(url))


@lru_cache(maxsize=256)
def _masked(text: str) -> str:
    has_no_secret = scheme_of(text) in (*LOCAL, STDIN) and not _PERHAPS_A_URL.search(text)
    return text if has_no_secret else mask_text(text)


def mask_item(item: object) -> str:
    """Returns the start of the repr of any object, given where a URL was expected, with secrets masked."""
    return mask_text(repr(item)[:300])[:80]


def cannot_list(url: str, reason: str, doing: str = "list") -> ShardListError:
    """Returns the error for a pattern that cannot be listed or expanded."""
    shown = mask_url(url)
    return ShardListError(f"cannot {doing} {shown}: {reason}", shard=shown)


def cannot_open(shard: str, reason: str) -> ShardOpenError:
    """Returns the error for a shard that cannot be opened; `shard` is its masked URL."""
    return ShardOpenError(f"cannot open shard {shard}: {reason}", shard=shard)


def expand_braces(pattern: str, *, within: str | None = None) -> Iterator[str]:
    """Expands all braces of a path or URL; messages name the whole pattern, `within`."""
    if "{" not in pattern and "}" not in pattern:
        yield pattern
        return
    _check(pattern, within or pattern)
    if (found := _ONE_RANGE.fullmatch(pattern)) is not None:
        yield from _numbered(*found.groups())
        return
    import braceexpand

    try:
        yield from braceexpand.braceexpand(pattern, escape=False)
    except ValueError as error:
        raise _wrong_braces(within or pattern, "its braces are unbalanced") from masked_cause(error)
    except RecursionError:
        raise _wrong_braces(within or pattern, "its braces are nested too deeply") from None


def _numbered(before: str, first: str, last: str, after: str) -> Iterator[str]:
    """Expands one range of numbers, the most common pattern, faster than braceexpand does."""
    is_padded = any(len(end) > 1 and end[0] == "0" for end in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    return (f"{before}{number:0{width}d}{after}" for number in range(int(first), int(last) + 1))


def expand_clear_braces(pattern: str) -> Iterator[str]:
    """Expands the lists and ranges of a command or web address, and leaves other braces such as ``${X}`` alone."""
    choices: list[list[str]] = []
    end = 0
    for start, stop in _clear_groups(pattern):
        choices += [[pattern[end:start]], list(expand_braces(pattern[start:stop], within=pattern))]
        end = stop
    for parts in product(*choices):
        yield "".join(parts) + pattern[end:]


def unexpanded(url: str) -> str:
    """Returns advice for a URL that does not exist but looks like a pattern; else ""."""
    if scheme_of(url) in ("http", "https"):
        is_pattern = any(_clear_groups(unquote(url)))
    else:
        is_pattern = not _MARKS.isdisjoint(url) or ("?" in url and is_local(url))
    return " and looks like a pattern that was not expanded; put .list_shards() before the loader" if is_pattern else ""


def _clear_groups(pattern: str) -> Iterator[tuple[int, int]]:
    """Yields start and end of the lists and ranges in a command: for ``a{1..3}b ${X} {a,b}``, (1, 7) and (13, 18)."""
    position = 0
    while (start := pattern.find("{", position)) >= 0:
        # The matching brace is the first after which as many braces were closed as opened.
        depths = accumulate({"{": 1, "}": -1}.get(letter, 0) for letter in pattern[start:])
        stop = next((start + count for count, depth in enumerate(depths, 1) if not depth), start)
        group = pattern[start:stop]
        position = start + 1
        is_foreign = pattern[max(0, start - 1) : start] == "$" or _FOREIGN.search(group)
        if group and not is_foreign and ("," in group or _RANGE.fullmatch(group)):
            yield start, stop
            position = stop


def _check(pattern: str, whole: str) -> None:
    if "{}" in pattern:
        raise _wrong_braces(whole, "its braces {} are empty")
    for found in _ALMOST_RANGE.finditer(pattern):
        complete = _RANGE.fullmatch(found[0])
        if complete is None or complete[1].isalpha() != complete[2].isalpha():
            raise _wrong_braces(whole, f"{found[0]} is not a complete range")
        first, last = (ord(end) if end.isalpha() else int(end) for end in complete.group(1, 2))
        if not complete[3] and first > last:
            raise _wrong_braces(whole, f"the range {found[0]} runs backwards")


def _wrong_braces(pattern: str, what: str) -> ShardListError:
    return cannot_list(pattern, f"{what}; write {{000..146}} or {{train,val}}", "expand")
