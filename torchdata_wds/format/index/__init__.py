"""The index of a shard: how many samples it has and which bytes are whose. `sidecars` knows where it lies.

The file is UTF-8 text, one JSON value a line. The first line is an object:

| name | value |
|---|---|
| ``format`` | ``"torchdata_wds index"`` |
| ``version`` | ``1`` |
| ``shard`` | the last part of the shard's name |
| ``keys`` | by which rule names are split into key and field: ``"first_dot"`` or ``"last_dot"`` |
| ``samples`` | how many samples follow, one a line |
| ``tar_bytes`` | size of the archive in bytes, decompressed |
| ``compressed`` | whether the shard is stored compressed |
| ``bytes`` | size of the shard as it is stored; null where that is not known |
| ``sha256`` | its digest in hexadecimal digits; null where nobody has read the shard whole |
| ``tag`` | which version of the shard it is, as `StoredVersion.tag` has it; not always there |
| ``special`` | a list of `SPECIAL` words: what samples are not read by their bytes alone; not there in older files |

Readers ignore names that they do not know.

Each further line is a sample in the shard's order: ``[key, start, stop, [[name, offset, size], ...]]``. ``start`` is
where the header of its first member begins, extended headers included, and ``stop`` is after the padding of its last;
``offset`` and ``size`` give the content of each member, both null for a sparse one. All are bytes of the decompressed
archive. A hard link has the place of the content that it stands for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

from torchdata_wds.checks import is_count
from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.index.sidecars import index_url, open_index, open_index_target, read_index_line, shard_name
from torchdata_wds.format.samples.names import key_splitter
from torchdata_wds.storage import ByteStream, mask_url, open_shard

__all__ = [
    "SPECIAL", "IndexHeader", "IndexedMember", "IndexedSample", "ShardIndex", "dali_index", "index_url", "pack_row",
    "parse_index_header", "read_index_header", "shard_name", "wids_index", "wids_list",
]  # fmt: skip

_FORMAT = "torchdata_wds index"
_VERSION = 1
_OPTIONAL = ("tag", "special")  # fields that a file leaves out where they are None

#: What makes the samples of a shard more than their own bytes: hard links, whose content lies elsewhere, and global
#: headers, which name or size members after them. Sparse members are read by their bytes, but have no place of content.
SPECIAL = ("hard_links", "global_headers", "sparse")


class IndexHeader(NamedTuple):
    """What an index says about its shard as a whole; the module describes the fields."""

    shard: str
    keys: str
    samples: int
    tar_bytes: int
    compressed: bool = False
    bytes: int | None = None
    sha256: str | None = None
    tag: str | None = None
    special: tuple[str, ...] | None = None


class IndexedMember(NamedTuple):
    """One member of an indexed sample; a sparse one has neither offset nor size."""

    name: str
    offset: int | None  # where its content begins, in bytes of the decompressed archive
    size: int | None  # of the content, in bytes


class IndexedSample(NamedTuple):
    """One sample of an index."""

    key: str
    start: int  # where its first header begins, in bytes of the decompressed archive
    stop: int  # where its last member's padding ends
    members: tuple[IndexedMember, ...]


class ShardIndex(Sequence[IndexedSample]):
    """The index of one shard: a sequence of its samples, each parsed when it is asked for.

    Args:
        header: About the shard as a whole.
        rows: A line of JSON for each sample, as `pack_row` makes it, or as it stands in the file.

    Example:
        >>> row = pack_row("a", 0, 1024, [("a.txt", 512, 3)])
        >>> index = ShardIndex(IndexHeader("x.tar", "first_dot", 1, 10240), [row])
        >>> len(index), index[0].start, index[0].members[0].size
        (1, 0, 3)
    """

    def __init__(self, header: IndexHeader, rows: Sequence[str | bytes]) -> None:
        if header.samples != len(rows):
            told = f"it promises {header.samples:,} samples and has {len(rows):,}. Make it again with index_shard"
            what = f"the index of shard {header.shard} is not whole: {told}"
            raise ShardFormatError(what, shard=header.shard, kind="index")
        self.header = header
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, number: int) -> IndexedSample: ...

    @overload
    def __getitem__(self, number: slice) -> list[IndexedSample]: ...

    def __getitem__(self, number: int | slice) -> IndexedSample | list[IndexedSample]:
        if isinstance(number, slice):
            return [_parse_row(row) for row in self._rows[number]]
        return _parse_row(self._rows[number])

    def __iter__(self) -> Iterator[IndexedSample]:
        return map(_parse_row, self._rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardIndex):
            return NotImplemented
        return self.header == other.header and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ShardIndex({self.header.shard!r}, {len(self):,} samples)"

    def dump(self) -> bytes:
        """The index as the bytes of its file."""
        fields = self.header._asdict().items()
        known = {name: value for name, value in fields if value is not None or name not in _OPTIONAL}
        head = {"format": _FORMAT, "version": _VERSION, **known}
        rows = (row if isinstance(row, bytes) else row.encode() for row in self._rows)
        return b"\n".join((json.dumps(head).encode(), *rows, b""))

    def save(
        self, url: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Writes the index, in place of one that is there; `index_url` of a shard is where readers look for it.

        Raises:
            ShardOpenError: if that cannot be written.
        """
        target = open_index_target(url, storage_options=storage_options)
        target.write(self.dump())
        target.commit()

    @classmethod
    def load(
        cls, url: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> ShardIndex:
        """Reads an index by its own URL.

        Raises:
            ShardOpenError: if it cannot be opened.
            ShardFormatError: if it is not an index, or not whole.
        """
        return cls._read(mask_url(url), open_shard(url, storage_options=storage_options))

    @classmethod
    def beside(
        cls, shard: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> ShardIndex:
        """Reads the index that lies beside a shard, in its hidden folder or at its old place.

        Raises:
            ShardOpenError: if there is none, or it cannot be opened.
            ShardFormatError: if it is not an index, or not whole.
            ValueError: if nothing can lie beside the shard, which is a stream.
        """
        url, stream = open_index(shard, storage_options=storage_options)
        return cls._read(mask_url(url), stream)

    @classmethod
    def _read(cls, shown: str, opened: ByteStream) -> ShardIndex:
        with opened as stream:
            head, *rows = stream.read().split(b"\n")
        header = parse_index_header(head, shown)
        if not rows or rows.pop():
            raise ShardFormatError(
                f"index {shown} is cut off: its last line has no end. Make it again", shard=shown, kind="index"
            )
        return cls(header, rows)


def pack_row(key: str, start: int, stop: int, members: Iterable[tuple[str, int | None, int | None]]) -> str:
    """Makes the line of one sample."""
    return json.dumps([key, start, stop, list(members)], separators=(",", ":"))


def _parse_row(row: str | bytes) -> IndexedSample:
    try:
        values = json.loads(row)
        if not isinstance(values, list):
            raise TypeError(f"it is a {type(values).__name__}")
        key, start, stop, members = values
        sample = IndexedSample(key, start, stop, tuple(IndexedMember(*member) for member in members))
        # readers seek by these, and an index may come from a stranger, as its shard may
        if type(start) is not int or type(stop) is not int or not 0 <= start <= stop:
            raise ValueError(f"no sample can lie from byte {start!r} to {stop!r}")
        if not sample.members or not isinstance(sample.members[0].name, str):
            raise ValueError("it names no member")
        return sample
    except (ValueError, TypeError, RecursionError) as error:
        what = f"an index has a damaged line, {row[:80]!r}: {error}. Make it again"
        raise ShardFormatError(what, kind="index") from error


def parse_index_header(line: bytes, shown: str) -> IndexHeader:
    """Parses the first line of an index; `shown` is its name in messages."""
    try:
        head = json.loads(line)
        if head["format"] != _FORMAT:
            raise ValueError(f"its format is {head['format']!r}")
        if head["version"] != _VERSION:
            raise ValueError(f"its version is {head['version']!r}, and {_VERSION} is the one that is known here")
        header = IndexHeader(
            **{name: head[name] for name in IndexHeader._fields if name in head or name not in _OPTIONAL}
        )
        for name, count in (("samples", header.samples), ("tar_bytes", header.tar_bytes), ("bytes", header.bytes or 0)):
            if not is_count(count, 0):
                raise ValueError(f"its {name} is {count!r}, not a whole number from 0")
        if not isinstance(header.sha256, str | None):
            raise TypeError(f"its sha256 is {header.sha256!r}, not text")
        if not isinstance(header.tag, str | None):
            raise TypeError(f"its tag is {header.tag!r}, not text")
        if header.special is None:
            return header
        if not isinstance(header.special, list) or not all(isinstance(word, str) for word in header.special):
            raise TypeError(f"its special is {header.special!r}, not a list of words")
        return header._replace(special=tuple(header.special))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        what = f"{shown} is not an index of a shard: {type(error).__name__}: {error}. index_shard makes one"
        raise ShardFormatError(what, shard=shown, kind="index") from error


def read_index_header(
    shard: str | os.PathLike[str], storage_options: Mapping[str, Mapping[str, Any]] | None = None
) -> IndexHeader:
    """Reads the first line of the index beside a shard; raises as `ShardIndex.beside`."""
    url, line = read_index_line(shard, storage_options=storage_options)
    return parse_index_header(line, mask_url(url))


def dali_index(index: ShardIndex) -> str:
    """Makes the text that NVIDIA DALI's ``fn.readers.webdataset`` takes as an index file (``index_paths=``).

    The layout is that of DALI's own ``wds2idx``, version 1.2: a line ``v1.2 N``, then a line a sample with
    ``extension offset size name`` for each member, all separated by blanks.

    Raises:
        TypeError: if it is not an index.
        ShardFormatError: if DALI could not read the shard with it: it is compressed, has no sample, a name with
            blanks, or a sparse member.

    Example:
        >>> row = pack_row("a", 0, 2048, [("a.cls", 512, 1), ("a.jpg", 1536, 3)])
        >>> print(dali_index(ShardIndex(IndexHeader("x.tar", "first_dot", 1, 10240), [row])), end="")
        v1.2 1
        cls 512 1 a.cls jpg 1536 3 a.jpg
    """
    header = _header(index)

    def unfit(why: str) -> ShardFormatError:
        what = f"DALI cannot read shard {header.shard} by an index: it {why}"
        return ShardFormatError(what, shard=header.shard, kind="unsupported")

    if header.compressed or not len(index):
        raise unfit("is compressed" if header.compressed else "has no sample")
    split = key_splitter("last_dot" if header.keys == "last_dot" else "first_dot")
    lines = []
    for sample in index:
        words = []
        for name, offset, size in sample.members:
            parts = split(name)
            if parts is None or offset is None:
                raise unfit(f"has a sparse member {name}")
            if len(name.split()) != 1 or name != name.strip():
                raise unfit(f"has blanks in the name {name!r}")
            words.append(f"{parts[1]} {offset} {size} {name}")
        lines.append(" ".join(words))
    return "\n".join((f"v1.2 {len(index)}", *lines, ""))


def _header(index: object) -> IndexHeader:
    if not isinstance(index, ShardIndex):
        raise TypeError(f"this takes the ShardIndex of index_shard() or ShardIndex.load(), not {index!r}")
    return index.header


def wids_index(
    indexes: Mapping[str, ShardIndex] | Iterable[tuple[str, ShardIndex]],
    *,
    name: str = "",
    md5sums: Mapping[str, str] | None = None,
) -> str:
    """Makes the JSON shard list that ``wids`` of WebDataset 0.2 reads (``wids-shard-index-v1``).

    Args:
        indexes: The shards' URLs, as `wids` shall open them, and their indexes.
        name: The data set's name.
        md5sums: The MD5 digests of shards in hexadecimal digits, by their URLs.

    Raises:
        TypeError: if one is not an index.
        ShardFormatError: for a compressed shard, which `wids` cannot read.

    Example:
        >>> empty = ShardIndex(IndexHeader("x.tar", "first_dot", 0, 10240), [])
        >>> json.loads(wids_index({"x.tar": empty}))["shardlist"]
        [{'url': 'x.tar', 'nsamples': 0, 'filesize': 10240}]
    """
    pairs = indexes.items() if isinstance(indexes, Mapping) else indexes
    return wids_list([(url, _header(index)) for url, index in pairs], name=name, md5sums=md5sums)


def wids_list(
    headers: Iterable[tuple[str, IndexHeader]], *, name: str = "", md5sums: Mapping[str, str] | None = None
) -> str:
    """Makes the shard list of `wids_index` from URLs and the headers of indexes."""
    shards = []
    for url, header in headers:
        if header.compressed:
            what = f"wids cannot read shard {header.shard}: it is compressed"
            raise ShardFormatError(what, shard=header.shard, kind="unsupported")
        shard: dict[str, str | int] = {"url": url, "nsamples": header.samples, "filesize": header.tar_bytes}
        if md5sums and url in md5sums:
            shard["md5sum"] = md5sums[url]
        shards.append(shard)
    content = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": name, "shardlist": shards}
    return json.dumps(content, indent=1) + "\n"
