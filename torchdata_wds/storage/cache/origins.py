"""The origin of a shard: the place its bytes really come from, by which its copy in a cache is named.

One URL may mean two shards: rewriting rules, AIStore's gateway and the endpoint or account of a store decide too.
Credentials are left out, since they change while the shard stays the same.
"""

import configparser
import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from torchdata_wds.environment import aws_config, store_variables
from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.places import StorageOptions, resolve
from torchdata_wds.storage.secrets.masking import without_credentials
from torchdata_wds.storage.sources.aistore import object_address
from torchdata_wds.storage.sources.fsspec import protocol_of
from torchdata_wds.storage.urls import AIS, LOCAL, STDIN

# The package's own client reads these, without fsspec's configuration.
_WEB = ("http", "https")
_DEFAULT_PLACES = frozenset({"https://huggingface.co"})

#: Words in the names of options that choose a place, and words that exclude an option such as ``proxy_host``.
_PLACE_WORDS = frozenset(
    {"account", "address", "addr", "branch", "domain", "drive", "endpoint", "fo", "host", "hostname", "instance"}
    | {"namenode", "org", "port", "ref", "repo", "rev", "revision", "server", "sha", "uri", "url"}
)
_OTHER_WORDS = frozenset(("auth", "ca", "cache", "cert", "key", "oauth", "password", "proxies", "proxy", "token"))


def origin_of(url: str, options: StorageOptions) -> str:
    """Returns the place that a shard is read from, as a text that is equal for equal places.

    It is the URL itself if nothing leads it elsewhere, else the rewritten URL without credentials, or its address in
    AIStore. A second line has the endpoint, account and the like of its store in JSON, if there are any.
    """
    resolved = resolve(url, options)
    place, scheme = resolved.url, resolved.scheme
    if scheme in (*LOCAL, STDIN):
        return place
    if scheme == AIS:
        try:
            return without_credentials(object_address(place))
        except ShardOpenError:  # opening it says better what is missing
            return f"{place}\nin AIStore"
    text = url if place == url else without_credentials(place)
    parts = [] if scheme == "pipe" else place.split("::")
    protocols = {protocol for protocol in map(protocol_of, parts) if protocol != "file"}
    stores = {protocol: store for protocol in protocols if (store := _store(protocol, options))}
    return f"{text}\n{json.dumps(stores, sort_keys=True)}" if stores else text


def _store(protocol: str, options: StorageOptions) -> dict[str, str]:
    """Returns the options that choose a place, given or in fsspec's configuration (files and ``FSSPEC_...``)."""
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
    """Returns all protocols of a store, the given one first: options under any of them belong to the store."""
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
    """Returns the endpoint of a profile in the configuration file of AWS, found as botocore does."""
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
