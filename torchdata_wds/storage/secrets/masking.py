"""Hiding what is secret in URLs, commands and other texts, for messages and logs.

Secrets are found by where they stand: before a host, or after a name such as ``token``, ``--password`` or
``X-Auth-Key``; what single letters mean to programs (``curl -u``) is in `commands`. Every pattern is bounded or
anchored, so that long texts take linear time.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from urllib.parse import unquote

from torchdata_wds.storage.secrets.commands import MASK, mask_commands

# Compiled when they are first used, by re and kept there: together they would take a tenth of the package's import.
_SURE_NAME = (
    r"sig$|signature|token|secret|pass(?:w|phrase|code|$|[_.-])|(?:^|[_.-])pw$|pwd|credential|creds$"
    r"|auth(?!or(?!i))|bearer|jwt|cookie|hmac|hdnts|hdnea|hdntl|connection_?-?string"
    r"|(?:access|api|account|secret|private|resource|auth|client|encryption|shared)_?-?key$"
)

_SECRET_NAME = (
    rf"(?i){_SURE_NAME}|session|private|access_?-?key|api_?-?key|account_?-?key|accessid|access_?-?id|key-pair|^key$"
    r"|[_.-]key$|^rlkey$|^policy$|^code$|^otp$|(?:^|[_.-])sas(?:$|[_.-])|(?:^|[_.-])sign$"
)

# Words of options whose value is where the secret is, and not the secret: --password-file, --passphrase-fd.
_ABOUT_SECRETS = r"(?i)[_-](?:file|fd|stdin|command|env|path|dir|type|length|prompt|name)$"
_LATER_PARAMETER = r"([?&;#])([^=&;?#\s'\"]{1,100})(=)[^&;#\s'\"]*"

# In a query that a client library has percent-encoded: %3FSignature%3Dabc
_QUOTED_PARAMETER = r"(?i)(%3F|%26)([\w.-]+)(%3D)(?:(?!%26)[^\s'\"&])*"
_SCHEME = r"(?<![\w+.-])\w[\w+.-]{1,30}:/{1,3}"  # whatever number of slashes somebody has typed
_USER_AND_PASSWORD = rf"({_SCHEME}[^\s/:'\"\[]*):[^\s/'\"]*@"

# A password with a slash in it: what stands before the slash is no port.
_SLASH_IN_PASSWORD = rf"({_SCHEME}[^\s/:'\"\[]*):(?!\d*/)[^\s'\"@]{{0,100}}/[^\s'\"@]{{0,100}}@"
_LONE_USER = r"(?i)(https?://)[^\s/:'\"]+@"
_NO_SCHEME = r"(?<![\w./:@%+-])(?!mailto:)([A-Za-z_][\w.+-]{0,63}):(?!//)[^\s'\"/]{1,200}@(?=[\w\[])"
_VALUE = r"(?:'[^']*'|\"[^\"]*\"|\\.|[^\s'\"\\])(?:'[^'\s]*'|\"[^\"\s]*\"|\\.|[^\s'\"\\])*"
_NO_PLACE = r"(?!(?:env|file|fd):)"  # of openssl: where the secret is
_ASSIGNED = r"(?<![\w?&;#/.-])-{0,2}([A-Za-z_][\w.-]{0,80})="
_OPTION = r"(?<![^\s'\"\[])--?([A-Za-z][\w.-]{1,80})(?:['\"]?,?\s+['\"]?)"
_SETTING = r"(?i)(?<![\w.-])([a-z]{1,30}(?:_[a-z]{1,30}){0,4}_(?:key|token|secret|password|passwd|passphrase))\s+"
_LABEL = r"(?<![\w-])([A-Za-z][\w-]{0,60})['\"]?\s{0,3}:\s{0,3}"

# A header's value goes to the end of the line; after a colon without a blank stands a word, as in pass:secret.
_LABELLED = rf"(?<=\s)(?:'[^'\n]*'|\"[^\"\n]*\"|[^'\"\n]+)|{_VALUE}"
_BEARER = r"(?i)\b((?:bearer|basic)\s+)[^\s'\"]+"


def mask_text(text: str) -> str:
    """Masks whatever looks secret in any text: URLs, commands, and messages of libraries that quote them.

    Example:
        >>> mask_text("curl -su me:pw 'https://host/x.tar?part=1&sig=abc' failed, as https://me:p@ss@host/ did")
        "curl -su me:*** 'https://host/x.tar?part=1&sig=***' failed, as https://me:***@host/ did"
    """
    text = mask_commands(text)
    text = re.sub(_USER_AND_PASSWORD, rf"\1:{MASK}@", text)
    text = re.sub(_SLASH_IN_PASSWORD, rf"\1:{MASK}@", text)
    text = re.sub(_LONE_USER, rf"\1{MASK}@", text)
    text = re.sub(_NO_SCHEME, rf"\1:{MASK}@", text)
    return _mask_named(text, _is_secret)


def without_credentials(url: str) -> str:
    """Leaves out of a URL or command what proves who asks, and nothing that may tell one shard from another.

    Example:
        >>> without_credentials("https://me:pw@host/get?key=a.tar&token=abc")
        'https://host/get?key=a.tar&token=***'
    """
    text = mask_commands(url, users_only=True)
    text = re.sub(r"(?i)(https?://)[^\s/'\"]*@", r"\1", text)
    text = re.sub(_USER_AND_PASSWORD, r"\1@", text)
    return _mask_named(text, _is_surely_secret)


def masked_cause(error: Exception) -> Exception:
    """Returns an exception as the cause of another: itself, or a copy in words if its traceback would show a secret."""
    seen: list[BaseException] = []
    shown: BaseException | None = error
    while shown is not None and shown not in seen:
        texts = [str(shown), *getattr(shown, "__notes__", ())]
        if isinstance(shown, BaseExceptionGroup) or any(mask_text(text) != text for text in texts):
            return OSError(f"{type(error).__name__}: {mask_text(str(error))}")
        seen.append(shown)
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    return error


Test = Callable[[str], bool]


def _mask_named(text: str, is_secret: Test) -> str:
    """Masks what follows a name: parameters, assignments, options, settings, headers."""

    def parameter(found: re.Match[str]) -> str:
        mark, name, equals = found.group(1, 2, 3)
        return f"{mark}{name}{equals}{MASK}" if is_secret(unquote(name)) else found[0]

    text = re.sub(_LATER_PARAMETER, parameter, text)
    text = re.sub(_QUOTED_PARAMETER, parameter, text)
    text = _mask_after(_LABEL, _LABELLED, text, _is_surely_secret)
    text = re.sub(_BEARER, rf"\1{MASK}", text)
    for names in (_ASSIGNED, _OPTION, _SETTING):
        text = _mask_after(names, _NO_PLACE + _VALUE, text, is_secret)
    return text


def _mask_after(names: str, value: str, text: str, is_secret: Test) -> str:
    """Masks each value whose name is secret; other values are looked into, as that of ``-o user=me,password=x``."""
    pattern, wanted = re.compile(names), re.compile(value)
    position = done = 0
    parts: list[str] = []
    while (found := pattern.search(text, position)) is not None:
        position = found.end()
        if not is_secret(found[1]):
            continue
        secret = wanted.match(text, position)
        if secret is not None and secret[0] != MASK:
            quote = secret[0][0] if secret[0][0] in "'\"" and secret[0][0] == secret[0][-1] else ""
            parts.append(f"{text[done:position]}{quote}{MASK}{quote}")
            position = done = secret.end()
    return "".join([*parts, text[done:]])


@lru_cache(maxsize=1000)
def _is_secret(name: str) -> bool:
    return re.search(_SECRET_NAME, name) is not None and re.search(_ABOUT_SECRETS, name) is None


@lru_cache(maxsize=1000)
def _is_surely_secret(name: str) -> bool:
    return re.search(rf"(?i){_SURE_NAME}", name) is not None and re.search(_ABOUT_SECRETS, name) is None
