"""Which of fsspec's protocols stand before ``::`` and read through the URL behind it (``simplecache::s3://...``)."""

from __future__ import annotations

import inspect
from functools import lru_cache

__all__ = ["is_chaining"]

# Classes that cannot be imported here (libarchive wants its library) cannot be asked.
_ALWAYS = frozenset(
    {"simplecache", "filecache", "blockcache", "cached", "zip", "tar", "libarchive", "reference", "dir"}
)
_CHAIN_ARGUMENTS = frozenset({"fo", "target_protocol"})


def is_chaining(part: str) -> bool:
    """Tells whether the part before a ``::`` is a chaining protocol of fsspec: ``simplecache``, ``zip://inner.tar``.

    Example:
        >>> is_chaining("simplecache"), is_chaining("zip://a.tar"), is_chaining("a.tar"), is_chaining("s3://b/a.tar")
        (True, True, False, False)
    """
    protocol, _, _ = part.partition("://")
    return protocol in _ALWAYS or (protocol.isidentifier() and _takes_a_target(protocol))


@lru_cache(maxsize=256)
def _takes_a_target(protocol: str) -> bool:
    import fsspec

    if protocol not in fsspec.available_protocols():
        return False
    try:
        parameters = inspect.signature(fsspec.get_filesystem_class(protocol).__init__).parameters
    except (ImportError, ValueError):
        return False
    return not _CHAIN_ARGUMENTS.isdisjoint(parameters)
