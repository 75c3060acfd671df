"""Storage options and rewriting rules, and the place of a shard that follows from them and its URL.

Samples, indexes, caches and checkpoints keep the original URL, so they are the same on machines with different rules.
`resolve` applies the rules once, where a URL is listed or opened, and never to their own result.
"""

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torchdata_wds.environment import ais_schemes, rewriting_variables
from torchdata_wds.errors import ShardOpenError, UnsafeDataError, WdsError
from torchdata_wds.storage.meters import Meter
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.secrets.withheld import Withheld
from torchdata_wds.storage.urls import AIS, LOCAL, mask_url, scheme_of, url_text

Rules = tuple[tuple[str, str], ...]

# Characters with no special meaning in any shell.
_PLAIN_WORD = re.compile(r"[\w@%+=:,./-]*")

#: Options whose string values may appear in pickles, unless they contain a password.
_OPEN_NAMES = frozenset({"account_name", "endpoint_url", "profile", "project", "region_name"})


class RewriteRules:
    r"""Ordered rules that rewrite URLs (``rewrite=``, ``WDS_REWRITE``, ``GOPEN_REWRITE``).

    They are written as ``"regex=replacement;..."``, or as a mapping from regex to replacement, in which both may
    contain ``=`` and ``;``. A regex is matched at the start of a URL, and only the matched part is replaced; ``\1`` in
    the replacement is the first group. Rules can be pickled, and their repr masks secrets; rules that contain a secret
    are kept out of pickles, as `StorageOptions` are. A malformed rule raises ValueError.

    Example:
        >>> rules = RewriteRules("gs://=/shared/data/;s3://([^/]*)=https://mirror/\\1")
        >>> rules.apply("gs://b/x.tar"), rules.apply("s3://b/x.tar"), rules.apply("x.tar")
        ('/shared/data/b/x.tar', 'https://mirror/b/x.tar', None)
    """

    __slots__ = ("_held",)

    def __init__(self, rules: "str | Mapping[str, str] | RewriteRules | None" = None) -> None:
        if isinstance(rules, RewriteRules):
            self._held: Withheld[Rules] = rules._held
            return
        given = _parse(rules)
        text = ";".join(map("=".join, given))
        shown = mask_text(text)
        self._held = Withheld("rewriting rules", shown, given, is_secret=shown != text)

    def apply(self, url: str) -> str | None:
        """Returns a URL rewritten by the first matching rule; None if no rule matches."""
        for regex, replacement in self._held.value:
            found = re.match(regex, url)
            if found is not None:
                start, rest = found.expand(replacement), url[found.end() :]
                place = start + rest
                if scheme_of(place) == "pipe" and scheme_of(url) != "pipe":
                    _check_command(url, replacement, [*found.groups(""), rest if start[-1:].isspace() else ""])
                return os.path.expanduser(place) if place.startswith("~") else place  # noqa: PTH111 - a str
        return None

    def __repr__(self) -> str:
        return f"RewriteRules({self._held.names!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RewriteRules) and self._held.value == other._held.value

    def __hash__(self) -> int:
        return hash(self._held.value)

    def __bool__(self) -> bool:
        return bool(self._held.names)


def _parse(rules: object) -> Rules:
    wanted = 'rewrite must be "regex=replacement;..." or a mapping from regex to replacement, found a'
    pairs: list[tuple[str, str]] = []
    if isinstance(rules, str):
        for rule in filter(str.strip, rules.split(";")):
            regex, equals, replacement = rule.partition("=")
            if not equals:
                raise ValueError(f"rewriting rule {mask_text(rule)!r} has no '=': write regex=replacement;...")
            pairs.append((regex.lstrip(), replacement))  # a trailing blank is kept: it separates a command from the URL
    elif isinstance(rules, Mapping):
        pairs = list(rules.items())
    elif rules is not None:
        raise TypeError(f"{wanted} {type(rules).__name__}")
    for regex, replacement in pairs:
        if not isinstance(regex, str) or not isinstance(replacement, str):
            raise TypeError(f"{wanted} {type(regex).__name__} with a {type(replacement).__name__}")
        _check_rule(regex, replacement)
    return tuple(pairs)


def _check_rule(regex: str, replacement: str) -> None:
    rule = mask_text(f"{regex}={replacement}")
    if not regex:
        raise ValueError(f"rewriting rule {rule!r} has no regex before its '='")
    try:
        re.compile(regex)
    except re.error as error:
        raise ValueError(
            f"the regex of rewriting rule {rule!r}, which is everything before its first '=', is wrong: {error}. "
            r"Write \x3d for a '=' and \x3b for a ';' in it, or pass rewrite={regex: replacement}"
        ) from error
    try:
        # The empty alternative always matches, so the replacement is always parsed.
        if (found := re.match(f"{regex}|", "")) is not None:
            found.expand(replacement)
    except (re.error, IndexError) as error:
        raise ValueError(
            f"the replacement of rewriting rule {rule!r} is wrong: {error}; "
            r"\1 is the text that the first group of the regex matched"
        ) from error


def _check_command(url: str, replacement: str, beginnings: list[str]) -> None:
    """Refuses a URL that would itself become a command, or more than one word of the rule's command.

    A list of shards may be untrusted: ``x.tar;rm -rf ~`` must not reach a shell through ``pipe:curl -s``.
    """
    shard = mask_url(url)
    if scheme_of(replacement) != "pipe":
        raise UnsafeDataError(
            f"shard {shard} would become a command by a rewriting rule: what it names is a command itself, without its "
            "scheme. Write the whole pipe: command in the list of shards, or 'pipe:' in the rule's replacement",
            shard=shard,
        )
    special = sorted(set(_PLAIN_WORD.sub("", url)))
    if special or any(part.startswith("-") for part in beginnings):
        found = f"{''.join(special)!r}" if special else "a '-' where a word begins"
        raise UnsafeDataError(
            f"shard {shard} would become part of a command by a rewriting rule, but holds {found}, which may mean "
            "something else to a shell or a command. Rename it, or write the whole pipe: command in the list of shards",
            shard=shard,
        )


