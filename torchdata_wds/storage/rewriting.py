"""Rules that send URLs elsewhere: ``rewrite=``, ``WDS_REWRITE`` and ``GOPEN_REWRITE``.

A shard keeps the name it was given in samples, indexes, caches and checkpoints, so these are the same on machines with
other rules. `places.resolve` applies the rules once, where a URL is listed or opened, and never to their own result.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from torchdata_wds.errors import UnsafeDataError
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.secrets.withheld import Withheld
from torchdata_wds.storage.urls import mask_url, scheme_of

Rules = tuple[tuple[str, str], ...]

# What every shell takes for letters of a word.
_PLAIN_WORD = re.compile(r"[\w@%+=:,./-]*")


class RewriteRules:
    r"""Rules from regular expression to replacement, in order; picklable, and its repr masks secrets.

    Rules with a secret in them stay out of pickles as `StorageOptions` do.

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

    __slots__ = ("_held",)

    def __init__(self, rules: str | Mapping[str, str] | RewriteRules | None = None) -> None:
        if isinstance(rules, RewriteRules):
            self._held: Withheld[Rules] = rules._held
            return
        given = _parse(rules)
        text = ";".join(map("=".join, given))
        shown = mask_text(text)
        self._held = Withheld("rewriting rules", shown, given, is_secret=shown != text)

    def apply(self, url: str) -> str | None:
        """Returns what the first matching rule makes of a URL; None if none matches.

        Raises:
            UnsafeDataError: if that is a command, and the URL holds what a shell would run.
        """
        for regex, replacement in self._held.value:
            found = re.match(regex, url)
            if found is not None:
                start, rest = found.expand(replacement), url[found.end() :]
                if scheme_of(start + rest) == "pipe" and scheme_of(url) != "pipe":
                    _check_command(url, replacement, [*found.groups(""), rest if start[-1:].isspace() else ""])
                place = start + rest
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
    found = "" if rules is None or isinstance(rules, (str, Mapping)) else f"a {type(rules).__name__}"
    pairs: list[tuple[str, str]] = []
    if isinstance(rules, str):
        for rule in filter(str.strip, rules.split(";")):
            regex, equals, replacement = rule.partition("=")
            if not equals:
                raise ValueError(f"rewriting rule {mask_text(rule)!r} has no '=': write regex=replacement;...")
            pairs.append((regex.lstrip(), replacement))  # a blank at a command's end separates it from the URL
    elif isinstance(rules, Mapping):
        pairs = list(rules.items())
        wrong = next((pair for pair in pairs if not all(isinstance(text, str) for text in pair)), None)
        found = f"a {type(wrong[0]).__name__} with a {type(wrong[1]).__name__}" if wrong else ""
    if found:
        raise TypeError(
            f'rewrite must be "regex=replacement;..." or a mapping from regex to replacement, found {found}'
        )
    for pair in pairs:
        _check_rule(*pair)
    return tuple(pairs)


def _check_rule(regex: str, replacement: str) -> None:
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
        # The empty alternative always matches, so that the replacement is parsed.
        if (found := re.match(f"{regex}|", "")) is not None:
            found.expand(replacement)
    except (re.error, IndexError) as error:
        raise ValueError(
            f"the replacement of rewriting rule {rule!r} is wrong: {error}; "
            r"\1 stands for what the first group of the regex matched"
        ) from error


def _check_command(url: str, replacement: str, beginnings: list[str]) -> None:
    """Refuses a URL that would bring a command with it, or become more than one word of the user's command.

    A URL may come from a stranger's list: ``x.tar;rm -rf ~`` must not reach a shell through ``pipe:curl -s``.
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
