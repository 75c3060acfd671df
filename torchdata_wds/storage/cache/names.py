"""The names of copies in a cache's folder.

By default, a name consists of the shard's own name and a digest of its origin (the whole URL or command, or the place
it leads to), so that no two shards share a file. The other ways are for folders that others fill.
"""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from torchdata_wds.errors import CacheError
from torchdata_wds.option_types import Naming
from torchdata_wds.storage.compression import SHARD_SUFFIXES
from torchdata_wds.storage.urls import is_local, local_path, mask_url, scheme_of

#: The suffixes of files that are not finished copies.
PART, LOCK = ".part", ".lock"
_LONGEST_STEM = 100
_OTHER_SUFFIX = re.compile(r"(\.[a-z][a-z0-9]{0,9})?(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_OWN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*-[0-9a-f]{32}(\.[a-z][a-z0-9]{0,9})?(\.(gz|bz2|xz|zst))?")
_IN_COMMAND = re.compile(r"[^\s'\"/=:|<>&;()]+\.(?:tar|tgz|tbz2?|txz|tzst)(?:\.[a-z0-9]{2,4})?(?=$|[\s'\"?|<>&;)])")

#: Query parameters of signed URLs: of AWS and its CloudFront, Google and Azure.
_SIGNING = re.compile(
    r"(?i)x-amz-.*|x-goog-.*|awsaccesskeyid|googleaccessid|signature|key-pair-id|policy|hash-algorithm"
)

_AZURE = frozenset(
    "sv ss srt sp se st spr sig sr si sip skoid sktid skt ske sks skv saoid suoid scid sdd ses".split()  # noqa: SIM905
)


def check_naming(name: Naming) -> Naming:
    """Returns a ``name=`` argument; a ValueError or TypeError if it is not a valid one."""
    if name is None or callable(name) or (isinstance(name, str) and name in ("unsigned", *_WAYS)):
        return name
    valid = f"None, 'unsigned', {', '.join(map(repr, _WAYS))} or a function from URL to path"
    raise (ValueError if isinstance(name, str) else TypeError)(f"name must be {valid}, not {name!r}")


def copy_name(url: str, name: Naming = None, origin: str | None = None) -> str:
    """Returns the name of a copy, as a path inside the cache folder; `origin` is that of `origin_of`.

    For ``s3://bucket/data/x.tar?versionId=3`` it is ``x-<32 hexadecimal digits>.tar``, with "basename" ``x.tar``, and
    with "path" ``bucket/data/x.tar``. No such name, or one that leads out of the folder, is a CacheError.
    """
    if name is None or name == "unsigned":
        identity = url if origin is None else origin
        return _by_digest(url, unsigned(identity) if name else identity)
    made = _WAYS[name](url) if isinstance(name, str) else name(url)
    path = made if isinstance(made, str) else os.fspath(made) if isinstance(made, os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise _no_name(url, f"name= returned {made!r}; expected a path inside the cache folder")
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.name or path.endswith("/"):
        raise _no_name(url, f"{path!r} is not a file path inside the cache folder")
    if pure.name.endswith((PART, LOCK)):
        raise _no_name(url, f"{path!r} ends like an unfinished copy: choose another name=")
    return str(pure)


def digest_of(url: str) -> str:
    """Returns 128 bits in hexadecimal digits for a URL or origin; local paths are made absolute first."""
    text = url if not is_local(url) else os.path.abspath(local_path(url))  # noqa: PTH100 - a str
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def is_own_name(name: str) -> bool:
    """Returns whether a file name is one that only this package makes."""
    return _OWN_NAME.fullmatch(name) is not None


def names_a_tar(url: str) -> bool:
    """Returns whether a URL or command names a tar archive."""
    is_command = scheme_of(url) == "pipe"
    return bool(_IN_COMMAND.search(url)) if is_command else _path_of(url).lower().endswith(SHARD_SUFFIXES)


def unsigned(url: str) -> str:
    """Removes the query parameters that sign a URL, which change from day to day."""
    base, mark, query = url.partition("?")
    if not mark or scheme_of(url) == "pipe":
        return url
    query, newline, store = query.partition("\n")  # see origin_of
    pairs = [(unquote(pair.partition("=")[0]).lower(), pair) for pair in query.split("&")]
    names = {name for name, _ in pairs}
    left_out = {name for name in names if _SIGNING.fullmatch(name)}
    left_out |= _AZURE if "sig" in names else set()
    left_out |= {"expires"} if "signature" in names else set()
    kept = "&".join(pair for name, pair in pairs if name not in left_out)
    return (base + mark + kept if kept else base) + newline + store


def _by_digest(url: str, identity: str) -> str:
    own = _own_name(url)
    suffix = max((suffix for suffix in SHARD_SUFFIXES if own.lower().endswith(suffix)), key=len, default="")
    if not suffix and (found := _OTHER_SUFFIX.search(own)):
        suffix = found[0]
    stem = own[: len(own) - len(suffix)]
    suffix = ".tar" if suffix.lower() in ("", PART, LOCK) else suffix.lower()
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", stem)[:_LONGEST_STEM].lstrip(".")
    return f"{stem or 'shard'}-{digest_of(identity)}{suffix}"


def _own_name(url: str) -> str:
    if scheme_of(url) == "pipe":
        found = _IN_COMMAND.findall(url)
        return found[-1] if found else "command"
    return _path_of(url).rpartition("/")[2]


def _path_of(url: str) -> str:
    """Returns the path in a URL, without host and query; of a chained URL, that of its last part."""
    return local_path(url) if is_local(url) else urlsplit(url.rpartition("::")[2]).path


def _basename(url: str) -> str:
    if scheme_of(url) == "pipe" and not _IN_COMMAND.search(url):
        raise _no_name(url, "the command names no file: pass a function as name=, or leave it out")
    name = _own_name(url)
    return unquote(name) if scheme_of(url) in ("http", "https") else name


def _host_and_path(url: str) -> str:
    scheme = scheme_of(url)
    if scheme == "pipe":
        raise _no_name(url, "a command has no host and path: pass a function as name=, or leave it out")
    if scheme in ("", "file"):
        return local_path(url).lstrip("/")
    parts = urlsplit(url.rpartition("::")[2])
    path = unquote(parts.path) if scheme in ("http", "https") else parts.path
    return f"{parts.netloc.rpartition('@')[2]}/{path.lstrip('/')}"


def _no_name(url: str, reason: str) -> CacheError:
    shard = mask_url(url)
    return CacheError(f"shard {shard} has no place in the cache: {reason}", shard=shard)


_WAYS: dict[str, Callable[[str], str]] = {"basename": _basename, "path": _host_and_path}
