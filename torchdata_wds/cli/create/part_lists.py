"""Lists of the parts of samples: folders of files, recipes (a line per member) and plans (a row per sample)."""

import csv
import io
import os
import re
import string
from collections.abc import Iterator

from torchdata_wds.cli.command import UsageError
from torchdata_wds.cli.create.assembling import FilesOfSample, Kind, Part, PartList, Problems, check_part_field
from torchdata_wds.cli.tables import unescape_cell
from torchdata_wds.cli.terminal import printable
from torchdata_wds.environment import is_secure
from torchdata_wds.errors import SampleError, ShardOpenError, SpecError, UnsafeDataError
from torchdata_wds.format.dataset_files.reading import Origin, SpecPlace, join_url, short
from torchdata_wds.format.samples.names import skip_reason, split_name
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.urls import STDIN, local_path, scheme_of

#: The key of a sample in a plan without keys.
KEY_FORMAT = "{number:09d}"
_KEY = "__key__"
_BASE64 = "base64:"
_TAB = "\t"
_STRANGER = SpecPlace(Origin("list", trusted=False))
_BLANKS = re.compile(r"[ \t]+")

# Between key and field: no file name contains it, and it sorts first, so that names sort by key, then by field.
_CUT = "\0"


class SampleFolder(PartList):
    """The files in a folder and its subfolders, sorted by key, which is relative to the folder."""

    def __init__(self, path: str) -> None:
        super().__init__(f"folder {printable(path)}", path.rstrip("/") or path)
        self._names: list[str] | None = None

    def parts(self, problems: Problems) -> Iterator[Part]:
        """Yields the parts, and adds unreadable folders to the problems."""
        for key, fields, paths in self.samples(problems):
            for field, path in zip(fields, paths, strict=True):
                yield Part(key, field, "file", path)

    def samples(self, problems: Problems) -> Iterator[FilesOfSample]:
        """Yields the key of each sample, its fields and their files; else as `parts`."""
        if self._names is None:
            self._names = sorted(self._find(problems))
        start = os.path.join(self.url, "")  # noqa: PTH118 - a str, as millions of them are made
        last = ""
        fields: list[str] = []
        paths: list[str] = []
        for name in self._names:
            key, _, field = name.partition(_CUT)
            if key != last and fields:
                yield last, fields, paths
                fields, paths = [], []
            last = key
            fields.append(field)
            paths.append(f"{start}{key}.{field}")
        if fields:
            yield last, fields, paths

    def _find(self, problems: Problems) -> Iterator[str]:
        waiting = [""]
        while waiting:
            below = waiting.pop()
            path = os.path.join(self.url, below)  # noqa: PTH118 - a str, as millions of them are made
            try:
                with os.scandir(path) as entries:
                    for entry in entries:
                        name = below + entry.name
                        is_file = entry.is_file(follow_symlinks=False)
                        is_link = not is_file and entry.is_symlink()
                        if is_link and os.path.isdir(entry.path):  # noqa: PTH112 - as above
                            self.skipped["link to a folder"] += 1  # it may lead in a circle, or out of the folder
                        elif not is_file and entry.is_dir(follow_symlinks=False):
                            if entry.name.startswith("."):
                                self.skipped["hidden folder"] += 1
                            else:
                                waiting.append(name + "/")
                        elif (names := split_name(name)) is None:
                            self.skipped[skip_reason(name)] += 1
                        elif is_link or is_file:
                            # where a link leads is checked with all files; one that leads nowhere is a missing file
                            yield _CUT.join(names)
                        else:
                            self.skipped["no regular file"] += 1
            except OSError as error:
                problems.add(f"folder {path!r}", SampleError(f"it cannot be read: {error.strerror or error}"))


class _TextList(PartList):
    """A list in UTF-8, perhaps with a BOM. Bytes that are not UTF-8 are kept as in file names, as lone surrogates."""

    def __init__(self, kind: str, data: bytes, url: str, folder: str) -> None:
        super().__init__(f"{kind} on standard input" if url == STDIN else f"{kind} {printable(mask_url(url))}", url)
        self._text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
        self._folder = folder  # where relative paths start; may be a URL


