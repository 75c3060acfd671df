"""What a file is that is not a tar archive, by its first bytes or its name, and what reads it."""

from __future__ import annotations

import re

_CREATE = "Make shards of its content with ShardWriter or `wds create`."
_PAGE = (
    "It is a page or an error message of a server: read it, and check the URL and the credentials. Folders of web "
    "servers are not listed: write braces."
)
_CBOR = "It looks like CBOR records: read it with .load_cbor_shards()."
_MSGPACK = "It looks like MessagePack records: read it with .load_msgpack_shards()."
_BY_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "It is a pointer of Git LFS: fetch the file itself with `git lfs pull`."),
    (b"PK\x03\x04", f"It is a zip archive. {_CREATE}"),
    (b"7z\xbc\xaf'\x1c", f"It is a 7z archive. {_CREATE}"),
    (b"Rar!\x1a\x07", f"It is a RAR archive. {_CREATE}"),
    (b"PAR1", f"It is a Parquet file. {_CREATE}"),
    (b"ARROW1", f"It is an Arrow file. {_CREATE}"),
    (b"Obj\x01", f"It is an Avro file. {_CREATE}"),
    (b"\x89HDF\r\n\x1a\n", f"It is an HDF5 file. {_CREATE}"),
    (b"\n#\xd7\xce", f"It is an MXNet RecordIO file. {_CREATE}"),
    (b"SQLite format 3\0", "It is an SQLite database; .cache_samples(file) reads those that it wrote."),
    (b"\x93NUMPY", "It is one numpy array, not a shard of samples."),
    (b"\xff\xd8\xff", "It is one JPEG image, not a shard of samples."),
    (b"\x89PNG\r\n", "It is one PNG image, not a shard of samples."),
    (b"%PDF-", "It is a PDF document, not a shard of samples."),
)

#: These may also begin records of CBOR or MessagePack.
_BY_SHORT_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\xd9\xd9\xf7", _CBOR),
    (b"\x80\x04\x95", "It is a pickle, not a shard of samples."),
    (b"\x80\x05\x95", "It is a pickle, not a shard of samples."),
)
_BY_SUFFIX: dict[str, str] = {
    **dict.fromkeys(("cbor", "cbors"), _CBOR),
    **dict.fromkeys(("msgpack", "mp", "msg"), _MSGPACK),
    **dict.fromkeys(("tfrecord", "tfrecords"), f"It looks like a TFRecord file. {_CREATE}"),
    "mds": f"It looks like a shard of MosaicML streaming. {_CREATE}",
}
_SUFFIX = re.compile(r"\.(\w+)(?:\.(?:gz|bz2|xz|zstd?))?(?:[?#].*)?\Z", re.DOTALL)


def describe_magic(head: bytes) -> str | None:
    """Says what a file is by its first bytes, and what to do; None where they tell nothing."""
    if head.startswith(b"\xde\xc0\xef\xbe", 16):
        return f"It is an LMDB database. {_CREATE}"
    return next((text for magic, text in _BY_MAGIC if head.startswith(magic)), None)


def describe_file(head: bytes, shard: str) -> str:
    """Says what a file seems to be that was read as a tar archive, and what to do."""
    by_magic = describe_magic(head) or next((text for magic, text in _BY_SHORT_MAGIC if head.startswith(magic)), None)
    if by_magic is not None:
        return by_magic
    suffix = _SUFFIX.search(shard)
    if suffix is not None and (by_suffix := _BY_SUFFIX.get(suffix[1].lower())):
        return by_suffix
    start = head.lstrip()[:14].lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return _PAGE
    if start.startswith((b"{", b"[")):
        return "It looks like JSON: a list of shards goes to load_dataset(), a message of a server tells what is wrong."
    return "Is it a page that a server sent instead, or another file format?"
