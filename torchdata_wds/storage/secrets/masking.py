"""Masks secrets in URLs, commands and other texts, for messages and logs.

Secrets are recognised by their position: before a host, after a name such as ``token``, ``--password`` or
``X-Auth-Key``, or as an argument of a program that fetches, decrypts or unpacks shards (``curl -su me:secret``). Every
pattern is bounded or anchored, so that masking takes linear time.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

MASK = "***"
Mask = Callable[[str], str]
T = TypeVar("T")

# Not compiled here, but by re at their first use: compiling all of them would take a tenth of the package's import.
_SURE_NAME = (
    r"sig$|signature|token|secret|pass(?:w|phrase|code|$|[_.-])|(?:^|[_.-])pw$|pwd|credential|creds$"
    r"|auth(?!or(?!i))|bearer|jwt|cookie|hmac|hdnts|hdnea|hdntl|connection_?-?string"
    r"|(?:access|api|account|secret|private|resource|auth|client|encryption|shared)_?-?key$"
)

_SECRET_NAME = (
    rf"(?i){_SURE_NAME}|session|private|access_?-?key|api_?-?key|account_?-?key|accessid|access_?-?id|key-pair|^key$"
    r"|[_.-]key$|^rlkey$|^policy$|^code$|^otp$|(?:^|[_.-])sas(?:$|[_.-])|(?:^|[_.-])sign$"
)

# Endings of options whose value says where the secret is, and is not secret itself: --password-file, --passphrase-fd.
_ABOUT_SECRETS = r"(?i)[_-](?:file|fd|stdin|command|env|path|dir|type|length|prompt|name)$"
_LATER_PARAMETER = r"([?&;#])([^=&;?#\s'\"]{1,100})(=)[^&;#\s'\"]*"

# In a query that a client library has percent-encoded: %3FSignature%3Dabc
_QUOTED_PARAMETER = r"(?i)(%3F|%26)([\w.-]+)(%3D)(?:(?!%26)[^\s'\"&])*"
_SCHEME = r"(?<![\w+.-])\w[\w+.-]{1,30}:/{1,3}"  # also with a mistyped number of slashes
_USER_AND_PASSWORD = rf"({_SCHEME}[^\s/:'\"\[]*):[^\s/'\"]*@"

# A password with a slash in it: the characters before the slash are not a port.
_SLASH_IN_PASSWORD = rf"({_SCHEME}[^\s/:'\"\[]*):(?!\d*/)[^\s'\"@]{{0,100}}/[^\s'\"@]{{0,100}}@"
_LONE_USER = r"(?i)(https?://)[^\s/:'\"]+@"
_NO_SCHEME = r"(?<![\w./:@%+-])(?!mailto:)([A-Za-z_][\w.+-]{0,63}):(?!//)[^\s'\"/]{1,200}@(?=[\w\[])"
_VALUE = r"(?:'[^']*'|\"[^\"]*\"|\\.|[^\s'\"\\])(?:'[^'\s]*'|\"[^\"\s]*\"|\\.|[^\s'\"\\])*"
_NO_PLACE = r"(?!(?:env|file|fd):)"  # for openssl, where these say where the secret is
_ASSIGNED = r"(?<![\w?&;#/.-])-{0,2}([A-Za-z_][\w.-]{0,80})="
_OPTION = r"(?<![^\s'\"\[])--?([A-Za-z][\w.-]{1,80})(?:['\"]?,?\s+['\"]?)"
_SETTING = r"(?i)(?<![\w.-])([a-z]{1,30}(?:_[a-z]{1,30}){0,4}_(?:key|token|secret|password|passwd|passphrase))\s+"
_LABEL = r"(?<![\w-])([A-Za-z][\w-]{0,60})['\"]?\s{0,3}:\s{0,3}"

# After a colon and a blank, a header's value extends to the end of the line; without a blank it is a word: pass:secret.
_LABELLED = rf"(?<=\s)(?:'[^'\n]*'|\"[^\"\n]*\"|[^'\"\n]+)|{_VALUE}"
_BEARER = r"(?i)\b((?:bearer|basic)\s+)[^\s'\"]+"

# The URLs of most shards: without a blank, quote, "=", "@", "%" or further ":" no pattern finds a secret in them.
_PLAIN_URL = re.compile(r"(?:https?|s3a?|gs|gcs|az|abfss?|hf|ais)://[A-Za-z0-9_./-]*")


def mask_text(text: str) -> str:
    """Masks everything that looks secret in any text: URLs, commands, and messages of libraries that quote them."""
    if _PLAIN_URL.fullmatch(text):
        return text
    text = mask_commands(text)
    text = re.sub(_USER_AND_PASSWORD, rf"\1:{MASK}@", text)
    text = re.sub(_SLASH_IN_PASSWORD, rf"\1:{MASK}@", text)
    text = re.sub(_LONE_USER, rf"\1{MASK}@", text)
    text = re.sub(_NO_SCHEME, rf"\1:{MASK}@", text)
    return _mask_named(text, _is_secret)


def without_credentials(url: str) -> str:
    """Removes credentials from a URL or command, but nothing that may distinguish two shards."""
    if _PLAIN_URL.fullmatch(url):
        return url
    text = mask_commands(url, users_only=True)
    text = re.sub(r"(?i)(https?://)[^\s/'\"]*@", r"\1", text)
    text = re.sub(_USER_AND_PASSWORD, r"\1@", text)
    return _mask_named(text, _is_surely_secret)


def masked_cause(error: Exception) -> Exception:
    """Returns an exception to use as a cause: itself, or a masked copy if its traceback would show a secret."""
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
    """Masks values that follow a name: of parameters, assignments, options, settings and headers."""

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
    """Masks each value whose name is secret; searches inside the other values, as in ``-o user=me,password=x``."""
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


_WORD = re.compile(
    r"(?P<end>[|;()`\n]|(?<![<>])&)"
    r"|(?:'[^'\n]*'|\"(?:\\.|[^\"\\\n])*\"|\\[\s\S]|[^\s'\"\\|;&()`]|(?<=[<>])&|['\"\\])+"
)

# Treats quotes as blanks, for commands that a message has put in quotes of its own.
_FLAT_WORD = re.compile(r"(?P<end>[|;()`\n]|(?<![<>])&)|(?:\\[\s\S]|[^\s'\"\\|;&()`]|(?<=[<>])&)+")

_HEADER_OPTION = re.compile(
    r"((?<!\S)['\"]?(?:-\w{0,8}H|--(?:proxy-)?header)['\",=\s]{0,4})([\w-]{1,80}):(\s*)([^'\"\s][^'\"\n]*)"
)

_DEEPEST = 3

#: Headers that are not secret.
_HARMLESS = re.compile(r"(?i)accept.*|cache-control|connection|content-.*|date|host|if-.*|range|referer|user-agent|via")

#: Options that read a secret from standard input, where another program writes it: echo secret | gpg --passphrase-fd 0
_FROM_STANDARD_INPUT = re.compile(r"passphrase-fd|password-stdin|-pass(?:in)? (?:stdin|fd:)|sudo -S")
_WRITTEN = re.compile(r"\b(echo|printf)\s[^|\n]{1,1000}(?=\|)|(<<<)\s*[^\s|;]+")


def _each(names: str, value: T) -> dict[str, T]:
    return dict.fromkeys(names.split(), value)


def _all(value: str) -> str:  # noqa: ARG001 - one signature
    return MASK


def _after(mark: str) -> Mask:
    """Returns a function that masks everything after a mark, as in ``user:password``."""
    return partial(re.sub, f"(?s){mark}.*", mark + MASK)


def _header(value: str) -> str:
    name, colon, rest = value.partition(":")
    blank = " " if rest[:1] == " " else ""
    return f"{name}:{blank}{MASK}" if colon and rest and not _HARMLESS.fullmatch(name.strip()) else value


def _data(value: str) -> str:
    """Masks the values of a form's fields, ``name=value&...``, or any other data; ``@file`` only names a file."""
    if value.startswith("@"):
        return value
    is_form = re.fullmatch(r"[\w.-]+=[^&]*(?:&[\w.-]+=[^&]*)*", value)
    if is_form is None or not value.rpartition("&")[2].rstrip("=").count("="):
        return MASK  # a last field without a value may be Base64, which ends in "="
    return re.sub(r"=[^&]*", f"={MASK}", value)


