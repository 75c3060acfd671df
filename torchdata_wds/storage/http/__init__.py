"""Shards from web servers: ``http:`` and ``https:``, by urllib3.

`client` sends one request, `source` goes on where one breaks, and `versions` says whether the object is still the same.
"""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.byte_streams import ShardSource, wrap_source
from torchdata_wds.storage.decompression import HEAD_SIZE, may_be_compressed
from torchdata_wds.storage.http.client import HttpRequest, malformation
from torchdata_wds.storage.http.options import read_http_options
from torchdata_wds.storage.http.source import HttpSource
from torchdata_wds.storage.http.versions import Version
from torchdata_wds.storage.places import Place
from torchdata_wds.storage.secrets.masking import mask_text

_OWN_DECODERS = ("gzip", "x-gzip", "zstd")


def open_http(place: Place, offset: int) -> io.BufferedReader:
    """Opens a shard on a web server; an offset becomes a range request if the server and the shard allow it.

    A user name and password in the URL are sent as basic authentication.
    """
    shard = place.shown
    chosen = read_http_options(place.scheme, place.options.get(place.scheme, {}))
    if wrong := malformation(place.url):
        raise ShardOpenError(f"cannot open shard {shard}: its address is malformed: {wrong}", shard=shard)
    request = HttpRequest(place.url, shard, chosen)
    version = _version_if_plain(request) if offset else None
    source = HttpSource(request, start=0 if version is None else offset, version=version)
    try:
        source.connect()
        if version is not None:
            return wrap_source(source, shard, plain=True)
        # Some servers compress although nobody asked them to.
        encoding = source.version.encoding
        if encoding not in ("", "identity", *_OWN_DECODERS):
            shown = mask_text(encoding)[:80]
            raise ShardOpenError(
                f"cannot open shard {shard}: the server sent Content-Encoding {shown!r}, expected identity", shard=shard
            )
        body = ShardSource(source, shard) if encoding in _OWN_DECODERS else source
        return wrap_source(body, shard, skip=offset)
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
        plain = not may_be_compressed(head)
        return replace(source.version, encoding="identity") if plain else None