class Recipe(_TextList):
    r"""The members of an archive, in their order.

    A line is ``name source``, split at its first blanks; the source may contain more. Blank lines are skipped. With
    `sort`, the lines are sorted by key. Commands and templates are allowed only with `allow_pipe`.
    """

    def __init__(
        self, data: bytes, url: str = "-", folder: str = "", *, sort: bool = False, allow_pipe: bool = False
    ) -> None:
        super().__init__("recipe", data, url, folder)
        if b"\0" in data:
            raise SpecError(f"{self.name} is not text with lines 'name source': it has a NUL at byte {data.index(0):,}")
        self._trusted = allow_pipe
        self._lines = self._text.split("\n")
        self._order: range | list[int] = range(len(self._lines))
        if sort:
            self._order = sorted(self._order, key=lambda index: _key_of(self._lines[index]))
        else:
            self.cure = "Put the lines of a sample together, or sort them (--sort)"

    def parts(self, problems: Problems) -> Iterator[Part]:
        """Yields the parts, and adds faulty lines to the problems."""
        for index in self._order:
            if line := self._lines[index].removesuffix("\r").lstrip(" \t"):
                try:
                    yield Part(*self._member(line), index + 1)
                except SampleError as error:
                    problems.add(f"line {index + 1:,}", error)

    def _member(self, line: str) -> tuple[str, str, Kind, str]:
        name, *rest = _BLANKS.split(line, maxsplit=1)
        if not rest or not rest[0]:
            raise SampleError(f"expected a name and a source with a blank between, found only {short(name)}")
        if (names := split_name(name)) is None:
            raise SampleError(f"name {short(name)} belongs to no sample: {skip_reason(name)}; expected key.extension")
        source = rest[0]
        if source.startswith("text:"):
            return *names, "text", source.removeprefix("text:")
        if source.startswith(_BASE64):
            return *names, "base64", source.removeprefix(_BASE64)
        try:
            if scheme_of(source) != "pipe":
                return *names, *parse_path(source, self._folder, trusted=self._trusted)
            if not self._trusted:
                what = "which a recipe may do only with --allow-pipe. Pass it if you trust the recipe's author"
                raise SampleError(f"{mask_url(source)} runs a command, {what}")
        except SampleError as error:
            raise SampleError(f"member {short(name)}: {error}") from error
        return *names, "pipe", source


def _key_of(line: str) -> str:
    names = split_name(_BLANKS.split(line.lstrip(" \t"), maxsplit=1)[0])
    return "" if names is None else names[0]


