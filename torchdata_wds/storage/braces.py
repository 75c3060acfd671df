"""Brace expansion: ``train-{000..146}.tar``, ``{train,val}-{0..9}.tar``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate, product
from urllib.parse import unquote

from torchdata_wds.errors import ShardListError
from torchdata_wds.storage.secrets.masking import masked_cause
from torchdata_wds.storage.urls import cannot_list, is_local, scheme_of

_RANGE = re.compile(r"\{(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(\.\.-?\d+)?\}")
_ALMOST_RANGE = re.compile(r"\{[^{},]*\.\.[^{},]*\}")
_MARKS = frozenset("{*[")

# Inside braces, these mean something to a shell or a program rather than to us.
_FOREIGN = re.compile(r"[\s'\"$`;|&()<>\\]")


def expand_braces(pattern: str, *, within: str | None = None) -> Iterator[str]:
    """Expands all braces of a path or URL; messages name what it stands `within`."""
    if "{" not in pattern and "}" not in pattern:
        yield pattern
        return
    import braceexpand

    _check(pattern, within or pattern)
    try:
        yield from braceexpand.braceexpand(pattern, escape=False)
    except ValueError as error:
        raise _complaint(within or pattern, "its braces are unbalanced") from masked_cause(error)
    except RecursionError:
        raise _complaint(within or pattern, "its braces are nested too deeply") from None


def expand_clear_braces(pattern: str) -> Iterator[str]:
    """Expands the lists and ranges of a command or web address, and leaves every other brace alone.

    Example:
        >>> list(expand_clear_braces("pipe:cat ${HOME}/{a,b}.tar | awk '{print $1, $2}'"))
        ["pipe:cat ${HOME}/a.tar | awk '{print $1, $2}'", "pipe:cat ${HOME}/b.tar | awk '{print $1, $2}'"]
    """
    choices: list[list[str]] = []
    end = 0
    for start, stop in _clear_groups(pattern):
        choices += [[pattern[end:start]], list(expand_braces(pattern[start:stop], within=pattern))]
        end = stop
    for parts in product(*choices):
        yield "".join(parts) + pattern[end:]


def unexpanded(url: str) -> str:
    """Returns words for a URL that does not exist: that it looks like a pattern, if it does; else ""."""
    if scheme_of(url) in ("http", "https"):
        is_pattern = any(_clear_groups(unquote(url)))
    else:
        is_pattern = not _MARKS.isdisjoint(url) or ("?" in url and is_local(url))
    return " and looks like a pattern that nobody expanded; put .list_shards() before the loader" if is_pattern else ""


def _clear_groups(pattern: str) -> Iterator[tuple[int, int]]:
    """Yields where the lists and ranges of a command begin and end: in ``a{1..3}b ${X} {a,b}``, (1, 7) and (13, 18)."""
    position = 0
    while (start := pattern.find("{", position)) >= 0:
        # The brace that closes this one is the first after which as many were closed as opened.
        depths = accumulate({"{": 1, "}": -1}.get(letter, 0) for letter in pattern[start:])
        stop = next((start + count for count, depth in enumerate(depths, 1) if not depth), start)
        group = pattern[start:stop]
        position = start + 1
        is_foreign = pattern[max(0, start - 1) : start] == "$" or _FOREIGN.search(group)
        if group and not is_foreign and ("," in group or _RANGE.fullmatch(group)):
            yield start, stop
            position = stop


def _check(pattern: str, whole: str) -> None:
    if "{}" in pattern:
        raise _complaint(whole, "its braces {} are empty")
    for found in _ALMOST_RANGE.finditer(pattern):
        complete = _RANGE.fullmatch(found[0])
        if complete is None or complete[1].isalpha() != complete[2].isalpha():
            raise _complaint(whole, f"{found[0]} is not a complete range")
        first, last = (ord(end) if end.isalpha() else int(end) for end in complete.group(1, 2))
        if not complete[3] and first > last:
            raise _complaint(whole, f"the range {found[0]} runs backwards")


def _complaint(pattern: str, what: str) -> ShardListError:
    return cannot_list(pattern, f"{what}; write {{000..146}} or {{train,val}}", "expand")
