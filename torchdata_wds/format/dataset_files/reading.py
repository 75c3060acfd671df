"""Dataset files as they are read, YAML or JSON; whom one may ask to run, and what its relative names mean."""

from __future__ import annotations

import importlib
import json
import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import urljoin

from torchdata_wds.environment import is_secure
from torchdata_wds.errors import Advice, ShardListError, SpecError, UnsafeDataError, WdsError
from torchdata_wds.storage import open_shard
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.sources.fsspec import protocol_of
from torchdata_wds.storage.urls import STDIN, expand_braces, local_path, mask_url, scheme_of

_MAX_BYTES = 64 << 20
_MAX_MERGED = 10_000
_IS_JSON = re.compile(r"\.json(\.(gz|bz2|xz|zstd?))?([?#].*)?\Z", re.IGNORECASE | re.DOTALL)
_LOCAL = ("", "file")
_WEB = ("http", "https")
_TEMPLATES = "reference"  # fsspec's references are templates, which its older versions render without a sandbox
_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}", re.ASCII)
_MAX_SHARDS = 10_000_000  # a range is expanded in memory
_LOOKED_AT = 1000  # URLs of a pattern that are looked at before it is used; each is again when it is listed
_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = 100


def short(value: object) -> str:
    """Shows a value from a file in a message, however large or deep it is."""
    return _shortener.repr(value)


@dataclass(frozen=True)
class Origin:
    """Where a specification was read."""

    shown: str  # its name in messages, without secrets
    folder: str = ""  # of its relative names; "" for the working directory
    trusted: bool = True  # whether it may run commands: the program wrote it, or said so
    remote: bool = False  # whether it came from another machine

    @classmethod
    def of_file(cls, url: str, *, trusted: bool) -> Origin:
        """The origin of what a file holds."""
        return cls(f"dataset file {mask_url(url)}", folder_of(url), trusted, scheme_of(url) not in _LOCAL)


@dataclass(frozen=True)
class SpecPlace:
    """A place in a specification, for messages and for judging what stands there."""

    origin: Origin
    path: str = ""  # such as ``dataset[1].weight``, counted from 0; "" is the whole

    def at(self, key: str | int) -> SpecPlace:
        """The place of an item of what stands here."""
        step = f"[{key}]" if isinstance(key, int) else f".{key}" if self.path else key
        return SpecPlace(self.origin, self.path + step)

    def __str__(self) -> str:
        return f"{self.origin.shown}: {self.path}" if self.path else self.origin.shown

    def error(self, problem: str) -> SpecError:
        """The error that something here is wrong."""
        return SpecError(f"{self}: {problem}")

    def check_keys(self, mapping: object, known: tuple[str, ...]) -> None:
        """Refuses what is not a mapping with known keys only."""
        if not isinstance(mapping, Mapping):
            raise self.error(f"expected a mapping with keys {', '.join(known)}, found {short(mapping)}")
        unknown = [key for key in mapping if key not in known]
        if unknown:
            raise self.error(f"unknown key {', '.join(map(short, unknown[:5]))}; known are {', '.join(known)}")

    def check_url(self, url: str) -> str:
        """Returns the URL of a shard or file if this specification may open it.

        Trust is needed for what runs something or reads what belongs to the program; ``WDS_SECURE=1`` forbids commands.
        """
        scheme = scheme_of(url)
        danger = {"pipe": "runs a command", STDIN: "reads this program's standard input"}.get(scheme)
        if scheme not in ("pipe", STDIN, *_LOCAL, *_WEB) and _TEMPLATES in map(protocol_of, url.split("::")):
            danger = "renders templates"
        if danger is not None:
            shown = mask_url(url)
            what = f"{self}: {shown} {danger}"
            if scheme == "pipe" and is_secure():
                raise UnsafeDataError(f"{what}, which WDS_SECURE forbids", shard=shown)
            if not self.origin.trusted:
                advice = _allow_pipe(", or list these shards in your program")
                raise UnsafeDataError(f"{what}, which no dataset file may do unasked.", shard=shown, advice=advice)
        return url

    def check_pattern(self, pattern: str) -> str:
        """Returns a pattern if `check_url` allows all its URLs, as far as can be seen without listing."""
        if _count_of_ranges(pattern) > _MAX_SHARDS:
            raise self.error(f"{short(pattern)} stands for more than {_MAX_SHARDS:,} shards")
        try:
            for url in islice(_visible_urls(pattern), _LOOKED_AT):
                self.check_url(url)
        except ShardListError as error:
            raise self.error(str(error)) from error
        return pattern

    def expand(self, text: str) -> str:
        """Expands ``~`` and ``$NAME``; what is not set stays as it is."""
        for match in () if self.origin.trusted else _VARIABLE.finditer(text):
            name = match[1] or match[2]
            what = f"{self}: asks for the environment variable {name}"
            if self.origin.remote:
                advice = _allow_pipe(", or keep a copy of the file here")
                raise UnsafeDataError(f"{what}, which no file from another machine gets.", advice=advice)
            if mask_text(f"{name}=value") != f"{name}=value":
                advice = _allow_pipe("; credentials belong into storage_options")
                raise UnsafeDataError(f"{what}, whose name says that it is secret.", advice=advice)
        return os.path.expanduser(os.path.expandvars(text))  # noqa: PTH111 - a str, maybe a URL


