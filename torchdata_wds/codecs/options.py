"""Options of the codecs, the types that count as a field's data, and imports of optional packages."""

from __future__ import annotations

import importlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torchdata_wds.checks import check_flags, checked_int

#: Values of these types are a field's data already.
BYTES_TYPES = (bytes, bytearray, memoryview)

#: The default limit on what a field may decompress to: 1 GiB.
DEFAULT_MAX_BYTES = 2**30


@dataclass(frozen=True)
class DecodeOptions:
    """The options of ``Decoder`` that codecs read; ``.wds_decode`` describes them."""

    errors: str = "strict"
    allow_pickle: bool = False
    max_bytes: int = DEFAULT_MAX_BYTES

    def __post_init__(self) -> None:
        if not isinstance(self.errors, str):
            raise TypeError(f"errors must be a str such as 'strict' or 'replace', not {self.errors!r}")
        try:  # some of Python's handlers are for encoding only
            with suppress(UnicodeDecodeError):
                b"\xff".decode("utf-8", self.errors)
        except (LookupError, TypeError) as cause:
            raise ValueError(
                f"errors={self.errors!r} is not a way to decode text: use 'strict', 'replace', 'ignore', "
                "'backslashreplace' or 'surrogateescape'"
            ) from cause
        check_flags(allow_pickle=self.allow_pickle)
        checked_int("max_bytes", self.max_bytes, 1)


@dataclass(frozen=True)
class EncodeOptions:
    """The options of ``Encoder`` that codecs read; ``channels_first`` means that image tensors are CHW."""

    jpeg_quality: int = 95
    png_compression: int = 6
    channels_first: bool = False

    def __post_init__(self) -> None:
        checked_int("jpeg_quality", self.jpeg_quality, 1, 100)
        checked_int("png_compression", self.png_compression, 0, 9)


class MissingPackageError(ModuleNotFoundError):
    """A field needs a package that is not installed. Never a ``DecodingError``: skipping samples would not help."""


def import_optional(module: str, *, extra: str, fields: str) -> Any:
    """Imports an optional package; if it is missing, the error says what needs it and which extra installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as cause:
        raise MissingPackageError(
            f"{fields} need the {module} package, which is not installed: pip install 'torchdata_wds[{extra}]'",
            name=module,
        ) from cause
