"""Samples to the blocks of a tar archive: headers packed directly, the same bytes for the same sample.

The layout is that of POSIX.1-2017, pax, "ustar Interchange Format"; what does not fit into it, a long name or a member
of 8 GiB, has an extended header before it ("pax Extended Header").
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from torchdata_wds.checks import is_count, is_number
from torchdata_wds.errors import MissingFieldError, SampleError
from torchdata_wds.format.headers import BLOCK, PAX_HEADER, padding
from torchdata_wds.format.samples.names import as_bytes, check_field, check_key, is_written

_NAME_SIZE = 100
_PREFIX_SIZE = 155
_OWNER_SIZE = 31
_TOO_LARGE = 8**11  # eleven octal digits
_ZEROS = bytes(BLOCK)
_PAX_NAME = b"PaxHeaders/member"

# name, mode + uid + gid, size, mtime, checksum, type to devminor, prefix
_HEADER = struct.Struct(f"{_NAME_SIZE}s24s12s12s8s189s{_PREFIX_SIZE}s12x")
_SIZE_DIGITS, _SUM_DIGITS = slice(124, 135), slice(148, 154)  # where they stand in a header
_SIZE_SHIFTS = np.arange(30, -1, -3)  # the bits of eleven octal digits
_MAX_PLANS = 1000  # data sets have few combinations of fields; one with ever new ones must not fill the memory


class PackedSample(NamedTuple):
    """A sample as it will stand in an archive."""

    key: str
    names: list[bytes]  # of its members
    parts: list[bytes]  # header blocks, content and padding of each member, in turn
    size: int  # bytes of all parts

    def members(self) -> Iterator[tuple[str, int, int]]:
        """Yields the name of each member, where its content begins in the sample, and its size."""
        offset = 0
        for name, head, data, fill in zip(self.names, *(self.parts[column::3] for column in range(3)), strict=True):
            offset += len(head)
            yield name.decode(), offset, len(data)
            offset += len(data) + len(fill)


class PackedSamples(NamedTuple):
    """Several samples, as they will stand in an archive."""

    keys: list[str]
    parts: list[bytes]  # as those of a `PackedSample`
    size: int


class SamplePacker:
    """Packs samples whose fields are bytes already; options as those of ``TarWriter``."""

    def __init__(
        self,
        *,
        mode: int = 0o444,
        user: str = "bigdata",
        group: str = "bigdata",
        mtime: float = 0,
        lowercase: bool = True,
    ) -> None:
        self._lowercase = lowercase
        if not is_count(mode, 0) or mode > 0o7777:
            error = ValueError if type(mode) is int else TypeError
            raise error(f"mode must be permissions from 0 to 0o7777, such as 0o444, not {mode!r}")
        if not is_number(mtime) or not 0 <= mtime < _TOO_LARGE:
            error = ValueError if is_number(mtime) else TypeError
            raise error(f"mtime must be seconds since 1970, from 0 to {_TOO_LARGE - 1:,}, not {mtime!r}")
        self._front = b"%07o\0%07o\0%07o\0" % (mode, 0, 0)
        self._time = b"%011o" % int(mtime)
        owner = _owner_field("user", user) + _owner_field("group", group)
        self._back = bytes(100) + b"ustar\x0000" + owner + b"0000000\0" * 2
        self._middle = b"0" + self._back
        # the checksum of a header without name and size; its own field counts as eight blanks
        self._sum = sum(self._front) + sum(self._time) + sum(self._middle) + 8 * 32
        self._plans: dict[tuple[Any, ...], list[tuple[str, bytes, int]]] = {}

    def pack(self, sample: Mapping[str, Any]) -> PackedSample:
        """Packs one sample: its fields in sorted order, without those like ``__url__``."""
        names = tuple(sample)
        plan = self._plans.get(names)
        if plan is None:
            plan = self._plan(sample)
        key = sample["__key__"]
        stem = check_key(key)
        # As in headers.byte_sum: adler32's low half is 1 + the sum of the bytes, and a header's sum has three of them
        stem_sum = self._sum + (zlib.adler32(stem) & 0xFFFF) - 3
        written: list[bytes] = []
        parts: list[bytes] = []
        size = 0
        for field, suffix, suffix_sum in plan:
            data = sample[field]
            if type(data) is not bytes:
                data = as_bytes(data, key, field)
            length = len(data)
            name = stem + suffix
            if len(name) <= _NAME_SIZE and length < _TOO_LARGE:
                digits = b"%011o" % length
                total = stem_sum + suffix_sum + (zlib.adler32(digits) & 0xFFFF)
                head = _HEADER.pack(name, self._front, digits, self._time, b"%06o\0 " % total, self._middle, b"")
            else:
                head = self._long_header(name, length)
            fill = _ZEROS[: -length % BLOCK]
            written.append(name)
            parts += (head, data, fill)
            size += len(head) + length + len(fill)
        return PackedSample(key, written, parts, size)

    def pack_all(self, samples: Sequence[Mapping[str, Any]]) -> PackedSamples | None:
        """Packs several samples as `pack` does, faster; None where one is unusual, or wrong."""
        contents: list[Any] = []
        names: list[bytes] = []
        columns: dict[tuple[Any, ...], tuple[Callable[[Any], Iterable[Any]], list[bytes]]] = {}
        try:
            keys = [sample["__key__"] for sample in samples]
            for sample, stem in zip(samples, _check_keys(keys), strict=True):
                if (found := columns.get(fields := tuple(sample))) is None:
                    found = columns[fields] = _columns(self._plans.get(fields) or self._plan(sample))
                get, suffixes = found
                contents += get(sample)
                names += [stem + suffix for suffix in suffixes]
        except (SampleError, KeyError):
            return None
        if set(map(type, contents)) != {bytes} or max(map(len, names)) > _NAME_SIZE:
            return None
        sizes = np.fromiter(map(len, contents), np.int64, len(contents))
        if sizes.max() >= _TOO_LARGE:
            return None
        heads = self._headers(names, sizes).tobytes()
        parts = [b""] * (3 * len(names))
        parts[::3] = [heads[place : place + BLOCK] for place in range(0, len(heads), BLOCK)]
        parts[1::3] = contents
        parts[2::3] = [_ZEROS[:fill] for fill in (-sizes % BLOCK).tolist()]
        return PackedSamples(keys, parts, len(heads) + int((sizes + -sizes % BLOCK).sum()))

    def _headers(self, names: list[bytes], sizes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Makes the headers of members with short names, all at once."""
        empty = _HEADER.pack(b"", self._front, b"", self._time, b"000000\0 ", self._middle, b"")
        heads = np.empty((len(names), BLOCK), np.uint8)
        heads[:] = np.frombuffer(empty, np.uint8)
        heads[:, :_NAME_SIZE] = np.array(names, f"S{_NAME_SIZE}").view(np.uint8).reshape(-1, _NAME_SIZE)
        digits = (sizes[:, np.newaxis] >> _SIZE_SHIFTS & 7) + ord("0")
        heads[:, _SIZE_DIGITS] = digits
        totals = self._sum + heads[:, :_NAME_SIZE].sum(axis=1, dtype=np.int64) + digits.sum(axis=1)
        heads[:, _SUM_DIGITS] = (totals[:, np.newaxis] >> _SIZE_SHIFTS[-6:] & 7) + ord("0")
        return heads

    def _plan(self, sample: Mapping[str, Any]) -> list[tuple[str, bytes, int]]:
        """Checks the fields of a sample: their order, suffix of the name and its checksum, kept for the next one."""
        key = sample.get("__key__")
        fields = sorted(field for field in sample if is_written(field, key))
        suffixes = [b"." + check_field(field, key, self._lowercase) for field in fields]
        check_key(key)
        if not fields:
            what = f"sample {key!r} has no field to write: only {', '.join(map(repr, sample))}"
            cure = "names like __x__ are not written. Give it a field, or leave it out"
            raise MissingFieldError(f"{what}, and {cure}", key=key)
        plan = [(field, suffix, zlib.adler32(suffix) & 0xFFFF) for field, suffix in zip(fields, suffixes, strict=True)]
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[tuple(sample)] = plan
        return plan

    def _long_header(self, name: bytes, size: int) -> bytes:
        """The header of a member whose name or size needs more than one block."""
        cut = name.rfind(b"/", 0, _PREFIX_SIZE + 1)
        if len(name) > _NAME_SIZE and size < _TOO_LARGE and cut > 0 and len(name) - cut - 1 <= _NAME_SIZE:
            return self._header(name[cut + 1 :], size, prefix=name[:cut])
        records = _record(b"path", name) if len(name) > _NAME_SIZE else b""
        if size >= _TOO_LARGE:
            records += _record(b"size", b"%d" % size)
        extended = self._header(_PAX_NAME, len(records), kind=PAX_HEADER)
        own = self._header(name[:_NAME_SIZE], size if size < _TOO_LARGE else 0)
        return extended + records + bytes(padding(len(records))) + own

    def _header(self, name: bytes, size: int, *, kind: bytes = b"0", prefix: bytes = b"") -> bytes:
        digits = b"%011o" % size
        total = self._sum + sum(name) + sum(digits) + sum(prefix) + kind[0] - ord("0")
        return _HEADER.pack(name, self._front, digits, self._time, b"%06o\0 " % total, kind + self._back, prefix)


