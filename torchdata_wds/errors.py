"""The exceptions of the package.

Each takes one positional message, and its place as keywords, so that it survives pickling and worker processes. Advice
comes in two wordings, because options have different names in Python and on the command line: `str` of an error has
the library's, and `cli_message` returns the message with that of the command line.
"""

import copy
from typing import Literal, NamedTuple, Self

__all__ = [
    "WdsError", "ShardListError", "ShardOpenError", "ShardFormatError", "SampleError", "DuplicateFieldError",
    "ReappearingKeyError", "MissingFieldError", "DecodingError", "EncodingError", "CacheError", "UnsafeDataError",
    "SpecError", "DivisionError",
]  # fmt: skip


class Advice(NamedTuple):
    """What to do about an error: whole sentences, in the words of the library and in those of the ``wds`` program."""

    library: str
    cli: str

    @classmethod
    def of(cls, text: str, library: str, cli: str) -> Self:
        """Makes advice from a text, whose ``{}`` is replaced by each of the two wordings."""
        return cls(text.format(library), text.format(cli))


#: How to skip failures, in the words of the library and the program.
SKIPPING = ("handler=warn_and_continue", "--errors skip")
SKIP_DAMAGED = Advice.of("Skip damaged shards with {}.", *SKIPPING)
SKIP_SAMPLES = Advice.of("Repair it, or skip such samples with {}.", *SKIPPING)
DOWNLOAD_AGAIN = Advice.of("Download it again, or skip damaged shards with {}.", *SKIPPING)
TRY_AGAIN = Advice.of("Try again, or skip failing shards with {}.", *SKIPPING)

#: Kinds of damage in a shard; ``wds validate`` reports these words.
DamageKind = Literal[
    "empty",  # it has no bytes at all
    "no-tar",  # it is another kind of file
    "cut",  # it ends too early
    "trailing-bytes",  # it continues after its end marker
    "multi-volume",  # it is one of several volumes
    "bad-header",  # a header has a wrong checksum, a wrong number or a damaged extension
    "sparse",  # the map of a sparse member is wrong
    "hard-link",  # a hard link points at nothing, or at data that cannot be read again
    "ambiguous",  # programs disagree on its content
    "too-large",  # a member or record exceeds the limit or the memory
    "bad-record",  # a record does not decode
    "compression",  # its compressed data is cut or wrong
    "index",  # its index is damaged, or belongs to another version of the shard
    "unsupported",  # it is sound, but another program cannot read it
    "damage",  # anything else
]


class WdsError(Exception):
    """Base of all exceptions that this package raises about data.

    Args:
        message: What failed, where, what was expected and found, and what to do.
        shard, member: URL of the shard, credentials masked; name of the archive member.
        key, field: Key of the sample, and its field.
        advice: What to do, appended to the message; a str if library and command line use the same words.

    Attributes:
        cli_message: The message with the advice for the command line; empty if that is the same.
    """

    def __init__(
        self,
        message: str = "",
        *,
        shard: str | None = None,
        member: str | None = None,
        key: str | None = None,
        field: str | None = None,
        advice: Advice | str = "",
    ) -> None:
        words = advice.library if isinstance(advice, Advice) else advice
        super().__init__(f"{message} {words}" if words else message)
        self.shard, self.member, self.key, self.field = shard, member, key, field
        self.cli_message = f"{message} {advice.cli}" if isinstance(advice, Advice) else ""

    def extended(self, text: str, *, shard: str | None = None) -> Self:
        """Returns a copy of the error with text appended to both wordings, and optionally with another shard."""
        extended = copy.copy(self)
        extended.args = (f"{self}{text}",)
        extended.shard = self.shard if shard is None else shard
        extended.cli_message = self.cli_message and self.cli_message + text
        return extended


def cli_message(error: BaseException) -> str:
    """Returns the message of any exception, with advice for the command line."""
    return getattr(error, "cli_message", "") or str(error)


class ShardListError(WdsError, ValueError):
    """Shard patterns are wrong, or match no shards."""


class ShardOpenError(WdsError, OSError):
    """A shard cannot be opened, or its source failed while it was read."""


class ShardFormatError(WdsError, ValueError):
    """A shard is not a complete, undamaged archive.

    `kind` says what is wrong; `offset` says where, in bytes of the decompressed archive, or is None if unknown.
    """

    def __init__(
        self,
        message: str = "",
        *,
        shard: str | None = None,
        member: str | None = None,
        key: str | None = None,
        field: str | None = None,
        advice: Advice | str = "",
        kind: DamageKind = "damage",
        offset: int | None = None,
    ) -> None:
        super().__init__(message, shard=shard, member=member, key=key, field=field, advice=advice)
        self.kind, self.offset = kind, offset


class ChangedShardError(ShardFormatError):
    """A shard is not the version that an index or a saved state was made with."""


class SampleError(WdsError, ValueError):
    """One sample is wrong."""


class DuplicateFieldError(SampleError):
    """A sample has the same field twice."""


class ReappearingKeyError(SampleError):
    """A key reappears later in its shard: the members are not grouped by key."""


class MissingFieldError(SampleError):
    """A sample lacks a requested field."""


class DecodingError(SampleError):
    """A field cannot be decoded."""


class EncodingError(SampleError):
    """A value cannot be encoded as its field's type."""


class CacheError(WdsError, OSError):
    """A shard cache or sample cache cannot be used."""


class UnsafeDataError(WdsError):
    """Data or a URL could run code, which was not allowed."""


class SpecError(WdsError, ValueError):
    """A dataset file is wrong."""


class DivisionError(WdsError, RuntimeError):
    """The work of a graph is not divided as its loader needs: items would be lost, or come several times."""
