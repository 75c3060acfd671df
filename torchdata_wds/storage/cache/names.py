"""The names of copies in a cache's folder.

By default, a name consists of the shard's own name and a digest of its origin (the whole URL or command, or the place
it leads to), so that no two shards share a file. The other options of ``name=`` are for folders filled by other means.

The same URL may mean different shards, depending on rewriting rules, AIStore's gateway, and the endpoint or account of
a store. The origin says where the bytes really come from, without credentials, which may change for the same shard.
"""

import configparser
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from torchdata_wds.environment import aws_config, store_variables
from torchdata_wds.errors import CacheError, ShardOpenError
from torchdata_wds.option_types import Naming
from torchdata_wds.storage.compression import SHARD_SUFFIXES
from torchdata_wds.storage.places import StorageOptions, resolve
from torchdata_wds.storage.secrets.masking import without_credentials
from torchdata_wds.storage.sources.aistore import object_address
from torchdata_wds.storage.sources.fsspec import protocol_of
from torchdata_wds.storage.urls import AIS, LOCAL, STDIN, is_local, local_path, mask_url, scheme_of

#: The suffixes of files that are not finished copies.
PART, LOCK = ".part", ".lock"
_LONGEST_STEM = 100
_OTHER_SUFFIX = re.compile(r"(\.[a-z][a-z0-9]{0,9})?(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_OWN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*-[0-9a-f]{32}(\.[a-z][a-z0-9]{0,9})?(\.(gz|bz2|xz|zst))?")
_SHORT = "|".join(suffix[1:] for suffix in SHARD_SUFFIXES if suffix.count(".") == 1)  # tar, tgz, ...
_IN_COMMAND = re.compile(rf"[^\s'\"/=:|<>&;()]+\.(?:{_SHORT})(?:\.[a-z0-9]{{2,4}})?(?=$|[\s'\"?|<>&;)])")

#: Query parameters of signed URLs: of AWS and its CloudFront, Google and Azure.
_SIGNING = re.compile(
    r"(?i)x-amz-.*|x-goog-.*|awsaccesskeyid|googleaccessid|signature|key-pair-id|policy|hash-algorithm"
)

_AZURE = frozenset(
    "sv ss srt sp se st spr sig sr si sip skoid sktid skt ske sks skv saoid suoid scid sdd ses".split()  # noqa: SIM905
)


def check_naming(name: Naming) -> Naming:
    """Returns a valid ``name=`` argument; raises ValueError or TypeError for others."""
    if name is None or callable(name) or (isinstance(name, str) and name in ("unsigned", *_WAYS)):
        return name
    valid = f"None, 'unsigned', {', '.join(map(repr, _WAYS))} or a function from URL to path"
    raise (ValueError if isinstance(name, str) else TypeError)(f"name must be {valid}, not {name!r}")