def _openssl(value: str) -> str:
    return value if re.match(r"(?:env|file|fd):|stdin$", value) else f"pass:{MASK}" if value[:5] == "pass:" else MASK


class _Program(NamedTuple):
    """The options of a program that take a secret, and how to mask their values."""

    letters: Mapping[str, Mask]  # short options; the value follows directly, or is the next word
    words: Mapping[str, Mask] = MappingProxyType({})  # long options, with their dashes
    others: str = ""  # short options with a value that is not secret: the rest of the word is that value
    before: str = ""  # a pattern for a word that a secret may follow without an option


_user = _after(":")
_cookie = partial(re.sub, r"=[^;]*", f"={MASK}")
_proxy = partial(re.sub, r"^((?:\w+://)?)([^/:]*):.*@", rf"\1\2:{MASK}@")
_FORM = "--data --data-raw --data-ascii --data-binary --data-urlencode --form --form-string --json --url-query"
_CURL = _Program(
    {**_each("u U E", _user), "H": _header, "b": _cookie, "d": _data, "F": _data, "x": _proxy},
    {
        **_each("--user --proxy-user --cert --proxy-cert", _user),
        **_each("--header --proxy-header", _header),
        **_each("--proxy --preproxy", _proxy),
        **_each(_FORM, _data),
        "--cookie": _cookie,
        "--oauth2-bearer": _all,
    },
    "AcCDehKmoPQrtTwXyYz",
)
_WGET = _Program({}, {"--header": _header, "--post-data": _data, "--body-data": _data})
_PASSWORD = _Program({"p": _all})
_SAMBA = _Program({"U": _after("%")}, {"--user": _after("%")}, before=r"(?://|\\\\|smb:)")
_OPENSSL = {**_each("-pass -passin -passout", _openssl), **_each("-k -K -hmac -macopt -password", _all)}

