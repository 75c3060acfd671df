"""What ``storage_options`` may say about ``http`` and ``https``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NAMES = ("headers", "retries", "connect_timeout", "read_timeout")

# Reading writes these itself: a foreign range would be taken for the shard.
_OWN_HEADERS = frozenset({"range", "if-range"})


@dataclass(frozen=True)
class HttpOptions:
    """How requests are sent to a web server."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # sent only to the host of the URL
    retries: int = 8  # further attempts that may bring nothing new before reading gives up
    connect_timeout: float = 30  # seconds that a connection may take to be made
    read_timeout: float = 60  # seconds without a byte after which a connection counts as broken


def read_http_options(scheme: str, chosen: Mapping[str, Any]) -> HttpOptions:
    """Checks what ``storage_options`` say about a protocol.

    Raises:
        TypeError: if a name is unknown or a value has the wrong type. Values are not shown.
        ValueError: if a number is out of range, or a header cannot be sent.

    Example:
        >>> read_http_options("https", {"headers": {"X-Token": "abc"}, "retries": 3})
        HttpOptions(retries=3, connect_timeout=30, read_timeout=60)
    """
    where = f"storage_options for {scheme!r}"
    if unknown := [name for name in chosen if name not in _NAMES]:
        known, found = (", ".join(map(repr, names)) for names in (_NAMES, unknown))
        raise TypeError(f"{where} takes only {known}, found {found}")
    retries = chosen.get("retries", HttpOptions.retries)
    if not isinstance(retries, int) or isinstance(retries, bool):
        raise TypeError(f"{where}: 'retries' must be an int, found a {type(retries).__name__}")
    if retries < 0:
        raise ValueError(f"{where}: 'retries' must not be negative, found {retries}")
    timeouts = {}
    for name in ("connect_timeout", "read_timeout"):
        value = timeouts[name] = chosen.get(name, getattr(HttpOptions, name))
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{where}: {name!r} must be a number of seconds, found a {type(value).__name__}")
        if not 0 < value < math.inf:
            raise ValueError(f"{where}: {name!r} must be more than 0 seconds, found {value}")
    return HttpOptions(_read_headers(where, chosen.get("headers")), retries, **timeouts)


def _read_headers(where: str, given: object) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{where}: 'headers' must map names to values, found a {type(given).__name__}")
    headers: dict[str, str] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, (str, int, float)):
            raise TypeError(
                f"{where}: a header is a str and its value another, found {name!r}: a {type(value).__name__}"
            )
        # Tokens that were read from a file end in a newline.
        headers[name] = text = str(value).strip()
        header = f"{where}: header {name!r}"
        if not name or not (name + text).isprintable():
            raise ValueError(f"{header} or its value holds control characters")
        if any(ord(character) > 255 for character in name + text):
            raise ValueError(f"{header} or its value holds characters that no header can: it takes Latin-1")
        if name.lower() in _OWN_HEADERS:
            raise ValueError(f"{header} belongs to the reader, which asks for the parts that it needs; leave it out")
    return headers
