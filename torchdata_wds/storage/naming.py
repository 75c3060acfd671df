"""Shards that lie at another place than their name says: errors name both."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchdata_wds.errors import WdsError
from torchdata_wds.storage.byte_streams import BUFFER_SIZE, ByteStream, ShardSource
from torchdata_wds.storage.urls import mask_url

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["named_stream", "naming"]


class NamedSource(ShardSource):
    """A shard's bytes, whose errors tell the name that the shard was given besides the place where it lies."""

    def __init__(self, source: io.RawIOBase, url: str, why: str) -> None:
        super().__init__(source, mask_url(url), plain=True)
        self._url = url
        self._why = why

    @property
    def is_compressed(self) -> bool:
        """Whether what lies there is compressed."""
        return isinstance(self._source, ShardSource) and self._source.is_compressed

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        with naming(self._url, self._why):
            return super().readinto(buffer)


@contextlib.contextmanager
def naming(url: str, why: str) -> Iterator[None]:
    """Gives errors the name of the shard as it was given.

    Args:
        url: The name.
        why: Why it lies elsewhere, in a few words.
    """
    try:
        yield
    except WdsError as error:
        shard = mask_url(url)
        raise error.extended(f" ({why} shard {shard})", shard=shard) from error


def named_stream(stream: ByteStream, url: str, why: str) -> ByteStream:
    """A stream whose errors name the shard as it was given as well.

    Args:
        stream: What was opened in its place; a local file's is given back as it is.
        url: The name.
        why: Why it lies elsewhere.
    """
    if not isinstance(stream, io.BufferedReader) or not isinstance(getattr(stream, "raw", None), ShardSource):
        return stream
    return io.BufferedReader(NamedSource(stream.detach(), url, why), BUFFER_SIZE)
