"""The exceptions of the package.

WdsError
├── ShardListError    (ValueError)   a list of shards cannot be made from what was given
├── ShardOpenError    (OSError)      a shard cannot be opened, or its source failed while it was read
├── ShardFormatError  (ValueError)   a shard's bytes are not a whole, undamaged archive
├── SampleError       (ValueError)   one sample is wrong
│   ├── DuplicateFieldError          the same field twice in one sample
│   ├── ReappearingKeyError          a key that comes back later in its shard
│   ├── MissingFieldError            a field that was asked for is not there
│   ├── DecodingError                a field's bytes do not decode
│   └── EncodingError                a value cannot be written as its field's type
├── CacheError        (OSError)      a shard or sample cache cannot be used
├── UnsafeDataError                  data or a URL that could run code, without permission to
└── SpecError         (ValueError)   a dataset file is wrong

Each takes one positional message and the place as keywords, so that it survives pickling and worker processes.
"""

from __future__ import annotations

__all__ = [
    "WdsError",
    "ShardListError",
    "ShardOpenError",
    "ShardFormatError",
    "SampleError",
    "DuplicateFieldError",
    "ReappearingKeyError",
    "MissingFieldError",
    "DecodingError",
    "EncodingError",
    "CacheError",
    "UnsafeDataError",
    "SpecError",
]


class WdsError(Exception):
    """Base of all exceptions that this package raises about data.

    Args:
        message: What failed, where, what was expected and found, and what to do.
        shard: URL of the shard, credentials masked.
        member: Name of the archive member.
        key: Key of the sample.
        field: Field of the sample.
    """

    def __init__(
        self,
        message: str = "",
        *,
        shard: str | None = None,
        member: str | None = None,
        key: str | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.shard = shard
        self.member = member
        self.key = key
        self.field = field


class ShardListError(WdsError, ValueError):
    """A list of shards cannot be made from what was given."""


class ShardOpenError(WdsError, OSError):
    """A shard cannot be opened, or its source failed while it was read."""


class ShardFormatError(WdsError, ValueError):
    """A shard's bytes are not a whole, undamaged archive."""


class SampleError(WdsError, ValueError):
    """One sample is wrong."""


class DuplicateFieldError(SampleError):
    """The same field comes twice in one sample."""


class ReappearingKeyError(SampleError):
    """A key comes back later in its shard: the members are not sorted."""


class MissingFieldError(SampleError):
    """A field that was asked for is not in the sample."""


class DecodingError(SampleError):
    """A field's bytes do not decode."""


class EncodingError(SampleError):
    """A value cannot be written as its field's type."""


class CacheError(WdsError, OSError):
    """A shard cache or sample cache cannot be used."""


class UnsafeDataError(WdsError):
    """Data or a URL could run code, and nobody has allowed it to."""


class SpecError(WdsError, ValueError):
    """A dataset file is wrong."""