def _columns(plan: list[tuple[str, bytes, int]]) -> tuple[Callable[[Any], Iterable[Any]], list[bytes]]:
    """What gets the fields of a plan from a sample, and the suffixes of their names."""
    fields = [field for field, _, _ in plan]
    get: Callable[[Any], Iterable[Any]] = itemgetter(*fields) if len(fields) > 1 else lambda sample: [sample[fields[0]]]
    return get, [suffix for _, suffix, _ in plan]


def _check_keys(keys: list[Any]) -> list[bytes]:
    """Checks keys as `check_key` does; most together need no closer look."""
    if set(map(type, keys)) == {str}:
        joined = "\n".join(("", *keys, ""))
        is_plain = joined.isascii() and joined.count("\n") == len(keys) + 1
        if is_plain and not any(odd in joined for odd in (".", "\0", "\n\n", "\n/", "/\n", "\n__")):
            return joined[1:-1].encode().split(b"\n")
    return [check_key(key) for key in keys]


def _record(keyword: bytes, value: bytes) -> bytes:
    """One PAX record, which begins with its own length."""
    rest = b" %b=%b\n" % (keyword, value)
    length = len(rest) + 1
    while length != (whole := len(rest) + len(b"%d" % length)):
        length = whole
    return b"%d%b" % (length, rest)


def _owner_field(argument: str, name: str) -> bytes:
    if not isinstance(name, str):
        raise TypeError(f"{argument} must be a str, not {name!r}")
    encoded = name.encode("utf-8", "surrogatepass")
    if len(encoded) > _OWNER_SIZE or b"\0" in encoded:
        raise ValueError(f"{argument} must have at most {_OWNER_SIZE} bytes and no NUL, not {name!r}")
    return encoded.ljust(_OWNER_SIZE + 1, b"\0")