class StorageOptions(Mapping[str, Mapping[str, Any]]):
    """A read-only mapping ``{"s3": {"key": ...}, ...}`` whose values no message, log, traceback or checkpoint shows.

    `options` may be another instance, whose rules are kept if `rewrite` is None. Except for pickles that start a
    process, pickles contain no values but numbers and a few harmless strings such as ``endpoint_url``. A process that
    loads such a pickle uses its own options of the same names; if it has none, using them raises ShardOpenError.

    Example:
        >>> StorageOptions({"s3": {"key": "AKIA", "anon": False}})
        StorageOptions(s3={key=***, anon=***})
    """

    __slots__ = ("_held", "rewrite")

    def __init__(
        self,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        rewrite: str | Mapping[str, str] | RewriteRules | None = None,
    ) -> None:
        given_rules = options.rewrite if rewrite is None and isinstance(options, StorageOptions) else rewrite
        self.rewrite: RewriteRules = RewriteRules(given_rules)  # tried before the environment's
        if isinstance(options, StorageOptions):
            self._held: Withheld[dict[str, dict[str, Any]]] = options._held
            return
        given = _checked_options(options)
        names = tuple((protocol, *chosen) for protocol, chosen in given.items())
        is_open = all(_is_open(*option) for chosen in given.values() for option in chosen.items())
        self._held = Withheld("storage_options", names, given, is_secret=not is_open)

    @property
    def _names(self) -> tuple[tuple[str, ...], ...]:
        return self._held.names  # type: ignore[return-value]

    def __getitem__(self, protocol: str) -> dict[str, Any]:
        if protocol not in self:
            raise KeyError(protocol)
        return dict(self._held.value[protocol])

    def __contains__(self, protocol: object) -> bool:
        return any(protocol == name for name, *_ in self._names)

    def __iter__(self) -> Iterator[str]:
        return (protocol for protocol, *_ in self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        shown = [f"{protocol}={{{', '.join(f'{name}=***' for name in names)}}}" for protocol, *names in self._names]
        shown += [f"rewrite={self.rewrite!r}"] if self.rewrite else []
        return f"StorageOptions({', '.join(shown)})"

    def __hash__(self) -> int:
        return hash(tuple(sorted(self)))


def _checked_options(options: Any) -> dict[str, dict[str, Any]]:
    if options is None:
        return {}
    found = "" if isinstance(options, Mapping) else f"a {type(options).__name__}"
    for protocol, chosen in () if found else options.items():
        if not isinstance(protocol, str) or not isinstance(chosen, Mapping):
            # Only types are named: the values may be secrets.
            what = protocol if isinstance(protocol, str) else type(protocol).__name__
            found = found or f"{what!r}: a {type(chosen).__name__}"
    if found:
        raise TypeError(
            'storage_options must map a protocol to a mapping of its options, such as {"s3": {"anon": True}} '
            f'or {{"https": {{"headers": {{...}}}}}}; found {found}'
        )
    return {protocol: dict(chosen) for protocol, chosen in options.items()}


def _is_open(name: str, value: Any) -> bool:
    """Returns whether any pickle may contain an option's value."""
    if isinstance(value, str):
        return name in _OPEN_NAMES and mask_text(value) == value
    return isinstance(value, int | float | None)


class Place(NamedTuple):
    """The location of a shard: its URL is resolved once, and every backend takes the result."""

    url: str  # after rewriting
    scheme: str  # selects the backend: that of `scheme_of`, but "ais" for every scheme that goes through AIStore
    options: StorageOptions  # for all protocols
    shown: str  # the URL with secrets masked, for messages
    name: str  # the original URL

    @property
    def is_local(self) -> bool:
        """Whether it is a local path or a ``file:`` URL."""
        return self.scheme in LOCAL

    @property
    def is_moved(self) -> bool:
        """Whether a rule has rewritten the URL."""
        return self.url != self.name


def place_of(url: str, options: StorageOptions, *, name: str | None = None) -> Place:
    """Returns the place of a URL without applying any rule."""
    scheme = scheme_of(url)
    kind = AIS if scheme in ais_schemes() else scheme
    return Place(url, kind, options, mask_url(url), url if name is None else name)


_rules_of = lru_cache(maxsize=16)(RewriteRules)


def resolve(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    rewrite: str | Mapping[str, str] | RewriteRules | None = None,
) -> Place:
    """Returns the place of a shard: the `rewrite` rules are tried first, then those of the environment.

    A malformed rule raises ValueError, or ShardOpenError if it comes from the environment.
    """
    text, options = url_text(url), storage_options
    if not isinstance(options, StorageOptions) or rewrite is not None:
        options = StorageOptions(options, rewrite=rewrite)
    found = options.rewrite.apply(text)
    for variable, rules in rewriting_variables() if found is None else ():
        try:
            found = _rules_of(rules).apply(text)
        except ValueError as error:
            message = f"cannot open shard {mask_url(text)} while {variable} is wrong: {error}"
            raise ShardOpenError(message, shard=mask_url(text)) from error
        if found is not None:
            break
    return place_of(text if found is None else found, options, name=text)


def meter_for(url: str | os.PathLike[str], storage_options: Mapping[str, Mapping[str, Any]] | None = None) -> Meter:
    """Returns a meter for the source of a shard that is not open; opening it says what is wrong with its place."""
    try:
        return Meter(resolve(url, storage_options).shown)
    except (WdsError, ValueError):
        return Meter(mask_url(url))
