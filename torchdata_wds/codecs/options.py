"""What the codecs are told besides the bytes or the value.

Packages that are imported when the first field needs them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BYTES_TYPES",
    "DEFAULT_MAX_BYTES",
    "DecodeOptions",
    "EncodeOptions",
    "check_text_errors",
    "MissingPackageError",
    "import_optional",
]


#: The types of values that are data of a field already.
BYTES_TYPES = (bytes, bytearray, memoryview)

#: What a field may decompress to, unless ``max_bytes=`` says otherwise: 1 GiB.
DEFAULT_MAX_BYTES = 2**30


@dataclass(frozen=True)
class DecodeOptions:
    """The options of ``Decoder`` that single codecs look at.

    Args:
        errors: What text fields do with bytes that are not UTF-8, as in ``bytes.decode``.
        allow_pickle: Whether pickle fields may be loaded, which runs code that the shard chooses.
        max_bytes: The most that a compressed field may decompress to.
    """

    errors: str = "strict"
    allow_pickle: bool = False
    max_bytes: int = DEFAULT_MAX_BYTES

    def __post_init__(self) -> None:
        check_text_errors(self.errors)
        _check_flag("allow_pickle", self.allow_pickle)
        if isinstance(self.max_bytes, bool) or not isinstance(self.max_bytes, int):
            raise TypeError(f"max_bytes must be an int, not {self.max_bytes!r}")
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, not {self.max_bytes}")


@dataclass(frozen=True)
class EncodeOptions:
    """The options of ``Encoder`` that single codecs look at.

    Args:
        jpeg_quality: Quality of JPEG files, 1 to 100.
        png_compression: How hard PNG files are compressed, 0 to 9.
        channels_first: Whether tensors of images are CHW, instead of HWC.
    """

    jpeg_quality: int = 95
    png_compression: int = 6
    channels_first: bool = False

    def __post_init__(self) -> None:
        _check_range("jpeg_quality", self.jpeg_quality, 1, 100)
        _check_range("png_compression", self.png_compression, 0, 9)


def check_text_errors(errors: str) -> None:
    """Checks that ``errors`` names a way to decode damaged UTF-8.

    Raises:
        TypeError: if it is no str.
        ValueError: if Python knows no such way, or it works for encoding only.
    """
    if not isinstance(errors, str):
        raise TypeError(f"errors must be a str such as 'strict' or 'replace', not {errors!r}")
    try:
        b"\xff".decode("utf-8", errors)
    except UnicodeDecodeError:
        return
    except (LookupError, TypeError) as cause:
        raise ValueError(
            f"errors={errors!r} is no way to decode text: use 'strict', 'replace', 'ignore', 'backslashreplace' "
            "or 'surrogateescape'"
        ) from cause


def _check_range(name: str, value: object, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if not lowest <= value <= highest:
        raise ValueError(f"{name} must be {lowest} to {highest}, not {value}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


class MissingPackageError(ModuleNotFoundError):
    """A field needs a package that is not installed: no sample can work, so it is never a ``DecodingError``."""


def import_optional(module: str, *, extra: str, fields: str) -> Any:
    """Imports an optional package, or says which extra brings it.

    Args:
        module: The module to import.
        extra: The extra of this package that installs it.
        fields: What needs it, in words for the message.

    Raises:
        MissingPackageError: an ImportError, if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as cause:
        raise MissingPackageError(
            f"{fields} need the {module} package, which is not installed: pip install 'torchdata_wds[{extra}]'",
            name=module,
        ) from cause