def copy_name(url: str, name: Naming = None, origin: str | None = None) -> str:
    """Returns the name of a copy, as a path inside the cache folder; `origin` is the result of `origin_of`.

    For ``s3://bucket/data/x.tar?versionId=3`` it is ``x-<32 hexadecimal digits>.tar``, with "basename" ``x.tar``, and
    with "path" ``bucket/data/x.tar``. Raises CacheError if there is no name, or it leads out of the folder.
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
    """Returns a digest of a URL or origin, 32 hexadecimal digits; makes local paths absolute first."""
    text = url if not is_local(url) else os.path.abspath(local_path(url))  # noqa: PTH100 - a str
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def is_own_name(name: str) -> bool:
    """Returns whether a file name has the default form, which only this package makes."""
    return _OWN_NAME.fullmatch(name) is not None


def names_a_tar(url: str) -> bool:
    """Returns whether a URL or command names a tar archive."""
    is_command = scheme_of(url) == "pipe"
    return bool(_IN_COMMAND.search(url)) if is_command else _path_of(url).lower().endswith(SHARD_SUFFIXES)


def unsigned(url: str) -> str:
    """Removes the query parameters that sign a URL: every signing changes them."""
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
    """Returns the path in a URL, without host and query; for a chained URL, that of its last part."""
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


# The package's own client reads these, without fsspec's configuration.
_WEB = ("http", "https")
_DEFAULT_PLACES = frozenset({"https://huggingface.co"})

#: Words in the names of options that choose a place, and words that rule out an option such as ``proxy_host``.
_PLACE_WORDS = frozenset(
    {"account", "address", "addr", "branch", "domain", "drive", "endpoint", "fo", "host", "hostname", "instance"}
    | {"namenode", "org", "port", "ref", "repo", "rev", "revision", "server", "sha", "uri", "url"}
)
_OTHER_WORDS = frozenset(("auth", "ca", "cache", "cert", "key", "oauth", "password", "proxies", "proxy", "token"))


def origin_of(url: str, options: StorageOptions) -> str:
    """Returns the place that a shard is read from, as a string that is equal for equal places.

    This is the URL itself, or, if a rule rewrites it, the new URL without credentials, or its address in AIStore. If
    the options choose an endpoint, account or the like of the store, a second line has these as JSON.
    """
    resolved = resolve(url, options)
    place, scheme = resolved.url, resolved.scheme
    if scheme in (*LOCAL, STDIN):
        return place
    if scheme == AIS:
        try:
            return without_credentials(object_address(place))
        except ShardOpenError:  # opening the shard reports what is missing
            return f"{place}\nin AIStore"
    text = url if place == url else without_credentials(place)
    parts = [] if scheme == "pipe" else place.split("::")
    protocols = {protocol for protocol in map(protocol_of, parts) if protocol != "file"}
    stores = {protocol: store for protocol in protocols if (store := _store(protocol, options))}
    return f"{text}\n{json.dumps(stores, sort_keys=True)}" if stores else text


def _store(protocol: str, options: StorageOptions) -> dict[str, str]:
    """Returns the options that choose a place, from `options` or fsspec's configuration (files and ``FSSPEC_...``)."""
    from fsspec.config import conf

    names = _aliases(protocol)
    chosen: dict[str, Any] = {}
    for name in reversed(names if protocol not in _WEB else []):
        chosen.update(conf.get(name, {}))
    chosen.update(next((options[name] for name in names if name in options), {}))
    found = dict(_places(chosen))
    if not found:
        found = {name: _public(name, value) for name, value in store_variables(protocol)}
    if not found and "s3" in names:
        found = _aws_profile(chosen)
    return {name: value for name, value in found.items() if value not in _DEFAULT_PLACES}


@lru_cache(maxsize=64)
def _aliases(protocol: str) -> list[str]:
    """Returns all protocols of a store, this one first: options under any of them apply to the store."""
    from fsspec.registry import known_implementations

    own = known_implementations.get(protocol, {}).get("class")
    others = [name for name, known in known_implementations.items() if own is not None and known["class"] == own]
    return list(dict.fromkeys([protocol, *others]))


def _places(options: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yields the options that choose a place, including nested ones as in ``client_kwargs``."""
    for name, value in options.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping):
            yield from _places(value, f"{path}.")
        elif isinstance(value, (str, int, os.PathLike)) and not isinstance(value, bool):
            words = set(re.split(r"[^a-z]+", str(name).lower()))
            if name == "connection_string" or (words & _PLACE_WORDS and not words & _OTHER_WORDS):
                yield path, _public(path, str(value)).rstrip("/")


def _public(name: str, value: str) -> str:
    """Removes credentials from a value; keeps account and host of Azure's ``AccountName=...;AccountKey=...``."""
    if not name.lower().endswith("connection_string"):
        return without_credentials(value)
    settings = (setting for setting in value.split(";") if re.match(r"(?i)\w*(name|endpoint)\w*=", setting))
    return ";".join(sorted(map(without_credentials, settings)))


def _aws_profile(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the endpoint of a profile in the AWS configuration file, looked up as botocore does."""
    profile, path = aws_config()
    profile = options.get("profile") or profile
    parser = configparser.RawConfigParser(strict=False)
    with contextlib.suppress(OSError, configparser.Error, UnicodeDecodeError):
        parser.read(os.path.expanduser(path))  # noqa: PTH111 - a str
    name = "default" if profile == "default" else f"profile {profile}"
    chosen = dict(parser.items(name)) if parser.has_section(name) else {}
    services = f"services {chosen.get('services', '')}"
    of_s3 = parser.get(services, "s3", fallback="") if parser.has_section(services) else ""
    nested = re.search(r"^\s*endpoint_url\s*=\s*(\S+)", of_s3, re.MULTILINE)
    endpoint = (nested[1] if nested else chosen.get("endpoint_url", "")).rstrip("/")
    return {"endpoint_url": endpoint} if endpoint else {}
