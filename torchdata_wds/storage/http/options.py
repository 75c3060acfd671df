"""What ``storage_options`` may say about ``http`` and ``https``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["HttpOptions", "read_http_options"]


_NAMES = ("headers", "retries", "connect_timeout", "read_timeout")

# Reading writes these itself: a foreign range would be taken for the shard.
_OWN_HEADERS = frozenset({"range", "if-range"})


@dataclass(frozen=True)
class HttpOptions:
    """How a web server is asked.

    Attributes:
        headers: Sent with every request, but to no other host than that of the URL.
        retries: How many further attempts may bring nothing new before reading gives up.
        connect_timeout: Seconds that a connection may take to be made.
        read_timeout: Seconds without a byte after which a connection counts as broken.
    """

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    retries: int = 8
    connect_timeout: float = 30
    read_timeout: float = 60


def read_http_options(scheme: str, chosen: Mapping[str, Any]) -> HttpOptions:
    """Checks the options of a protocol.

    Args:
        scheme: The protocol, for messages.
        chosen: Its part of ``storage_options``.

    Raises:
        TypeError: if a name is unknown or a value has the wrong type. Values are not shown.
        ValueError: if a number is out of range, or a header cannot be sent.

    Example:
        >>> read_http_options("https", {"headers": {"X-Token": "abc"}, "retries": 3})
        HttpOptions(retries=3, connect_timeout=30, read_timeout=60)
    """
    unknown = [name for name in chosen if name not in _NAMES]
    if unknown:
        raise TypeError(
            f"storage_options for {scheme!r} takes only {', '.join(map(repr, _NAMES))}, "
            f"found {', '.join(map(repr, unknown))}"
        )
    defaults = HttpOptions()
    return HttpOptions(
        headers=_read_headers(scheme, chosen.get("headers")),
        retries=_read_retries(scheme, chosen.get("retries", defaults.retries)),
        connect_timeout=_read_seconds(scheme, chosen, "connect_timeout", defaults.connect_timeout),
        read_timeout=_read_seconds(scheme, chosen, "read_timeout", defaults.read_timeout),
    )


def _read_headers(scheme: str, given: object) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"storage_options for {scheme!r}: 'headers' must map names to values, found a {type(given).__name__}"
        )
    headers: dict[str, str] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, (str, int, float)):
            raise TypeError(
                f"storage_options for {scheme!r}: a header is a str and its value another, "
                f"found {name!r}: a {type(value).__name__}"
            )
        # Tokens that were read from a file end in a newline.
        headers[name] = text = str(value).strip()
        _check_header(scheme, name, text)
    return headers


def _check_header(scheme: str, name: str, value: str) -> None:
    where = f"storage_options for {scheme!r}: header {name!r}"
    if not name or not (name + value).isprintable():
        raise ValueError(f"{where} or its value holds control characters")
    if any(ord(character) > 255 for character in name + value):
        raise ValueError(f"{where} or its value holds characters that no header can: it takes Latin-1")
    if name.lower() in _OWN_HEADERS:
        raise ValueError(f"{where} belongs to the reader, which asks for the parts that it needs; leave it out")


def _read_retries(scheme: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"storage_options for {scheme!r}: 'retries' must be an int, found a {type(value).__name__}")
    if value < 0:
        raise ValueError(f"storage_options for {scheme!r}: 'retries' must not be negative, found {value}")
    return value


def _read_seconds(scheme: str, chosen: Mapping[str, Any], name: str, default: float) -> float:
    value = chosen.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(
            f"storage_options for {scheme!r}: {name!r} must be a number of seconds, found a {type(value).__name__}"
        )
    if not 0 < value < math.inf:
        raise ValueError(f"storage_options for {scheme!r}: {name!r} must be more than 0 seconds, found {value}")
    return value
