"""What kind of URL a text is, and how it is shown in messages: without what is secret in it.

Which of fsspec's protocols stand before ``::`` and read through the URL behind it (``simplecache::s3://...``).
"""

from __future__ import annotations

import inspect
import os
import re
from functools import lru_cache
from urllib.parse import unquote

from torchdata_wds.errors import ShardListError, ShardOpenError
from torchdata_wds.storage.secrets.masking import mask_text

__all__ = [
    "is_chaining",
    "STDIN",
    "check_letter",
    "local_path",
    "mask_item",
    "mask_url",
    "mask_text",
    "scheme_of",
    "url_text",
]


# Classes that cannot be imported here (libarchive wants its library) cannot be asked.
_ALWAYS = frozenset(
    {"simplecache", "filecache", "blockcache", "cached", "zip", "tar", "libarchive", "reference", "dir"}
)

_CHAIN_ARGUMENTS = frozenset({"fo", "target_protocol"})


def is_chaining(part: str) -> bool:
    """Tells whether the part before a ``::`` is a chaining protocol of fsspec: ``simplecache``, ``zip://inner.tar``.

    Example:
        >>> is_chaining("simplecache"), is_chaining("zip://a.tar"), is_chaining("a.tar"), is_chaining("s3://b/a.tar")
        (True, True, False, False)
    """
    protocol, _, _ = part.partition("://")
    return protocol in _ALWAYS or (protocol.isidentifier() and _takes_a_target(protocol))


@lru_cache(maxsize=256)
def _takes_a_target(protocol: str) -> bool:
    import fsspec

    if protocol not in fsspec.available_protocols():
        return False
    try:
        parameters = inspect.signature(fsspec.get_filesystem_class(protocol).__init__).parameters
    except (ImportError, ValueError):
        return False
    return not _CHAIN_ARGUMENTS.isdisjoint(parameters)


STDIN = "-"

# Two letters at least: "D:/x.tar" is a path.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")

_PERHAPS_A_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!//)|(?i:\bpipe:)")

_WITHOUT_SLASHES = ("pipe", "file")


def url_text(url: str | os.PathLike[str]) -> str:
    """Turns what was given as a shard into a str.

    Raises:
        TypeError: if it is neither a str nor a path.
    """
    text = os.fspath(url) if isinstance(url, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise TypeError(f"a shard is a str or a path, not {type(url).__name__}")
    return text


def check_letter(text: str, what: str) -> None:
    """Refuses a single character where a shard is expected: it is a letter of a str that stands for a list.

    Args:
        text: The shard.
        what: What it is refused as, and by whom.

    Raises:
        ShardListError: if it is one, and neither standard input nor a file of that name.
    """
    if len(text) > 1 or text == STDIN or os.path.exists(text):  # noqa: PTH110 - a str
        return
    raise ShardListError(
        f"{what} {text!r}: did a str stand where a list belongs? Write "
        'IterableWrapper(["train-000000.tar"]), not IterableWrapper("train-000000.tar")'
    )


def scheme_of(url: str) -> str:
    """Tells which backend a URL belongs to.

    Returns:
        The scheme in small letters, "-" for standard input, "" for a local path.

    Example:
        >>> [scheme_of(url) for url in ("S3://b/x.tar", "pipe:cat x.tar", "-", "D:/x.tar", "a:b.tar", "x#1.tar")]
        ['s3', 'pipe', '-', '', '', '']
    """
    if url == STDIN:
        return STDIN
    found = _SCHEME.match(url)
    if found is None:
        return ""
    scheme, rest = found[1].lower(), url[found.end() :]
    if scheme in _WITHOUT_SLASHES or rest.startswith("//"):
        return scheme
    return scheme if rest.startswith(":") and is_chaining(found[1]) else ""


def local_path(url: str) -> str:
    """Turns a local path or a ``file:`` URL into the path: the one verbatim, the other percent-decoded.

    A home at its beginning, ``~`` or ``~user``, is put in, unless there is a file of this very name.

    Raises:
        ShardOpenError: if the ``file:`` URL names another host.
    """
    if url.startswith("~") and not os.path.lexists(url):
        return os.path.expanduser(url)  # noqa: PTH111 - a str
    if scheme_of(url) != "file":
        return url
    rest = url[len("file:") :]
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost"):
            raise ShardOpenError(
                f"cannot open shard {mask_text(url)}: a file: URL names a file of this machine, not of host "
                f"{mask_text(host)!r}; write {mask_text(f'file:///{host}{slash}{path}')} if that is a folder",
                shard=mask_text(url),
            )
        rest = slash + path
    return unquote(rest)


def mask_url(url: str | os.PathLike[str]) -> str:
    """Replaces what is secret in a URL or a ``pipe:`` command by ``***``, for messages and logs.

    Masked are passwords before a host, query parameters, options and headers whose name says signature, token, key,
    password or the like, and what the options of curl, wget, gpg, openssl and others take. A local path is left as it
    is, unless a mistyped URL may be in it.

    Args:
        url: The URL, path or ``pipe:`` command.

    Example:
        >>> mask_url("https://me:pw@host/x.tar?part=1&X-Amz-Signature=abc")
        'https://me:***@host/x.tar?part=1&X-Amz-Signature=***'
    """
    text = url_text(url)
    return _masked(text)


@lru_cache(maxsize=256)
def _masked(text: str) -> str:
    is_local = scheme_of(text) in ("", "file", STDIN) and not _PERHAPS_A_URL.search(text)
    return text if is_local else mask_text(text)


def mask_item(item: object) -> str:
    """Shows the beginning of what was given in place of a URL, as `mask_url` shows those.

    Example:
        >>> mask_item(("https://me:pw@host/x.tar", None))
        "('https://me:***@host/x.tar', None)"
    """
    return mask_text(repr(item)[:300])[:80]