def _allow_pipe(otherwise: str) -> Advice:
    return Advice.of(f"Pass {{}} if you trust its author{otherwise}", "allow_pipe=True", "--allow-pipe")


def _visible_urls(pattern: str) -> Iterator[str]:
    """What a pattern may become, and each part of what it joins; more than it does become, so as to miss nothing."""
    texts = [pattern]
    if not {"{", "}"}.isdisjoint(pattern) and scheme_of(pattern) not in ("pipe", *_WEB):
        with suppress(ShardListError):  # of a part, which may be half a brace
            texts += [url for part in pattern.split("::") for url in islice(expand_braces(part), _LOOKED_AT)]
        if not os.path.lexists(local_path(pattern)):
            yield from expand_braces(pattern)
    for text in texts:
        yield text
        yield from text.split("::")


def _count_of_ranges(pattern: str) -> int:
    """How many URLs the ranges of a pattern stand for, at most."""
    count = 1
    for first, last, step in _RANGE.findall(pattern):
        if max(map(len, (first, last))) > 18:  # int() of very long ones takes long, or raises
            return _MAX_SHARDS + 1
        count *= abs(int(last) - int(first)) // max(1, int(step[:18] or 1)) + 1
    return count


def folder_of(url: str) -> str:
    """The folder that a file's relative names are relative to; "" where it has none."""
    scheme = scheme_of(url)
    if scheme in ("pipe", STDIN):
        return ""
    text = re.split(r"[?#]", url, maxsplit=1)[0] if scheme in _WEB else local_path(url)
    folder, slash, _ = text.rpartition("/")
    return folder + slash


def join_url(folder: str, url: str) -> str:
    """Resolves a URL or path against a folder."""
    if not folder or url.startswith("/") or scheme_of(url):
        return url
    folder = folder if folder.endswith("/") else folder + "/"
    return urljoin(folder, url) if scheme_of(folder) in _WEB else folder + url


def read_spec(url: str, *, storage_options: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """Reads a dataset file: JSON where its name ends in ``.json``, else JSON or YAML."""
    shown = mask_url(url)
    try:
        with open_shard(url, storage_options=storage_options) as stream:
            data = stream.read(_MAX_BYTES + 1)
    except WdsError as error:
        raise type(error)(f"dataset file {shown} cannot be read: {error}", shard=shown) from error
    if len(data) > _MAX_BYTES:
        what = f"dataset file {shown} is larger than {_MAX_BYTES:,} bytes"
        raise SpecError(f"{what}: is it a shard? Write shard lists with braces")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"dataset file {shown} is not UTF-8 text: {error}") from error
    return parse_spec(text, shown, json_only=_IS_JSON.search(url) is not None)


def parse_spec(text: str, shown: str = "<text>", *, json_only: bool = False) -> Any:
    """Parses a dataset file's text, JSON or (unless `json_only`) YAML; `shown` is its name in messages."""
    try:
        if json_only or text.lstrip().startswith("{"):  # JSON needs no further package
            try:
                return json.loads(text, object_pairs_hook=partial(_unique, shown))
            except json.JSONDecodeError as error:
                if json_only:
                    raise SpecError(f"dataset file {shown} is not JSON: {error}") from error
        return _parse_yaml(text, shown)  # what JSON does not take may be YAML yet
    except RecursionError:
        raise SpecError(f"dataset file {shown} is nested too deeply to be one") from None


def _unique(shown: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _twice(shown, next(name for name in names if names.count(name) > 1))
    return found


def _twice(shown: str, key: object, where: str = "") -> SpecError:
    return SpecError(f"dataset file {shown} has the key {key!r:.80} twice in one mapping{where}: only one would count")


def _parse_yaml(text: str, shown: str) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ModuleNotFoundError as cause:
        what = f"dataset file {shown} is YAML, which needs the yaml package, which is not installed"
        cure = "pip install 'torchdata_wds[spec]', or write the file as JSON"
        raise ModuleNotFoundError(f"{what}: {cure}", name="yaml") from cause
    try:
        return yaml.load(text, _loader(yaml, shown))
    except yaml.YAMLError as error:
        hint = "\nIn a [list], a pattern with braces needs quotes." if "{" in text else ""
        raise SpecError(f"dataset file {shown} is not YAML: {error}{hint}") from error
    except SpecError:
        raise
    except (ValueError, TypeError, AttributeError) as error:  # what its scalars raise: dates that are none, "0x_"
        raise SpecError(f"dataset file {shown} holds a value that is not YAML: {error}") from error


def _loader(yaml: Any, shown: str) -> Any:
    """A SafeLoader (plain values only); alone it takes the last of two equal keys, and until 6.0.3 merges endlessly."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                if (key.tag, key.value) in seen:
                    raise _twice(shown, key.value, f", line {key.start_mark.line + 1}")
                seen.add((key.tag, key.value))
            return node

        def flatten_mapping(self, node: Any) -> None:
            merged = 0
            for key, value in node.value:
                if key.tag != "tag:yaml.org,2002:merge":
                    continue
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(source, yaml.MappingNode):
                        self.flatten_mapping(source)
                        merged += len(source.value)
                    if merged > _MAX_MERGED:
                        raise SpecError(f"dataset file {shown} merges more than {_MAX_MERGED:,} keys into a mapping")
            super().flatten_mapping(node)

    return Loader
