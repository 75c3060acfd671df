"""Where the shards of a card lie, and the split that each belongs to, by names as Hugging Face Datasets finds it."""

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from torchdata_wds.cli.command import UsageError
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.urls import STDIN, is_local, local_path, scheme_of

TRAIN = "train"
_WORDS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF = {word: split for split, words in _WORDS.items() for word in words}
_BETWEEN = re.compile(r"[-._ 0-9]+")
_NUMBERED = re.compile(r"(?:.*/)?data/([^/]+)-\d{5}-of-\d{5}[^/]*")  # as datasets itself names files
_ALL = "all"
_NAME = re.compile(r"\w+(\.\w+)*")
_PATTERN_SIGNS = frozenset("*?[]")


class SplitRule(NamedTuple):
    """One ``--split``: the name of a split and a glob for its shards, None for all of them."""

    name: str
    glob: str | None


def split_rule(text: str) -> SplitRule:
    """Parses ``NAME`` or ``NAME=GLOB``."""
    name, has_glob, glob = text.partition("=")
    if not _NAME.fullmatch(name) or (has_glob and not glob):
        raise argparse.ArgumentTypeError(f"expected NAME or NAME=GLOB, such as test='test-*.tar', not {text!r:.60}")
    if name == _ALL:
        raise argparse.ArgumentTypeError(
            "'all' means all splits together to Hugging Face Datasets: choose another name"
        )
    return SplitRule(name, glob if has_glob else None)


class Place(NamedTuple):
    """The folder of a card, and the shards as its files name them: relative to it, or as URLs."""

    folder: Path
    paths: list[str]
    is_remote: bool


def locate(urls: Sequence[str], out: str | None) -> Place:
    """Finds the folder of a card, by default the one that has all shards in it."""
    if len(set(urls)) < len(urls):
        raise UsageError("a shard is named twice")
    remote = [url for url in urls if not is_local(url)]
    if remote and len(remote) < len(urls):
        raise UsageError("some of the shards are local and others remote: make a card for each kind")
    place = _remote_place(urls, out) if remote else _local_place(urls, out)
    for path in place.paths:
        if not place.is_remote and not _PATTERN_SIGNS.isdisjoint(path):
            raise UsageError(f"the hub takes the name of shard {path} for a pattern: rename it without *, ? and []")
    return place


def _remote_place(urls: Sequence[str], out: str | None) -> Place:
    if out is None or not is_local(out):
        raise UsageError("the shards are remote: name a local folder for the card with -o FOLDER")
    for url in urls:
        if scheme_of(url) in (STDIN, "pipe"):
            raise UsageError(f"a card cannot refer to {mask_url(url)}: name the shard itself")
        if mask_url(url) != url:
            raise UsageError(f"the card would publish the secrets in {mask_url(url)}: pass a URL without them")
    return Place(Path(out), list(urls), is_remote=True)


def _local_place(urls: Sequence[str], out: str | None) -> Place:
    files = [os.path.abspath(local_path(url)) for url in urls]  # noqa: PTH100 - without following links
    folder = os.path.commonpath([os.path.dirname(file) for file in files]) if out is None else out  # noqa: PTH120
    root = Path(os.path.abspath(folder))  # noqa: PTH100
    paths = []
    for file in files:
        try:
            paths.append(Path(file).relative_to(root).as_posix())
        except ValueError:
            raise UsageError(f"shard {file} is not in the folder of the card, {root}: choose another with -o") from None
    return Place(root, paths, is_remote=False)


def assign_splits(paths: Iterable[str], rules: Sequence[SplitRule]) -> Mapping[str, str]:
    """Returns the split of each path: by the rules, or else by the words in its folders or in its name."""
    paths = list(paths)
    if rules:
        return {path: _by_rules(path, rules) for path in paths}
    by_folder = {path: _named(path, _words(path.rpartition("/")[0])) for path in paths}
    by_name = {path: _named(path, _words(path.rpartition("/")[2])) for path in paths}
    for found in (by_folder, by_name):
        known = {path: split for path, split in found.items() if split is not None}
        if len(known) == len(paths):
            return known
        if known:
            path = next(path for path in paths if path not in known)
            raise UsageError(f"shard {mask_url(path)} has no split in its name, as others have: pass --split NAME=GLOB")
    return dict.fromkeys(paths, TRAIN)


def _by_rules(path: str, rules: Sequence[SplitRule]) -> str:
    name = path.rpartition("/")[2]
    found = {split for split, glob in rules if glob is None or fnmatchcase(path, glob) or fnmatchcase(name, glob)}
    if len(found) != 1:
        raise UsageError(f"shard {mask_url(path)} belongs to {len(found)} of the splits that --split names, not to one")
    return found.pop()


def _words(text: str) -> list[str]:
    return [word for part in text.split("/") for word in _BETWEEN.split(part)]


def _named(path: str, words: Iterable[str]) -> str | None:
    if (numbered := _NUMBERED.fullmatch(path)) and _NAME.fullmatch(numbered[1]) and numbered[1] != _ALL:
        return numbered[1]
    found = {_SPLIT_OF[word] for word in words if word in _SPLIT_OF}
    if len(found) > 1:
        raise UsageError(
            f"shard {mask_url(path)} names the splits {' and '.join(sorted(found))}: pass --split NAME=GLOB"
        )
    return next(iter(found), None)


def in_order(splits: Iterable[str]) -> list[str]:
    """Sorts names of splits: train, validation, test, then others by name."""
    known = list(_WORDS)
    return sorted(set(splits), key=lambda name: (known.index(name) if name in known else len(known), name))
