r"""``tsv`` and ``json``: fields as a table, and as lines of JSON.

In a cell of a table, a backslash, tab, newline and carriage return are written ``\\``, ``\t``, ``\n`` and ``\r``. Bytes
that are not UTF-8 are an error, are escaped as ``\xe9``, or turn the whole value into ``base64:`` and its Base64.
"""

import argparse
import base64
import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from torchdata_wds.cli.command import Command, add_count, choice, flag
from torchdata_wds.cli.inputs import SampleReader, add_input_arguments
from torchdata_wds.cli.outputs import add_field_arguments, field_choices, write_line
from torchdata_wds.cli.terminal import counted, guess_text, say
from torchdata_wds.codecs.decoder import Decoder
from torchdata_wds.codecs.options import DEFAULT_MAX_BYTES
from torchdata_wds.codecs.suffixes import split_suffix
from torchdata_wds.codecs.table import find_codec
from torchdata_wds.codecs.values.text import write_json
from torchdata_wds.errors import DecodingError, UnsafeDataError
from torchdata_wds.format.samples.names import is_metadata
from torchdata_wds.pipes.samples.field_specs import name_sample
from torchdata_wds.storage import mask_url

_KEY, _URL = "__key__", "__url__"
Binary = Literal["error", "escape", "base64"]  # how a cell shows bytes that are not UTF-8
_BASE64 = "base64:"
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
_BYTES = {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(0x80, 0x100)}  # as surrogateescape decodes them
_PLAIN = {"\\": "\\", "t": "\t", "n": "\n", "r": "\r"}
_SEQUENCE = re.compile(r"\\(x[89a-fA-F][0-9a-fA-F]|.?)", re.DOTALL)

JsonBinary = Literal["base64", "skip"]  # how values that JSON cannot hold are written
_UNSTRICT = (b"NaN", b"Infinity")
_FOLDED = ("torch", "cbor")  # their files can contain one object many times, and even inside itself
_ITEM = 64  # about the bytes that a number in a list takes


def _add_tsv_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    add_field_arguments(parser, required=True)
    add_count(parser)
    flag(parser, "--no-key", "leave out the first column, __key__")
    flag(parser, "--no-header", "leave out the first line, the columns' names")
    text = r"if a value is not UTF-8: stop, escape bytes as \xe9, or write 'base64:' and its Base64 (default: error)"
    choice(parser, "--binary", get_args(Binary), text, "error")


def _run_tsv(arguments: argparse.Namespace) -> int:
    choices = field_choices(arguments)
    columns = choices.columns
    key = [] if arguments.no_key or _KEY in columns else [_KEY]
    reader = SampleReader(arguments)

    def line_of(sample: dict[str, Any]) -> str | None:
        if (values := choices.row(sample)) is None:
            return None
        cells = [escape_cell(sample[name]) for name in key]
        for column, value in zip(columns, values, strict=True):
            try:
                text = mask_url(value) if column == _URL and isinstance(value, str) else value
                cells.append(escape_cell(text) if isinstance(text, str) else write_cell(text, arguments.binary))
            except ValueError as error:
                name, place = name_sample(sample)
                cure = "Leave the field out, or pass --binary escape or --binary base64"
                what = f"field {column!r} of {name} is not text: {error}. {cure}"
                raise DecodingError(what, **place, field=column) from error
        return "\t".join(cells)

    if not arguments.no_header:
        write_line("\t".join(map(escape_cell, key + columns)))
    for line in reader.taken(line_of, arguments.count):
        write_line(line)
    choices.tell()
    return reader.finish()


def escape_cell(text: str) -> str:
    r"""Escapes tabs, line ends and backslashes, and as ``\x80`` the bytes that ``surrogateescape`` let through."""
    escaped = text.translate(_ESCAPES)
    if escaped.isascii():
        return escaped
    escaped = escaped.translate(_BYTES)
    try:
        escaped.encode()
    except UnicodeEncodeError as error:
        what = f"character {error.start} of {text[:40]!r} is a lone surrogate"
        raise ValueError(f"{what}, which UTF-8 cannot encode") from error
    return escaped


def unescape_cell(cell: str) -> str:
    """Reverses `escape_cell`; raises ValueError for a backslash before anything that it does not escape."""

    def plain(found: re.Match[str]) -> str:
        code = found[1]
        if len(code) == 3:
            return chr(0xDC00 + int(code[1:], 16))
        if code not in _PLAIN:
            what = f"the cell {cell[:40]!r} has a backslash at character {found.start()} that escapes nothing"
            expected = r"expected \\, \t, \n, \r or a byte such as \xe9. Write a backslash itself as \\"
            raise ValueError(f"{what}: {expected}")
        return _PLAIN[code]

    return _SEQUENCE.sub(plain, cell) if "\\" in cell else cell


def write_cell(data: bytes, binary: Binary = "error") -> str:
    """Writes bytes as a cell; with ``"base64"``, text that begins with ``base64:`` itself becomes Base64 too."""
    try:
        text = data.decode(errors="surrogateescape" if binary == "escape" else "strict")
        if binary != "base64" or not text.startswith(_BASE64):
            return escape_cell(text)
    except UnicodeDecodeError as error:
        if binary == "error":
            found = data[error.start : error.start + 1]
            raise ValueError(f"byte {error.start:,} of {len(data):,} is {found!r}, which is not UTF-8") from error
    return _BASE64 + base64.b64encode(data).decode()