class Plan(_TextList):
    r"""The samples of a table, one per row, whose cells are fields or name the files that hold them.

    The first line names the fields. Cells below a name that begins with ``@`` are paths or URLs of files; below other
    names they are text in UTF-8. The column ``__key__`` has the keys; without it, samples are numbered from 0 with
    `key_format`, in the syntax of `str.format`. With `base64`, text that begins with ``base64:`` is decoded to bytes.

    With tabs, each line is a row, and cells are escaped as by `tables.escape_cell`; with any other delimiter, the table
    is CSV, where a cell with a delimiter, quote or line end is quoted.

    Example:
        >>> plan = Plan(b"__key__\t@jpg\tcls\nx\tcat.jpg\t3\n", "plan.tsv")
        >>> [tuple(part) for part in plan.parts(Problems(plan.name))]
        [('x', 'jpg', 'file', 'cat.jpg', 2), ('x', 'cls', 'text', '3', 2)]
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
        no_escapes: bool = False,
        base64: bool = False,
    ) -> None:
        super().__init__("plan", data, url, folder)
        delimiter = _TAB if delimiter in ("\\t", "tab") else delimiter
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise UsageError(f"the delimiter of a table is one character, not a quote or line end; got {delimiter!r}")
        try:
            names = {name for _, name, _, _ in string.Formatter().parse(key_format) if name is not None}
            if names != {"number"} or not key_format.format(number=0):
                raise UsageError(f"the format of keys {key_format!r} needs {{number}}, and nothing else")
        except (ValueError, LookupError) as error:
            raise UsageError(f"the format of keys {key_format!r} is wrong: {error}") from error
        self._delimiter = delimiter
        self._key_format = key_format
        self._plain = str if no_escapes or delimiter != _TAB else unescape_cell
        self._base64 = base64
        # UTF-16 has NULs everywhere, an archive in its first name
        if (place := data.partition(b"\n")[0].find(b"\0")) >= 0:
            raise SpecError(f"{self.name} is not a table in UTF-8: its first line has a NUL at byte {place:,}")
        self._columns = self._read_header()

    def parts(self, problems: Problems) -> Iterator[Part]:
        """Yields the parts, and adds faulty rows to the problems."""
        rows = self._rows(problems)
        next(rows)
        for number, (line, cells) in enumerate(rows):
            try:
                yield from self._row(number, line, cells)
            except SampleError as error:
                problems.add(f"line {line:,}", error)

    def _read_header(self) -> dict[str, bool]:
        """Reads the fields, each with whether its cells name files."""
        problems = Problems(self.name)
        line, cells = next(self._rows(problems), (1, []))
        columns: dict[str, bool] = {}
        for number, cell in enumerate(cells, 1):
            try:
                name = self._plain(cell).lower()
                field = name.removeprefix("@")
                if field in columns:
                    raise SampleError(f"field {field!r} already has a column")
                if name != _KEY:
                    check_part_field(field, "(any)")
                columns[field] = name.startswith("@")
            except ValueError as error:
                problems.add(f"line {line}, column {number}", error)
        problems.check()
        if not columns.keys() - {_KEY}:
            problems.add(f"line {line}", f"no column is a field; expected names of fields, found {short(cells)}")
            problems.check()
        return columns

    def _row(self, number: int, line: int, cells: list[str]) -> list[Part]:
        if len(cells) != len(self._columns):
            raise SampleError(f"expected {len(self._columns):,} cells as in the first line, found {len(cells):,}")
        key = self._key_format.format(number=number)
        sources: list[tuple[str, Kind, str]] = []
        for (field, names_files), cell in zip(self._columns.items(), cells, strict=True):
            try:
                text = self._plain(cell) if "\\" in cell else cell
                if field == _KEY:
                    key = text
                elif names_files:  # an empty cell is a missing file
                    sources.append((field, *parse_path(text, self._folder)) if text else (field, "file", ""))
                elif self._base64 and text.startswith(_BASE64):
                    sources.append((field, "base64", text.removeprefix(_BASE64)))
                else:
                    cell.encode()
                    sources.append((field, "text", text))
            except UnicodeEncodeError as error:
                what = f"the text is not UTF-8, at its character {error.start + 1:,}"
                raise SampleError(f"column {field!r}: {what}") from error
            except ValueError as error:
                raise SampleError(f"column {field!r}: {error}") from error
        return [Part(key, field, kind, value, line) for field, kind, value in sources]

    def _rows(self, problems: Problems) -> Iterator[tuple[int, list[str]]]:
        """Yields the cells of each row with the number of its first line; skips blank lines."""
        if self._delimiter == _TAB:
            lines = self._text.removesuffix("\n").split("\n")
            is_single = _TAB not in lines[0]  # in a table of one column an empty line is an empty cell
            for number, line in enumerate(lines, 1):
                line = line.removesuffix("\r")
                if line or is_single or number == 1:
                    yield number, line.split(_TAB)
            return
        # csv's limit protects programs that read an endless stream; this text is in memory already
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


def parse_path(text: str, folder: str = "", *, trusted: bool = False) -> tuple[Kind, str]:
    """Parses a path, ``file:path`` or a URL, which renders templates only if `trusted`, never with ``WDS_SECURE=1``."""
    scheme = scheme_of(text)
    if text == STDIN:
        raise SampleError("standard input ('-') cannot be the source of a member; write './-' for a file of that name")
    if scheme == "pipe":
        raise SampleError("a command (pipe:) is not a file; recipes may have commands")
    try:
        path = local_path(text)
    except ShardOpenError as error:
        raise SampleError(str(error)) from error
    if not path:
        raise SampleError("it names no file")
    if scheme == "":
        path = join_url(folder, path)
    elif scheme == "file" and scheme_of(folder) == "":
        path = os.path.join(folder, path)  # noqa: PTH118 - a str, as millions of them are made
    if scheme == "file" or not scheme_of(path):
        return "file", path
    if not trusted or is_secure():
        try:
            _STRANGER.check_url(path)
        except UnsafeDataError as error:
            raise SampleError(
                f"{mask_url(path)} renders templates, which could send secrets of this machine anywhere. A recipe may "
                "name it with --allow-pipe, unless WDS_SECURE=1"
            ) from error
    return "url", path
