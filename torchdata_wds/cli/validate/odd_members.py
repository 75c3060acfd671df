"""Members that loaders pass over, or that are named as no writer should: what is odd about each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchdata_wds.format.samples.names import skip_reason, split_name
from torchdata_wds.format.tar.entries import TarEntry
from torchdata_wds.format.tar.headers import HEADER_WORDS, full_name, is_file

__all__ = ["odd_kind", "odd_name"]


_DIRECTORY = "directory"

_REASONS = {
    "macOS metadata": "macOS writes such files beside the real ones",
    "metadata": "a first part of the form __x__ marks what belongs to no sample",
    "hidden file": "its name begins with a dot",
    "empty extension": "nothing follows the dot",
    "no extension": "a field is what follows a dot",
}


def odd_kind(entry: TarEntry) -> tuple[str, str] | None:
    """Says what an entry is that is no file; folders are nothing odd.

    Returns:
        A word for it and a message, or None.
    """
    word = HEADER_WORDS.get(entry.kind)
    if is_file(entry.kind) or word == _DIRECTORY:
        return None
    if word is None:
        return "unknown-entry", f"member {entry.name} is of the unknown type {chr(entry.kind)!r} and is passed over"
    target = f" to {entry.link}" if entry.link else ""
    return word.lower().replace(" ", "-"), f"member {entry.name} is a {word}{target} and is passed over"


def odd_name(name: str, has_key: bool, blocks: Sequence[bytes]) -> Iterator[tuple[str, str]]:
    """Says what is odd about a name.

    Args:
        name: The member's name.
        has_key: Whether the rule for keys makes it part of a sample.
        blocks: The blocks of its headers, in which the name stands as it was written.

    Yields:
        A word for each oddity and a message.

    Example:
        >>> [kind for kind, _ in odd_name("/../.hidden", False, [])]
        ['hidden-file', 'absolute-name', 'parent-folder']
    """
    if not has_key and split_name(name) is not None:
        yield "no-key", f"member {name} belongs to no sample by the rule for keys, and is passed over"
    elif not has_key:
        reason = skip_reason(name)
        yield (
            reason.lower().replace(" ", "-"),
            f"member {name} belongs to no sample and is passed over: {_REASONS[reason]}",
        )
    if name.startswith("/"):
        yield "absolute-name", f"member {name} has an absolute path as its name, and its key cannot be written again"
    if ".." in name.split("/"):
        yield "parent-folder", f"member {name} has a part '..' in its name, and its key cannot be written again"
    if "\\x" in name and _is_escaped(name, blocks):
        yield "not-utf-8", f"member {name} has a name that is not UTF-8: its other bytes are written as \\xNN"


def _is_escaped(name: str, blocks: Sequence[bytes]) -> bool:
    """Tells whether a backslash in a name was put there by decoding: then the headers do not have it so."""
    written = name.encode()
    return bool(blocks) and written not in b"".join(blocks) and written != full_name(blocks[-1])
