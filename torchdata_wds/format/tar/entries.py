"""A byte stream to tar entries: headers, extended headers, end marker; and every way in which a shard can be cut."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, NoReturn

from torchdata_wds.errors import DOWNLOAD_AGAIN, Advice, DamageKind, ShardFormatError
from torchdata_wds.format import headers
from torchdata_wds.format.headers import BLOCK, REGULAR, Header, HeaderError, padding, text
from torchdata_wds.format.tar.file_kinds import describe_file
from torchdata_wds.format.tar.members import ByteSource, gap_seeker
from torchdata_wds.format.tar.sparse_maps import Segments, SparseSource, full_size, locate, unpack

#: The largest member that is read, unless ``max_member_bytes=`` says otherwise: 4 GiB.
DEFAULT_MAX_MEMBER_BYTES = 4 << 30
_ZERO_BLOCK = bytes(BLOCK)
_PIECE = 16 << 20  # a header may lie about a size: memory is taken only as bytes arrive
_LARGEST_EXTENDED_HEADER = 16 << 20
_LARGEST_EXTENDED_HEADERS = 32 << 20  # of one member, with their blocks
_LONGEST_END = 256 << 20  # a compressed kilobyte can hold that many zeros
_END_PIECE = 1 << 20
_LARGEST_RECORD = 20 * BLOCK
_FILES = REGULAR | {headers.SPARSE}
_UNUSUAL = frozenset({headers.SPARSE, headers.MULTI_VOLUME})
_RAISE_LIMIT = Advice(
    "Raise max_member_bytes if you want it; otherwise leave the member out with select=.", "Raise --max-member-bytes."
)
_LEAVE_OUT = Advice(
    "Leave it out with select=, or set max_member_bytes to what one member may take.", "Try where there is more memory."
)
_MAYBE_NO_END = Advice.of(
    "Download it again; if its writer never ends archives, pass {}.", "require_end_marker=False", "--no-end-marker"
)
_CONCATENATED = Advice.of("If archives were joined with cat, pass {}.", "concatenated=True", "--concatenated")
_TRUNCATE = "Cut it off there with truncate, or write it again."


class TarEntry(NamedTuple):
    """One entry of an archive, before its payload is read."""

    name: str  # from the header or its extensions
    kind: int  # type flag
    size: int  # of the payload in the archive, in bytes
    link: str  # the link's target
    offset: int  # where the entry begins, its extended headers included, in bytes of the decompressed archive
    sparse_size: int | None = None  # full size of a sparse member
    sparse: SparseSource | None = None  # what a sparse member's map is read from


@dataclass(eq=False)
class TarEntries:
    """Walks the entries of an archive; the caller takes or skips each payload before it asks for the next.

    Iterating yields `TarEntry`, and None at an end marker that has been seen (more may follow if `concatenated`).
    `stream` is the decompressed archive from byte `offset` on, read forward only; its ``pass_over(size)``, if it has
    one, is used as that of `gap_seeker`. `shard` is its URL as messages may show it.
    """

    stream: ByteSource
    shard: str
    _: KW_ONLY
    require_end_marker: bool = True
    concatenated: bool = False
    offset: int = 0
    max_member_bytes: int = DEFAULT_MAX_MEMBER_BYTES

    def __post_init__(self) -> None:
        self._pass_over: Callable[[int], bool] | None
        self._pass_over = getattr(self.stream, "pass_over", None) or gap_seeker(self.stream)
        self.has_globals = False  # whether a global header changes names or sizes of the entries after it
        self.raw: list[bytes] = []  # the blocks of the current entry's headers, for those that look closer
        self._first = self._start = self.offset
        self._global: dict[str, bytes] = {}
        self._own: dict[str, bytes] = {}  # the records of the last PAX header before the entry
        self._long: dict[str, bytes] = {}  # GNU's long name and long link
        self._extended = 0  # bytes of the extended headers before the next entry

    def __iter__(self) -> Iterator[TarEntry | None]:
        while True:
            block = self._read_block()
            if block == _ZERO_BLOCK:
                yield None
                block = self._pass_end_marker()
            if not block:
                return
            try:
                header = headers.parse_header(block)
            except HeaderError as error:
                at = self.offset - BLOCK
                if at == self._first:
                    what = f"is not a tar archive: its first bytes are {block[:40]!r}, and {error},"
                    raise self.damaged("no-tar", what, describe_file(block, self.shard), at=at) from None
                raise self.damaged("bad-header", f"has a damaged header: {error};", at=at) from None
            self.raw.append(block)
            if header.kind in headers.EXTENSIONS:
                self._extend(header)
                continue
            yield self._entry(header, block)
            if self._extended:
                self._own, self._long, self._extended = {}, {}, 0
            self.raw.clear()
            self._start = self.offset

    def passed(self, length: int) -> None:
        """Notes that `length` bytes of entries were read by others, between two that are iterated."""
        self.offset += length
        self._start = self.offset

    def take(self, entry: TarEntry, *, look: Callable[[Segments, int], None] | None = None) -> bytes:
        """Reads an entry's content, holes filled with zeros; `look` gets the map and full size of a sparse member."""
        size = entry.size if entry.sparse_size is None else max(entry.size, entry.sparse_size)
        if size > self.max_member_bytes:
            what = f"holds member {entry.name} of {size:,} bytes, more than the limit of {self.max_member_bytes:,},"
            raise self.damaged("too-large", what, _RAISE_LIMIT, member=entry.name, at=entry.offset)
        try:
            content = self._take(entry)
            if entry.sparse is None or entry.sparse_size is None:
                return content
            segments, begin = locate(entry.sparse, content)
            content = unpack(content, begin, segments, entry.sparse_size)
        except MemoryError as error:
            what = f"holds member {entry.name} of {size:,} bytes, more than this process has memory for,"
            raise self.damaged("too-large", what, _LEAVE_OUT, member=entry.name, at=entry.offset) from error
        except HeaderError as error:
            what = f"holds a damaged sparse member {entry.name}: {error};"
            raise self.damaged("sparse", what, "Write it again.", member=entry.name, at=entry.offset) from None
        if look is not None:
            look(segments, entry.sparse_size)
        return content

    def skip(self, entry: TarEntry) -> None:
        """Passes an entry's payload, if its kind has one, without reading it where that is possible."""
        left = entry.size
        if not left or entry.kind in headers.NO_PAYLOAD:
            return
        length = left + padding(left)
        if self._pass_over is not None and self._pass_over(length):
            self.offset += length
            return
        while left:
            data = self.stream.read(min(left, 1 << 20))
            self.offset += len(data)
            if not data:
                self._cut(f"inside member {entry.name}", left, member=entry.name)
            left -= len(data)
        self._pass_padding(entry)

    def damaged(
        self,
        kind: DamageKind,
        what: str,
        advice: Advice | str = DOWNLOAD_AGAIN,
        *,
        member: str | None = None,
        at: int | None = None,
    ) -> ShardFormatError:
        """Makes the error for damage at a byte offset."""
        offset = self.offset if at is None else at
        message = f"shard {self.shard} {what} at byte {offset:,}."
        return ShardFormatError(message, shard=self.shard, member=member, advice=advice, kind=kind, offset=offset)

    def _take(self, entry: TarEntry) -> bytes:
        size = entry.size
        data = self.stream.read(size) if size <= _PIECE else b""
        if len(data) < size:
            data = self._read_rest(data, size)
        self.offset += len(data)
        if len(data) < size:
            self._cut(f"inside member {entry.name}", size - len(data), member=entry.name)
        self._pass_padding(entry)
        return data

    def _read_rest(self, data: bytes, size: int) -> bytes:
        """Completes a short read, in pieces: the stream has ended, gives less than asked for, or the size lies."""
        # One buffer becomes the result without a copy: a list of pieces would need twice the memory for a moment.
        buffer = io.BytesIO()
        buffer.write(data)
        while buffer.tell() < size and (piece := self.stream.read(min(size - buffer.tell(), _PIECE))):
            buffer.write(piece)
        return buffer.getvalue()

    def _pass_padding(self, entry: TarEntry) -> None:
        if fill := -entry.size % BLOCK:
            got = len(self.stream.read(fill))
            if got < fill:
                got = len(self._read_rest(bytes(got), fill))
            self.offset += got
            if got < fill:
                self._cut(f"in the padding of member {entry.name}", fill - got, member=entry.name)

    def _read_block(self) -> bytes:
        block = self.stream.read(BLOCK)
        if len(block) < BLOCK:
            block = self._read_rest(block, BLOCK)
        self.offset += len(block)
        if len(block) == BLOCK:
            return block
        if block:
            self._cut("inside a header", BLOCK - len(block), starts=block)
        if self.offset == self._first:
            what = "is empty: no tar archive, not even its end marker,"
            raise self.damaged("empty", what, "Download or write it again.")
        if self._extended or self.require_end_marker:
            self._cut("between two members: there is no end-of-archive marker", BLOCK)
        return b""

    def _cut(self, where: str, missing: int, *, member: str | None = None, starts: bytes = b"") -> NoReturn:
        if starts and self.offset - len(starts) == self._first:
            what = f"is not a tar archive: it is only {len(starts)} bytes long, {starts[:40]!r},"
            raise self.damaged("no-tar", what, describe_file(starts, self.shard))
        noun = "byte" if missing == 1 else "bytes"
        advice = _MAYBE_NO_END if where.startswith("between") else DOWNLOAD_AGAIN
        advice = Advice(*(f"Expected at least {missing:,} more {noun}. {words}" for words in advice))
        raise self.damaged("cut", f"is cut off {where}", advice, member=member)

    def _extend(self, header: Header) -> None:
        """Reads a long name, a long link or PAX records, which describe the entry that follows."""
        kind, size = header.kind, header.size
        if size > _LARGEST_EXTENDED_HEADER:
            what = f"has an extended header of {size:,} bytes, more than the limit of 16 MiB,"
            raise self.damaged("bad-header", what, "The shard is probably corrupt.")
        if kind != headers.GLOBAL_PAX:
            self._count_extended(BLOCK + size)
        content = self._take(TarEntry("(extended header)", kind, size + padding(size), "", self.offset))
        self.raw.append(content)
        try:
            if kind in (headers.LONG_NAME, headers.LONG_LINK):
                self._long["path" if kind == headers.LONG_NAME else "linkpath"] = headers.long_name(content, size)
                return
            records = headers.parse_records(content[:size])
            if kind == headers.GLOBAL_PAX and headers.is_sparse(records):
                raise HeaderError("a sparse map for all members that follow")
        except HeaderError as error:
            raise self.damaged("bad-header", f"has a damaged extended header before member: {error};") from None
        if headers.begins_elsewhere(records):
            self._refuse_part(text(records.get("GNU.volume.filename", b"?")))
        records = {keyword: value for keyword, value in records.items() if keyword in headers.RELEVANT}
        if kind == headers.GLOBAL_PAX:
            self._global |= records
            self.has_globals = not {"path", "size", "GNU.sparse.name"}.isdisjoint(self._global)
            self.raw.clear()
        else:
            self._own = records  # as in GNU tar and bsdtar: of two headers in a row the last one counts

    def _count_extended(self, size: int) -> None:
        """Refuses to keep more headers of one member than any program writes: they compress to almost nothing."""
        self._extended += size
        if self._extended > _LARGEST_EXTENDED_HEADERS:
            what = "has more than 32 MiB of headers before one member's content,"
            raise self.damaged("bad-header", what, "The shard is probably corrupt.", at=self._start)

    def _entry(self, header: Header, block: bytes) -> TarEntry:
        name, size, kind, link = header
        if not self._own and not self._long and not self._global and kind not in _UNUSUAL:
            entry = TarEntry(text(name), kind, size, text(link), self._start)
        else:
            entry = self._extended_entry(header, block)
        if entry.kind not in _FILES:
            if entry.size and entry.kind in headers.NO_PAYLOAD:
                self._refuse_content(entry)
        elif entry.name.endswith("/"):  # a folder, as V7 archives write it
            if entry.size or entry.sparse_size:
                self._refuse_content(entry)
            return entry._replace(kind=headers.DIRECTORY, sparse=None, sparse_size=None)
        return entry

    def _extended_entry(self, header: Header, block: bytes) -> TarEntry:
        name, size, kind, link = header
        records = {keyword: value for keyword, value in (self._global | self._own).items() if value}
        own_name = records.get("GNU.sparse.name", records.get("path", self._long.get("path", name)))
        member = text(own_name.partition(b"\0")[0])
        target = text(records.get("linkpath", self._long.get("linkpath", link)).partition(b"\0")[0])
        if kind == headers.MULTI_VOLUME:
            self._refuse_part(member)
        try:
            own_size = headers.record_number(self._own if "size" in self._own else records, "size")
            sparse = self._sparse_source(kind, records, block)
            full = None if sparse is None else full_size(sparse)
        except HeaderError as error:
            raise self.damaged("bad-header", f"has a damaged header: {error};", member=member) from None
        return TarEntry(member, kind, size if own_size is None else own_size, target, self._start, full, sparse)

    def _sparse_source(self, kind: int, records: dict[str, bytes], block: bytes) -> SparseSource | None:
        """What describes a sparse member; the blocks that continue an old GNU header are read."""
        has_records = headers.is_sparse(records)
        if kind != headers.SPARSE:
            if has_records and kind not in REGULAR:
                raise HeaderError("what is no regular file has a sparse map")
            return records if has_records else None
        if has_records:
            raise HeaderError("a sparse member has two maps")
        blocks, more = [block], block[482]
        while more:
            self._count_extended(BLOCK)
            block = self._read_block()
            self.raw.append(block)
            blocks.append(block)
            more = block[504]
        return blocks

    def _refuse_content(self, entry: TarEntry) -> NoReturn:
        """Other programs do not agree on whether bytes after a link or a folder are skipped, or are members."""
        word = headers.HEADER_WORDS.get(entry.kind, "folder" if entry.name.endswith("/") else "hard link")
        has = f"has {entry.sparse_size or entry.size:,} bytes of content, which programs skip or read as members,"
        what = f"is ambiguous: {word} {entry.name} {has}"
        raise self.damaged("ambiguous", what, "Write the shard again without it.", member=entry.name, at=self._start)

    def _refuse_part(self, name: str) -> NoReturn:
        what = f"begins with the rest of member {name} of another volume"
        raise self.damaged("multi-volume", what, "Join the volumes first.", member=name, at=self._start)

    def _pass_end_marker(self) -> bytes:
        """Reads on after a zero block; returns the next archive's first header, or nothing at the verified end."""
        if self._extended:
            raise self.damaged("cut", "ends after an extended header, before its member,")
        begin = self.offset
        while True:
            # the first blocks one by one: what follows them at once must not wait for more to come
            size = BLOCK if self.concatenated or self.offset - begin < _LARGEST_RECORD else _END_PIECE
            block = self._read_rest(self.stream.read(size), size)
            if not block:
                return b""
            at = self.offset
            self.offset += len(block)
            if not (rest := block.lstrip(b"\0")):
                if self.offset - begin > _LONGEST_END:
                    what = "has more than 256 MiB of zeros after its end-of-archive marker,"
                    raise self.damaged("trailing-bytes", what, _TRUNCATE, at=begin)
                continue
            if not self.concatenated:
                at += (len(block) - len(rest)) // BLOCK * BLOCK
                what = f"has bytes after its end-of-archive marker, {rest[:20]!r},"
                raise self.damaged("trailing-bytes", what, _CONCATENATED, at=at)
            if len(block) < BLOCK:
                self._cut("inside a header", BLOCK - len(block))
            self._start = at
            return block
