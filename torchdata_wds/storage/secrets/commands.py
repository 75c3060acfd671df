"""Secrets in the arguments of the programs that fetch, decrypt and unpack shards, such as ``curl -su me:secret``."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeVar

MASK = "***"
Mask = Callable[[str], str]
T = TypeVar("T")

_WORD = re.compile(
    r"(?P<end>[|;()`\n]|(?<![<>])&)"
    r"|(?:'[^'\n]*'|\"(?:\\.|[^\"\\\n])*\"|\\[\s\S]|[^\s'\"\\|;&()`]|(?<=[<>])&|['\"\\])+"
)

# Quotes as if they were blanks, for commands that a message has put into quotes of its own.
_FLAT_WORD = re.compile(r"(?P<end>[|;()`\n]|(?<![<>])&)|(?:\\[\s\S]|[^\s'\"\\|;&()`]|(?<=[<>])&)+")

_HEADER_OPTION = re.compile(
    r"((?<!\S)['\"]?(?:-\w{0,8}H|--(?:proxy-)?header)['\",=\s]{0,4})([\w-]{1,80}):(\s*)([^'\"\s][^'\"\n]*)"
)

_DEEPEST = 3

#: Headers that anybody may see.
_HARMLESS = re.compile(r"(?i)accept.*|cache-control|connection|content-.*|date|host|if-.*|range|referer|user-agent|via")

#: What tells that a program before it writes a secret: echo secret | gpg --passphrase-fd 0
_FROM_STANDARD_INPUT = re.compile(r"passphrase-fd|password-stdin|-pass(?:in)? (?:stdin|fd:)|sudo -S")
_WRITTEN = re.compile(r"\b(echo|printf)\s[^|\n]{1,1000}(?=\|)|(<<<)\s*[^\s|;]+")


def _each(names: str, value: T) -> dict[str, T]:
    return dict.fromkeys(names.split(), value)


def _all(value: str) -> str:  # noqa: ARG001 - one signature
    return MASK


def _after(mark: str) -> Mask:
    """Masks what stands after a mark, as in ``user:password``."""
    return partial(re.sub, f"(?s){mark}.*", mark + MASK)


def _header(value: str) -> str:
    name, colon, rest = value.partition(":")
    blank = " " if rest[:1] == " " else ""
    return f"{name}:{blank}{MASK}" if colon and rest and not _HARMLESS.fullmatch(name.strip()) else value


def _data(value: str) -> str:
    """Fields of a form, each ``name=value``; ``@file`` is a file's name."""
    if value.startswith("@"):
        return value
    if re.fullmatch(r"[\w.-]+=[^&]*(?:&[\w.-]+=[^&]*)*", value) is None:
        return MASK
    return re.sub(r"=[^&]*", f"={MASK}", value)


def _openssl(value: str) -> str:
    return value if re.match(r"(?:env|file|fd):|stdin$", value) else f"pass:{MASK}" if value[:5] == "pass:" else MASK


class _Program(NamedTuple):
    """Which options of a program take a secret: how to mask their values."""

    letters: Mapping[str, Mask]  # of short options; the value follows at once or as the next word
    words: Mapping[str, Mask] = MappingProxyType({})  # of long options, by name with dashes
    others: str = ""  # short options with another value: what follows is not a letter
    before: str = ""  # a pattern of the word after which the secret may stand without an option


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
    r"""Masks the secrets that known programs take as arguments, in a text that may have commands in it.

    With `users_only`, only the passwords of ``user:password`` are masked.

    Example:
        >>> mask_commands("cat x | sshpass -p secret ssh host 'curl -sH \"X-Key: a b\" h'")
        'cat x | sshpass -p *** ssh host \'curl -sH "X-Key: ***" h\''
    """
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


class _Scanner:
    """Goes through a text word by word, and knows the program whose arguments the words are."""

    def __init__(self, users_only: bool) -> None:
        self._users_only = users_only

    def scan(self, text: str, program: _Program | None, depth: int, words: re.Pattern[str] = _WORD) -> str:
        """Masks a text whose first words may be arguments of a program."""
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
        return word if self._users_only and mask("a:") != f"a:{MASK}" else f"{start}{mask(value)}{end}"

    def _option(self, program: _Program, word: str) -> tuple[str, Mask | None]:
        """Masks an option with its value; returns how to mask the next word, if that is the value."""
        name, _, value = word.partition("=")
        mask = program.words.get(name)
        if mask is None and len(name) >= 5 and name.startswith("--"):
            # curl allows abbreviations of long options.
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
    """Takes the quotes off a word, also as it stands in a printed list: ``['-u', 'me:secret']``."""
    start = "[" if word.startswith("[") else ""
    end = word[len(word.rstrip("],")) :]
    inner = word[len(start) : len(word) - len(end)]
    if len(inner) > 1 and inner[0] in "'\"" and inner[0] == inner[-1]:
        return start + inner[0], inner[1:-1], inner[0] + end
    return "", word, ""
