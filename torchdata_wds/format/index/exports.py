"""Indexes as other programs have them: DALI's ``wds2idx`` text, and the shard list of ``wids``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.index import IndexHeader, ShardIndex
from torchdata_wds.format.samples.names import key_splitter


def dali_index(index: ShardIndex) -> str:
    """Makes the text that NVIDIA DALI's ``fn.readers.webdataset`` takes as an index file (``index_paths=``).

    The layout is that of DALI's own ``wds2idx``, version 1.2: a line ``v1.2 N``, then a line a sample with
    ``extension offset size name`` for each member, all separated by blanks.

    Raises:
        TypeError: if it is no index.
        ShardFormatError: if DALI could not read the shard with it: it is compressed, has no sample, a name with
            blanks, or a sparse member.

    Example:
        >>> from torchdata_wds.format.index import IndexHeader, pack_row
        >>> row = pack_row("a", 0, 2048, [("a.cls", 512, 1), ("a.jpg", 1536, 3)])
        >>> print(dali_index(ShardIndex(IndexHeader("x.tar", "first_dot", 1, 10240), [row])), end="")
        v1.2 1
        cls 512 1 a.cls jpg 1536 3 a.jpg
    """
    header = _header(index)

    def unfit(why: str) -> ShardFormatError:
        what = f"DALI cannot read shard {header.shard} by an index: it {why}"
        return ShardFormatError(what, shard=header.shard, kind="unsupported")

    if header.compressed:
        raise unfit("is compressed")
    if not len(index):
        raise unfit("has no sample")
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
        TypeError: if one is no index.
        ShardFormatError: for a compressed shard, which `wids` cannot read.

    Example:
        >>> from torchdata_wds.format.index import IndexHeader
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
