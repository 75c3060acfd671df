"""Requests to web servers, by urllib3: connections, proxies, redirects, and the choice of headers for each host."""

import contextlib
import http.client
import io
import logging
import math
import os
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urljoin
from urllib.request import getproxies, proxy_bypass

import urllib3

from torchdata_wds.environment import proxy_variables
from torchdata_wds.storage.retrying import Failure
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.urls import mask_url

#: The pause in seconds if a server requests one without saying how long, and the longest that it can request.
_SECONDS, _LONGEST_SECONDS = 0.5, 300.0
_REDIRECTS = 8
_REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
_PASSING_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})

# The reader sets these itself: the range of a user's header would be taken for the whole shard.
_OWN_HEADERS = frozenset({"range", "if-range"})

#: The user's headers that may be sent to any host.
_HARMLESS = frozenset({"user-agent", "accept", "accept-charset", "accept-encoding", "accept-language"})

#: An unwanted body up to this size is read, in order to keep the connection.
_WORTH_READING = 16 * 1024

# Workers read several shards at once, and a store redirects to many hosts.
_CONNECTIONS_PER_HOST = _HOSTS = 32


@dataclass(frozen=True)
class HttpOptions:
    """The ``storage_options`` for ``http`` and ``https``."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # sent only to the host of the URL
    retries: int = 8  # further attempts without new bytes before reading gives up
    connect_timeout: float = 30  # seconds for making a connection
    read_timeout: float = 60  # seconds without a byte after which a connection counts as broken


def read_http_options(scheme: str, chosen: Mapping[str, Any]) -> HttpOptions:
    """Checks the ``storage_options`` of a protocol; messages show no value that may be secret."""
    where = f"storage_options for {scheme!r}"
    names = [option.name for option in fields(HttpOptions)]
    if unknown := [name for name in chosen if name not in names]:
        known, found = (", ".join(map(repr, some)) for some in (names, unknown))
        raise TypeError(f"{where} takes only {known}, found {found}")
    numbers = {name: chosen.get(name, getattr(HttpOptions, name)) for name in names[1:]}
    for name, value in numbers.items():
        wanted, kind = ("an int", int) if name == "retries" else ("a number of seconds", (int, float))
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{where}: {name!r} must be {wanted}, found a {type(value).__name__}")
        if name == "retries" and value < 0:
            raise ValueError(f"{where}: {name!r} must not be negative, found {value}")
        if name != "retries" and not 0 < value < math.inf:
            raise ValueError(f"{where}: {name!r} must be more than 0 seconds, found {value}")
    return HttpOptions(_read_headers(where, chosen.get("headers")), **numbers)


def _read_headers(where: str, given: object) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{where}: 'headers' must map names to values, found a {type(given).__name__}")
    headers: dict[str, str] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, (str, int, float)):
            raise TypeError(
                f"{where}: a header must be a str with a str as its value, found {name!r}: a {type(value).__name__}"
            )
        headers[name] = text = str(value).strip()  # tokens that were read from a file end in a newline
        wrong = ""
        if not name or not (name + text).isprintable():
            wrong = "or its value contains control characters"
        elif any(ord(character) > 255 for character in name + text):
            wrong = "or its value contains characters outside Latin-1, which a header cannot have"
        elif name.lower() in _OWN_HEADERS:
            wrong = "is set by the reader, which requests the parts that it needs; leave it out"
        if wrong:
            raise ValueError(f"{where}: header {name!r} {wrong}")
    return headers


def retry_after(headers: Mapping[str, str]) -> float:
    """Returns the pause in seconds that `Retry-After` requests, as seconds or a date, limited to a reasonable time."""
    value = headers.get("Retry-After", "").strip()
    try:
        if value.isascii() and value.isdecimal():
            seconds = float(value)
        else:
            date = parsedate_to_datetime(value)
            seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - time.time()
    except (TypeError, ValueError):
        return _SECONDS
    return min(max(seconds, 0.0), _LONGEST_SECONDS)


def is_number(text: str) -> bool:
    """Returns whether a header's value may be the length of an object."""
    return text.isascii() and text.isdecimal() and len(text) <= 18