_PROGRAMS: dict[str, _Program] = {
    "curl": _CURL,
    **_each("wget wget2 aria2c rclone axel", _WGET),
    **_each("http https httpie xh", _Program({"a": _user}, {"--auth": _user})),
    **_each("sshpass 7z 7za 7zr 7zz rar unrar ncftp ncftpget", _PASSWORD),
    **_each("mysql mysqldump mariadb mongo mongodump mongoexport", _PASSWORD),
    **_each("docker podman skopeo oras", _Program({"p": _all}, _each("--creds --src-creds --dest-creds", _user))),
    **_each("smbclient smbget rpcclient net", _SAMBA),
    **_each("unzip zip", _Program({"P": _all})),
    "lftp": _Program({"u": _after(",")}, {"--user": _after(",")}),
    "redis-cli": _Program({"a": _all}),
    "ldapsearch": _Program({"w": _all}),
    "openssl": _Program({}, _OPENSSL),
}


def mask_commands(text: str, *, users_only: bool = False) -> str:
    """Masks secret arguments of known programs in a text; `users_only` masks only those like ``user:password``."""
    if not users_only and _FROM_STANDARD_INPUT.search(text):
        text = _WRITTEN.sub(lambda found: f"{found[1] or found[2]} {MASK} ", text)
    scanner = _Scanner(users_only)
    text = scanner.scan(text, None, 0)
    if "'" not in text and '"' not in text:
        return text
    return scanner.scan(text if users_only else _HEADER_OPTION.sub(_header_option, text), None, _DEEPEST, _FLAT_WORD)


def _header_option(found: re.Match[str]) -> str:
    option, name, blank, _ = found.groups()
    return found[0] if _HARMLESS.fullmatch(name) else f"{option}{name}:{blank}{MASK}"


class _Scanner(NamedTuple):
    """Masks a text word by word, keeping track of the program that the words are arguments of."""

    users_only: bool

    def scan(self, text: str, program: _Program | None, depth: int, words: re.Pattern[str] = _WORD) -> str:
        """Masks a text whose first words may be arguments of `program`."""
        # In "curl -su me:secret https://h/x | gunzip", `curl` sets `program`; its option -su takes the next word, so
        # `wanted` masks that word after the colon; "|" ends the command. A quoted word with blanks, as of bash -c, is
        # scanned as a text of its own. Unchanged words stay in `text` and are copied with the next masked one.
        outer, wanted, may_be_option = program, None, False
        parts: list[str] = []
        done = 0
        for found in words.finditer(text):
            word = found[0]
            if words is _FLAT_WORD and not word.strip("[],"):
                continue
            if found["end"] is not None:
                program, wanted = outer, None
                continue
            start, bare, end = _unquoted(word)
            if wanted is not None and not (may_be_option and bare.startswith("-")):
                masked = self._mask(wanted, bare)
                wanted = None
            elif bare.startswith("-") and program is not None:
                masked, wanted = self._option(program, bare)
                may_be_option = False
            elif re.search(r"\s", bare) and depth < _DEEPEST:
                masked = self.scan(bare, program, depth + 1)
            else:
                masked = bare
                program = _PROGRAMS.get(bare.removeprefix("pipe:").rpartition("/")[2], program)
                may_be_option = program is not None and re.match(program.before or "$.", bare) is not None
                wanted = _all if may_be_option else None
            if masked != bare:
                parts += [text[done : found.start()], start, masked, end]
                done = found.end()
        return "".join([*parts, text[done:]])

    def _mask(self, mask: Mask, word: str) -> str:
        start, value, end = _unquoted(word)
        return word if self.users_only and mask("a:") != f"a:{MASK}" else f"{start}{mask(value)}{end}"

    def _option(self, program: _Program, word: str) -> tuple[str, Mask | None]:
        """Masks the value of an option; if the value is the next word, returns how to mask that."""
        name, _, value = word.partition("=")
        mask = program.words.get(name)
        if mask is None and len(name) >= 5 and name.startswith("--"):
            # curl accepts abbreviations of long options.
            mask = next((mask for option, mask in program.words.items() if option.startswith(name)), None)
        if mask is not None:
            return (f"{name}={self._mask(mask, value)}", None) if value else (word, mask)
        if word.startswith("--"):
            return word, None
        for place, letter in enumerate(word[1:], 1):
            if letter in program.letters:
                mask, rest = program.letters[letter], word[place + 1 :]
                return (word[: place + 1] + self._mask(mask, rest), None) if rest else (word, mask)
            if letter in program.others or not letter.isalpha():
                break
        return word, None


def _unquoted(word: str) -> tuple[str, str, str]:
    """Splits a word into quote, content and quote, also in a printed list such as ``['-u', 'me:secret']``."""
    start = "[" if word.startswith("[") else ""
    end = word[len(word.rstrip("],")) :]
    inner = word[len(start) : len(word) - len(end)]
    if len(inner) > 1 and inner[0] in "'\"" and inner[0] == inner[-1]:
        return start + inner[0], inner[1:-1], inner[0] + end
    return "", word, ""