TSV_COMMAND = Command(
    """Write chosen fields as a table: a line per sample, tabs between the fields.

    wds tsv -f "cls txt" -c 10 train-000000.tar
    wds tsv -f "cls" --no-header 'train-{000000..000003}.tar' | cut -f 2 | sort | uniq -c
    """,
    _add_tsv_arguments,
    _run_tsv,
)


# ----------------------------------------------------------------------------------------------------------------- json


def _add_json_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    add_field_arguments(parser)
    add_count(parser)
    flag(parser, "--no-key", "leave out __key__")
    text = 'if JSON cannot hold a value: write {"base64": ...}, or leave it out (default: base64)'
    choice(parser, "--binary", get_args(JsonBinary), text, "base64")


def _run_json(arguments: argparse.Namespace) -> int:
    choices = field_choices(arguments)
    has_url = _URL in choices.columns
    reader = SampleReader(arguments)
    lines = JsonLines(arguments.binary)

    def line_of(sample: dict[str, Any]) -> bytes | None:
        stored = {name: value if is_metadata(name) else StoredField(name, value) for name, value in sample.items()}
        if (chosen := choices.choose(stored)) is None:
            return None
        metadata = {} if arguments.no_key else {_KEY: sample[_KEY]}
        if has_url:
            metadata[_URL] = mask_url(sample[_URL])
        return lines({**metadata, **{name: value or None for name, value in chosen.items() if not is_metadata(name)}})

    for line in reader.taken(line_of, arguments.count):
        write_line(line)
    choices.tell()
    if lines.skipped:
        say(f"left out {counted(lines.skipped, 'field')} that JSON cannot hold (--binary skip)")
    return reader.finish()


class StoredField(NamedTuple):
    """The bytes of a field, and the name under which they were stored, by which they are decoded."""

    field: str
    data: bytes


class JsonLines:
    """Writes samples as strict JSON, one per line.

    Fields are decoded by their names: text becomes a string, an integer a number, an array or tensor a list, and
    ``json``, ``msgpack`` and ``cbor`` become their content. A field of unknown type becomes a string if it looks like
    text. Anything else (images, pickles, NaN, dates, keys that are not strings, tensors of more than 16 million
    numbers) becomes ``{"base64": ...}`` with the stored bytes, or is left out and counted in ``skipped``.
    """

    def __init__(self, binary: JsonBinary = "base64") -> None:
        self.binary, self.skipped = binary, 0
        self._decode = Decoder()

    def __call__(self, sample: Mapping[str, Any]) -> bytes:
        """Returns the line, without its end, of a sample of bytes, `StoredField`, str and None (null)."""
        place = {name: value for name, value in sample.items() if name in (_KEY, _URL)}
        written = []
        for name, value in sample.items():
            if isinstance(value, bytes):
                value = StoredField(name, value)
            if (text := self._write(value, place) if isinstance(value, StoredField) else write_json(value)) is None:
                self.skipped += 1
            else:
                written.append(write_json(name) + b":" + text)
        return b"{" + b",".join(written) + b"}"

    def _write(self, stored: StoredField, place: Mapping[str, Any]) -> bytes | None:
        with contextlib.suppress(UnsafeDataError):
            value = self._decode({**place, stored.field: stored.data})[stored.field]
            codec = find_codec(split_suffix(stored.field)[0])
            if codec is None and isinstance(value, bytes) and (guess := guess_text(value, len(value))) is not None:
                value = guess
            # the value is nested too deeply, or is a tensor without numbers
            with contextlib.suppress(TypeError, ValueError, RuntimeError):
                text = write_json(unfold(value) if codec is not None and codec.name in _FOLDED else value)
                if any(word in text for word in _UNSTRICT):
                    json.dumps(json.loads(text), allow_nan=False)
                return text
        return b'{"base64":"%b"}' % base64.b64encode(stored.data) if self.binary == "base64" else None


def unfold(value: Any) -> Any:
    """Turns tensors into lists, inside containers too; those of torch and CBOR may hold one object many times.

    Raises:
        ValueError: if the result would take more than 1 GiB, which even a small file can cause.
        RuntimeError: if a tensor has no numbers, or (RecursionError) the value contains itself.
    """
    # a file of a kilobyte can hold torch.zeros(1).expand(1 << 40): count the size of the result before making it
    room = DEFAULT_MAX_BYTES

    def plain(value: Any) -> Any:
        nonlocal room
        is_tensor = hasattr(value, "tolist") and type(value).__module__.partition(".")[0] == "torch"
        room -= _ITEM * int(value.numel()) if is_tensor else _ITEM
        room -= len(value) if isinstance(value, str | bytes) else 0
        if room < 0:
            raise ValueError(f"it takes more than {DEFAULT_MAX_BYTES:,} bytes")
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value.tolist() if is_tensor else value

    return plain(value)


JSON_COMMAND = Command(
    """Write samples, or chosen fields of them, as lines of JSON.

    wds json -f "cls json" -c 10 train-000000.tar
    wds json -f "*.json label=cls" --missing empty 'train-{000000..000003}.tar' > labels.jsonl
    """,
    _add_json_arguments,
    _run_json,
)
