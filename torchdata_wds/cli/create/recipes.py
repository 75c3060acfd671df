"""Recipes: a line for each member of an archive, with its name and where its content comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchdata_wds.cli.create.assembling import Part, Problems
from torchdata_wds.cli.create.member_sources import parse_source
from torchdata_wds.cli.terminal import printable
from torchdata_wds.errors import SampleError, SpecError
from torchdata_wds.format.dataset_files.trust import short
from torchdata_wds.format.samples.names import skip_reason, split_name
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.urls import STDIN

_BLANKS = re.compile(r"[ \t]+")


def list_name(kind: str, url: str) -> str:
    """Names a recipe or plan for messages."""
    return f"{kind} on standard input" if url == STDIN else f"{kind} {printable(mask_url(url))}"


def list_text(data: bytes) -> str:
    """Decodes a list without its BOM; bytes that are not UTF-8 are kept as in file names, as lone surrogates."""
    return data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")


class Recipe:
    r"""The parts that a recipe lists, in its order.

    A line is ``name source``, cut at its first blanks: all that follows belongs to the source, which is as in
    `parse_source`. Lines end with ``\n`` or ``\r\n``; blank lines are passed over.

    Relative paths are relative to `folder`, which may be a URL. With `sort`, lines are sorted by key, so that those of
    a sample come together. Only a trusted recipe may run commands and render templates.

    Example:
        >>> recipe = Recipe(b"a.txt text:hello world\na.jpg cat.jpg\n", "lists/x.txt", "lists")
        >>> [(part.key, part.field, part.source.value) for part in recipe.parts(Problems(recipe.name))]
        [('a', 'txt', 'hello world'), ('a', 'jpg', 'lists/cat.jpg')]
    """

    def __init__(
        self, data: bytes, url: str = "-", folder: str = "", *, sort: bool = False, trusted: bool = True
    ) -> None:
        self.name = list_name("recipe", url)
        self.url = url
        # sorted, those of a sample are together
        self.cure = "" if sort else "Put the lines of a sample together, or sort them (--sort)"
        self._folder = folder
        self._trusted = trusted
        if b"\0" in data:
            raise SpecError(f"{self.name} is not text with lines 'name source': it has a NUL at byte {data.index(0):,}")
        self._lines = list_text(data).split("\n")
        self._order: range | list[int] = range(len(self._lines))
        if sort:
            self._order = sorted(self._order, key=lambda index: _key_of(self._lines[index]))

    def parts(self, problems: Problems) -> Iterator[Part]:
        """Yields the parts, and adds lines that are wrong to the problems."""
        for index in self._order:
            line = self._lines[index].removesuffix("\r").lstrip(" \t")
            if not line:
                continue
            try:
                yield self._part(line, index + 1)
            except SampleError as error:
                problems.add(f"line {index + 1:,}", error)

    def _part(self, line: str, number: int) -> Part:
        name, *rest = _BLANKS.split(line, maxsplit=1)
        if not rest or not rest[0]:
            raise SampleError(f"expected a name and a source with a blank between, found only {short(name)}")
        names = split_name(name)
        if names is None:
            raise SampleError(f"name {short(name)} belongs to no sample: {skip_reason(name)}; expected key.extension")
        try:
            source = parse_source(rest[0], self._folder, trusted=self._trusted)
            if source.kind == "pipe" and not self._trusted:
                raise SampleError(
                    f"{mask_url(source.value)} runs a command, which no recipe may do unasked. Pass --allow-pipe if "
                    "you trust the recipe's author"
                )
        except SampleError as error:
            raise SampleError(f"member {short(name)}: {error}") from error
        return Part(*names, source, number)


def _key_of(line: str) -> str:
    names = split_name(_BLANKS.split(line.lstrip(" \t"), maxsplit=1)[0])
    return "" if names is None else names[0]
