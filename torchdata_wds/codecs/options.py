"""What a decoder of fields is told besides the bytes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT_MAX_BYTES", "DecodeOptions", "check_text_errors"]

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


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