class Answer:
    """A response whose body is read piece by piece; `via` is " (redirected to ...)", masked, or ""."""

    def __init__(self, response: urllib3.BaseHTTPResponse, via: str = "") -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._body = _plain_body(response)
        self._via = via

    def readinto(self, view: memoryview) -> int:
        """Reads the bytes that have arrived, not decoded; 0 only at the verified end of the body."""
        body, count = self._body, 0
        if body is not None and not body.isclosed() and body.length:
            # Directly into the buffer: urllib3 would copy the bytes.
            try:
                count = body.fp.readinto1(view[: body.length])
            except OSError as error:
                why = "Read timed out." if isinstance(error, TimeoutError) else f"Connection broken: {_reason(error)}"
                raise Failure(why, error=error) from None
            # urllib3 needs to know how much was read, to detect an early end and to reuse the connection.
            body.length -= count
            self._response.length_remaining = body.length
            if not body.length:
                body.close()
                self._response.release_conn()
        if not count:
            data = self.read(len(view))
            count = len(data)
            view[:count] = data
        return count

    def read(self, size: int) -> bytes:
        """Reads up to `size` bytes by urllib3."""
        try:
            # If the connection breaks, read() would drop the bytes that it has already received.
            return self._response.read1(min(size, 512 * 1024), decode_content=False) or b""
        except urllib3.exceptions.HTTPError as error:
            raise Failure(_reason(error), error=error) from None

    def interrupt(self) -> None:
        """Ends a read in another thread, if urllib3 can."""
        # urllib3 before 2.3 has no shutdown(), and there is no connection after the end of the body.
        with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
            self._response.shutdown()

    def describe(self) -> str:
        """Describes the answer, for messages."""
        status = f"{self.status} {self._response.reason or ''}".strip()
        return f"the server answered {_shown(status)}{self._via}"

    def close(self) -> None:
        """Releases the body; keeps the connection only if the body was read to its end."""
        self._response.close()

    def dismiss(self) -> None:
        """Releases an unwanted body; keeps the connection if the body is short."""
        length = self.headers.get("Content-Length", "")
        if is_number(length) and int(length) <= _WORTH_READING:
            self._response.drain_conn()
        self._response.close()


def _plain_body(response: urllib3.BaseHTTPResponse) -> http.client.HTTPResponse | None:
    """Returns the standard library's response inside urllib3's; None if it is chunked, has no length, or is missing."""
    body = getattr(response, "_fp", None)
    if not isinstance(body, http.client.HTTPResponse) or body.chunked or not isinstance(body.fp, io.BufferedReader):
        return None
    return body if body.length and getattr(response, "length_remaining", None) == body.length else None


def request(url: str, options: HttpOptions, headers: Mapping[str, str]) -> Answer:
    """Requests an object, following redirects; unlike those of the options, `headers` are sent to all hosts."""
    auth = urllib3.util.parse_url(url).auth
    basic = urllib3.make_headers(basic_auth=unquote(auth)) if auth else {}
    first = url = _without_auth(url)
    own = {**basic, **options.headers}
    for _ in range(_REDIRECTS + 1):
        merged = urllib3.HTTPHeaderDict({"Accept-Encoding": "identity", **own})
        merged.update(headers)
        via = "" if mask_url(url) == mask_url(first) else f" (redirected to {mask_url(url)})"
        answer = Answer(_get(url, options, merged), via)
        location = answer.headers.get("Location")
        if answer.status in _PASSING_STATUSES:
            answer.dismiss()
            raise Failure(answer.describe(), wait=retry_after(answer.headers))
        if answer.status not in _REDIRECT_STATUSES or not location:
            return answer
        answer.dismiss()
        target = _redirect_target(url, location)
        if _origin(target) != _origin(url):
            # Also if a later redirect leads back to the first host: the other host may have chosen where to.
            own = {name: value for name, value in own.items() if name.lower() in _HARMLESS}
        url = target
    raise Failure(f"more than {_REDIRECTS} redirects, the last one to {mask_url(url)}", lasting=True)


def _get(url: str, options: HttpOptions, headers: urllib3.HTTPHeaderDict) -> urllib3.BaseHTTPResponse:
    timeout = urllib3.Timeout(connect=options.connect_timeout, read=options.read_timeout)
    scheme, _, host = url.split("/")[:3]
    try:
        proxy = _proxy_for(scheme.lower().rstrip(":"), host, proxy_variables())
        # urllib3's own retries and redirects would log URLs, and send headers to hosts that must not get them.
        return _pool(proxy, os.getpid()).request(
            "GET", url, headers=headers, preload_content=False, retries=False, redirect=False, timeout=timeout
        )
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        raise Failure(_reason(error), lasting=_is_lasting(error), error=error) from None


