"""Rules that send URLs elsewhere: ``WDS_REWRITE``, ``GOPEN_REWRITE`` and ``rewrite=``.

A shard keeps the name that it was given, in samples, indexes, caches and checkpoints, which are thus the same on
machines with other rules. The rules are applied once, where a URL is looked for or opened, and never to what a rule
has made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torchdata_wds.environment import rewriting_variables
from torchdata_wds.errors import ShardOpenError, UnsafeDataError
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.secrets.pickles import Withheld, is_starting_a_process
from torchdata_wds.storage.urls import mask_url, scheme_of

__all__ = ["RewriteRules", "rewritten"]


Rules = tuple[tuple[str, str], ...]

_withheld: Withheld[Rules] = Withheld("rewriting rules")

# What no shell takes for more than a letter of a word.
_PLAIN_WORD = re.compile(r"[\w@%+=:,./-]*")


class RewriteRules:
    r"""Rules from regular expression to replacement, in order; picklable, and its repr masks secrets.

    With a secret in them, they stay out of pickles as `StorageOptions` do.

    Args:
        rules: ``"regex=replacement;..."``, a mapping from regex to replacement (which may hold ``=`` and ``;``), other
            rules, or None for none. A regex is matched at the beginning of a URL. Only what it matches is replaced;
            ``\1`` in the replacement stands for its first group.

    Raises:
        TypeError: if they are neither text nor a mapping of texts.
        ValueError: if a rule has no ``=``, or its regex or replacement is wrong.

    Example:
        >>> rules = RewriteRules("gs://=/shared/data/;s3://([^/]*)=https://mirror/\\1")
        >>> rules.apply("gs://b/x.tar"), rules.apply("s3://b/x.tar"), rules.apply("x.tar")
        ('/shared/data/b/x.tar', 'https://mirror/b/x.tar', None)
    """

    __slots__ = ("_given", "_mark", "_shown")

    _given: Rules | None
    _mark: str
    _shown: str

    def __init__(self, rules: str | Mapping[str, str] | RewriteRules | None = None) -> None:
        if isinstance(rules, RewriteRules):
            self._given, self._mark, self._shown = rules._given, rules._mark, rules._shown
            return
        self._given = _parse(rules)
        text = ";".join(map("=".join, self._given))
        self._shown = mask_text(text)
        self._mark = "" if self._shown == text else _withheld.add(self._shown, self._given)

    @property
    def _rules(self) -> Rules:
        return _withheld.find(self._mark, self._shown) if self._given is None else self._given

    def apply(self, url: str) -> str | None:
        """What the first rule that matches makes of a URL; None where none does.

        Raises:
            UnsafeDataError: if that is a command, and the URL holds what a shell would run.
        """
        for regex, replacement in self._rules:
            found = re.match(regex, url)
            if found is not None:
                start, rest = found.expand(replacement), url[found.end() :]
                if scheme_of(start + rest) == "pipe" and scheme_of(url) != "pipe":
                    _check_origin(url, replacement)
                    _check_words(url, [*found.groups(""), rest if start[-1:].isspace() else ""])
                place = start + rest
                return os.path.expanduser(place) if place.startswith("~") else place  # noqa: PTH111 - a str
        return None

    def __repr__(self) -> str:
        return f"RewriteRules({self._shown!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RewriteRules) and self._rules == other._rules

    def __hash__(self) -> int:
        return hash(self._rules)

    def __bool__(self) -> bool:
        return bool(self._shown)

    def __reduce__(self) -> tuple[Callable[..., RewriteRules], tuple[Any, ...]]:
        goes_along = not self._mark or is_starting_a_process()
        return _restored, (self._rules if goes_along else None, self._mark, self._shown)


def _restored(rules: Rules | None, mark: str, shown: str) -> RewriteRules:
    made = RewriteRules(None if rules is None else dict(rules))
    if rules is None:
        made._given, made._mark, made._shown = _withheld.known(mark), mark, shown
    return made


def rewritten(url: str, rules: RewriteRules) -> str:
    """The URL under which a shard is looked for and opened: its own where no rule matches.

    Args:
        url: The shard's name.
        rules: Those that are tried before the environment's.

    Raises:
        ShardOpenError: if a rule in the environment is malformed.
        UnsafeDataError: if a rule would make a command of a URL that holds what a shell would run.
    """
    place = rules.apply(url)
    for variable, text in rewriting_variables() if place is None else ():
        try:
            place = _rules_of(text).apply(url)
        except ValueError as error:
            shard = mask_url(url)
            raise ShardOpenError(
                f"cannot open shard {shard} while {variable} is wrong: {error}", shard=shard
            ) from error
        if place is not None:
            break
    return url if place is None else place


@lru_cache(maxsize=16)
def _rules_of(text: str) -> RewriteRules:
    return RewriteRules(text)


def _parse(rules: object) -> Rules:
    if rules is None:
        return ()
    if isinstance(rules, str):
        return tuple(_checked(*_split(rule)) for rule in rules.split(";") if rule.strip())
    if not isinstance(rules, Mapping):
        raise TypeError(_expected(f"a {type(rules).__name__}"))
    for regex, replacement in rules.items():
        if not isinstance(regex, str) or not isinstance(replacement, str):
            raise TypeError(_expected(f"a {type(regex).__name__} with a {type(replacement).__name__}"))
    return tuple(_checked(regex, replacement) for regex, replacement in rules.items())


def _split(rule: str) -> tuple[str, str]:
    regex, equals, replacement = rule.partition("=")
    if not equals:
        raise ValueError(f"rewriting rule {mask_text(rule)!r} has no '=': write regex=replacement;...")
    return regex.lstrip(), replacement  # a blank at a command's end is there for the URL that follows


def _checked(regex: str, replacement: str) -> tuple[str, str]:
    rule = mask_text(f"{regex}={replacement}")
    if not regex:
        raise ValueError(f"rewriting rule {rule!r} has no regex before its '='")
    try:
        re.compile(regex)
    except re.error as error:
        raise ValueError(
            f"the regex of rewriting rule {rule!r}, which is all that stands before its first '=', is wrong: {error}. "
            r"Write \x3d for a '=' and \x3b for a ';' in it, or pass rewrite={regex: replacement}"
        ) from error
    try:
        # A match of nothing, if only so that the replacement is looked at.
        if (found := re.match(f"{regex}|", "")) is not None:
            found.expand(replacement)
    except (re.error, IndexError) as error:
        raise ValueError(
            f"the replacement of rewriting rule {rule!r} is wrong: {error}; "
            r"\1 stands for what the first group of the regex matched"
        ) from error
    return regex, replacement


def _expected(found: str) -> str:
    return f'rewrite must be "regex=replacement;..." or a mapping from regex to replacement, found {found}'


def _check_origin(url: str, replacement: str) -> None:
    """A URL may come from a stranger's list, and must not bring the command with it."""
    if scheme_of(replacement) != "pipe":
        shard = mask_url(url)
        raise UnsafeDataError(
            f"shard {shard} would become a command by a rewriting rule: what it names is a command itself, without its "
            "scheme. Write the whole pipe: command in the list of shards, or 'pipe:' in the rule's replacement",
            shard=shard,
        )


def _check_words(url: str, beginnings: list[str]) -> None:
    """A URL may come from a stranger's list, and must not become anything but a word of the user's command."""
    special = sorted(set(_PLAIN_WORD.sub("", url)))
    if special or any(part.startswith("-") for part in beginnings):
        shard = mask_url(url)
        found = f"{''.join(special)!r}" if special else "a '-' where a word begins"
        raise UnsafeDataError(
            f"shard {shard} would become part of a command by a rewriting rule, but holds {found}, which may mean "
            "something else to a shell or a command. Rename it, or write the whole pipe: command in the list of shards",
            shard=shard,
        )
