"""Shards from web servers: ``http:`` and ``https:``, by urllib3.

`http_client` sends one request, `http_source` goes on where one breaks, `http_versions` tells whether the object is
still the same, and `patience` how long to wait.
"""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.byte_streams import ShardSource, Source, wrap_source
from torchdata_wds.storage.compression import HEAD_SIZE, is_compressed
from torchdata_wds.storage.http.client import HttpRequest, is_well_formed
from torchdata_wds.storage.http.options import read_http_options
from torchdata_wds.storage.http.source import HttpSource
from torchdata_wds.storage.http.versions import Version
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.urls import mask_url

__all__ = ["open_http"]


_OWN_DECODERS = ("gzip", "x-gzip", "zstd")


def open_http(url: str, offset: int, options: StorageOptions) -> io.BufferedReader:
    """Opens a shard on a web server.

    Args:
        url: Its URL; a user name and password in it are sent as basic authentication.
        offset: Decompressed bytes to leave out: by a range request where the server and the shard allow it.
        options: ``{"https": {"headers": {...}, "retries": 8, "connect_timeout": 30, "read_timeout": 60}}``, and the
            same for ``http``.

    Raises:
        ShardOpenError: if no server answers, or with anything but the shard.
        ShardFormatError: if the offset is known to lie behind its end.
        TypeError: if an option is unknown or of the wrong type.
        ValueError: if an option's value is out of range.
    """
    shard = mask_url(url)
    scheme = url.partition(":")[0].lower()
    chosen = read_http_options(scheme, options.get(scheme, {}))
    if wrong := is_well_formed(url):
        raise ShardOpenError(f"cannot open shard {shard}: its address is malformed: {wrong}", shard=shard)
    request = HttpRequest(url, shard, chosen)
    version = _version_if_plain(request) if offset else None
    source = HttpSource(request) if version is None else HttpSource(request, start=offset, version=version)
    try:
        source.connect()
        if version is None:
            return wrap_source(_decoded(source, shard), shard, skip=offset)
        return wrap_source(source, shard, plain=True)
    except BaseException:
        source.close()
        raise


def _version_if_plain(request: HttpRequest) -> Version | None:
    """What is known of the shard, if the server gives parts of it and it is not compressed.

    Offsets count decompressed bytes: only then are they those of a range.
    """
    with HttpSource(request, stop=HEAD_SIZE) as source:
        source.connect()
        if not source.gives_parts or source.version.encoding not in ("", "identity"):
            return None
        head = b"".join(iter(partial(source.read, HEAD_SIZE), b""))
        plain = len(head) == HEAD_SIZE and not is_compressed(head)
        return replace(source.version, encoding="identity") if plain else None


def _decoded(source: HttpSource, shard: str) -> Source:
    """The body without a Content-Encoding that nobody asked for."""
    encoding = source.version.encoding
    if encoding in ("identity", ""):
        return source
    if encoding in _OWN_DECODERS:
        return ShardSource(source, shard)
    shown = mask_text(encoding)[:80]
    raise ShardOpenError(
        f"cannot open shard {shard}: the server sent Content-Encoding {shown!r}, expected identity", shard=shard
    )