@lru_cache(maxsize=64)
def _proxy_for(scheme: str, host: str, variables: tuple[str | None, ...]) -> str | None:  # noqa: ARG001 - the key
    # The library looks through the whole environment: with 40 variables, 0.08 ms of the 0.5 ms that a request takes.
    return None if proxy_bypass(host) else getproxies().get(scheme)


def malformation(url: str) -> str | None:
    """Describes what is wrong with an address, masked; None if it is well-formed."""
    try:
        urllib3.util.parse_url(url)
    except urllib3.exceptions.HTTPError as error:
        return _reason(error)
    return None


def _redirect_target(url: str, location: str) -> str:
    """Returns the address that a redirect leads to, without user name and password."""
    target, to, wrong = "", f"to {_shown(location)}", ""
    try:
        target = urljoin(url, location)
    except ValueError as error:
        wrong = f"is malformed: {_shown(str(error))}"
    else:
        to, scheme = f"to {mask_url(target)}", target.partition(":")[0].lower()
        if scheme not in ("http", "https"):
            wrong = "is not a web address"
        elif reason := malformation(target):
            wrong = f"is malformed: {reason}"
        elif scheme == "http" and url.lower().startswith("https:"):
            to, wrong = f"from https {to}", "is not encrypted"
    if wrong:
        raise Failure(f"the server redirects {to}, which {wrong}", lasting=True)
    return _without_auth(target)


def _origin(url: str) -> tuple[str | None, str | None, int | None]:
    parsed = urllib3.util.parse_url(url)
    return parsed.scheme, parsed.host, parsed.port or {"http": 80, "https": 443}.get(parsed.scheme or "")


def _without_auth(url: str) -> str:
    # A proxy would see the user name and password, and servers do not use them in a URL.
    return urllib3.util.parse_url(url)._replace(auth=None).url


@lru_cache(maxsize=8)
def _pool(proxy: str | None, process: int) -> urllib3.PoolManager:  # noqa: ARG001 - one pool per process, for fork
    for name in ("urllib3.connectionpool", "urllib3.connection"):
        logging.getLogger(name).addFilter(_mask_record)
    if not proxy:
        return urllib3.PoolManager(_HOSTS, maxsize=_CONNECTIONS_PER_HOST)
    auth = urllib3.util.parse_url(proxy).auth
    headers = urllib3.make_headers(proxy_basic_auth=unquote(auth)) if auth else None
    return urllib3.ProxyManager(_without_auth(proxy), _HOSTS, proxy_headers=headers, maxsize=_CONNECTIONS_PER_HOST)


def _mask_record(record: logging.LogRecord) -> bool:
    """Masks a log record: urllib3 logs whole addresses, signed queries included, at the level DEBUG."""
    record.msg, record.args = mask_text(record.getMessage()), ()
    return True


def _is_lasting(error: Exception) -> bool:
    """Returns whether another attempt would fail too: a malformed address, an unknown host, a wrong certificate."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError | ssl.CertificateError):
            return True
        if isinstance(seen, socket.gaierror):
            return seen.errno == socket.EAI_NONAME
        if isinstance(seen, ValueError) and not isinstance(seen, OSError):
            return True
        inner = getattr(seen, "reason", None) or seen.__cause__ or next(iter(seen.args), None)
        seen = inner if isinstance(inner, BaseException) else None
    return False


def _reason(error: Exception) -> str:
    cause = getattr(error, "reason", None) or error
    args: tuple[object, ...] = getattr(cause, "args", ())
    text = str(cause)
    if len(args) == 2 and isinstance(args[1], Exception):
        text = str(args[0]) if str(args[1]) in str(args[0]) else f"{args[0]} {args[1]}"
    # urllib3 puts the connection object before the text: "<...HTTPConnection object at 0x...>: Failed to ..."
    return _shown(re.sub(r"<?[\w.]*HTTPS?Connection(Pool)?\b[^:>]*?(object at 0x\w+)?>?: ", "", text))


def _shown(text: str) -> str:
    """Returns a server's text for a message: masked, shortened, and without control characters."""
    masked = mask_text(text)[:200]
    return masked if masked.isprintable() else ascii(masked)[1:-1]
