"""Plans: a table with a row for each sample, whose cells are fields, or name the files that hold them."""

from __future__ import annotations

import csv
import io
import string
from collections.abc import Iterator
from typing import NamedTuple

from torchdata_wds.cli.create.assembling import Part, Problems, check_part_field
from torchdata_wds.cli.create.member_sources import MemberSource, parse_path
from torchdata_wds.cli.create.recipes import list_name, list_text
from torchdata_wds.cli.tables import unescape_cell
from torchdata_wds.errors import SampleError, SpecError
from torchdata_wds.format.dataset_files.trust import short

#: The key of a sample in a plan without keys.
KEY_FORMAT = "{number:09d}"
_KEY = "__key__"
_BASE64 = "base64:"
_TAB = "\t"


class _Column(NamedTuple):
    """A column of a plan: its field, and whether its cells name files."""

    field: str
    names_files: bool


class Plan:
    r"""The parts that a table lists.

    The first line has the names of the fields. The cells below a name that begins with ``@`` are paths or URLs of
    files, below any other texts, in UTF-8. The column ``__key__`` has the keys; without it samples are numbered from 0.

    With tabs, a line is a row, and cells are escaped as in `tables.escape_cell`; with any other delimiter, the table is
    CSV, where a cell with a delimiter, quote or line end is in quotes.

    Relative paths are relative to `folder`, which may be a URL. `key_format` numbers samples in the syntax of
    `str.format`. With `base64`, a text that begins with ``base64:`` stands for bytes.

    Example:
        >>> plan = Plan(b"__key__\t@jpg\tcls\nx\tcat.jpg\t3\n", "plan.tsv")
        >>> [(part.key, part.field, part.source.kind, part.source.value) for part in plan.parts(Problems(plan.name))]
        [('x', 'jpg', 'file', 'cat.jpg'), ('x', 'cls', 'text', '3')]
    """

    cure = "Each row needs a key of its own"

    def __init__(
        self,
        data: bytes,
        url: str = "-",
        folder: str = "",
        *,
        delimiter: str = _TAB,
        key_format: str = KEY_FORMAT,
        escapes: bool = True,
        base64: bool = False,
    ) -> None:
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise ValueError(f"the delimiter of a table is one character, and no quote or line end, not {delimiter!r}")
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(key_format) if name is not None]
            is_right = set(names) == {"number"} and bool(key_format.format(number=0))
        except (ValueError, LookupError) as error:
            raise ValueError(f"the format of keys {key_format!r} is wrong: {error}") from error
        if not is_right:
            raise ValueError(f"the format of keys {key_format!r} needs {{number}}, and nothing else")
        self.name = list_name("plan", url)
        self.url = url
        self._folder = folder
        self._delimiter = delimiter
        self._key_format = key_format
        self._escapes = escapes and delimiter == _TAB
        self._base64 = base64
        # UTF-16 has them everywhere, an archive in its first name
        if (place := data.partition(b"\n")[0].find(b"\0")) >= 0:
            raise SpecError(f"{self.name} is not a table in UTF-8: its first line has a NUL at byte {place:,}")
        self._text = list_text(data)
        self._columns = self._read_header()

    def parts(self, problems: Problems) -> Iterator[Part]:
        """Yields the parts, and adds rows that are wrong to the problems."""
        rows = self._rows(problems)
        next(rows)
        for number, (line, cells) in enumerate(rows):
            try:
                yield from self._row(number, line, cells)
            except SampleError as error:
                problems.add(f"line {line:,}", error)

    def _read_header(self) -> list[_Column]:
        problems = Problems(self.name)
        line, cells = next(self._rows(problems), (1, []))
        columns: list[_Column] = []
        for number, cell in enumerate(cells, 1):
            try:
                name = (unescape_cell(cell) if self._escapes else cell).lower()
                column = _Column(name.removeprefix("@"), name.startswith("@"))
                if any(column.field == other.field for other in columns):
                    raise SampleError(f"field {column.field!r} has a column before")
                if name != _KEY:
                    check_part_field(column.field, "(any)")
                columns.append(column)
            except ValueError as error:
                problems.add(f"line {line}, column {number}", error)
        problems.check()
        if not {column.field for column in columns} - {_KEY}:
            problems.add(f"line {line}", f"no column is a field; expected names of fields, found {short(cells)}")
        problems.check()
        return columns

    def _row(self, number: int, line: int, cells: list[str]) -> list[Part]:
        if len(cells) != len(self._columns):
            raise SampleError(f"expected {len(self._columns):,} cells as in the first line, found {len(cells):,}")
        key = self._key_format.format(number=number)
        sources = []
        for column, cell in zip(self._columns, cells, strict=True):
            try:
                text = unescape_cell(cell) if self._escapes else cell
                if column.field == _KEY:
                    key = text
                else:
                    sources.append((column.field, self._source(column, cell, text)))
            except ValueError as error:
                raise SampleError(f"column {column.field!r}: {error}") from error
        return [Part(key, field, source, line) for field, source in sources]

    def _source(self, column: _Column, cell: str, text: str) -> MemberSource:
        if column.names_files:
            # an empty cell is a missing file
            return parse_path(text, self._folder) if text else MemberSource("file", "")
        if self._base64 and text.startswith(_BASE64):
            return MemberSource("base64", text.removeprefix(_BASE64))
        try:
            cell.encode()
        except UnicodeEncodeError as error:
            raise SampleError(f"the text is not UTF-8, at its character {error.start + 1:,}") from error
        return MemberSource("text", text)

    def _rows(self, problems: Problems) -> Iterator[tuple[int, list[str]]]:
        """Yields the cells of each row, with the number of its first line; blank lines are passed over."""
        if self._delimiter == _TAB:
            lines = self._text.removesuffix("\n").split("\n")
            is_single = _TAB not in lines[0]  # in a table of one column an empty line is an empty cell
            for number, line in enumerate(lines, 1):
                line = line.removesuffix("\r")
                if line or is_single or number == 1:
                    yield number, line.split(_TAB)
            return
        # the module's limit protects programs that read an endless stream; this text is in memory already
        csv.field_size_limit(max(csv.field_size_limit(), len(self._text)))
        reader = csv.reader(io.StringIO(self._text, newline=""), delimiter=self._delimiter, strict=True)
        first = 1
        try:
            for cells in reader:
                if cells:
                    yield first, cells
                first = reader.line_num + 1
        except csv.Error as error:
            problems.add(f"line {first:,}", f"it is not CSV: {error}")
