"""What kind of URL a text is, and how it is shown in messages: without what is secret in it."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.chaining import is_chaining

__all__ = ["STDIN", "local_path", "mask_url", "mask_text", "masked_cause", "scheme_of", "url_text"]

STDIN = "-"

MASK = "***"

# Two letters at least: "D:/x.tar" is a path.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
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

    Raises:
        ShardOpenError: if the ``file:`` URL names another host.
    """
    if scheme_of(url) != "file":
        return url
    rest = url[len("file:") :]
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost"):
            raise ShardOpenError(
                f"cannot open shard {url}: a file: URL names a file of this machine, not of host {host!r}; "
                f"write file:///{host}{slash}{path} if that is a folder",
                shard=url,
            )
        rest = slash + path
    return unquote(rest)


# ---------------------------------------------------------------------------------------------------------- masking

# Compiled when they are first used, by re and kept there: together they would take a tenth of the package's import.
_SECRET_NAME = (
    r"(?i)sig$|signature|token|secret|passw|pwd|credential|auth|jwt|cookie|session|private"
    r"|access_?-?key|api_?-?key|account_?-?key|accessid|key-pair|^key$|[_.-]key$|^policy$|^code$"
)
_QUOTED_PARAMETER = r"(?i)(%3F|%26)([\w.-]+)(%3D)(?:(?!%26)[^\s'\"&])*"
_USER_AND_PASSWORD = r"((?<![\w+.-])\w[\w+.-]{0,30}://[^\s/@:'\"]*):[^\s/@'\"]*@"
_LONE_USER = r"(?i)(https?://)[^\s/@:'\"]+@"
_QUERY_PARAMETER = r"([?&;])([^=&;?\s'\"]+)=([^&;#\s'\"]*)"
_VALUE = r"('[^']*'|\"[^\"]*\"|[^\s'\"]+)"
_ASSIGNMENT = rf"(?<![\w?&;/.-])(-{{0,2}}[A-Za-z_][\w-]*)(=){_VALUE}"
_OPTION = rf"(?<!\S)(--[A-Za-z][\w-]*)(\s+){_VALUE}"
_HEADER = r"(?i)((?:authorization|token|secret|cookie|api-?key|password)[\w-]{0,30}\s*:\s*)[^'\"\n]+"
_BEARER = r"(?i)\b(bearer\s+)[^\s'\"]+"
_USER_OPTION = r"((?:^|\s)(?:--user|--proxy-user|-u|-U)(?:=|\s*)['\"]?[^\s:'\"/]+):[^\s'\"]+"


def mask_url(url: str | os.PathLike[str]) -> str:
    """Replaces what is secret in a URL or a ``pipe:`` command by ``***``, for messages and logs.

    Masked are passwords before a host, query parameters and options whose name says signature, token, key, password
    or the like, and headers such as ``Authorization``. A local path is left as it is.

    Args:
        url: The URL, path or ``pipe:`` command.

    Example:
        >>> mask_url("https://me:pw@host/x.tar?part=1&X-Amz-Signature=abc")
        'https://me:***@host/x.tar?part=1&X-Amz-Signature=***'
    """
    text = url_text(url)
    return mask_text(text) if scheme_of(text) not in ("", "file", STDIN) else text


def mask_text(text: str) -> str:
    """Masks whatever looks secret in any text: commands, and messages of libraries that quote URLs."""
    text = re.sub(_USER_AND_PASSWORD, rf"\1:{MASK}@", text)
    text = re.sub(_LONE_USER, rf"\1{MASK}@", text)
    text = re.sub(_QUERY_PARAMETER, _mask_parameter, text)
    text = re.sub(_QUOTED_PARAMETER, _mask_quoted, text)
    text = re.sub(_HEADER, rf"\1{MASK}", text)
    text = re.sub(_BEARER, rf"\1{MASK}", text)
    text = re.sub(_USER_OPTION, rf"\1:{MASK}", text)
    return re.sub(_OPTION, _mask_value, re.sub(_ASSIGNMENT, _mask_value, text))


def masked_cause(error: Exception) -> Exception:
    """Gives an exception as the cause of another: itself, or a copy in words where a traceback of it shows a secret."""
    seen: list[BaseException] = []
    shown: BaseException | None = error
    while shown is not None and shown not in seen:
        texts = [str(shown), *getattr(shown, "__notes__", ())]
        if isinstance(shown, BaseExceptionGroup) or any(mask_text(text) != text for text in texts):
            return OSError(f"{type(error).__name__}: {mask_text(str(error))}")
        seen.append(shown)
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    return error


def _mask_parameter(found: re.Match[str]) -> str:
    mark, name, _ = found.groups()
    return f"{mark}{name}={MASK}" if re.search(_SECRET_NAME, unquote(name)) else found[0]


def _mask_quoted(found: re.Match[str]) -> str:
    """A query that a client library has percent-encoded: ``%3FSignature%3Dabc``."""
    mark, name, equals = found.groups()
    return f"{mark}{name}{equals}{MASK}" if re.search(_SECRET_NAME, name) else found[0]


def _mask_value(found: re.Match[str]) -> str:
    """``AWS_SECRET_ACCESS_KEY=x``, ``--token=x`` and ``--token x``."""
    name, between, _ = found.groups()
    return f"{name}{between}{MASK}" if re.search(_SECRET_NAME, name) else found[0]
